// A CopyStore to test with: either kind, on a FaultEnv that can do more or less, or on a real
// directory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fault_env.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/image/sample_image.h"
#include "tests/tiers/tier_harness.h"
#include "tiers/durable/copy_store.h"

namespace holdfast {

struct DurablePlace {
  DurableKind kind = DurableKind::kNvme;
  bool real = false;  // a directory under /tmp; else a FaultEnv
  bool hard_links = true;
  bool rename_no_replace = true;
  bool allocate = true;
  bool direct = false;
  bool power_loss = true;   // what Crash is; else the process dies and the kernel lives
  bool compressed = false;  // for the test to pass on, which publishes
};

class DurableHarness : public TierHarness {
 public:
  explicit DurableHarness(const DurablePlace& place);

  absl::Status Start() override;
  void Stop() override { store_.reset(); }
  std::vector<std::string> problems() override { return problems_; }
  Tier& tier() override { return *store_; }
  FaultEnv* faults() override { return faults_.get(); }
  void Crash() override;
  uint64_t BytesInUse() override;
  uint64_t BytesOfCopy(uint64_t image_bytes) override { return image_bytes; }
  absl::Status FlipRecordBit(const ShardId& id, uint64_t byte) override;
  absl::Status ReplaceRecord(const ShardId& id, std::string_view bytes) override;
  absl::Status CutImage(const ShardId& id, uint64_t bytes) override;
  absl::Status DeleteImage(const ShardId& id) override;

  CopyStore& store() { return *store_; }
  Env& env() { return *env_; }
  const std::string& dir() const { return options_.dir; }
  CopyStore::Options& options() { return options_; }  // for the next Start
  // Every file below the directory but what is ready for reuse, with its path from there.
  std::vector<std::string> Files();
  // What must not be there when nothing is under way: temporaries, intents, halves of copies.
  std::vector<std::string> Leftovers();

 private:
  void Walk(const std::string& path, std::vector<std::string>& out);

  const bool power_loss_;
  std::unique_ptr<TemporaryDirectory> directory_;
  std::unique_ptr<FaultEnv> faults_;
  Env* env_ = nullptr;
  CopyStore::Options options_;
  std::vector<std::string> problems_;
  std::unique_ptr<CopyStore> store_;
};

// Rank `rank` of `world_size` of job "demo", attempt 3, at a step: small images, all different.
SampleImage SampleShard(Step step, Rank rank, uint32_t world_size, Attempt attempt = 3);
JobIdentity SampleJob();
CopyName NameOf(const SampleImage& sample);
CheckpointName CheckpointOf(const SampleImage& sample);
NewCopy NewCopyOfShard(const SampleImage& sample);

// Begin, write, Publish; direct where the store does so.
absl::StatusOr<PublishedCopy> PublishShard(CopyStore& store, const SampleImage& sample,
                                           std::optional<int> zstd_level = std::nullopt);
absl::Status WriteShard(CopyStore::Writing& writing, const SampleImage& sample);
// Reads it back and compares everything.
absl::Status CheckShard(CopyStore& store, const SampleImage& sample);
// The manifest that these copies make.
Manifest ManifestOf(const std::vector<SampleImage>& samples,
                    const std::vector<PublishedCopy>& copies);

// Replaces a file's content through Env, not atomically: the hand that meddles.
absl::Status Overwrite(Env& env, const std::string& path, std::string_view bytes);

}  // namespace holdfast
