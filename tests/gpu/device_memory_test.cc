// The rules of tests/client-lib/device_*_test.cc on a real device (docs/design.md, "Device
// memory"): what runs late is made by long queues of copies within the device. Slots are those of a
// fake daemon, in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/client-lib/fake_daemon.h"
#include "tests/gpu/cuda.h"

namespace holdfast {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kLateBytes = 256 * kMiB;
constexpr int kLateCopies = 200;  // some tens of milliseconds of them
const Milliseconds kLong(60'000);

std::string Bytes(size_t bytes, uint8_t value) {
  return std::string(bytes, static_cast<char>(value));
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Cuda::Get().present()) {
      GTEST_SKIP() << kNoDevice;
    }
    current_ = std::make_unique<Cuda::Current>(0);
    cuda_ = &Cuda::Get();
    stream_ = cuda_->NewStream();
    late_ = cuda_->Allocate(2 * kLateBytes);
    Result<std::unique_ptr<Job>> job = Job::Open(daemon_.Options());
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
  }

  void TearDown() override {
    if (current_ == nullptr) {
      return;
    }
    job_.reset();
    cuda_->Wait(stream_);
    cuda_->EndStream(stream_);
    cuda_->Free(late_);
    for (uint8_t* const memory : allocated_) {
      cuda_->Free(memory);
    }
    current_.reset();
  }

  // From now on what is enqueued on the stream runs late.
  void MakeLate(void* stream) {
    for (int i = 0; i < kLateCopies; ++i) {
      cuda_->Copy(stream, late_ + (i % 2) * kLateBytes, late_ + ((i + 1) % 2) * kLateBytes,
                  kLateBytes);
    }
  }

  uint8_t* Add(State& state, const std::string& name, size_t bytes, int device = 0) {
    uint8_t* const memory = cuda_->Allocate(std::max<size_t>(bytes, 1));
    allocated_.push_back(memory);
    state.tensors.emplace_back(name, Type::kU8, std::vector<uint64_t>{bytes}, memory);
    state.tensors.back().device = device;
    return memory;
  }

  // A stream that the job is told of: what comes on it before the call is saved.
  std::vector<DeviceStream> Stream() const { return {{0, stream_}}; }

  std::map<std::string, std::string> Saved(uint64_t step) {
    AttachOptions options;
    options.job = "test";
    options.socket = daemon_.socket();
    options.newest = false;
    options.step = step;
    Result<std::unique_ptr<View>> view = Attach(options);
    std::map<std::string, std::string> saved;
    EXPECT_TRUE(view.ok()) << view.status().ToString();
    if (view.ok()) {
      EXPECT_TRUE((*view)->Verify().ok());
      for (const Tensor& tensor : (*view)->tensors()) {
        saved[tensor.name] = std::string(static_cast<const char*>(tensor.data), tensor.bytes);
      }
    }
    return saved;
  }

  FakeDaemon daemon_;
  std::unique_ptr<Cuda::Current> current_;
  Cuda* cuda_ = nullptr;
  void* stream_ = nullptr;
  uint8_t* late_ = nullptr;
  std::unique_ptr<Job> job_;
  std::vector<uint8_t*> allocated_;
};

TEST_F(GpuTest, WhatWasEnqueuedBeforeIsWhatIsSaved) {
  State state;
  uint8_t* const w = Add(state, "w", 64 * kMiB + 17);
  for (uint8_t step = 1; step <= 5; ++step) {
    MakeLate(stream_);
    cuda_->Fill(stream_, w, 64 * kMiB + 17, step);
    auto handle = job_->SaveAsync(step, state, {.streams = Stream()});
    const Status sealed = handle->Wait(Stage::kSealed, kLong);
    ASSERT_TRUE(sealed.ok()) << sealed.ToString();
    EXPECT_EQ(Saved(step).at("w"), Bytes(64 * kMiB + 17, step));
  }
}

TEST_F(GpuTest, TheLegacyStreamIsAStream) {
  State state;
  uint8_t* const w = Add(state, "w", 64 * kMiB);
  MakeLate(nullptr);
  cuda_->Fill(nullptr, w, 64 * kMiB, 7);
  auto handle = job_->SaveAsync(1, state, {.streams = {{0, nullptr}}});
  ASSERT_TRUE(handle->FenceStreams({{0, nullptr}}, kLong).ok());
  cuda_->Fill(nullptr, w, 64 * kMiB, 0xee);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  EXPECT_EQ(Saved(1).at("w"), Bytes(64 * kMiB, 7));
}

TEST_F(GpuTest, AStepBehindTheFenceIsNotSavedAndTheHostGoesOn) {
  State state;
  uint8_t* const w = Add(state, "w", 512 * kMiB + 1);
  ASSERT_TRUE(job_->Reserve(state, kLong).ok());
  for (uint8_t step = 1; step <= 5; ++step) {
    MakeLate(stream_);
    cuda_->Fill(stream_, w, 512 * kMiB + 1, step);
    auto handle = job_->SaveAsync(step, state, {.streams = Stream()});
    ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
    cuda_->Fill(stream_, w, 512 * kMiB + 1, 0xee);  // the next optimizer step
    if (cuda_->Done(stream_)) {
      std::printf("the device was done before the fence was: nothing was late\n");
    }
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    EXPECT_EQ(Saved(step).at("w"), Bytes(512 * kMiB + 1, step));
  }
}

TEST_F(GpuTest, TheNextSaveOvertakesTheSnapshot) {
  State state;
  uint8_t* const w = Add(state, "w", 128 * kMiB);
  std::vector<std::unique_ptr<SaveHandle>> handles;
  for (uint8_t step = 1; step <= 3; ++step) {
    MakeLate(stream_);
    cuda_->Fill(stream_, w, 128 * kMiB, step);
    handles.push_back(job_->SaveAsync(step, state, {.streams = Stream()}));
    ASSERT_TRUE(handles.back()->FenceStreams(Stream(), kLong).ok());
  }
  for (uint8_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(handles[step - 1u]->Wait(Stage::kSealed, kLong).ok());
    EXPECT_EQ(Saved(step).at("w"), Bytes(128 * kMiB, step));
  }
}

TEST_F(GpuTest, BlocksMayBeFreedAfterTheSnapshot) {
  for (uint8_t step = 1; step <= 5; ++step) {
    State state;
    uint8_t* const w = cuda_->Allocate(64 * kMiB);
    state.tensors.emplace_back("w", Type::kU8, std::vector<uint64_t>{64 * kMiB}, w);
    state.tensors.back().device = 0;
    cuda_->Fill(stream_, w, 64 * kMiB, step);
    auto handle = job_->SaveAsync(step, state, {.streams = Stream()});
    ASSERT_TRUE(handle->WaitSnapshot(kLong).ok());
    cuda_->Free(w);
    uint8_t* const again = cuda_->Allocate(64 * kMiB);
    cuda_->Fill(stream_, again, 64 * kMiB, 0xee);
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    EXPECT_EQ(Saved(step).at("w"), Bytes(64 * kMiB, step));
    cuda_->Wait(stream_);
    cuda_->Free(again);
  }
}

TEST_F(GpuTest, CapturesAreRefusedOrLeftAlone) {
  State state;
  uint8_t* const w = Add(state, "w", 64 * kMiB);
  cuda_->Fill(stream_, w, 64 * kMiB, 7);
  cuda_->Wait(stream_);
  void* const captured = cuda_->NewStream();
  cuda_->BeginCapture(captured);
  cuda_->Fill(captured, w, 64 * kMiB, 0xee);  // into the graph, which never runs
  // 1. On the stream that is captured.
  const Status refused = job_->Save(1, state, {.streams = {{0, captured}}});
  EXPECT_EQ(refused.code(), Code::kRefused) << refused.ToString();
  // 2. Beside it: the first use of everything, pinning included.
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  EXPECT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  const Status sealed = handle->Wait(Stage::kSealed, kLong);
  EXPECT_TRUE(sealed.ok()) << sealed.ToString();
  EXPECT_TRUE(job_->Restore(state, {.streams = Stream()}).ok());
  cuda_->Fill(captured, w, 64 * kMiB, 0xef);
  EXPECT_TRUE(cuda_->EndCapture(captured));
  EXPECT_EQ(Saved(1).at("w"), Bytes(64 * kMiB, 7));
  cuda_->EndStream(captured);
}

TEST_F(GpuTest, RestoreComesAfterEarlierWorkAndIsThereOnReturn) {
  State state;
  uint8_t* const w = Add(state, "w", 200 * kMiB + 3);
  cuda_->Fill(stream_, w, 200 * kMiB + 3, 1);
  ASSERT_TRUE(job_->Save(1, state, {.streams = Stream()}).ok());
  MakeLate(stream_);
  cuda_->Fill(stream_, w, 200 * kMiB + 3, 0xee);
  const Result<Restored> restored = job_->Restore(state, {.streams = Stream()});
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(cuda_->Read(w, 200 * kMiB + 3), Bytes(200 * kMiB + 3, 1));
}

TEST_F(GpuTest, WhatDoesNotMatchItsDigestIsReported) {
  State state;
  uint8_t* const w = Add(state, "w", 20 * kMiB);
  cuda_->Fill(stream_, w, 20 * kMiB, 1);
  ASSERT_TRUE(job_->Save(1, state, {.streams = Stream()}).ok());
  daemon_.FlipImageByte(daemon_.LastRecord().header_bytes + 9 * kMiB);
  EXPECT_FALSE(job_->Restore(state, {.streams = Stream()}).ok());
}

TEST_F(GpuTest, HostAndDevicesMixedAndDigestsAsOfTheSameBytesOnTheHost) {
  std::mt19937_64 random(3);
  State state;
  std::map<std::string, std::string> expected;
  std::vector<size_t> sizes = {0, 1, kMiB - 1, kMiB, kMiB + 1, 9 * kMiB - 3, 70 * kMiB + 5};
  sizes.insert(sizes.end(), 2000, 777);
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::string bytes(sizes[i], '\0');
    std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<char>(random()); });
    const std::string name = "t" + std::to_string(i);
    expected[name] = bytes;
    if (i % 3 != 0) {
      uint8_t* const memory = Add(state, name, sizes[i]);
      if (!bytes.empty()) {
        cuda_->Write(memory, bytes);
      }
    } else {
      state.tensors.emplace_back(name, Type::kU8, std::vector<uint64_t>{sizes[i]},
                                 expected[name].data());
    }
  }
  ASSERT_TRUE(job_->Save(1, state, {.streams = Stream()}).ok());
  EXPECT_EQ(Saved(1), expected);
  const std::vector<uint64_t> digests = daemon_.LastRecord().digests;
  for (Tensor& tensor : state.tensors) {
    tensor.device = -1;
    tensor.data = expected[tensor.name].data();
  }
  ASSERT_TRUE(job_->Save(2, state).ok());
  EXPECT_EQ(daemon_.LastRecord().digests, digests);
}

TEST_F(GpuTest, TwentyThousandSmallTensors) {
  State state;
  uint8_t* const all = cuda_->Allocate(20'000 * 4096);
  allocated_.push_back(all);
  for (size_t i = 0; i < 20'000; ++i) {
    cuda_->Fill(stream_, all + i * 4096, 4096, static_cast<uint8_t>(i % 251));
    state.tensors.emplace_back("t" + std::to_string(i), Type::kU8, std::vector<uint64_t>{4096},
                               all + i * 4096);
    state.tensors.back().device = 0;
  }
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  const auto saved = Saved(1);
  for (size_t i = 0; i < 20'000; ++i) {
    ASSERT_EQ(saved.at("t" + std::to_string(i)), Bytes(4096, static_cast<uint8_t>(i % 251)));
  }
}

TEST_F(GpuTest, TwoDevices) {
  if (Cuda::Get().devices() < 2) {
    std::printf("one device only: nothing to try\n");
    return;
  }
  State state;
  uint8_t* const a = Add(state, "a", 100 * kMiB);
  cuda_->Fill(stream_, a, 100 * kMiB, 1);
  uint8_t* b = nullptr;
  void* other = nullptr;
  {
    const Cuda::Current second(1);
    b = cuda_->Allocate(100 * kMiB);
    other = cuda_->NewStream();
    cuda_->Fill(other, b, 100 * kMiB, 2);
  }
  state.tensors.emplace_back("b", Type::kU8, std::vector<uint64_t>{100 * kMiB}, b);
  state.tensors.back().device = 1;
  const std::vector<DeviceStream> streams = {{0, stream_}, {1, other}};
  auto handle = job_->SaveAsync(1, state, {.streams = streams});
  ASSERT_TRUE(handle->FenceStreams(streams, kLong).ok());
  cuda_->Fill(stream_, a, 100 * kMiB, 0xee);
  {
    const Cuda::Current second(1);
    cuda_->Fill(other, b, 100 * kMiB, 0xee);
  }
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  EXPECT_EQ(Saved(1).at("a"), Bytes(100 * kMiB, 1));
  EXPECT_EQ(Saved(1).at("b"), Bytes(100 * kMiB, 2));
  ASSERT_TRUE(job_->Restore(state, {.streams = streams}).ok());
  EXPECT_EQ(cuda_->Read(a, 100 * kMiB), Bytes(100 * kMiB, 1));
  const Cuda::Current second(1);
  EXPECT_EQ(cuda_->Read(b, 100 * kMiB), Bytes(100 * kMiB, 2));
  cuda_->EndStream(other);
  cuda_->Free(b);
}

// For people: no time is judged.
TEST_F(GpuTest, SaysHowFastItWas) {
  constexpr size_t kTotal = size_t{2} << 30;
  State state;
  Add(state, "w", kTotal);
  ASSERT_TRUE(job_->Reserve(state, kLong).ok());
  const auto timed = [](const char* what, const auto& work) {
    const auto began = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("%s: %.3f s, %.1f GB/s\n", what, took.count(), kTotal / took.count() / 1e9);
  };
  for (uint64_t step = 1; step <= 5; ++step) {
    timed("save", [&] { EXPECT_TRUE(job_->Save(step, state, {.streams = Stream()}).ok()); });
  }
  timed("overlapped save and fence", [&] {
    auto handle = job_->SaveAsync(6, state, {.streams = Stream()});
    const auto began = std::chrono::steady_clock::now();
    EXPECT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
    const std::chrono::duration<double> fence = std::chrono::steady_clock::now() - began;
    std::printf("fence: %.6f s\n", fence.count());
  });
  timed("restore", [&] { EXPECT_TRUE(job_->Restore(state, {.streams = Stream()}).ok()); });
}

}  // namespace
}  // namespace holdfast
