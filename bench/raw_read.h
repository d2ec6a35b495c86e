// The ceiling of the case about peers: one-sided reads over one connection, a window of pieces
// under way, and nothing else. Straight calls of libfabric, on the device that Holdfast opened.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "tiers/peer/fabric.h"
#include "tiers/peer/pull.h"

namespace holdfast::bench {

// Reads all of `into` from the source's first device. Ends the program with a message when it
// cannot. Connects beforehand; `seconds`: the reads alone.
class RawReader {
 public:
  RawReader(Fabric& fabric, const PullSource& source);
  ~RawReader();
  RawReader(const RawReader&) = delete;
  RawReader& operator=(const RawReader&) = delete;

  void Read(std::span<std::byte> into, size_t piece_bytes, size_t window);

 private:
  struct Connection;
  const PullSource source_;
  Connection* const connection_;
};

}  // namespace holdfast::bench
