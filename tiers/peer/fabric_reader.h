// A connection to a device of a peer, to read over, driven by the thread that owns it. Internal to
// tiers/peer/.
//
//   HF_ASSIGN_OR_RETURN(auto reader, FabricReader::Connect(device, endpoint, greeting));
//   reader->Post(…, tag);                          // false: not now
//   while (auto done = reader->Poll()) … done->tag …
//   FabricReader::Wait({&reader, 1}, 20ms);
//   reader.reset();              // ends what is under way: nothing lands in memory afterwards
//
// Not thread-safe.
#pragma once

#include <rdma/fabric.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast {

class FabricReader {
 public:
  // Begins to connect. `peer`: where it listens, `greeting`: what it wants to hear.
  static absl::StatusOr<std::unique_ptr<FabricReader>> Connect(std::shared_ptr<FabricDevice> device,
                                                               const std::string& peer,
                                                               const std::string& greeting);
  FabricReader(const FabricReader&) = delete;
  FabricReader& operator=(const FabricReader&) = delete;

  // Begins to read `to.size()` bytes, at most max_bytes(). False when it has to be tried again: the
  // window is full, or the connection is still being made.
  absl::StatusOr<bool> Post(std::span<std::byte> to, void* descriptor, uint64_t from, uint64_t key,
                            uint64_t tag);

  // What is done, one at a time; software providers move the bytes in here. An error is the
  // connection's: Unavailable, without the peer's name, and it is of no further use.
  absl::StatusOr<std::optional<uint64_t>> Poll();

  // Sleeps until one of them may have something to do, at most so long.
  static void Wait(std::span<FabricReader* const> readers, Duration at_most);

  bool connected() const { return connected_; }
  size_t in_flight() const { return operations_.size() - free_.size(); }
  uint64_t max_bytes() const { return device().info().ep_attr->max_msg_size; }
  FabricDevice& device() const { return *queues_.device; }

 private:
  struct Operation {
    fi_context2 context;  // the provider's, while the read is under way
    uint64_t tag;
  };

  FabricReader(FabricQueues queues, size_t window);
  absl::Status TakeEvents();
  absl::Status Broken(int64_t error, const char* doing) const;

  bool connected_ = false;
  std::vector<Operation> operations_;
  std::vector<size_t> free_;
  FabricQueues queues_;
  FabricObject<fid_ep> endpoint_;  // closed first: until then it may use the others
};

}  // namespace holdfast
