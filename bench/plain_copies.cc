// The plain copies for torch_bench.py, which opens this library with ctypes.
#include <cstddef>
#include <vector>

#include "bench/plain_copy.h"

namespace {

using holdfast::bench::Piece;
using holdfast::bench::PlainCopies;

}  // namespace

extern "C" {

__attribute__((visibility("default"))) size_t plain_copies() {
  return PlainCopies().size();
}

__attribute__((visibility("default"))) const char* plain_copy_name(size_t copy) {
  return PlainCopies()[copy].name.c_str();
}

// Seconds that this copy takes for `count` pieces.
__attribute__((visibility("default"))) double plain_copy_seconds(size_t copy, size_t count,
                                                                 void* const* to,
                                                                 const void* const* from,
                                                                 const size_t* bytes, int threads) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < count; ++i) {
    pieces.push_back({to[i], from[i], bytes[i]});
  }
  return holdfast::bench::TimePlainCopy(PlainCopies()[copy], pieces, threads);
}

}  // extern "C"
