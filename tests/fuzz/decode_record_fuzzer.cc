// The input twice: as a record file, and as the body of one whose frame and CRC fit (no fuzzer
// guesses a CRC).
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/digest.h"
#include "tiers/image/record.h"

namespace {

void AppendLittleEndian(uint64_t value, size_t bytes, std::string& out) {
  for (size_t i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}

std::string Frame(std::string_view body, uint32_t version) {
  std::string file = "HFRECORD";
  AppendLittleEndian(version, 4, file);
  AppendLittleEndian(0, 4, file);
  AppendLittleEndian(body.size(), 8, file);
  file.append(body);
  AppendLittleEndian(holdfast::Crc64(file), 8, file);
  return file;
}

// What was accepted once is accepted again after encoding it, and is the same.
void Check(std::string_view file) {
  const auto record = holdfast::DecodeRecord(file);
  if (record.ok()) {
    const auto again = holdfast::DecodeRecord(holdfast::EncodeRecord(*record));
    if (!again.ok() || *again != *record) {
      std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  Check(input);
  for (uint32_t version = 1; version <= holdfast::kRecordFormatVersion; ++version) {
    Check(Frame(input, version));
  }
  return 0;
}
