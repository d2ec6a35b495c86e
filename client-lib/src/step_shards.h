// What all ranks have saved at one step, as their records say: for a rank that makes what it wants
// out of several shards. No tensor is read.
//
//   auto shards = StepShards::Read(source, job, checkpoint, saved_by, deadline);
//   HF_TRY(shards->AddTo(planner));
//   const ReshardPlan plan = planner.Plan(shards->Sources(reader, own, {}));
//
// Not thread-safe while it is read; constant afterwards.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/held_shard.h"
#include "holdfast/job.h"
#include "recovery/reshard.h"

namespace holdfast::client {

// Whether another copy is to be tried: this one is of no use, or lies on nodes that cannot be read.
bool MayPassOver(HeldShard& held, const Status& read);
// The tier of a copy that was found bad joins those that are left out. False: it was offered though
// it was there.
bool PassOver(const HeldShard& held, std::vector<std::string>& without);

class StepShards {
 public:
  // Of every rank of 0 to saved_by - 1; fails as the first rank does whose shard is to be had from
  // no tier.
  static Result<StepShards> Read(const ShardSource& source, const std::string& job,
                                 CheckpointId checkpoint, uint32_t saved_by, Deadline deadline);

  CheckpointId checkpoint() const { return checkpoint_; }
  uint32_t saved_by() const { return static_cast<uint32_t>(ranks_.size()); }
  // Every tensor that any rank saved a part of, whole, by name; none has bytes. Of each, how many
  // ranks have some of it.
  std::vector<Tensor> Tensors() const;
  std::vector<uint32_t> TensorRanks() const;
  // What there is under the names of objects, without bytes; which ranks have the same the digests
  // say.
  struct Content {
    SavedObject content;
    uint64_t bytes = 0;
  };
  const std::vector<Content>& objects() const { return objects_; }
  // With their bytes, each from one of the ranks that have it.
  Result<std::vector<SavedObject>> ReadObjects(const std::vector<size_t>& which, CopyEngine& engine,
                                               Deadline deadline) const;
  // Some bytes of one of them, however large it is; they begin with a digest block.
  Status ReadObjectPart(size_t which, uint64_t begin, uint64_t bytes, void* to, CopyEngine& engine,
                        Deadline deadline) const;

  // `only`: of that rank's shard alone, as if no other rank had saved.
  Status AddTo(ReshardPlanner& planner, std::optional<Rank> only = std::nullopt) const;
  // The tensors of those names of which the rank has a part, whole; none has bytes.
  Result<std::vector<Tensor>> TensorsOf(Rank rank, const std::set<std::string>& names) const;
  // Of the slices of all ranks: their layouts and digests.
  uint64_t content() const { return content_; }
  // Whom to read from, but for those ranks: the nearest first. `own`: as many ranks as saved read.
  ReshardSources Sources(Rank reader, bool own, const std::set<Rank>& without) const;

  // That shard again, from another tier than those.
  Result<std::unique_ptr<HeldShard>> Open(Rank rank, const std::vector<std::string>& without,
                                          Deadline deadline) const;
  // kCorrupt: this copy of the rank's shard is not of what its record said when it was read.
  Status CheckSame(Rank rank, HeldShard& held) const;

 private:
  struct SavedLayout {
    std::string bytes;
    std::vector<uint64_t> first_digest;  // of each slice, and behind the last one
    std::vector<Rank> ranks;
  };
  struct SavedRank {
    const SavedLayout* layout = nullptr;
    std::vector<uint64_t> digests;
    std::vector<bool> left_out;  // slices of it, if any are: others' files have them
    uint64_t cost = 0;
  };
  using ObjectKey = std::tuple<std::string, SliceKind, std::string, std::vector<uint64_t>>;

  StepShards(ShardSource source, std::string job, CheckpointId checkpoint)
      : source_(std::move(source)), job_(std::move(job)), checkpoint_(checkpoint) {}
  Status CheckIdentity(const HeldShard& held, uint32_t saved_by) const;
  void Keep(const RecordAndLayout& image, const std::string& tier);
  // All its objects, from the nearest tier whose copy is good.
  Result<std::vector<Object>> ObjectsOf(Rank rank, CopyEngine& engine, Deadline deadline) const;
  Status ReadObjectPartOf(Rank rank, const Content& wanted, const CopyOutRange& part,
                          CopyEngine& engine, Deadline deadline) const;
  void KeepNames(const Layout& layout, Rank rank);
  std::optional<std::span<const uint64_t>> Digests(Rank rank, uint32_t slice) const;

  ShardSource source_;
  std::string job_;
  CheckpointId checkpoint_;
  std::map<LayoutHash, SavedLayout> layouts_;
  std::vector<SavedRank> ranks_;
  struct Known {
    DType dtype = DType::kU8;
    std::vector<uint64_t> shape;
    uint32_t ranks = 0;
    Rank last = 0;  // of them
  };
  std::map<std::string, Known> tensors_;
  std::map<ObjectKey, size_t> object_index_;  // while it is read
  std::vector<Content> objects_;
  uint64_t content_ = 0;
};

}  // namespace holdfast::client
