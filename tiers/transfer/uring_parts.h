// What an io_uring of ours decides without asking the kernel: whose a completion is, and how memory
// is cut up for registration. Internal to tiers/transfer/.
#pragma once

#include <cstddef>
#include <cstdint>
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

inline constexpr uint64_t kRegisteredBytesMax = kGiB;  // the kernel's limit for one buffer

struct MemorySlice {
  uint64_t offset;
  uint64_t bytes;
  bool operator==(const MemorySlice&) const = default;
};
// Whole gigabytes and the rest: a piece lies in one of them when pieces divide a gigabyte.
std::vector<MemorySlice> RegisteredSlices(uint64_t bytes);

}  // namespace holdfast
