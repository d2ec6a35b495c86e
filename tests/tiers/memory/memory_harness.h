// Places for the memory tier's tests: a FaultEnv that plays tmpfs, or a fresh directory on the
// machine's own.
#pragma once

#include <memory>
#include <string>

#include "base/env.h"
#include "base/fault_env.h"
#include "tests/tiers/image/sample_image.h"
#include "tests/tiers/tier_harness.h"
#include "tiers/memory/memory_tier.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

inline constexpr uint64_t kSlot = kSlotBytesMultiple;
inline constexpr char kTestBoot[] = "5f3c1a52-0000-4000-8000-000000000001";

// A new directory on /dev/shm, removed with all that is in it.
class SharedMemoryDirectory {
 public:
  SharedMemoryDirectory();
  ~SharedMemoryDirectory();
  SharedMemoryDirectory(const SharedMemoryDirectory&) = delete;
  SharedMemoryDirectory& operator=(const SharedMemoryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

SlotStore::Options StoreOptions(Env& env, const std::string& dir, uint64_t bytes_max = 64 * kSlot);

// A sealed image for a slot: image, then the record at the next multiple of 4096.
struct SlotContent {
  SampleImage sample;
  uint64_t record_offset = 0;
  RecordExpectation expected;
};
SlotContent MakeSlotContent(Step step, Generation generation, uint64_t elements = 3000);
// Writes image and record into the slot as a client does.
absl::Status FillSlot(SlotStore& store, SlotId slot, const SlotContent& content);
SlotNote NoteOf(Generation generation, uint64_t slot_bytes);
// Create, note, fill, publish.
absl::Status SealSlot(SlotStore& store, SlotId slot, const SlotContent& content,
                      uint64_t slot_bytes = kSlot);
absl::StatusOr<ShardRecord> PublishSlot(SlotStore& store, SlotId slot, const SlotContent& content);

// Replaces a file's content, through Env but not atomically: the hand that meddles.
absl::Status OverwriteFile(Env& env, const std::string& path, std::string_view bytes);
absl::Status FlipBitOf(Env& env, const std::string& path, uint64_t byte);

std::unique_ptr<TierHarness> MakeFaultEnvHarness();
std::unique_ptr<TierHarness> MakeSharedMemoryHarness();

}  // namespace holdfast
