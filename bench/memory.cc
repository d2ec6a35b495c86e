#include "bench/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace holdfast::bench {

Memory::Memory(size_t bytes, Kind kind) : bytes_(bytes) {
  const int flags = MAP_ANONYMOUS | (kind == Kind::kShared ? MAP_SHARED : MAP_PRIVATE);
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) {
    std::fprintf(stderr, "holdfast_bench: no memory for %zu bytes\n", bytes);
    std::exit(1);
  }
  data_ = static_cast<char*>(address);
  // Not zeros, and not alike: neither the hypervisor nor the CPU should find anything to save.
  uint64_t x = 0x9e3779b97f4a7c15;
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *reinterpret_cast<uint64_t*>(data_ + i) = x;
  }
}

Memory::~Memory() {
  munmap(data_, bytes_);
}

State MakeState(const Memory& memory, size_t bytes, size_t tensor_bytes) {
  State state;
  for (size_t offset = 0; offset < bytes; offset += tensor_bytes) {
    const size_t n = std::min(tensor_bytes, bytes - offset);
    char name[40];
    std::snprintf(name, sizeof name, "layers.%06zu.weight", offset / tensor_bytes);
    state.tensors.emplace_back(name, Type::kBF16, std::vector<uint64_t>{n / 2},
                               memory.data() + offset);
  }
  return state;
}

std::vector<Piece> PiecesInto(const Memory& target, const State& state) {
  std::vector<Piece> pieces;
  size_t offset = 0;
  for (const Tensor& tensor : state.tensors) {
    size_t bytes = TypeBytes(tensor.type);
    for (const uint64_t n : tensor.global_shape) {
      bytes *= n;
    }
    pieces.push_back({target.data() + offset, tensor.data, bytes});
    offset += bytes;
  }
  return pieces;
}

std::vector<Piece> PiecesFrom(const Memory& source, const State& state) {
  std::vector<Piece> pieces = PiecesInto(source, state);
  for (Piece& piece : pieces) {
    void* to = const_cast<void*>(piece.from);
    piece = {to, piece.to, piece.bytes};
  }
  return pieces;
}

}  // namespace holdfast::bench
