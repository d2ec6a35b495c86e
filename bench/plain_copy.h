// What the machine can do: plain copies that share no code with what is being judged.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace holdfast::bench {

struct Piece {
  void* to;
  const void* from;
  size_t bytes;
};

// One way of copying, run by `threads` threads that each take a share of the pieces.
struct PlainCopy {
  std::string name;
  void (*copy)(void* to, const void* from, size_t bytes);
};

// libc's memcpy and the streaming copies that this CPU can run.
const std::vector<PlainCopy>& PlainCopies();

// Seconds that `copy` takes for all pieces with `threads` threads, started before the clock is.
double TimePlainCopy(const PlainCopy& copy, const std::vector<Piece>& pieces, int threads);

}  // namespace holdfast::bench
