// Saves through the public interface against a scripted daemon: what lies in the slot is what the
// formats say.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "base/fault_guard.h"
#include "client-lib/src/worker_pool.h"
#include "tests/client-lib/fake_daemon.h"
#include "tiers/image/safetensors.h"

namespace holdfast {
namespace {

const Milliseconds kLong(60'000);

std::unique_ptr<Job> Open(FakeDaemon& daemon) {
  Result<std::unique_ptr<Job>> job = Job::Open(daemon.Options());
  EXPECT_TRUE(job.ok()) << job.status().ToString();
  return job.ok() ? *std::move(job) : nullptr;
}

// The newest sealed image, checked against its record; slices by name.
std::map<std::string, std::string> SavedBytes(FakeDaemon& daemon) {
  const ShardRecord record = daemon.LastRecord();
  const std::string image = daemon.LastImage();
  absl::StatusOr<Layout> layout =
      DecodeLayout(record.layout_bytes, record.header_bytes, record.image_bytes);
  EXPECT_TRUE(layout.ok()) << layout.status();
  if (!layout.ok()) {
    return {};
  }
  const auto bad = VerifyImage(
      record, *layout,
      [&](uint64_t offset, std::span<std::byte> out) {
        std::memcpy(out.data(), image.data() + offset, out.size());
        return absl::OkStatus();
      },
      10, nullptr);
  EXPECT_TRUE(bad.ok() && bad->empty());
  EXPECT_TRUE(
      ParseSafetensors(std::string_view(image).substr(0, record.header_bytes), image.size()).ok());
  std::map<std::string, std::string> slices;
  for (const Slice& slice : layout->slices) {
    slices[slice.name + slice.key] = image.substr(slice.image_offset, slice.bytes);
  }
  return slices;
}

TEST(Save, ImageAndRecordAreWhatTheFormatsSay) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<float> w(300'001);
  std::iota(w.begin(), w.end(), 0.f);
  std::vector<uint8_t> b = {1, 2, 3};
  const State state{
      {{"w", Type::kF32, {300'001}, w.data()}, {"b", Type::kU8, {3}, b.data()}},
      {{"epoch", "{\"n\": 3}", true, ""}, {"rng", std::string("\0\1\2", 3), false, "test.rng"}}};
  ASSERT_TRUE(job->Save(5, state).ok());

  const ShardRecord record = daemon.LastRecord();
  EXPECT_EQ(record.id.step, 5u);
  EXPECT_EQ(record.id.attempt, 1u);
  EXPECT_EQ(record.id.rank, 0u);
  EXPECT_EQ(record.world_size, 1u);
  EXPECT_EQ(record.job_name, "test");
  EXPECT_EQ(record.generation, 1u);
  ASSERT_EQ(record.descent.size(), 1u);
  const std::map<std::string, std::string> saved = SavedBytes(daemon);
  EXPECT_EQ(saved.size(), 4u);
  EXPECT_EQ(saved.at("w"), std::string(reinterpret_cast<char*>(w.data()), w.size() * 4));
  EXPECT_EQ(saved.at("b"), "\1\2\3");
  EXPECT_EQ(saved.at("epochjson"), "{\"n\": 3}");
  EXPECT_EQ(saved.at("rngopaque:test.rng"), std::string("\0\1\2", 3));
  EXPECT_EQ(job->failed_saves(), 0u);
}

TEST(Save, EveryType) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  State state;
  std::vector<std::vector<uint8_t>> memory;
  for (int i = static_cast<int>(Type::kBool); i <= static_cast<int>(Type::kF8E5M2Fnuz); ++i) {
    const auto type = static_cast<Type>(i);
    memory.emplace_back(5 * TypeBytes(type), static_cast<uint8_t>(i));
    state.tensors.emplace_back(TypeName(type), type, std::vector<uint64_t>{5},
                               memory.back().data());
  }
  EXPECT_EQ(state.tensors.size(), 19u);
  ASSERT_TRUE(job->Save(1, state).ok());
  const std::map<std::string, std::string> saved = SavedBytes(daemon);
  for (size_t i = 0; i < memory.size(); ++i) {
    EXPECT_EQ(saved.at(state.tensors[i].name), std::string(memory[i].begin(), memory[i].end()));
  }
}

TEST(Save, ScalarsEmptyTensorsAndStrangeNames) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  double scalar = 2.5;
  uint8_t byte = 7;
  const std::vector<std::string> names = {"new\nline", "quote\"s\\", std::string(10'000, 'n'),
                                          "\xe6\x97\xa5\xe6\x9c\xac", "tab\tand\x01"};
  State state;
  state.tensors = {{"scalar", Type::kF64, {}, &scalar}, {"empty", Type::kF32, {0, 5}, nullptr}};
  for (const std::string& name : names) {
    state.tensors.emplace_back(name, Type::kU8, std::vector<uint64_t>{1}, &byte);
  }
  ASSERT_TRUE(job->Save(1, state).ok());
  const std::map<std::string, std::string> saved = SavedBytes(daemon);
  EXPECT_EQ(saved.at("scalar"), std::string(reinterpret_cast<char*>(&scalar), 8));
  EXPECT_EQ(saved.at("empty"), "");
  for (const std::string& name : names) {
    EXPECT_EQ(saved.at(name), "\7");
  }
}

TEST(Save, AHundredThousandTensors) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<uint32_t> memory(100'000);
  std::iota(memory.begin(), memory.end(), 0u);
  State state;
  for (size_t i = 0; i < memory.size(); ++i) {
    state.tensors.emplace_back("layer." + std::to_string(i) + ".w", Type::kU32,
                               std::vector<uint64_t>{1}, &memory[i]);
  }
  ASSERT_TRUE(job->Save(1, state).ok());
  ASSERT_TRUE(job->Save(2, state).ok());
  const std::map<std::string, std::string> saved = SavedBytes(daemon);
  ASSERT_EQ(saved.size(), memory.size());
  for (const uint32_t i : {0u, 1u, 54'321u, 99'999u}) {
    uint32_t value = 0;
    std::memcpy(&value, saved.at("layer." + std::to_string(i) + ".w").data(), 4);
    EXPECT_EQ(value, i);
  }
}

TEST(Save, OverlapsThatAgreeAreSavedAndOthersRefusedBeforeASlotIsAskedFor) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<int32_t> whole = {0, 1, 2, 3};
  std::vector<int32_t> part = {2, 3};
  const State state{{{"w", Type::kI32, {4}, whole.data()},
                     Tensor::Box("w", Type::kI32, {4}, {2}, {2}, part.data())},
                    {}};
  EXPECT_TRUE(job->Save(1, state).ok());
  part[1] = 4;
  const Status status = job->Save(2, state);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("'w'"), std::string::npos);
  EXPECT_EQ(daemon.Count("begin_save"), 1);
  EXPECT_EQ(job->failed_saves(), 1u);
  EXPECT_EQ(job->last_failure().code(), Code::kInvalidArgument);

  const auto handle = job->SaveAsync(3, state);
  EXPECT_EQ(handle->WaitSnapshot(kLong).code(), Code::kInvalidArgument);
  EXPECT_EQ(daemon.Count("begin_save"), 1);
}

TEST(Save, InvalidStatesNeverReachTheDaemon) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w[2] = {};
  for (const State& state : {State{}, State{{{"w", Type::kF32, {2}, nullptr}}, {}},
                             State{{{"w\xff", Type::kF32, {2}, w}}, {}},
                             State{{{"w", Type::kF32, {2}, w}, {"w", Type::kF32, {2}, w}}, {}},
                             State{{}, {{"o", "{]", true, ""}}}}) {
    EXPECT_EQ(job->Save(1, state).code(), Code::kInvalidArgument);
    const auto handle = job->SaveAsync(1, state);
    EXPECT_EQ(handle->WaitSnapshot(kLong).code(), Code::kInvalidArgument);
    EXPECT_EQ(handle->Wait(Stage::kCommitted, kLong).code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(daemon.Count("begin_save"), 0);
  EXPECT_EQ(job->failed_saves(), 10u);
}

TEST(Save, SlotsThatComeAroundAgainNeedNoDescriptor) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<uint64_t> w(100'000);
  const State state{{{"w", Type::kU64, {w.size()}, w.data()}}, {}};
  for (uint64_t step = 1; step <= 10; ++step) {
    std::fill(w.begin(), w.end(), step);
    ASSERT_TRUE(job->Save(step, state).ok());
    EXPECT_EQ(SavedBytes(daemon).at("w"),
              std::string(reinterpret_cast<char*>(w.data()), w.size() * 8))
        << step;
  }
  EXPECT_EQ(daemon.LastRecord().id.step, 10u);
}

TEST(Save, ObjectsMayChangeTheirLengthFromSaveToSave) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  State state{{{"w", Type::kF32, {1}, &w}}, {{"loss", "", true, ""}}};
  for (uint64_t step = 1; step <= 5; ++step) {
    state.objects[0].bytes = "[" + std::string(step * 1000, ' ') + "]";
    ASSERT_TRUE(job->Save(step, state).ok());
    EXPECT_EQ(SavedBytes(daemon).at("lossjson"), state.objects[0].bytes);
    state.objects[0].bytes = std::string(step, '1');
    auto handle = job->SaveAsync(step + 100 * step, state);
    state.objects[0].bytes = "gone";  // objects were copied
    ASSERT_EQ(handle->Wait(Stage::kSealed, kLong).code(), step == 1 ? Code::kOk : Code::kOk);
    EXPECT_EQ(SavedBytes(daemon).at("lossjson"), std::string(step, '1'));
    step = step + 100 * step;
  }
}

TEST(Save, AStepThatDoesNotGrowIsRefusedByTheDaemonAndReported) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  const State state{{{"w", Type::kF32, {1}, &w}}, {}};
  ASSERT_TRUE(job->Save(7, state).ok());
  const Status status = job->Save(7, state);
  EXPECT_EQ(status.code(), Code::kRefused);
  EXPECT_NE(status.message().find("save step 7"), std::string::npos) << status.message();
  EXPECT_TRUE(job->Save(8, state).ok());
}

TEST(SaveAsync, StagesComeInOrderAndTensorsMayChangeAfterTheSnapshot) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<uint8_t> w(8 << 20, 1);
  const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  for (uint64_t step = 1; step <= 4; ++step) {
    std::fill(w.begin(), w.end(), static_cast<uint8_t>(step));
    auto handle = job->SaveAsync(step, state);
    ASSERT_TRUE(handle->WaitSnapshot(kLong).ok());
    EXPECT_GE(handle->times().snapshot.count(), 0);
    EXPECT_GT(handle->times().bytes, w.size());
    std::fill(w.begin(), w.end(), 0xee);
    ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
    EXPECT_GE(handle->times().sealed, handle->times().snapshot);
    ASSERT_TRUE(handle->Wait(Stage::kCommitted, kLong).ok());
    EXPECT_EQ(SavedBytes(daemon).at("w"), std::string(w.size(), static_cast<char>(step)));
  }
  EXPECT_EQ(daemon.Count("await_save"), 4);
}

TEST(SaveAsync, AnotherSaveWaitsForTheCopyAndDestroyingHandlesIsSafe) {
  FakeDaemon daemon;
  auto job = Open(daemon);
  std::vector<uint8_t> w(16 << 20, 1);
  const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  for (uint64_t step = 1; step <= 8; ++step) {
    job->SaveAsync(step, state);  // the handle's destructor waits for the snapshot
    std::fill(w.begin(), w.end(), static_cast<uint8_t>(step));
  }
  ASSERT_TRUE(job->Save(9, state).ok());
  auto last = job->SaveAsync(10, state);
  job.reset();  // waits for the copy and the seal
  EXPECT_TRUE(last->Wait(Stage::kSealed, kLong).ok());
  EXPECT_EQ(last->Wait(Stage::kCommitted, kLong).code(), Code::kRefused);  // the job is closed
  EXPECT_EQ(daemon.Count("seal"), 10);
  EXPECT_EQ(daemon.Count("leave"), 1);
}

TEST(SaveAsync, WaitingFromManyThreads) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<uint8_t> w(1 << 20, 1);
  const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<SaveHandle>> handles;
  for (uint64_t step = 1; step <= 5; ++step) {
    SaveHandle* handle = handles.emplace_back(job->SaveAsync(step, state)).get();
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([handle] { EXPECT_TRUE(handle->Wait(Stage::kCommitted, kLong).ok()); });
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(SaveAsync, AWaitOfNothingSaysWhatIsSoNow) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  const State state{{{"w", Type::kF32, {1}, &w}}, {}};
  auto handle = job->SaveAsync(1, state);
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  const Milliseconds nothing(0);
  EXPECT_TRUE(handle->Wait(Stage::kSnapshot, nothing).ok());
  EXPECT_TRUE(handle->Wait(Stage::kSealed, nothing).ok());
  EXPECT_TRUE(handle->Wait(Stage::kCommitted, nothing).ok());
  // Not yet; and the daemon's own words for it.
  daemon.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_await_save()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_failure()->set_code(4);
    reply.mutable_failure()->set_message("1 of 2 ranks have sealed it");
    peer.Send(reply);
    return true;
  });
  const Status not_yet = handle->Wait(Stage::kCommitted, nothing);
  EXPECT_EQ(not_yet.code(), Code::kDeadlineExceeded);
  EXPECT_NE(not_yet.message().find("1 of 2 ranks"), std::string::npos) << not_yet.message();
  daemon.SetHook(nullptr);
  EXPECT_TRUE(handle->Wait(Stage::kCommitted, nothing).ok());
  EXPECT_TRUE(job->Save(2, state).ok());  // nothing was left behind on the connection
  EXPECT_EQ(daemon.Count("join"), 1);
}

TEST(Save, WithoutAGuardForItsSlotItFailsAndSaysSo) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  float w = 1;
  const State state{{{"w", Type::kF32, {1}, &w}}, {}};
  char memory = 0;
  std::vector<std::unique_ptr<FaultGuard>> all;
  while (all.empty() || all.back()->ok()) {
    all.push_back(std::make_unique<FaultGuard>(&memory, 1));
  }
  EXPECT_EQ(job->Save(1, state).code(), Code::kInternal);
  EXPECT_EQ(daemon.Count("seal"), 0);
  EXPECT_EQ(daemon.Count("abort_save"), 1);
  all.clear();
  EXPECT_TRUE(job->Save(2, state).ok());
}

TEST(Reserve, MapsEverySlotAheadOfTheFirstSave) {
  FakeDaemon daemon;
  const auto job = Open(daemon);
  std::vector<uint8_t> w(5 << 20, 3);
  const State state{{{"w", Type::kU8, {w.size()}, w.data()}}, {}};
  const Result<ReserveReport> report = job->Reserve(state, kLong);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->slots_ready, 3u);
  EXPECT_EQ(report->slots_wanted, 3u);
  EXPECT_GE(report->slot_bytes, w.size());
  EXPECT_EQ(daemon.Count("reserve"), 4);  // three slots, then none
  for (uint64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(job->Save(step, state).ok());
    EXPECT_EQ(SavedBytes(daemon).at("w"), std::string(w.size(), 3));
  }
}

TEST(Open, RefusesOptionsThatMakeNoSense) {
  FakeDaemon daemon;
  const auto code = [&](const std::function<void(JobOptions&)>& change) {
    JobOptions options = daemon.Options();
    change(options);
    return Job::Open(options).status().code();
  };
  EXPECT_EQ(code([](JobOptions& o) { o.job = ""; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](JobOptions& o) { o.job = "../x"; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](JobOptions& o) { o.world_size = 0; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](JobOptions& o) { o.rank = 1; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](JobOptions& o) { o.launch = std::string(1000, 'x'); }), Code::kInvalidArgument);
  EXPECT_EQ(code([](JobOptions& o) { o.launch = "\xff"; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](JobOptions& o) { o.socket = "/" + std::string(500, 's'); }),
            Code::kInvalidArgument);
  EXPECT_EQ(daemon.Count("join"), 0);
  EXPECT_EQ(code([](JobOptions& o) {
              o.socket = "/nonexistent/s";
              o.open_deadline = Milliseconds(1);
            }),
            Code::kUnavailable);
}

}  // namespace
}  // namespace holdfast
