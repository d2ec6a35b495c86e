#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "base/fault_guard.h"
#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

const Milliseconds kLong(60'000);

class Restore : public testing::Test {
 protected:
  Restore() : weights_(700'000), rows_(12), flat_(9) {
    std::iota(weights_.begin(), weights_.end(), 1.f);
    std::iota(rows_.begin(), rows_.end(), 100);
    std::iota(flat_.begin(), flat_.end(), 50);
    Reopen();
  }
  void Reopen() {
    job_.reset();
    Result<std::unique_ptr<Job>> job = Job::Open(daemon_.Options());
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
  }
  static State MakeState(std::vector<float>& weights, std::vector<int64_t>& rows,
                         std::vector<int16_t>& flat) {
    return {{{"weights", Type::kF32, {700, 1000}, weights.data()},
             Tensor::Box("rows", Type::kI64, {8, 4}, {2, 0}, {3, 4}, rows.data()),
             Tensor::Flat("flat", Type::kI16, {10, 10}, 42, 9, flat.data()),
             {"empty", Type::kF32, {0}, nullptr}},
            {}};
  }
  State Saved() {
    State state = MakeState(weights_, rows_, flat_);
    state.objects = {{"epoch", "3", true, ""}, {"rng", std::string("\0x", 2), false, "test.rng"}};
    return state;
  }
  void Save(uint64_t step) {
    weights_[0] = static_cast<float>(step);
    const Status status = job_->Save(step, Saved());
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  // Into fresh memory.
  Result<Restored> Load(const RestoreOptions& options = {}) {
    got_weights_.assign(weights_.size(), -1);
    got_rows_.assign(rows_.size(), -1);
    got_flat_.assign(flat_.size(), -1);
    got_ = MakeState(got_weights_, got_rows_, got_flat_);
    return job_->Restore(got_, options);
  }
  bool TensorsAreBack() const {
    return got_weights_ == weights_ && got_rows_ == rows_ && got_flat_ == flat_;
  }

  FakeDaemon daemon_;
  std::unique_ptr<Job> job_;
  std::vector<float> weights_;
  std::vector<int64_t> rows_;
  std::vector<int16_t> flat_;
  std::vector<float> got_weights_;
  std::vector<int64_t> got_rows_;
  std::vector<int16_t> got_flat_;
  State got_;
};

TEST_F(Restore, NothingToRestoreIsItsOwnStatus) {
  EXPECT_EQ(Load().status().code(), Code::kNothingToRestore);
}

TEST_F(Restore, BringsBackEveryByteAndObject) {
  Save(1);
  Save(2);
  Reopen();
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 2u);
  EXPECT_EQ(restored->attempt, 1u);
  EXPECT_EQ(restored->source, "memory");
  EXPECT_EQ(restored->bytes, 2'800'000u + 96 + 18 + 1 + 2);
  EXPECT_TRUE(restored->notes.empty());
  EXPECT_TRUE(TensorsAreBack());
  ASSERT_EQ(got_.objects.size(), 2u);
  std::map<std::string, Object> objects;
  for (const Object& object : got_.objects) {
    objects[object.name] = object;
  }
  EXPECT_EQ(objects["epoch"].bytes, "3");
  EXPECT_TRUE(objects["epoch"].json);
  EXPECT_EQ(objects["rng"].bytes, std::string("\0x", 2));
  EXPECT_FALSE(objects["rng"].json);
  EXPECT_EQ(objects["rng"].codec, "test.rng");
  EXPECT_EQ(daemon_.Count("release_read"), 1);
  EXPECT_EQ(daemon_.Count("confirm_read"), 1);
}

TEST_F(Restore, AdoptsAStepWithoutLoadingIt) {
  Save(1);
  Save(2);
  Reopen();
  const Result<Restored> adopted = Load({.adopt_only = true});
  ASSERT_TRUE(adopted.ok()) << adopted.status().ToString();
  EXPECT_EQ(adopted->step, 2u);
  EXPECT_EQ(adopted->attempt, 1u);
  EXPECT_EQ(adopted->source, "");
  EXPECT_EQ(adopted->bytes, 0u);
  EXPECT_EQ(got_weights_, std::vector<float>(weights_.size(), -1)) << "left as it was";
  EXPECT_TRUE(daemon_.Frames("enter_session").back().enter_session().reads_by_itself());
  EXPECT_EQ(daemon_.Count("report_load"), 0);
  EXPECT_EQ(daemon_.Holds(), 0u);
  // It has taken part: the next restore begins the next attempt.
  ASSERT_TRUE(Load({.adopt_only = true}).ok());
  EXPECT_EQ(daemon_.Frames("join").back().join().leave_attempt(), 2u);
  // And what is usual is not asked for in this way.
  ASSERT_TRUE(Load().ok());
  EXPECT_FALSE(daemon_.Frames("enter_session").back().enter_session().reads_by_itself());
}

TEST_F(Restore, AdoptsNothingWhereThereIsNothing) {
  EXPECT_EQ(Load({.adopt_only = true}).status().code(), Code::kNothingToRestore);
}

TEST_F(Restore, ADaemonThatWantsTheShardLoadedIsTooOldToAdoptWith) {
  Save(1);
  Reopen();
  daemon_.SetHook([this](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_enter_session()) {
      return false;
    }
    v1::ClientFrame as_it_reads = frame;
    as_it_reads.mutable_enter_session()->clear_reads_by_itself();
    daemon_.AnswerLate(as_it_reads, peer);
    return true;
  });
  const Status status = Load({.adopt_only = true}).status();
  EXPECT_EQ(status.code(), Code::kRefused);
  EXPECT_NE(status.message().find("older than this library"), std::string::npos);
  EXPECT_EQ(daemon_.Count("report_load"), 1) << "the other ranks hear of it";
  EXPECT_FALSE(daemon_.Frames("report_load")[0].report_load().copy_is_bad());
  EXPECT_EQ(daemon_.Holds(), 0u);
}

TEST_F(Restore, TakesOnlyWhatIsNamed) {
  Save(1);
  Reopen();
  std::vector<int16_t> flat(9);
  State some{{Tensor::Flat("flat", Type::kI16, {10, 10}, 42, 9, flat.data())},
             {{"epoch", "", true, ""}}};
  const Result<Restored> restored = job_->Restore(some);
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(flat, flat_);
  ASSERT_EQ(some.objects.size(), 1u);
  EXPECT_EQ(some.objects[0].bytes, "3");
}

TEST_F(Restore, PartsOfOneTensorInAnyOrder) {
  std::vector<uint16_t> w(40);
  std::iota(w.begin(), w.end(), 1);
  const auto parts = [](uint16_t* data, const std::vector<uint64_t>& order) {
    State state;
    for (const uint64_t i : order) {
      state.tensors.push_back(
          i < 4 ? Tensor::Box("w", Type::kU16, {4, 8}, {i, 0}, {1, 8}, data + 8 * i)
                : Tensor("v", Type::kU16, {8}, data + 32));
    }
    return state;
  };
  ASSERT_TRUE(job_->Save(1, parts(w.data(), {0, 1, 2, 3, 4})).ok());
  for (const std::vector<uint64_t>& order : std::vector<std::vector<uint64_t>>{
           {0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2, 4, 0, 3, 1}, {4, 0, 1, 2, 3}}) {
    std::vector<uint16_t> got(40);
    Reopen();
    State state = parts(got.data(), order);
    const Result<Restored> restored = job_->Restore(state);
    ASSERT_TRUE(restored.ok()) << restored.status().ToString();
    EXPECT_EQ(got, w);
  }
}

TEST_F(Restore, AnExplicitStep) {
  Save(1);
  Save(2);
  Reopen();
  weights_[0] = 1;
  const Result<Restored> restored = Load({.newest = false, .step = 1});
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
  EXPECT_TRUE(TensorsAreBack());
  Reopen();
  EXPECT_EQ(Load({.newest = false, .step = 77}).status().code(), Code::kNotFound);
}

TEST_F(Restore, AnExplicitStepIsNeverAnsweredWithAnother) {
  Save(1);
  Save(2);
  daemon_.OfferTheNewestAlways();
  Reopen();
  for (const RestoreOptions& options : {RestoreOptions{.newest = false, .step = 1},
                                        RestoreOptions{.newest = false, .step = 2, .attempt = 9}}) {
    const int reports = daemon_.Count("report_load");
    const Status status = Load(options).status();
    EXPECT_EQ(status.code(), Code::kInternal);
    EXPECT_NE(status.message().find("step 2"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("asked for was step"), std::string::npos) << status.message();
    EXPECT_EQ(got_weights_, std::vector<float>(weights_.size(), -1));  // untouched
    ASSERT_EQ(daemon_.Count("report_load"), reports + 1);  // the session ends for the others, too
    const v1::ReportLoad report = daemon_.Frames("report_load").back().report_load();
    EXPECT_FALSE(report.loaded());
    EXPECT_FALSE(report.copy_is_bad());
    ASSERT_EQ(daemon_.Count("release_read"), reports + 1);
    EXPECT_GT(daemon_.Frames("release_read").back().release_read().hold(), 0u);
  }
  EXPECT_TRUE(Load({.newest = false, .step = 2, .attempt = 1}).ok());
  EXPECT_TRUE(TensorsAreBack());
}

TEST_F(Restore, AnExplicitStepIsNeverSaidToBeAnotherOne) {
  Save(1);
  Save(2);
  Reopen();
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_report_load()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_enter_session()->set_done(true);
    reply.mutable_enter_session()->set_attempt(1);
    reply.mutable_enter_session()->set_step(2);
    peer.Send(reply);
    return true;
  });
  const Status status = Load({.newest = false, .step = 1}).status();
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_NE(status.message().find("asked for was step 1"), std::string::npos) << status.message();
}

TEST_F(Restore, ABadBlockIsReportedAndTheNextStepTaken) {
  Save(1);
  Save(2);
  const ShardRecord record = daemon_.LastRecord();
  daemon_.FlipImageByte(record.header_bytes + 2'000'000);
  Reopen();
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
  ASSERT_EQ(restored->notes.size(), 1u);
  EXPECT_NE(restored->notes[0].find("step 2"), std::string::npos);
  EXPECT_NE(restored->notes[0].find("'weights'"), std::string::npos) << restored->notes[0];
  weights_[0] = 1;
  EXPECT_TRUE(TensorsAreBack());
  const v1::ReportLoad report = daemon_.Frames("report_load")[0].report_load();
  EXPECT_FALSE(report.loaded());
  EXPECT_TRUE(report.copy_is_bad());
  EXPECT_FALSE(report.wants_mismatch());
  EXPECT_EQ(daemon_.Count("release_read"), 2);
}

TEST_F(Restore, ABadHeaderOrObjectIsFoundToo) {
  Save(1);
  Save(2);
  daemon_.FlipImageByte(20);
  Reopen();
  EXPECT_EQ(Load()->step, 1u);
  const ShardRecord record = daemon_.LastRecord();
  daemon_.FlipImageByte(record.image_bytes - 1);
  Reopen();
  EXPECT_EQ(Load()->step, 1u);
}

TEST_F(Restore, NothingLeftIsUnreadable) {
  Save(1);
  daemon_.FlipImageByte(20);
  Reopen();
  EXPECT_EQ(Load().status().code(), Code::kUnreadable);
}

TEST_F(Restore, TornForeignAndNewerRecordsArePassedOver) {
  Save(1);
  Save(2);
  Save(3);
  const ShardRecord good = daemon_.LastRecord();
  const auto offers = [&](const std::string& bytes) {
    daemon_.ReplaceRecord(bytes);
    Reopen();
    const Result<Restored> restored = Load();
    EXPECT_TRUE(restored.ok()) << restored.status().ToString();
    EXPECT_TRUE(restored.ok() && restored->step == 2);
    EXPECT_TRUE(restored.ok() && restored->notes.size() == 1);
  };
  const std::string whole = EncodeRecord(good);
  offers(whole.substr(0, whole.size() / 2));
  offers("");
  ShardRecord other_job = good;
  other_job.job_name = "other";
  offers(EncodeRecord(other_job));
  ShardRecord other_rank = good;
  other_rank.id.rank = 1;
  other_rank.world_size = 2;
  offers(EncodeRecord(other_rank));
  ShardRecord other_generation = good;
  other_generation.generation += 1;
  offers(EncodeRecord(other_generation));
  ShardRecord other_length = good;  // whole, but not what the daemon named
  other_length.image_bytes += 4096;
  offers(EncodeRecord(other_length));
  std::string newer = whole;
  newer[8] = 99;  // the format's version
  offers(newer);
  for (const v1::ClientFrame& frame : daemon_.Frames("report_load")) {
    const v1::ReportLoad& report = frame.report_load();
    EXPECT_TRUE(report.loaded() || report.copy_is_bad()) << report.problem();
  }
}

TEST_F(Restore, ATruncatedSlotIsABadCopyAndNoCrash) {
  Save(1);
  Save(2);
  daemon_.TruncateImage(8192);
  Reopen();
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
  EXPECT_TRUE(daemon_.Frames("report_load")[0].report_load().copy_is_bad());
}

TEST_F(Restore, WhatThisProcessLacksIsNotTheCopysFault) {
  Save(1);
  Save(2);
  Reopen();
  char memory = 0;
  std::vector<std::unique_ptr<FaultGuard>> all;
  while (all.empty() || all.back()->ok()) {
    all.push_back(std::make_unique<FaultGuard>(&memory, 1));
  }
  const Status status = Load().status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  ASSERT_EQ(daemon_.Count("report_load"), 1);
  EXPECT_FALSE(daemon_.Frames("report_load")[0].report_load().copy_is_bad());
  EXPECT_EQ(daemon_.Count("release_read"), 1);
  all.clear();
  const Result<Restored> restored = Load();  // the newest step is still the one
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 2u);
}

TEST_F(Restore, MemoryThatRunsOutIsReportedAndIsNotTheCopysFault) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers end the program when memory runs out";
#endif
  Save(1);
  Save(2);
  // An object larger than this process may have memory, as a record may say; its file has no bytes,
  // only that length.
  constexpr uint64_t kHuge = uint64_t{1} << 36;
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_DATA, &before), 0);
  const struct rlimit less = {std::min<rlim_t>(before.rlim_max, kHuge / 2), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_DATA, &less), 0);
  ShardRecord record = daemon_.LastRecord();
  Slice huge;
  huge.name = "huge";
  huge.kind = SliceKind::kJson;
  huge.global_shape = {kHuge};
  Reopen();
  absl::StatusOr<ImagePlan> plan = PlanImage({huge}, 0);
  ASSERT_TRUE(plan.ok());
  record.layout_bytes = plan->layout_bytes;
  record.layout_hash = plan->layout_hash;
  record.image_bytes = plan->layout.image_bytes;
  record.header_bytes = plan->layout.header_bytes;
  record.digests.assign(DigestCount(plan->layout), 0);
  daemon_.ReplaceRecord(EncodeRecord(record));
  daemon_.TruncateImage(record.image_bytes);
  State nothing;
  const Status status = job_->Restore(nothing).status();
  EXPECT_EQ(::setrlimit(RLIMIT_DATA, &before), 0);
  EXPECT_EQ(status.code(), Code::kUnavailable) << status.ToString();
  ASSERT_EQ(daemon_.Count("report_load"), 1);
  EXPECT_FALSE(daemon_.Frames("report_load")[0].report_load().copy_is_bad());
  EXPECT_EQ(daemon_.Count("release_read"), 1);
}

TEST_F(Restore, ARefillThatTheDaemonNoticedMakesTheCopyBadWhenItSaysSo) {
  Save(1);
  Save(2);
  Reopen();
  std::atomic<bool> refused{false};
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_confirm_read() || refused.exchange(true)) {
      return false;
    }
    v1::DaemonFrame refuse;
    refuse.set_id(frame.id());
    refuse.mutable_failure()->set_code(15);  // DATA_LOSS, as ckptd answers
    refuse.mutable_failure()->set_message("not held by this process");
    peer.Send(refuse);
    return true;
  });
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
  EXPECT_TRUE(daemon_.Frames("report_load")[0].report_load().copy_is_bad());
}

TEST_F(Restore, ARefillThatTheDaemonNoticedEndsTheSessionForNow) {
  Save(1);
  Save(2);
  Reopen();
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_confirm_read()) {
      return false;
    }
    v1::DaemonFrame refuse;
    refuse.set_id(frame.id());
    refuse.mutable_failure()->set_code(5);
    refuse.mutable_failure()->set_message("the slot was refilled");
    peer.Send(refuse);
    return true;
  });
  const Status status = Load().status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("refilled"), std::string::npos) << status.message();
  ASSERT_EQ(daemon_.Count("report_load"), 1);  // not asked again, and again
  EXPECT_FALSE(daemon_.Frames("report_load")[0].report_load().copy_is_bad());
  daemon_.SetHook(nullptr);
  EXPECT_TRUE(Load().ok());
}

TEST_F(Restore, ASlotOfItsOwnIsReadWhereItLiesAndAsStrictly) {
  Save(1);
  Save(2);
  EXPECT_TRUE(Load().ok());
  EXPECT_TRUE(TensorsAreBack());
  // Cut short while it is mapped here: the copy is bad, and the mapping is given up.
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
    if (frame.has_enter_session()) {
      daemon_.TruncateImage(8192);
    }
    return false;
  });
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
  EXPECT_TRUE(daemon_.Frames("report_load")[1].report_load().copy_is_bad());
  daemon_.SetHook(nullptr);
  Save(3);
  EXPECT_EQ(daemon_.Count("release_slots"), 1);
}

// The hold is the daemon's to end; whether it has said so keeps nobody waiting.
TEST_F(Restore, ADaemonThatIsSlowToEndTheReadKeepsNobody) {
  Save(1);
  Reopen();
  std::mutex mutex;
  std::optional<std::pair<v1::ClientFrame, FakeDaemon::Peer>> kept;
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_release_read()) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    kept.emplace(frame, peer);
    return true;
  });
  // Were it waited for, this would take until the restore's deadline.
  auto restoring =
      std::async(std::launch::async, [&] { return Load({.deadline = 2 * kLong}).status(); });
  ASSERT_EQ(restoring.wait_for(kLong), std::future_status::ready);
  EXPECT_TRUE(restoring.get().ok());
  EXPECT_TRUE(TensorsAreBack());
  // Asked for once, and the daemon does not count as one that hangs; its answer may come late.
  ASSERT_TRUE(daemon_.WaitForCount("release_read", 1));
  EXPECT_GT(daemon_.Frames("release_read")[0].release_read().hold(), 0u);
  Save(2);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    daemon_.AnswerLate(kept->first, kept->second);
  }
  daemon_.SetHook(nullptr);
  Save(3);
  EXPECT_EQ(daemon_.Count("release_read"), 1);
  EXPECT_EQ(daemon_.Count("join"), 2);  // the same connection all the time
}

TEST_F(Restore, ADaemonThatSaysDoneBeforeAnythingWasLoadedIsNotBelieved) {
  Save(1);
  Reopen();
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_enter_session()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_enter_session()->set_done(true);
    reply.mutable_enter_session()->set_attempt(1);
    reply.mutable_enter_session()->set_step(1);
    peer.Send(reply);
    return true;
  });
  EXPECT_EQ(Load().status().code(), Code::kInternal);
}

TEST_F(Restore, AMismatchIsTheCallersAndTouchesNothing) {
  Save(1);
  Save(2);
  Reopen();
  std::vector<float> weights(700'000, -1);
  State wrong{{{"weights", Type::kF32, {1000, 700}, weights.data()}}, {}};
  const Result<Restored> restored = job_->Restore(wrong);
  EXPECT_EQ(restored.status().code(), Code::kInvalidArgument);
  EXPECT_NE(restored.status().message().find("[700, 1000]"), std::string::npos)
      << restored.status().message();
  EXPECT_NE(restored.status().message().find("[1000, 700]"), std::string::npos);
  EXPECT_EQ(weights, std::vector<float>(700'000, -1));
  ASSERT_EQ(daemon_.Count("report_load"), 1);  // no older step was tried
  EXPECT_TRUE(daemon_.Frames("report_load")[0].report_load().wants_mismatch());
  EXPECT_EQ(daemon_.Count("join"), 2);

  // The attempt is not decided by it: the same process may ask again, rightly.
  ASSERT_TRUE(Load().ok());
  EXPECT_EQ(daemon_.Count("join"), 2);
}

TEST_F(Restore, WantedTensorsAreCheckedBeforeAnybodyIsAsked) {
  State wrong{{{"weights", Type::kF32, {2}, nullptr}}, {}};
  EXPECT_EQ(job_->Restore(wrong).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(daemon_.Count("enter_session"), 0);
}

TEST_F(Restore, InARunningAttemptItBeginsTheNextOne) {
  EXPECT_EQ(Load().status().code(), Code::kNothingToRestore);
  EXPECT_EQ(job_->attempt(), 1u);
  Save(1);
  Save(2);
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(job_->attempt(), 2u);
  EXPECT_EQ(daemon_.Frames("join")[1].join().leave_attempt(), 1u);
  EXPECT_TRUE(TensorsAreBack());
  auto handle = job_->SaveAsync(3, Saved());
  ASSERT_TRUE(handle->Wait(Stage::kSealed, kLong).ok());
  ASSERT_TRUE(Load().ok());
  EXPECT_EQ(job_->attempt(), 3u);
  EXPECT_EQ(handle->Wait(Stage::kCommitted, kLong).code(), Code::kSuperseded);
}

TEST_F(Restore, SurvivesARestartOfTheDaemonAtEveryExchange) {
  Save(1);
  Save(2);
  for (const std::string at : {"enter_session", "confirm_read", "release_read", "report_load"}) {
    Reopen();
    std::atomic<bool> closed{false};
    daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      if (RequestName(frame) == at && !closed.exchange(true)) {
        peer.Close();
        return true;
      }
      return false;
    });
    const Result<Restored> restored = Load({.deadline = kLong});
    ASSERT_TRUE(restored.ok()) << at << ": " << restored.status().ToString();
    EXPECT_EQ(restored->step, 2u);
    EXPECT_TRUE(restored->notes.empty()) << restored->notes[0];
    EXPECT_TRUE(TensorsAreBack());
    daemon_.SetHook(nullptr);
  }
}

// The daemon has noted the reader and dies, or the connection does, before the reader hears of it.
TEST_F(Restore, NoHoldOutlivesAConnectionThatBroke) {
  Save(1);
  Save(2);
  for (const std::string at :
       {"enter_session", "report_load", "release_read", "confirm_read", "attach"}) {
    Reopen();
    std::atomic<bool> closed{false};
    std::promise<void> answered;
    daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      if (RequestName(frame) != at || closed.exchange(true)) {
        return false;
      }
      peer.Close();
      daemon_.AnswerLate(frame, peer);  // done, and its answer lost
      answered.set_value();
      return true;
    });
    if (at == "attach") {
      const Result<std::unique_ptr<View>> lost =
          Attach({.job = "job", .rank = 0, .socket = daemon_.socket()});
      EXPECT_EQ(lost.status().code(), Code::kUnavailable);
      ASSERT_EQ(answered.get_future().wait_for(kLong), std::future_status::ready);
      EXPECT_EQ(daemon_.Holds(), 1u);
    }
    ASSERT_TRUE(Load({.deadline = kLong}).ok()) << at;
    daemon_.SetHook(nullptr);
    Reopen();  // the next connection, at the latest
    EXPECT_EQ(daemon_.Holds(), 0u) << at;
  }
}

}  // namespace
}  // namespace holdfast
