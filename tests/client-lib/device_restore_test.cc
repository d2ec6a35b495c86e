// Restoring into tensors that lie on devices: after what was enqueued there before, verified before
// it gets there, and all there when Restore returns. And every call of the driver failing once, at
// any position of a save and a restore.
#include <algorithm>
#include <cstring>
#include <random>

#include "tests/client-lib/device_test.h"

namespace holdfast {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr uint64_t kSeeds = 20;
constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

class DeviceRestoreTest : public DeviceTest {};

std::string Held(const State& state, size_t tensor) {
  return std::string(static_cast<const char*>(state.tensors[tensor].data),
                     state.tensors[tensor].global_shape[0]);
}

// (8)
TEST_F(DeviceRestoreTest, ComesAfterEarlierWorkAndIsThereOnReturn) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    driver_->Run();
    Open();
    State state;
    uint8_t* const a = Add(state, "a", 0, 19 * kMiB + 3, 1);
    uint8_t* const b = Add(state, "b", 1, 5 * kMiB, 2);
    Add(state, "c", -1, 3 * kMiB, 3);
    ASSERT_TRUE(job_->Save(1, state).ok());
    driver_->Pause();
    // An initialisation that has yet to run, in pieces.
    for (int i = 0; i < 20; ++i) {
      driver_->Fill(stream_, a, 19 * kMiB, 0xee);
      driver_->Fill(other_stream_, b, 5 * kMiB, 0xee);
    }
    driver_->Run();
    const Result<Restored> restored = job_->Restore(state, {.streams = BothStreams()});
    ASSERT_TRUE(restored.ok()) << restored.status().ToString();
    driver_->Pause();
    EXPECT_EQ(Held(state, 0), Bytes(19 * kMiB + 3, 1)) << "seed " << seed;
    EXPECT_EQ(Held(state, 1), Bytes(5 * kMiB, 2)) << "seed " << seed;
    EXPECT_EQ(Held(state, 2), Bytes(3 * kMiB, 3));
    driver_->Finish();
    EXPECT_EQ(Held(state, 0), Bytes(19 * kMiB + 3, 1)) << "seed " << seed;
    CheckEnd();
  }
}

TEST_F(DeviceRestoreTest, WithoutTheStreamsEarlierWorkShows) {
  int changed = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    driver_->Run();
    Open();
    State state;
    uint8_t* const a = Add(state, "a", 0, 3 * kMiB, 1);
    ASSERT_TRUE(job_->Save(1, state).ok());
    driver_->Pause();
    for (int i = 0; i < 20; ++i) {
      driver_->Fill(stream_, a, 3 * kMiB, 0xee);
    }
    driver_->Run();
    ASSERT_TRUE(job_->Restore(state).ok());
    driver_->Finish();
    changed += Held(state, 0) != Bytes(3 * kMiB, 1) ? 1 : 0;
    CheckEnd();
  }
  EXPECT_GT(changed, 0);
}

TEST_F(DeviceRestoreTest, ManyTensorsOnAnyDevice) {
  driver_->Run();
  Open();
  std::mt19937_64 random(5);
  State state;
  std::vector<size_t> sizes = {0, 1, kMiB, kMiB + 1, 8 * kMiB, 8 * kMiB + 1, 33 * kMiB + 7};
  sizes.insert(sizes.end(), 3000, 777);
  for (size_t i = 0; i < sizes.size(); ++i) {
    Add(state, "t" + std::to_string(i), static_cast<int32_t>(random() % 3) - 1, sizes[i],
        static_cast<uint8_t>(random()));
  }
  ASSERT_TRUE(job_->Save(1, state, {.streams = BothStreams()}).ok());
  const std::map<std::string, std::string> expected = Saved(1);
  // Into others, in another order, on other devices.
  State target;
  std::shuffle(state.tensors.begin(), state.tensors.end(), random);
  for (const Tensor& tensor : state.tensors) {
    Add(target, tensor.name, static_cast<int32_t>(random() % 3) - 1, tensor.global_shape[0]);
  }
  const int events = driver_->Count("CreateEvent");
  ASSERT_TRUE(job_->Restore(target, {.streams = BothStreams()}).ok());
  EXPECT_LE(driver_->Count("CreateEvent") - events, 40);
  for (size_t i = 0; i < target.tensors.size(); ++i) {
    ASSERT_EQ(Held(target, i), expected.at(target.tensors[i].name));
  }
  EXPECT_EQ(driver_->Count("AllocateHost"), 4);
  CheckEnd();
}

TEST_F(DeviceRestoreTest, WhatIsWantedMayBeChosenWhenItHasBeenSeen) {
  driver_->Run();
  Open();
  State state;
  uint8_t* const a = Add(state, "a", 0, 9 * kMiB, 1);
  Add(state, "b", -1, 5, 2);
  state.objects = {{"o", "1", true, ""}};
  ASSERT_TRUE(job_->Save(1, state).ok());
  driver_->Pause();
  driver_->Fill(stream_, a, 9 * kMiB, 0xee);
  driver_->Run();
  RestoreOptions options;
  options.streams = Stream();
  const Result<Restored> restored = job_->Restore(
      [&](const holdfast::Saved& saved) {
        EXPECT_EQ(saved.tensors.size(), 2u);
        return Result<State>(state);
      },
      options);
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(Held(state, 0), Bytes(9 * kMiB, 1));
  driver_->BeginCapture(stream_);
  EXPECT_FALSE(
      job_->Restore([&](const holdfast::Saved&) { return Result<State>(state); }, options).ok());
  EXPECT_TRUE(driver_->EndCapture(stream_));
  CheckEnd();
}

TEST_F(DeviceRestoreTest, WhatDoesNotMatchItsDigestIsNotCopiedToTheDevice) {
  driver_->Run();
  Open();
  State state;
  Add(state, "w", 0, 20 * kMiB, 1);
  ASSERT_TRUE(job_->Save(1, state).ok());
  std::memset(state.tensors[0].data, 2, 20 * kMiB);
  ASSERT_TRUE(job_->Save(2, state).ok());
  const uint64_t header = daemon_->LastRecord().header_bytes;
  daemon_->FlipImageByte(header + 9 * kMiB + 5);
  const Result<Restored> restored = job_->Restore(state, {.streams = Stream()});
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);  // the older one
  ASSERT_EQ(restored->notes.size(), 1u);
  EXPECT_NE(restored->notes[0].find("'w'"), std::string::npos) << restored->notes[0];
  EXPECT_NE(restored->notes[0].find("block 9"), std::string::npos) << restored->notes[0];
  EXPECT_EQ(Held(state, 0), Bytes(20 * kMiB, 1));

  // With no older one.
  daemon_->FlipImageByte(header + 9 * kMiB + 5);  // mends step 2
  std::memset(state.tensors[0].data, 0x77, 20 * kMiB);
  const int copies = driver_->Count("CopyToDevice");
  daemon_->FlipImageByte(header + 1);
  daemon_->FlipImageByte(header + 3);
  RestoreOptions only;
  only.newest = false;
  only.step = 2;
  only.streams = Stream();
  EXPECT_FALSE(job_->Restore(state, only).ok());
  EXPECT_EQ(Held(state, 0), Bytes(20 * kMiB, 0x77));  // the first piece was bad: nothing came
  EXPECT_EQ(driver_->Count("CopyToDevice"), copies);
  CheckEnd();
}

TEST_F(DeviceRestoreTest, WorkThatDoesNotEndEndsTheRestore) {
  driver_->Run();
  for (const bool by_call : {true, false}) {
    UseSeed(1);
    driver_->Run();
    Open(by_call ? kLong : Milliseconds(1000));
    State state;
    uint8_t* const w = Add(state, "w", 0, 20 * kMiB, 1);
    ASSERT_TRUE(job_->Save(1, state).ok());
    driver_->Hold(stream_, true);
    driver_->Fill(stream_, w, 20 * kMiB, 2);
    RestoreOptions options;
    options.streams = Stream();
    options.deadline = by_call ? Milliseconds(300) : kLong;
    EXPECT_FALSE(job_->Restore(state, options).ok());
    State again = state;
    EXPECT_EQ(job_->Restore(again, {.streams = {}}).status().code(), Code::kUnavailable);
    driver_->Hold(stream_, false);
    driver_->Finish();
    ASSERT_TRUE(job_->Restore(state, {.streams = Stream()}).ok());
    EXPECT_EQ(Held(state, 0), Bytes(20 * kMiB, 1));
    CheckEnd();
  }
}

// (7) Two saves and a restore, into and from both devices and the host. False: something failed.
class DeviceFailureTest : public DeviceTest {
 protected:
  // `arm` is called before the first call of the driver.
  bool Round(bool pinned, const std::function<void()>& arm) {
    driver_->Refuse("RegisterHost", pinned ? 0 : kNotSupported);
    driver_->Run();
    Open();
    State state;
    uint8_t* const a = Add(state, "a", 0, 4 * kMiB + 1, 1);
    uint8_t* const b = Add(state, "b", 1, 2000, 2);
    Add(state, "c", -1, 3000, 3);
    arm();
    bool all_ok = true;
    // 1. Overlapped, with a step behind the fence.
    auto handle = job_->SaveAsync(1, state, {.streams = BothStreams()});
    Status status = handle->FenceStreams(BothStreams(), kLong);
    all_ok = all_ok && status.ok();
    if (!status.ok()) {
      EXPECT_NE(status.message().find("FAKE_ERROR"), std::string::npos) << status.ToString();
      static_cast<void>(handle->WaitSnapshot(kLong).ok());
    }
    driver_->Fill(stream_, a, 4 * kMiB + 1, 11);
    driver_->Fill(other_stream_, b, 2000, 12);
    status = handle->Wait(Stage::kSealed, kLong);
    CheckSaved(1, status, 1, 2);
    all_ok = all_ok && status.ok();
    // 2. And the next.
    status = job_->Save(2, state, {.streams = BothStreams()});
    CheckSaved(2, status, 11, 12);
    all_ok = all_ok && status.ok();
    // 3. Back, if there is anything.
    driver_->Fill(stream_, a, 4 * kMiB + 1, 21);
    driver_->Fill(other_stream_, b, 2000, 22);
    const Result<Restored> restored = job_->Restore(state, {.streams = BothStreams()});
    driver_->Finish();
    if (restored.ok()) {
      const uint8_t add = restored->step == 1 ? 0 : 10;
      EXPECT_EQ(Bytes(4 * kMiB + 1, static_cast<uint8_t>(add + 1)),
                std::string(reinterpret_cast<char*>(a), 4 * kMiB + 1));
      EXPECT_EQ(Bytes(2000, static_cast<uint8_t>(add + 2)),
                std::string(reinterpret_cast<char*>(b), 2000));
    } else {
      EXPECT_NE(restored.status().code(), Code::kCorrupt) << restored.status().ToString();
    }
    handle.reset();
    job_.reset();
    return all_ok && restored.ok();
  }

  void CheckSaved(uint64_t step, const Status& status, uint8_t a, uint8_t b) {
    if (!status.ok()) {
      EXPECT_NE(status.message().find("FAKE_ERROR"), std::string::npos) << status.ToString();
      return;
    }
    const auto saved = Saved(step);
    ASSERT_EQ(saved.size(), 3u);
    EXPECT_EQ(saved.at("a"), Bytes(4 * kMiB + 1, a));
    EXPECT_EQ(saved.at("b"), Bytes(2000, b));
    EXPECT_EQ(saved.at("c"), Bytes(3000, 3));
  }
};

// Under a sanitizer a round takes seconds: every so many calls are enough there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCallsApart = 13;
#else
constexpr int kCallsApart = 1;
#endif

TEST_F(DeviceFailureTest, EachCallFailsOnceAtAnyPosition) {
  for (const bool pinned : {true, false}) {
    int failed_rounds = 0;
    int nth = 1;
    for (bool reached = true; reached; nth += kCallsApart) {
      UseSeed(static_cast<uint64_t>(nth));
      const bool all_ok = Round(pinned, [&] { driver_->FailCall(nth, 999); });
      reached = driver_->failed();
      failed_rounds += all_ok ? 0 : 1;
      EXPECT_EQ(driver_->Misuse(), "") << "call " << nth;
      // A slot that the driver does not let go of keeps its addresses: the only thing left.
      const std::string leaks = driver_->Leaks();
      EXPECT_TRUE(leaks.empty() || leaks == "registered ranges: 1\n") << "call " << nth << leaks;
      if (HasFailure()) {
        return;
      }
    }
    EXPECT_GT(nth, 100);
    EXPECT_GT(failed_rounds, 20 / kCallsApart);
  }
}

TEST_F(DeviceFailureTest, OutOfMemoryNamesTheDriversError) {
  driver_->Run();
  driver_->Refuse("RegisterHost", kNotSupported);
  Open();
  State state;
  Add(state, "w", 0, kMiB, 1);
  driver_->Refuse("AllocateHost", 2);
  const Status status = job_->Save(1, state, {.streams = Stream()});
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_NE(status.message().find("FAKE_ERROR_2"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("pinned host memory"), std::string::npos) << status.ToString();
  driver_->Refuse("AllocateHost", 0);
  EXPECT_TRUE(job_->Save(2, state, {.streams = Stream()}).ok());
  CheckEnd();
}

// From some call on every one fails, as after an illegal access: nothing hangs, and a save on the
// host still goes.
TEST_F(DeviceFailureTest, ALostDeviceFailsSavesAndHangsNothing) {
  bool reached = true;
  for (int nth = 1; reached; nth += 3 * kCallsApart) {
    UseSeed(static_cast<uint64_t>(nth));
    Round(true, [&] { driver_->LoseDevice(nth); });
    reached = driver_->failed();
    EXPECT_EQ(driver_->Misuse(), "") << "call " << nth;
    State host;
    Add(host, "h", -1, kMiB, 1);
    Open();
    ASSERT_TRUE(job_->Save(10, host).ok());
    job_.reset();
    if (HasFailure()) {
      return;
    }
  }
}

}  // namespace
}  // namespace holdfast
