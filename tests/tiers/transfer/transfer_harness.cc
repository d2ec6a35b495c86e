#include "tests/tiers/transfer/transfer_harness.h"

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "base/units.h"

namespace holdfast {
namespace {

constexpr std::chrono::seconds kDeadline{60};
constexpr char kOldByte = '\xEE';

std::string RandomBytes(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text(bytes, '\0');
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(text.data() + at, &word, std::min<uint64_t>(8, bytes - at));
  }
  return text;
}

size_t CountEntries(const char* directory) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) {
    ++count;
  }
  return count;
}

}  // namespace

SampleImage MakeTransferImage(uint64_t big_slice_bytes) {
  std::vector<Slice> slices = {
      Whole("big", DType::kU8, {big_slice_bytes}), Whole("empty", DType::kF32, {0, 7}),
      Whole("weight", DType::kF32, {300'001}), Whole("z.last", DType::kU8, {1})};
  for (int i = 0; i < 40; ++i) {
    slices.push_back(
        Whole("small." + std::to_string(i), DType::kU16, {static_cast<uint64_t>(1 + i * 977)}));
  }
  // The data in image order, which only the plan knows.
  const ImagePlan plan = ValueOf(PlanImage(slices, SampleRecord().id.rank));
  std::vector<std::string> data;
  for (const Slice& slice : plan.layout.slices) {
    data.push_back(RandomBytes(slice.bytes, data.size() + 1));
  }
  return MakeImageOf(std::move(slices), SampleRecord(), data);
}

TestSlot::TestSlot(uint64_t image_bytes, std::string_view fill) {
  std::string path = "/dev/shm/holdfast-test-slot-XXXXXX";
  const int fd = ::mkstemp(path.data());
  EXPECT_GE(fd, 0);
  ::close(fd);
  Env& env = *Env::System();
  const uint64_t bytes = RoundUp(std::max<uint64_t>(image_bytes, 1), 2 * kMiB);
  file_ = ValueOf(env.Open(path, OpenMode::kReadWrite));
  EXPECT_TRUE(env.Unlink(path).ok());  // a test that dies leaves nothing
  EXPECT_TRUE(file_->Allocate(0, bytes).ok());
  mapping_ = ValueOf(env.Map(*file_, 0, bytes, true));
  EXPECT_TRUE(env.Populate(*mapping_, 0, bytes).ok());
  std::memset(mapping_->data(), kOldByte, bytes);
  fill.copy(reinterpret_cast<char*>(mapping_->data()), fill.size());
}

std::string_view TestSlot::text(uint64_t bytes) const {
  return {reinterpret_cast<const char*>(mapping_->data()), bytes};
}

bool TestSlot::RestIsUntouched(uint64_t image_bytes) const {
  const auto rest = text(mapping_->bytes()).substr(image_bytes);
  return std::all_of(rest.begin(), rest.end(), [](char c) { return c == kOldByte; });
}

void TestSlot::Cut(uint64_t bytes) {
  EXPECT_TRUE(file_->Truncate(bytes).ok());
}

std::string ContentOf(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return std::move(out).str();
}

void FlipBitIn(File& file, uint64_t byte) {
  std::byte value{};
  ASSERT_TRUE(file.ReadAt(byte, {&value, 1}).ok());
  value ^= std::byte{1};
  ASSERT_TRUE(file.WriteAt(byte, {&value, 1}).ok());
}

void Gate::Open() {
  const std::lock_guard lock(mutex_);
  open_ = true;
  cv_.notify_all();
}

void Gate::Pass() {
  std::unique_lock lock(mutex_);
  ++waiting_;
  cv_.notify_all();
  cv_.wait(lock, [this] { return open_; });
  --waiting_;
  cv_.notify_all();
}

void Gate::WaitForWaiting(int count) {
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(cv_.wait_for(lock, kDeadline, [&] { return waiting_ >= count; }));
}

int Gate::waiting() {
  const std::lock_guard lock(mutex_);
  return waiting_;
}

absl::Status HangingFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  if (offset >= hang_from_) {
    gate_->Pass();
  }
  return ForwardingFile::ReadAt(offset, out);
}

absl::Status HangingFile::WriteAt(uint64_t offset, std::span<const std::byte> data) {
  if (offset >= hang_from_) {
    gate_->Pass();
  }
  return ForwardingFile::WriteAt(offset, data);
}

absl::Status WatchedFile::Count() {
  int call = 0;
  {
    const std::lock_guard lock(mutex_);
    call = ++calls_;
  }
  return before_(call);
}

absl::Status WatchedFile::ReadAt(uint64_t offset, std::span<std::byte> out) {
  HF_RETURN_IF_ERROR(Count());
  return ForwardingFile::ReadAt(offset, out);
}

absl::Status WatchedFile::WriteAt(uint64_t offset, std::span<const std::byte> data) {
  HF_RETURN_IF_ERROR(Count());
  return ForwardingFile::WriteAt(offset, data);
}

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

size_t CountThreads() {
  return CountEntries("/proc/self/task");
}

size_t CountDescriptors() {
  return CountEntries("/proc/self/fd");
}

}  // namespace holdfast
