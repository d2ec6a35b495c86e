#include "tests/tiers/memory/memory_harness.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <span>
#include <system_error>
#include <vector>

#include "base/status.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {

SharedMemoryDirectory::SharedMemoryDirectory() {
  char path[] = "/dev/shm/holdfast-test-XXXXXX";
  if (::mkdtemp(path) == nullptr) {
    std::perror("mkdtemp on /dev/shm");
    std::abort();
  }
  path_ = path;
}

SharedMemoryDirectory::~SharedMemoryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

SlotStore::Options StoreOptions(Env& env, const std::string& dir, uint64_t bytes_max) {
  return {&env, dir, bytes_max, kTestBoot};
}

SlotContent MakeSlotContent(Step step, Generation generation, uint64_t elements) {
  ShardRecord identity = SampleRecord();
  identity.id.step = step;
  identity.generation = generation;
  SlotContent content;
  content.sample =
      MakeSampleImage({Whole("weights", DType::kF32, {elements}), Json("progress", 20)}, identity);
  content.record_offset = (content.sample.image.size() + 4095) / 4096 * 4096;
  const ShardRecord& record = content.sample.record;
  content.expected = {record.id, record.job_name, record.world_size, record.generation,
                      record.descent};
  return content;
}

absl::Status FillSlot(SlotStore& store, SlotId slot, const SlotContent& content) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, store.OpenImageFile(slot, true));
  HF_RETURN_IF_ERROR(file->WriteAt(0, std::as_bytes(std::span<const char>(content.sample.image))));
  return file->WriteAt(content.record_offset,
                       std::as_bytes(std::span<const char>(content.sample.record_file)));
}

SlotNote NoteOf(Generation generation, uint64_t slot_bytes) {
  SlotNote note;
  note.generation = generation;
  note.slot_bytes = slot_bytes;
  return note;
}

absl::StatusOr<ShardRecord> PublishSlot(SlotStore& store, SlotId slot, const SlotContent& content) {
  return store.PublishRecord(slot, content.expected, content.record_offset,
                             content.sample.record_file.size());
}

absl::Status SealSlot(SlotStore& store, SlotId slot, const SlotContent& content,
                      uint64_t slot_bytes) {
  HF_RETURN_IF_ERROR(store.Create(slot, slot_bytes));
  HF_RETURN_IF_ERROR(store.WriteNote(slot, NoteOf(content.expected.generation, slot_bytes)));
  HF_RETURN_IF_ERROR(FillSlot(store, slot, content));
  return PublishSlot(store, slot, content).status();
}

absl::Status OverwriteFile(Env& env, const std::string& path, std::string_view bytes) {
  const absl::Status removed = env.Unlink(path);
  if (!removed.ok() && !absl::IsNotFound(removed)) {
    return removed;
  }
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kCreateExclusive));
  return file->WriteAt(0, std::as_bytes(std::span<const char>(bytes)));
}

absl::Status FlipBitOf(Env& env, const std::string& path, uint64_t byte) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kReadWrite));
  std::byte value{};
  HF_RETURN_IF_ERROR(file->ReadAt(byte, {&value, 1}));
  value ^= std::byte{0x10};
  return file->WriteAt(byte, {&value, 1});
}

namespace {

class MemoryHarness : public TierHarness {
 public:
  // With a FaultEnv of its own, or on shared memory.
  explicit MemoryHarness(bool faults) {
    if (faults) {
      faults_ = std::make_unique<FaultEnv>(FaultEnv::Durability::kNone);
      env_ = faults_.get();
      dir_ = "/shm/holdfast";
    } else {
      directory_ = std::make_unique<SharedMemoryDirectory>();
      env_ = Env::System();
      dir_ = directory_->path() + "/holdfast";
    }
  }

  absl::Status Start() override {
    HF_ASSIGN_OR_RETURN(store_, SlotStore::Open(StoreOptions(*env_, dir_)));
    HF_ASSIGN_OR_RETURN(const MemoryScan scan, store_->Scan());
    problems_ = scan.problems;
    HF_ASSIGN_OR_RETURN(tier_, MemoryTier::Start({.store = store_.get()}));
    return absl::OkStatus();
  }
  std::vector<std::string> problems() override { return problems_; }
  void Stop() override {
    tier_.reset();
    store_.reset();
  }
  Tier& tier() override { return *tier_; }
  FaultEnv* faults() override { return faults_.get(); }
  void Crash() override {
    if (faults_ != nullptr) {
      faults_->KillProcess();
    }
  }

  // What the directory says, not what the store believes.
  uint64_t BytesInUse() override {
    uint64_t bytes = 0;
    const std::vector<std::string> names = env_->List(dir_).value();
    for (const std::string& name : names) {
      EXPECT_FALSE(name.ends_with(".tmp")) << name;
      if (ParseFileName(name).role == FileRole::kImage) {
        bytes += env_->Info(JoinPath(dir_, name)).value().bytes;
      }
    }
    EXPECT_EQ(bytes, store_->bytes_used());
    return bytes - tier_->bytes_free_slots();
  }
  uint64_t BytesOfCopy(uint64_t image_bytes) override {
    return (image_bytes + kSlot - 1) / kSlot * kSlot;
  }

  absl::Status FlipRecordBit(const ShardId& id, uint64_t byte) override {
    HF_ASSIGN_OR_RETURN(const StoredSlot slot, store_->Find(id));
    return FlipBitOf(*env_, JoinPath(dir_, RecordName(slot.slot)), byte);
  }
  absl::Status ReplaceRecord(const ShardId& id, std::string_view bytes) override {
    HF_ASSIGN_OR_RETURN(const StoredSlot slot, store_->Find(id));
    return OverwriteFile(*env_, JoinPath(dir_, RecordName(slot.slot)), bytes);
  }
  absl::Status CutImage(const ShardId& id, uint64_t bytes) override {
    HF_ASSIGN_OR_RETURN(const StoredSlot slot, store_->Find(id));
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        env_->Open(JoinPath(dir_, ImageName(slot.slot)), OpenMode::kReadWrite));
    return file->Truncate(bytes);
  }
  absl::Status DeleteImage(const ShardId& id) override {
    HF_ASSIGN_OR_RETURN(const StoredSlot slot, store_->Find(id));
    return env_->Unlink(JoinPath(dir_, ImageName(slot.slot)));
  }

 private:
  std::unique_ptr<SharedMemoryDirectory> directory_;
  std::unique_ptr<FaultEnv> faults_;
  Env* env_ = nullptr;
  std::string dir_;
  std::vector<std::string> problems_;
  std::unique_ptr<SlotStore> store_;
  std::unique_ptr<MemoryTier> tier_;
};

}  // namespace

std::unique_ptr<TierHarness> MakeFaultEnvHarness() {
  return std::make_unique<MemoryHarness>(true);
}
std::unique_ptr<TierHarness> MakeSharedMemoryHarness() {
  return std::make_unique<MemoryHarness>(false);
}

}  // namespace holdfast
