// CRC-64/XZ bit by bit, from its published definition and nothing else: what the fast ones are held
// against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

inline uint64_t BitwiseCrc64(const void* data, size_t bytes) {
  const auto* byte = static_cast<const unsigned char*>(data);
  uint64_t state = ~uint64_t{0};
  for (size_t i = 0; i < bytes; ++i) {
    state ^= byte[i];
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ ((state & 1) * 0xC96C5795D7870F42u);
    }
  }
  return ~state;
}

}  // namespace holdfast
