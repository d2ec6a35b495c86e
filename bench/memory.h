// Memory that is present before a clock starts, and states made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/ceiling.h"
#include "holdfast/holdfast.h"

namespace holdfast::bench {

// Private or shared (tmpfs-like) anonymous memory, every page written once.
class Memory {
 public:
  enum class Kind { kPrivate, kShared };
  Memory(size_t bytes, Kind kind);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_;
  size_t bytes_;
};

// `bytes` in tensors of at most `tensor_bytes` each, lying one after the other in `memory`.
State MakeState(const Memory& memory, size_t bytes, size_t tensor_bytes);

// The same bytes as pieces of a plain copy from the state into `target` (or the other way round).
std::vector<Piece> PiecesInto(const Memory& target, const State& state);
std::vector<Piece> PiecesFrom(const Memory& source, const State& state);

}  // namespace holdfast::bench
