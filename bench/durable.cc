#include "bench/durable.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "base/digest.h"
#include "base/status.h"
#include "base/units.h"

namespace holdfast::bench {
namespace {

constexpr uint64_t kTensorBytes = 16 * kMiB;
constexpr uint64_t kSlotMultiple = 2 * kMiB;
constexpr double kCpuBytes = 8e9;
constexpr double kCpuBar = 1.5;
constexpr double kCpuGoal = 1.0;

[[noreturn]] void GiveUp(const std::string& message) {
  std::fprintf(stderr, "holdfast_bench: %s\n", message.c_str());
  std::exit(1);
}

std::vector<Slice> Tensors(uint64_t bytes) {
  std::vector<Slice> slices;
  for (uint64_t done = 0; done < bytes; done += kTensorBytes) {
    Slice slice;
    char name[40];
    std::snprintf(name, sizeof name, "layers.%06llu.weight",
                  static_cast<unsigned long long>(slices.size()));
    slice.name = name;
    slice.dtype = DType::kBF16;
    slice.global_shape = {std::min(kTensorBytes, bytes - done) / 2};
    slices.push_back(std::move(slice));
  }
  return slices;
}

ShardRecord RecordOf(const ImagePlan& plan, std::span<const std::byte> memory) {
  ShardRecord record;
  record.id = {JobUuid{{1}}, 1, 1, 0};
  record.job_name = "bench";
  record.world_size = 1;
  record.image_bytes = plan.layout.image_bytes;
  record.header_bytes = plan.layout.header_bytes;
  record.layout_hash = plan.layout_hash;
  record.layout_bytes = plan.layout_bytes;
  for (const DigestedRange& range : DigestedRanges(plan.layout)) {
    AppendBlockDigests(memory.subspan(range.image_offset, range.bytes), record.digests);
  }
  return record;
}

}  // namespace

void MustBeOk(const absl::Status& status, const char* doing) {
  if (!status.ok()) {
    GiveUp(std::string(doing) + ": " + ToString(status));
  }
}

void FillWithNoise(std::span<std::byte> bytes) {
  uint64_t x = 0x9e3779b97f4a7c15;
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    std::memcpy(bytes.data() + at, &x, 8);
  }
}

ShardInMemory::ShardInMemory(uint64_t bytes,
                             const std::function<void(std::span<std::byte>)>& fill) {
  std::string path = "/dev/shm/holdfast-bench-slot-XXXXXX";
  const int fd = ::mkstemp(path.data());
  if (fd < 0) {
    GiveUp("no file on /dev/shm");
  }
  ::close(fd);
  Env& env = *Env::System();
  ImagePlan plan = MustBeOk(PlanImage(Tensors(bytes), 0), "plan the image");
  const uint64_t slot_bytes = RoundUp(plan.layout.image_bytes, kSlotMultiple);
  file_ = MustBeOk(env.Open(path, OpenMode::kReadWrite), "open the slot");
  MustBeOk(env.Unlink(path), "unlink the slot");  // gone with this process, however it ends
  MustBeOk(file_->Allocate(0, slot_bytes), "allocate the slot");
  mapping_ = MustBeOk(env.Map(*file_, 0, slot_bytes, true), "map the slot");
  MustBeOk(env.Populate(*mapping_, 0, slot_bytes), "populate the slot");
  fill(memory());
  std::memcpy(mapping_->data(), plan.header.data(), plan.header.size());
  auto image = std::make_shared<RecordAndLayout>();
  image->record = RecordOf(plan, memory());
  image->layout = std::move(plan.layout);
  image_ = std::move(image);
}

ScratchDirectory::ScratchDirectory(const std::string& parent, uint64_t bytes)
    : path_(parent + "/holdfast-bench-XXXXXX") {
  const FilesystemInfo info = MustBeOk(Env::System()->Filesystem(parent), "look at --dir");
  if (info.bytes_free < bytes) {
    GiveUp(parent + " has " + FormatBytes(info.bytes_free) + " free, " + FormatBytes(bytes) +
           " are needed: say --dir, or a smaller --max-gib");
  }
  if (::mkdtemp(path_.data()) == nullptr) {
    GiveUp("cannot make a directory in " + parent);
  }
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

DirectFile OpenDirect(const std::string& path, OpenMode mode) {
  auto file = MustBeOk(Env::System()->Open(path, mode, {.direct = true}), "open for direct I/O");
  const DirectAlignment alignment = MustBeOk(file->Alignment(), "ask for the alignment");
  return {std::move(file), std::max(alignment.memory_bytes, alignment.offset_bytes)};
}

double ProcessCpuSeconds() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Row CpuRow(const std::string& name, uint64_t bytes, const std::vector<double>& seconds) {
  const double per = kCpuBytes / static_cast<double>(bytes);
  Row row{name, "s per 8 GB"};
  row.better = Better::kLower;
  row.value = row.ratio = Median(seconds) * per;
  row.ratio_low = *std::min_element(seconds.begin(), seconds.end()) * per;
  row.ratio_high = *std::max_element(seconds.begin(), seconds.end()) * per;
  row.bar = kCpuBar;
  row.goal = kCpuGoal;
  row.note = "the whole process, verification included";
  return row;
}

uint64_t PrivateBytes() {
  const std::string status = MustBeOk(ReadKernelFile("/proc/self/status"), "read /proc");
  const size_t at = status.find("RssAnon:");
  return at == std::string::npos ? 0 : std::strtoull(status.c_str() + at + 8, nullptr, 10) * kKiB;
}

}  // namespace holdfast::bench
