// What an io_uring of ours decides without asking the kernel: whose a completion is, when the queue
// is submitted, and how memory is cut up for registration. Internal to tiers/transfer/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/units.h"

namespace holdfast {

// Requests take places of a table, one after the other. A tag names a place and the submission that
// had it: an answer to an earlier one is none to the one that is there now.
class RequestTags {
 public:
  static constexpr uint64_t kNobody = ~uint64_t{0};  // of an entry whose answer nobody waits for

  explicit RequestTags(size_t places) : generations_(places) {}

  // For the next submission of that place; its earlier tags are void.
  uint64_t Issue(uint32_t place);
  // The place is free: all its tags are void.
  void Retire(uint32_t place) { ++generations_[place]; }
  // The place that waits for this tag; none if nobody does any more.
  std::optional<uint32_t> PlaceOf(uint64_t tag) const;

 private:
  std::vector<uint32_t> generations_;  // by place
};

// Submits until nothing is queued. The kernel may take only a part of the queue, which is no error,
// and whoever waits for the rest would wait for ever. `submit` returns how many entries the kernel
// took, or minus an errno (io_uring_submit). `queued` returns how many it has not taken
// (io_uring_sq_ready). 0, or the errno with which the kernel left the last entry in the queue.
int SubmitQueued(const std::function<int()>& submit, const std::function<unsigned()>& queued);

inline constexpr uint64_t kRegisteredBytesMax = kGiB;  // the kernel's limit for one buffer

struct MemorySlice {
  uint64_t offset;
  uint64_t bytes;
  bool operator==(const MemorySlice&) const = default;
};
// Whole gigabytes and the rest: a piece lies in one of them when pieces divide a gigabyte.
std::vector<MemorySlice> RegisteredSlices(uint64_t bytes);

}  // namespace holdfast
