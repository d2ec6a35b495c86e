// From what the user hands over to what lies in a slot: checks, layout, header, and where each
// tensor's bytes go.
//
//   PlanCache cache(rank);
//   HF_TRY_ASSIGN(std::shared_ptr<const StatePlan> plan, cache.Get(state));   // < 1 µs a tensor
//   when it is like the last one HF_TRY(CheckSources(*plan, sources));
//
// A plan never changes and may be kept as long as one likes; a PlanCache belongs to one thread at a
// time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "holdfast/state.h"
#include "holdfast/status.h"
#include "tiers/image/layout.h"
#include "tiers/image/record.h"

namespace holdfast::client {

struct StatePlan {
  std::string signature;  // of the tensors, in the caller's order: all but their addresses
  std::vector<uint64_t> input_bytes;  // of each tensor, then each object, in the caller's order
  ImagePlan image;
  std::vector<DigestedRange> ranges;  // of image.layout: header, then slices
  size_t digest_count = 0;
  std::vector<uint64_t> header_digests;
  std::vector<std::pair<uint32_t, uint32_t>> overlaps;  // indices into image.layout.slices
  uint64_t slot_bytes = 0;                              // image and record, as slots are cut
};

// Where the record of a shard with this image begins in its slot.
uint64_t RecordOffset(uint64_t image_bytes);

// The slice that a tensor is; its shapes are not checked yet.
Slice ToSlice(const Tensor& tensor);
// "tensor 'w'", for messages.
std::string NameOf(const Tensor& tensor);
std::string NameOf(const Object& object);
// "F32 [4, 8] box at [0, 0] of shape [2, 8]".
std::string Describe(const Slice& slice);

// The objects' own rules: UTF-8, JSON that is JSON, a codec where it is not.
Status CheckObjects(const std::vector<Object>& objects);

// Everything about a state that can be said without reading its tensors' bytes.
Result<std::shared_ptr<const StatePlan>> PlanState(const State& state, Rank rank);

// The same tensors with other objects.
Result<std::shared_ptr<const StatePlan>> PlanWithObjects(const StatePlan& plan,
                                                         const std::vector<Object>& objects,
                                                         Rank rank);

class PlanCache {
 public:
  explicit PlanCache(Rank rank) : rank_(rank) {}

  // The last plan, when it fits the tensors; whether it fits the objects too is FitsObjects.
  // Otherwise a new one. Objects and addresses are checked in any case.
  Result<std::shared_ptr<const StatePlan>> Get(const State& state);
  // The same where objects are not known yet; a new plan has none. At least one tensor.
  Result<std::shared_ptr<const StatePlan>> GetForTensors(const std::vector<Tensor>& tensors);
  void Keep(std::shared_ptr<const StatePlan> plan) { plan_ = std::move(plan); }

 private:
  Result<std::shared_ptr<const StatePlan>> Get(const std::vector<Tensor>& tensors,
                                               const std::vector<Object>& objects);

  const Rank rank_;
  std::shared_ptr<const StatePlan> plan_;
  std::string scratch_;
};

// Same names, kinds and lengths, in the same order.
bool FitsObjects(const StatePlan& plan, const std::vector<Object>& objects);

// Slices that share elements must agree on them. sources[i] are the bytes of the caller's tensor i.
Status CompareOverlaps(const StatePlan& plan, const std::vector<const void*>& sources);

}  // namespace holdfast::client
