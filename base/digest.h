// CRC-64/XZ (reflected ECMA-182 polynomial, initial value and final xor all ones): the digest of
// every block. Composable: the digest of A‖B follows from those of A and B and B's length.
//
// The digest of a byte range that Holdfast stores is a list: one CRC-64/XZ per kDigestBlockBytes,
// the last block short. An empty range has no blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace holdfast {

inline constexpr size_t kDigestBlockBytes = size_t{1} << 20;

// Crc64("123456789") == 0x995dc9bbdf1939fa. `crc` is the digest of what came before (0 for
// nothing).
uint64_t Crc64(const void* data, size_t bytes, uint64_t crc = 0);
inline uint64_t Crc64(std::string_view s) {
  return Crc64(s.data(), s.size());
}

// Digest of A‖B from those of A and B.
uint64_t Crc64Combine(uint64_t crc_a, uint64_t crc_b, uint64_t bytes_b);

inline constexpr size_t DigestBlockCount(uint64_t bytes) {
  return static_cast<size_t>((bytes + kDigestBlockBytes - 1) / kDigestBlockBytes);
}

// One digest per block of `data`, appended to `out`.
void AppendBlockDigests(std::span<const std::byte> data, std::vector<uint64_t>& out);

}  // namespace holdfast
