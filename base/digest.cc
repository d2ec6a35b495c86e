// ISA-L runs the CRC (carry-less multiplication, or tables where the CPU lacks it); putting digests
// together is polynomial arithmetic on 64-bit words.
#include "base/digest.h"

#include <isa-l/crc64.h>

#include <algorithm>
#include <array>

#include "base/crc64_math.h"

namespace holdfast {
namespace {

// kShiftByPowerOfTwo[k] = x^(8 * 2^k): what appending 2^k bytes multiplies a digest by.
constexpr std::array<uint64_t, 64> kShiftByPowerOfTwo = [] {
  std::array<uint64_t, 64> table{};
  table[0] = crc64_math::PowerOfX(8);
  for (size_t k = 1; k < table.size(); ++k) {
    table[k] = crc64_math::Multiply(table[k - 1], table[k - 1]);
  }
  return table;
}();

}  // namespace

uint64_t Crc64(const void* data, size_t bytes, uint64_t crc) {
  // An empty range may come with a null pointer, which ISA-L is not promised to accept.
  return bytes == 0 ? crc : crc64_ecma_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

uint64_t Crc64Combine(uint64_t crc_a, uint64_t crc_b, uint64_t bytes_b) {
  // The initial value and the final xor are the same, so they cancel and only the shift remains.
  for (size_t k = 0; bytes_b != 0; ++k, bytes_b >>= 1) {
    if ((bytes_b & 1) != 0) {
      crc_a = crc64_math::Multiply(crc_a, kShiftByPowerOfTwo[k]);
    }
  }
  return crc_a ^ crc_b;
}

void AppendBlockDigests(std::span<const std::byte> data, std::vector<uint64_t>& out) {
  out.reserve(out.size() + DigestBlockCount(data.size()));
  while (!data.empty()) {
    const size_t block = std::min(data.size(), kDigestBlockBytes);
    out.push_back(Crc64(data.data(), block));
    data = data.subspan(block);
  }
}

}  // namespace holdfast
