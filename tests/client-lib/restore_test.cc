#include <gtest/gtest.h>

#include <numeric>

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
}

TEST_F(Restore, ATruncatedSlotIsABadCopyAndNoCrash) {
  Save(1);
  Save(2);
  daemon_.TruncateImage(8192);
  Reopen();
  const Result<Restored> restored = Load();
  ASSERT_TRUE(restored.ok()) << restored.status().ToString();
  EXPECT_EQ(restored->step, 1u);
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
  daemon_.SetHook(nullptr);
  Save(3);
  EXPECT_EQ(daemon_.Count("release_slots"), 1);
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

}  // namespace
}  // namespace holdfast
