#include "tests/tiers/durable/durable_harness.h"

#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

constexpr uint64_t kLeak = uint64_t{1} << 40;
constexpr uint64_t kPoolBytes = uint64_t{8} << 20;

}  // namespace

DurableHarness::DurableHarness(const DurablePlace& place) : power_loss_(place.power_loss) {
  options_.kind = place.kind;
  options_.node_name = "node-1";
  options_.pool_bytes_max = kPoolBytes;
  options_.direct = place.direct;
  if (place.real) {
    directory_ = std::make_unique<TemporaryDirectory>();
    env_ = Env::System();
    options_.dir = directory_->path() + "/holdfast";
  } else {
    faults_ = std::make_unique<FaultEnv>();
    faults_->SetHardLinks(place.hard_links);
    faults_->SetRenameNoReplace(place.rename_no_replace);
    faults_->SetAllocate(place.allocate);
    env_ = faults_.get();
    options_.dir = "/mnt/holdfast";
  }
  options_.env = env_;
  if (absl::Status made = env_->CreateDirectories(options_.dir, 0700); !made.ok()) {
    ADD_FAILURE() << ToString(made);
  }
}

absl::Status DurableHarness::Start() {
  problems_.clear();
  HF_ASSIGN_OR_RETURN(store_, CopyStore::Open(options_));
  HF_ASSIGN_OR_RETURN(const SweepReport swept, store_->Sweep());
  for (const UnknownFile& file : swept.left_alone) {
    problems_.push_back(file.path + ": " + file.why);
  }
  HF_ASSIGN_OR_RETURN(const DurableScan scan, store_->ScanAll());
  for (const UnknownFile& file : scan.unknown) {
    problems_.push_back(file.path + ": " + file.why);
  }
  if (options_.kind == DurableKind::kRemote) {
    HF_RETURN_IF_ERROR(store_->ClaimAttempt(SampleJob(), 3, "opening 1"));
  }
  return absl::OkStatus();
}

void DurableHarness::Crash() {
  if (faults_ != nullptr) {
    power_loss_ ? faults_->Crash() : faults_->KillProcess();
  }
}

void DurableHarness::Walk(const std::string& path, std::vector<std::string>& out) {
  const std::vector<std::string> names = env_->List(path).value();
  for (const std::string& name : names) {
    const std::string inner = JoinPath(path, name);
    if (inner == options_.dir + "/.holdfast/pool") {
      continue;
    }
    if (S_ISDIR(env_->Info(inner).value().mode)) {
      Walk(inner, out);
    } else {
      out.push_back(inner.substr(options_.dir.size() + 1));
    }
  }
}

std::vector<std::string> DurableHarness::Files() {
  std::vector<std::string> files;
  Walk(options_.dir, files);
  return files;
}

std::vector<std::string> DurableHarness::Leftovers() {
  std::vector<std::string> left;
  for (const std::string& file : Files()) {
    const std::string path = JoinPath(options_.dir, file);
    const std::string name = file.substr(file.rfind('/') + 1);
    const StepFile parsed = ParseStepFileName(options_.kind, name);
    bool bad = parsed.role == StepFileRole::kTemporary || name.ends_with(".intent") ||
               name.starts_with("probe-");
    if (parsed.role == StepFileRole::kImage) {
      bad = !env_->Info(path.substr(0, path.rfind(".safetensors")) + ".record").ok();
    }
    if (bad) {
      left.push_back(file);
    }
  }
  return left;
}

// What the directory says, not what the store believes.
uint64_t DurableHarness::BytesInUse() {
  uint64_t bytes = 0;
  for (const std::string& leftover : Leftovers()) {
    ADD_FAILURE() << "left over: " << leftover;
    bytes += kLeak;
  }
  for (const std::string& file : Files()) {
    if (file.ends_with(".safetensors")) {
      bytes += env_->Info(JoinPath(options_.dir, file)).value().bytes;
    }
  }
  return bytes;
}

namespace {

std::string RecordPathOf(DurableHarness& harness, const ShardId& id) {
  const std::string image = harness.store().ImagePath({id, SampleJob().name, 4});
  return image.substr(0, image.rfind('.')) + ".record";
}

}  // namespace

absl::Status DurableHarness::FlipRecordBit(const ShardId& id, uint64_t byte) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                      env_->Open(RecordPathOf(*this, id), OpenMode::kReadWrite));
  std::byte value{};
  HF_RETURN_IF_ERROR(file->ReadAt(byte, {&value, 1}));
  value ^= std::byte{0x10};
  return file->WriteAt(byte, {&value, 1});
}
absl::Status DurableHarness::ReplaceRecord(const ShardId& id, std::string_view bytes) {
  return Overwrite(*env_, RecordPathOf(*this, id), bytes);
}
absl::Status DurableHarness::CutImage(const ShardId& id, uint64_t bytes) {
  HF_ASSIGN_OR_RETURN(
      const std::unique_ptr<File> file,
      env_->Open(store_->ImagePath({id, SampleJob().name, 4}), OpenMode::kReadWrite));
  return file->Truncate(bytes);
}
absl::Status DurableHarness::DeleteImage(const ShardId& id) {
  return env_->Unlink(store_->ImagePath({id, SampleJob().name, 4}));
}

absl::Status Overwrite(Env& env, const std::string& path, std::string_view bytes) {
  const absl::Status removed = env.Unlink(path);
  if (!removed.ok() && !absl::IsNotFound(removed)) {
    return removed;
  }
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kCreateExclusive));
  return file->WriteAt(0, std::as_bytes(std::span<const char>(bytes)));
}

// ---- Samples ----

JobIdentity SampleJob() {
  const ShardRecord record = SampleRecord();
  return {record.id.job, record.job_name, 0, 0};
}

SampleImage SampleShard(Step step, Rank rank, uint32_t world_size, Attempt attempt) {
  ShardRecord identity = SampleRecord();
  identity.id.step = step;
  identity.id.rank = rank;
  identity.id.attempt = attempt;
  identity.world_size = world_size;
  identity.descent = {{attempt, {0, 0}}};
  return MakeSampleImage({Whole("w", DType::kF32, {1000 + 16 * rank + step % 7})}, identity);
}

CopyName NameOf(const SampleImage& sample) {
  return {sample.record.id, sample.record.job_name, sample.record.world_size};
}
CheckpointName CheckpointOf(const SampleImage& sample) {
  return {sample.record.id.job, sample.record.job_name, sample.record.id.checkpoint()};
}
NewCopy NewCopyOfShard(const SampleImage& sample) {
  return {sample.record.id,
          sample.record.job_name,
          sample.record.world_size,
          sample.image.size(),
          0,
          0};
}

absl::Status WriteShard(CopyStore::Writing& writing, const SampleImage& sample) {
  constexpr size_t kAlignment = 4096;
  const size_t unit = writing.alignment();
  const size_t bytes = (sample.image.size() + unit - 1) / unit * unit;
  const std::unique_ptr<void, decltype(&std::free)> buffer(
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment),
      &std::free);
  std::memset(buffer.get(), 0x5a, bytes);  // the tail, which Publish is to cut off
  std::memcpy(buffer.get(), sample.image.data(), sample.image.size());
  return writing.image().WriteAt(0, {static_cast<const std::byte*>(buffer.get()), bytes});
}

absl::StatusOr<PublishedCopy> PublishShard(CopyStore& store, const SampleImage& sample,
                                           std::optional<int> zstd_level) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyStore::Writing> writing,
                      store.Begin(NewCopyOfShard(sample), zstd_level));
  HF_RETURN_IF_ERROR(WriteShard(*writing, sample));
  return writing->Publish(sample.record_file);
}

absl::Status CheckShard(CopyStore& store, const SampleImage& sample) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CopyStore::Reading> reading,
                      store.OpenCopy(NameOf(sample), {}));
  std::string image(sample.image.size(), '\0');
  HF_RETURN_IF_ERROR(reading->image().ReadAt(0, std::as_writable_bytes(std::span<char>(image))));
  ShardRecord expected = sample.record;
  expected.generation = 0;
  if (image != sample.image || reading->record() != expected ||
      reading->info().image_bytes != sample.image.size()) {
    return absl::DataLossError("what was read is not what was published");
  }
  return reading->Confirm();
}

Manifest ManifestOf(const std::vector<SampleImage>& samples,
                    const std::vector<PublishedCopy>& copies) {
  const ShardRecord& first = samples.at(0).record;
  Manifest manifest;
  manifest.job = first.id.job;
  manifest.job_name = first.job_name;
  manifest.checkpoint = first.id.checkpoint();
  manifest.world_size = first.world_size;
  manifest.descent = first.descent;
  manifest.committed_unix_ms = 1'700'000'000'000;
  for (size_t i = 0; i < samples.size(); ++i) {
    manifest.shards.push_back({samples[i].record.id.rank, copies.at(i).image_bytes,
                               copies[i].record_bytes, copies[i].record_crc,
                               copies[i].layout_hash});
  }
  return manifest;
}

}  // namespace holdfast
