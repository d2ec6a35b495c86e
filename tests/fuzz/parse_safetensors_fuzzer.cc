// The input as a whole file, as a header that another gigabyte of data follows, and as JSON whose
// length field fits.
#include <cstddef>
#include <cstdint>
#include <string>

#include "tiers/image/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  (void)holdfast::ParseSafetensors(input, size);
  (void)holdfast::ParseSafetensors(input, size + (uint64_t{1} << 30));
  std::string file;
  for (size_t i = 0; i < 8; ++i) {
    file.push_back(static_cast<char>(size >> (8 * i)));
  }
  file.append(input);
  (void)holdfast::ParseSafetensors(file, file.size());
  return 0;
}
