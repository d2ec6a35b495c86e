// Saving tensors that lie on devices: what is saved is what was there at the call, whatever runs
// late, and nothing is read after its time. The devices are a fake that does everything late and in
// any order that the streams allow.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "tests/client-lib/device_test.h"

namespace holdfast {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr uint64_t kSeeds = 20;
constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

class DeviceSaveTest : public DeviceTest {};

// (1) The producer's work runs after the call, and is what is saved.
TEST_F(DeviceSaveTest, WhatWasEnqueuedBeforeIsWhatIsSaved) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    Open();
    State state;
    uint8_t* const w = Add(state, "w", 0, 3 * kMiB + 17, 1);
    driver_->Fill(stream_, w, 3 * kMiB + 17, 2);
    auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
    ASSERT_EQ(w[0], 1);  // late
    driver_->Run();
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    EXPECT_EQ(Saved(1).at("w"), Bytes(3 * kMiB + 17, 2)) << "seed " << seed;

    driver_->Pause();
    driver_->Fill(stream_, w, 3 * kMiB + 17, 3);
    driver_->Run();
    ASSERT_TRUE(job_->Save(2, state, {.streams = Stream()}).ok());
    EXPECT_EQ(Saved(2).at("w"), Bytes(3 * kMiB + 17, 3)) << "seed " << seed;
    handle.reset();
    CheckEnd();
  }
}

// One save with the next optimizer step enqueued on the same stream right behind it. `fenced`:
// behind the fence. What was saved.
std::string SaveBeforeAStep(FakeDriver& driver, Job& job, const State& state, uint64_t step,
                            void* stream, bool fenced) {
  auto* const w = static_cast<uint8_t*>(state.tensors[0].data);
  const size_t bytes = state.tensors[0].global_shape[0];
  driver.Pause();
  driver.Fill(stream, w, bytes, static_cast<uint8_t>(step));
  auto handle = job.SaveAsync(step, state, {.streams = {{0, stream}}});
  // Without streams it only waits until the copies are enqueued.
  const std::vector<DeviceStream> streams =
      fenced ? std::vector<DeviceStream>{{0, stream}} : std::vector<DeviceStream>{};
  EXPECT_TRUE(handle->FenceStreams(streams, kLong).ok());
  driver.Fill(stream, w, bytes, 0xee);
  driver.Run();
  EXPECT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  return Bytes(bytes, static_cast<uint8_t>(step));
}

// (2) What the producer does after the fence comes after the reads.
TEST_F(DeviceSaveTest, AStepBehindTheFenceIsNotSaved) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    Open();
    State state;
    Add(state, "w", 0, 5 * kMiB + 1);
    for (uint64_t step = 1; step <= 3; ++step) {
      const std::string expected = SaveBeforeAStep(*driver_, *job_, state, step, stream_, true);
      ASSERT_EQ(Saved(step).at("w"), expected) << "seed " << seed;
    }
    CheckEnd();
  }
}

// (3) The same without the fence is found out: these devices are late enough for that.
TEST_F(DeviceSaveTest, WithoutTheFenceTheStepShows) {
  int changed = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    Open();
    State state;
    Add(state, "w", 0, 5 * kMiB + 1);
    const std::string expected = SaveBeforeAStep(*driver_, *job_, state, 1, stream_, false);
    changed += Saved(1).at("w") != expected ? 1 : 0;
    CheckEnd();
  }
  EXPECT_GT(changed, 0);
}

TEST_F(DeviceSaveTest, TheFenceHoldsOnEveryStreamOfEveryDevice) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    Open();
    void* const second = driver_->NewStream(0);
    State state;
    uint8_t* const a = Add(state, "a", 0, 5 * kMiB, 1);
    uint8_t* const b = Add(state, "b", 1, 7 * kMiB, 2);
    auto handle = job_->SaveAsync(1, state);
    // Streams of device 0 wait for the reads of device 1, too.
    ASSERT_TRUE(handle->FenceStreams({{0, second}, {1, other_stream_}, {0, nullptr}}, kLong).ok());
    driver_->Fill(second, b, 7 * kMiB, 0xee);
    driver_->Fill(other_stream_, a, 5 * kMiB, 0xee);
    driver_->Fill(nullptr, b, kMiB, 0xef);
    driver_->Run();
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    const auto saved = Saved(1);
    EXPECT_EQ(saved.at("a"), Bytes(5 * kMiB, 1));
    EXPECT_EQ(saved.at("b"), Bytes(7 * kMiB, 2));
    handle.reset();
    CheckEnd();
  }
}

TEST_F(DeviceSaveTest, TheFenceDoesNotWaitForTheCopies) {
  Open();
  State state;
  Add(state, "w", 0, 40 * kMiB, 7);
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});  // nothing runs yet
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  EXPECT_EQ(handle->WaitSnapshot(Milliseconds(0)).code(), Code::kDeadlineExceeded);
  driver_->Run();
  ASSERT_TRUE(handle->WaitSnapshot(kLong).ok());
  EXPECT_TRUE(handle->FenceStreams(Stream(), Milliseconds(0)).ok());  // and now at once
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  handle.reset();
  CheckEnd();
}

TEST_F(DeviceSaveTest, AFenceHasADeadlineAndAFailedSaveNeedsNone) {
  Open();
  State state;
  Add(state, "w", 0, kMiB, 7);
  std::atomic<bool> held{true};
  daemon_->SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_begin_save()) {
      return false;
    }
    if (held.exchange(false)) {
      return true;  // no slot, and no answer
    }
    peer.Close();
    return true;
  });
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  ASSERT_TRUE(daemon_->WaitForCount("begin_save", 1));
  EXPECT_EQ(handle->FenceStreams(Stream(), Milliseconds(1)).code(), Code::kDeadlineExceeded);
  daemon_->Stop();  // the save fails
  EXPECT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  EXPECT_EQ(handle->WaitSnapshot(kLong).code(), Code::kUnavailable);
  EXPECT_EQ(driver_->Enqueued(stream_), 1u);  // the event of the call; no wait
  daemon_->SetHook(nullptr);
  daemon_->Start();
  handle.reset();
  CheckEnd();
}

// (4)
TEST_F(DeviceSaveTest, TheNextSaveOvertakesTheSnapshot) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    Open();
    State state;
    uint8_t* const w = Add(state, "w", 0, 5 * kMiB);
    std::vector<std::unique_ptr<SaveHandle>> handles;
    for (uint8_t step = 1; step <= 3; ++step) {
      driver_->Fill(stream_, w, 5 * kMiB, step);
      if (step > 1) {
        driver_->Run();  // the call waits for the copy before it
      }
      handles.push_back(job_->SaveAsync(step, state, {.streams = Stream()}));
      ASSERT_TRUE(handles.back()->FenceStreams(Stream(), kLong).ok());
      driver_->Pause();
    }
    driver_->Run();
    for (uint8_t step = 1; step <= 3; ++step) {
      ASSERT_TRUE(handles[step - 1u]->Wait(Stage::kSealed, kLong).ok());
      ASSERT_EQ(Saved(step).at("w"), Bytes(5 * kMiB, step)) << "seed " << seed;
      EXPECT_TRUE(handles[step - 1u]->FenceStreams(Stream(), kLong).ok());
    }
    handles.clear();
    CheckEnd();
  }
}

// (5) A caching allocator gives a freed block out again; the driver notices reads of freed memory.
TEST_F(DeviceSaveTest, FreedBlocksAreNotRead) {
  enum class Until { kSnapshot, kHandleEnds, kFence };
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    driver_->Run();
    Open();
    uint64_t step = 0;
    for (const Until until : {Until::kSnapshot, Until::kHandleEnds, Until::kFence}) {
      State state;
      uint8_t* const a = Add(state, "a", 0, 2 * kMiB, 1);
      uint8_t* const b = Add(state, "b", 1, 2 * kMiB, 2);
      auto handle = job_->SaveAsync(++step, state, {.streams = BothStreams()});
      if (until == Until::kSnapshot) {
        ASSERT_TRUE(handle->WaitSnapshot(kLong).ok());
      } else if (until == Until::kHandleEnds) {
        handle.reset();
      } else {
        ASSERT_TRUE(handle->FenceStreams(BothStreams(), kLong).ok());
        // The same blocks again, in stream order, for something else.
        driver_->Fill(stream_, a, 2 * kMiB, 0xee);
        driver_->Fill(other_stream_, b, 2 * kMiB, 0xee);
        ASSERT_TRUE(handle->WaitSnapshot(kLong).ok());
        driver_->Finish();
      }
      driver_->Free(a);
      driver_->Free(b);
      driver_->Finish();
      handle.reset();
    }
    // Waits for the last seal.
    ASSERT_TRUE(job_->Save(++step, State{{}, {{"o", "1", true, ""}}}).ok());
    const auto saved = Saved(3);
    EXPECT_EQ(saved.at("a"), Bytes(2 * kMiB, 1));
    EXPECT_EQ(saved.at("b"), Bytes(2 * kMiB, 2));
    CheckEnd();
  }
}

// What may change as soon as SaveAsync returns is what it was at the call, wherever it lies.
TEST_F(DeviceSaveTest, WhatIsCopiedFirstMayChangeOnReturn) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    UseSeed(seed);
    driver_->Run();
    Open();
    State state;
    Add(state, "w", 0, 5 * kMiB, 1);
    uint8_t* const buffer = Add(state, "buffer", 0, 70'000, 1);
    uint8_t* const on_host = Add(state, "on_host", -1, 5000, 2);
    uint8_t* const other = Add(state, "other", 1, 3, 3);
    driver_->Fill(stream_, buffer, 70'000, 4);
    SaveOptions options;
    options.streams = BothStreams();
    options.copy_first = {1, 2, 3};
    auto handle = job_->SaveAsync(1, state, options);
    std::memset(on_host, 0xee, 5000);
    driver_->Fill(stream_, buffer, 70'000, 0xee);
    driver_->Fill(other_stream_, other, 3, 0xee);
    ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
    driver_->Fill(stream_, static_cast<uint8_t*>(state.tensors[0].data), 5 * kMiB, 0xee);
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    const auto saved = Saved(1);
    EXPECT_EQ(saved.at("w"), Bytes(5 * kMiB, 1)) << "seed " << seed;
    EXPECT_EQ(saved.at("buffer"), Bytes(70'000, 4)) << "seed " << seed;
    EXPECT_EQ(saved.at("on_host"), Bytes(5000, 2));
    EXPECT_EQ(saved.at("other"), Bytes(3, 3));
    handle.reset();
    CheckEnd();
  }
}

// The device may have much to do yet: the call does not wait for it, and neither do the streams for
// more than what comes first.
TEST_F(DeviceSaveTest, WhatIsCopiedFirstDoesNotWaitForTheDevice) {
  for (const bool pinned : {true, false}) {
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      UseSeed(seed);
      Open();
      if (!pinned) {
        driver_->Refuse("RegisterHost", kNotSupported);
      }
      State state;
      uint8_t* const w = Add(state, "w", 0, 5 * kMiB, 1);
      uint8_t* const buffer = Add(state, "buffer", 0, 70'000, 1);
      driver_->Pause();
      driver_->Fill(stream_, buffer, 70'000, 4);
      SaveOptions options;
      options.streams = Stream();
      options.copy_first = {1};
      auto handle = job_->SaveAsync(1, state, options);  // nothing runs yet
      ASSERT_EQ(handle->WaitSnapshot(Milliseconds(0)).code(), Code::kDeadlineExceeded);
      driver_->Fill(stream_, buffer, 70'000, 0xee);
      ASSERT_EQ(w[0], 1);
      driver_->Run();
      ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
      const auto saved = Saved(1);
      EXPECT_EQ(saved.at("w"), Bytes(5 * kMiB, 1)) << "seed " << seed;
      EXPECT_EQ(saved.at("buffer"), Bytes(70'000, 4)) << "seed " << seed;
      handle.reset();
      CheckEnd();
    }
  }
}

// Nobody was named whose work could be put behind the copy: the host waits for it.
TEST_F(DeviceSaveTest, WhatIsCopiedFirstWaitsWhereNoStreamCan) {
  Open();
  State state;
  Add(state, "a", 0, 70'000, 1);
  Add(state, "b", 1, 70'000, 2);
  SaveOptions options;
  options.streams = Stream();  // of device 0
  options.copy_first = {0, 1};
  options.return_at_once = true;
  driver_->Pause();
  auto handle = job_->SaveAsync(1, state, options);
  ASSERT_TRUE(handle->FenceStreams({}, kLong).ok());  // everything is enqueued, and nothing runs
  EXPECT_EQ(handle->WaitFirst(Milliseconds(0)).code(), Code::kDeadlineExceeded);
  driver_->Run();
  ASSERT_TRUE(handle->WaitFirst(kLong).ok());
  EXPECT_TRUE(handle->WaitSnapshot(Milliseconds(0)).ok());
  handle.reset();
  CheckEnd();
}

TEST_F(DeviceSaveTest, WhatIsCopiedFirstIsWaitedForWhereACaptureHasBegun) {
  Open();
  driver_->Run();
  State state;
  uint8_t* const buffer = Add(state, "buffer", 0, 70'000, 1);
  SaveOptions options;
  options.streams = Stream();
  options.copy_first = {0};
  options.return_at_once = true;
  auto handle = job_->SaveAsync(1, state, options);
  driver_->BeginCapture(stream_);
  ASSERT_TRUE(handle->WaitFirst(kLong).ok());
  EXPECT_TRUE(handle->WaitSnapshot(Milliseconds(0)).ok());
  EXPECT_TRUE(driver_->EndCapture(stream_));
  driver_->Fill(stream_, buffer, 70'000, 0xee);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  EXPECT_EQ(Saved(1).at("buffer"), Bytes(70'000, 1));
  handle.reset();
  CheckEnd();
}

// A process that uses one of eight devices keeps no context on the other seven, whatever streams
// are named.
TEST_F(DeviceSaveTest, DevicesWithoutTensorsAreLeftAlone) {
  Open();
  driver_->Run();
  State state;
  Add(state, "w", 0, kMiB, 1);
  auto handle = job_->SaveAsync(1, state, {.streams = BothStreams()});
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  ASSERT_TRUE(job_->Restore(state, {.streams = BothStreams()}).ok());
  EXPECT_EQ(driver_->Count("RetainContext"), 1);
  handle.reset();
  CheckEnd();
}

TEST_F(DeviceSaveTest, AHeldSaveIsSealedLater) {
  Open();
  State state;
  uint8_t* const w = Add(state, "w", 0, 5 * kMiB, 1);
  SaveOptions options;
  options.streams = Stream();
  options.hold = true;
  auto handle = job_->SaveAsync(1, state, options);
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  driver_->Fill(stream_, w, 5 * kMiB, 2);
  driver_->Run();
  ASSERT_TRUE(handle->WaitSnapshot(kLong).ok());
  {
    const Result<std::shared_ptr<const StagedTensors>> staged = handle->Staged();
    ASSERT_TRUE(staged.ok()) << staged.status().ToString();
    EXPECT_EQ(std::to_integer<int>((*staged)->bytes()[0][5 * kMiB - 1]), 1);
  }
  EXPECT_TRUE(handle->FenceStreams(Stream(), Milliseconds(0)).ok());
  ASSERT_TRUE(handle->Seal(kLong).ok());
  EXPECT_EQ(Saved(1).at("w"), Bytes(5 * kMiB, 1));
  handle.reset();
  CheckEnd();
}

// (6)
TEST_F(DeviceSaveTest, ACapturedStreamIsRefusedAndItsCaptureUnharmed) {
  Open();
  driver_->Run();
  State state;
  Add(state, "w", 0, kMiB, 7);
  // Not only at first, when contexts and streams are still to be made.
  for (uint64_t step = 1; step <= 3; ++step) {
    driver_->BeginCapture(stream_);
    const Status refused = job_->Save(step, state, {.streams = Stream()});
    EXPECT_EQ(refused.code(), Code::kRefused) << refused.ToString();
    EXPECT_NE(refused.message().find("captured"), std::string::npos);
    auto handle = job_->SaveAsync(step, state, {.streams = Stream()});
    EXPECT_EQ(handle->WaitSnapshot(kLong).code(), Code::kRefused);
    EXPECT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
    State target = state;
    EXPECT_EQ(job_->Restore(target, {.streams = Stream()}).status().code(), Code::kRefused);
    EXPECT_TRUE(driver_->EndCapture(stream_));
    ASSERT_TRUE(job_->Save(step, state, {.streams = Stream()}).ok());
  }
  driver_->SetCaptureImplicit(true);
  EXPECT_EQ(job_->Save(9, state, {.streams = {{0, nullptr}}}).code(), Code::kRefused);
  EXPECT_EQ(daemon_->Count("begin_save"), 3);
  CheckEnd();
}

TEST_F(DeviceSaveTest, ACaptureElsewhereIsUnharmed) {
  Open();
  driver_->Run();
  void* const captured = driver_->NewStream(0);
  State state;
  Add(state, "w", 0, 40 * kMiB, 7);
  driver_->BeginCapture(captured);
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  State target = state;
  ASSERT_TRUE(job_->Restore(target, {.streams = Stream()}).ok());
  EXPECT_TRUE(driver_->EndCapture(captured));
  handle.reset();
  CheckEnd();
}

TEST_F(DeviceSaveTest, AFenceOnACapturedStreamIsRefused) {
  Open();
  State state;
  Add(state, "w", 0, kMiB, 7);
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  ASSERT_TRUE(handle->FenceStreams({}, kLong).ok());  // enqueued
  driver_->BeginCapture(stream_);
  EXPECT_EQ(handle->FenceStreams(Stream(), kLong).code(), Code::kRefused);
  EXPECT_TRUE(driver_->EndCapture(stream_));
  EXPECT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  driver_->Run();
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  handle.reset();
  CheckEnd();
}

// (9)
TEST_F(DeviceSaveTest, SlotsArePinnedOnceAndUnpinnedBeforeTheyAreUnmapped) {
  Open();
  driver_->Run();
  State state;
  Add(state, "w", 0, 2 * kMiB, 7);
  ASSERT_TRUE(job_->Reserve(state, kLong).ok());
  EXPECT_EQ(driver_->Registered(), 3u);
  for (uint64_t step = 1; step <= 9; ++step) {
    ASSERT_TRUE(job_->Save(step, state).ok());
  }
  EXPECT_EQ(driver_->Count("RegisterHost"), 3);
  EXPECT_EQ(driver_->Count("AllocateHost"), 0);
  // A slot that is cut short is dropped, and so is its pin.
  daemon_->TruncateAll(4096);
  EXPECT_EQ(job_->Save(10, state).code(), Code::kCorrupt);
  EXPECT_EQ(driver_->Registered(), 2u);
  CheckEnd();
  EXPECT_EQ(driver_->Count("UnregisterHost"), 3);
}

TEST_F(DeviceSaveTest, WhatCannotBeUnpinnedKeepsItsAddresses) {
  Open();
  driver_->Run();
  State state;
  Add(state, "w", 0, 2 * kMiB, 7);
  ASSERT_TRUE(job_->Save(1, state).ok());
  int unregisters = 0;
  for (int call = 1; call < 50 && unregisters == 0; ++call) {
    driver_->FailCall(call, 999);
    job_.reset();
    unregisters = driver_->Registered() == 1 ? 1 : 0;
    if (unregisters == 0) {
      Open();
      ASSERT_TRUE(job_->Save(1, state).ok());
    }
  }
  EXPECT_EQ(unregisters, 1);
  EXPECT_EQ(driver_->Leaks(), "registered ranges: 1\n");
  EXPECT_EQ(driver_->Misuse(), "");
}

// (10) And sizes around those of blocks and pieces, in more than one order.
TEST_F(DeviceSaveTest, HostAndDevicesMixedAndDigestsAsOfTheSameBytesOnTheHost) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    for (const bool pinned : {true, false}) {
      UseSeed(seed);
      driver_->Refuse("RegisterHost", pinned ? 0 : kNotSupported);
      driver_->Run();
      Open();
      std::mt19937_64 random(seed);
      State state;
      std::map<std::string, std::string> expected;
      std::vector<size_t> sizes = {
          0, 1, kMiB - 1, kMiB, kMiB + 1, 4 * kMiB, 4 * kMiB + 1, 9 * kMiB - 3, 3, 20 * kMiB + 5};
      sizes.insert(sizes.end(), 700, 777);
      std::shuffle(sizes.begin(), sizes.end(), random);
      for (size_t i = 0; i < sizes.size(); ++i) {
        const std::string name = "t" + std::to_string(i);
        uint8_t* const memory = Add(state, name, static_cast<int32_t>(random() % 3) - 1, sizes[i]);
        for (size_t at = 0; at < sizes[i]; at += 1 + random() % 1000) {
          memory[at] = static_cast<uint8_t>(random());
        }
        expected[name] = std::string(reinterpret_cast<char*>(memory), sizes[i]);
      }
      state.objects = {{"o", "[1]", true, ""}};
      ASSERT_TRUE(job_->Save(1, state, {.streams = BothStreams()}).ok());
      EXPECT_EQ(Saved(1), expected) << "seed " << seed << (pinned ? ", pinned" : ", not pinned");
      const ShardRecord from_devices = daemon_->LastRecord();
      CheckEnd();

      // The same from the host.
      Open();
      for (Tensor& tensor : state.tensors) {
        tensor.device = -1;
      }
      ASSERT_TRUE(job_->Save(2, state).ok());
      EXPECT_EQ(daemon_->LastRecord().digests, from_devices.digests);
      job_.reset();
    }
  }
}

TEST_F(DeviceSaveTest, ManySmallTensorsNeedFewEvents) {
  Open();
  driver_->Run();
  State state;
  uint8_t* const all = driver_->Allocate(0, 20'000 * 64);
  for (size_t i = 0; i < 20'000; ++i) {
    std::memset(all + i * 64, static_cast<int>(i % 251), 64);
    state.tensors.emplace_back("t" + std::to_string(i), Type::kU8, std::vector<uint64_t>{64},
                               all + i * 64);
    state.tensors.back().device = 0;
  }
  ASSERT_TRUE(job_->Save(1, state, {.streams = Stream()}).ok());
  EXPECT_LE(driver_->Count("CreateEvent"), 20'000 / 200);
  const auto saved = Saved(1);
  for (size_t i = 0; i < 20'000; ++i) {
    ASSERT_EQ(saved.at("t" + std::to_string(i)), Bytes(64, static_cast<uint8_t>(i % 251)));
  }
  CheckEnd();
}

TEST_F(DeviceSaveTest, WhatCannotBePinnedGoesThroughBuffersOfBoundedSize) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    UseSeed(seed);
    driver_->Refuse("RegisterHost", kNotSupported);
    Open();
    State state;
    uint8_t* const w = Add(state, "w", 0, 70 * kMiB, 1);
    driver_->Fill(stream_, w, 70 * kMiB, 2);
    auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
    EXPECT_EQ(handle->FenceStreams(Stream(), Milliseconds(1)).code(), Code::kDeadlineExceeded);
    driver_->Run();
    ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
    driver_->Fill(stream_, w, 70 * kMiB, 3);
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    EXPECT_EQ(Saved(1).at("w"), Bytes(70 * kMiB, 2));
    ASSERT_TRUE(job_->Save(2, state, {.streams = Stream()}).ok());
    EXPECT_EQ(driver_->Count("AllocateHost"), 4);
    EXPECT_EQ(driver_->Count("RegisterHost"), 2);  // tried once a slot
    handle.reset();
    CheckEnd();
  }
}

TEST_F(DeviceSaveTest, OverlapsOnDevicesAreComparedByWhatWasCopied) {
  Open();
  driver_->Run();
  State state;
  uint8_t* const whole = Add(state, "w", 0, 4, 1);
  uint8_t* const part = driver_->Allocate(1, 2);
  std::memset(part, 1, 2);
  state.tensors.push_back(Tensor::Box("w", Type::kU8, {4}, {2}, {2}, part));
  state.tensors.back().device = 1;
  EXPECT_TRUE(job_->Save(1, state).ok());
  whole[3] = 9;
  const Status status = job_->Save(2, state);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("'w'"), std::string::npos) << status.message();
  EXPECT_EQ(daemon_->Count("seal"), 1);
  EXPECT_EQ(daemon_->Count("abort_save"), 1);
  CheckEnd();
}

// Work before the save that never ends.
TEST_F(DeviceSaveTest, AStalledDeviceFailsTheSaveAndKeepsItsSlot) {
  Open(Milliseconds(1000));
  driver_->Run();
  State state;
  uint8_t* const w = Add(state, "w", 0, kMiB, 1);
  ASSERT_TRUE(job_->Save(1, state).ok());
  driver_->Hold(stream_, true);
  driver_->Fill(stream_, w, kMiB, 2);
  auto handle = job_->SaveAsync(2, state, {.streams = Stream()});
  const Status stalled = handle->WaitSnapshot(kLong);
  EXPECT_EQ(stalled.code(), Code::kUnavailable);
  EXPECT_NE(stalled.message().find("device 0"), std::string::npos) << stalled.message();
  EXPECT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  // The device may still write into that slot: it is neither unmapped nor given to anybody.
  EXPECT_EQ(driver_->Registered(), 2u);
  EXPECT_EQ(job_->Save(3, state, {.streams = Stream()}).code(), Code::kUnavailable);
  uint8_t on_host = 1;
  const State host{{{"h", Type::kU8, {1}, &on_host}}, {}};
  const Status taken = job_->Save(4, host);  // gets just that slot
  EXPECT_EQ(taken.code(), Code::kUnavailable) << taken.ToString();
  EXPECT_EQ(daemon_->Count("release_slots"), 0);
  // It ends after all.
  driver_->Hold(stream_, false);
  driver_->Finish();
  EXPECT_TRUE(job_->Save(5, state, {.streams = Stream()}).ok());
  EXPECT_EQ(Saved(5).at("w"), Bytes(kMiB, 2));
  handle.reset();
  CheckEnd();
}

TEST_F(DeviceSaveTest, AJobThatEndsWhileADeviceIsStuckReleasesNothing) {
  Open(Milliseconds(1000));
  driver_->Run();
  State state;
  uint8_t* const w = Add(state, "w", 0, kMiB, 1);
  driver_->Hold(stream_, true);
  driver_->Fill(stream_, w, kMiB, 2);
  EXPECT_EQ(job_->Save(1, state, {.streams = Stream()}).code(), Code::kUnavailable);
  job_.reset();
  EXPECT_EQ(driver_->Registered(), 1u);
  EXPECT_EQ(daemon_->Count("release_slots") + daemon_->Count("leave"), 0);
  driver_->Hold(stream_, false);
  driver_->Finish();  // into memory that is still there
  EXPECT_EQ(driver_->Misuse(), "");
}

TEST_F(DeviceSaveTest, StatesOnTheHostTouchNoDriver) {
  Open();
  State state;
  Add(state, "w", -1, kMiB, 7);
  ASSERT_TRUE(job_->Reserve(state, kLong).ok());
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  ASSERT_TRUE(job_->Restore(state, {.streams = Stream()}).ok());
  handle.reset();
  CheckEnd();
  EXPECT_EQ(driver_->calls(), 0);
}

TEST_F(DeviceSaveTest, DevicesAndStreamsThatDoNotExist) {
  Open();
  driver_->Run();
  State state;
  Add(state, "w", 0, kMiB, 7);
  EXPECT_EQ(job_->Save(1, state, {.streams = {{-1, stream_}}}).code(), Code::kInvalidArgument);
  state.tensors[0].device = 99;
  const Status missing = job_->Save(1, state);
  EXPECT_EQ(missing.code(), Code::kInvalidArgument);
  EXPECT_NE(missing.message().find("device 99"), std::string::npos) << missing.message();
  state.tensors[0].device = -2;
  EXPECT_EQ(job_->Save(1, state).code(), Code::kInvalidArgument);
  EXPECT_EQ(daemon_->Count("begin_save"), 0);
  CheckEnd();
}

TEST_F(DeviceSaveTest, TheCallersContextStaysCurrent) {
  Open();
  driver_->Run();
  State state;
  Add(state, "w", 0, kMiB, 7);
  void* mine = nullptr;
  ASSERT_EQ(driver_->RetainContext(1, &mine), 0);
  ASSERT_EQ(driver_->PushContext(mine), 0);
  ASSERT_TRUE(job_->Save(1, state, {.streams = Stream()}).ok());
  EXPECT_EQ(driver_->Current(), mine);
  auto handle = job_->SaveAsync(2, state, {.streams = Stream()});
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());
  EXPECT_EQ(driver_->Current(), mine);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  handle.reset();
  job_.reset();
  EXPECT_EQ(driver_->Current(), mine);
  ASSERT_EQ(driver_->PopContext(), 0);
  ASSERT_EQ(driver_->ReleaseContext(1), 0);
  CheckEnd();
}

TEST_F(DeviceSaveTest, AForkedChildCallsNoDriver) {
  Open();
  State state;
  Add(state, "w", 0, kMiB, 7);
  auto handle = job_->SaveAsync(1, state, {.streams = Stream()});
  ASSERT_TRUE(handle->FenceStreams(Stream(), kLong).ok());  // nothing more happens by itself
  driver_->Pause();
  // The thread that copies goes on asking; in the child nobody does.
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    State target = state;
    const bool forked = handle->FenceStreams(Stream(), kLong).code() == Code::kForked &&
                        job_->Save(2, state, {.streams = Stream()}).code() == Code::kForked &&
                        job_->SaveAsync(2, state)->WaitSnapshot(kLong).code() == Code::kForked &&
                        job_->Restore(target).status().code() == Code::kForked &&
                        client::LoadDeviceDriver().status().code() == Code::kForked;
    handle.reset();
    job_.reset();
    ::_exit(forked && driver_->CallsOfThisProcess() == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  driver_->Run();
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  handle.reset();
  CheckEnd();
}

TEST(DeviceDriver, AMachineWithoutCudaSaysSo) {
  if (void* const cuda = ::dlopen("libcuda.so.1", RTLD_NOW); cuda != nullptr) {
    GTEST_SKIP() << "there is a CUDA driver here";
  }
  const Status status = client::LoadDeviceDriver().status();
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_NE(status.message().find("libcuda.so.1"), std::string::npos) << status.message();
  FakeDaemon daemon;
  Result<std::unique_ptr<Job>> job = Job::Open(daemon.Options());
  ASSERT_TRUE(job.ok());
  uint8_t byte = 1;
  State state{{{"w", Type::kU8, {1}, &byte}}, {}};
  EXPECT_TRUE((*job)->Save(1, state).ok());
  state.tensors[0].device = 0;
  EXPECT_EQ((*job)->Save(2, state).code(), Code::kInternal);
  EXPECT_EQ((*job)->Restore(state).status().code(), Code::kInternal);
}

}  // namespace
}  // namespace holdfast
