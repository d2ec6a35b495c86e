// Readers that take no part in an attempt: shards from whatever tier is nearest, and the list of
// what can be read (docs/protocol.md §10, "Readers").
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/tier_world.h"

namespace holdfast::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using v1::Failure;

v1::ClientFrame AnyTier(std::optional<CheckpointId> wanted = std::nullopt, Rank rank = 0,
                        uint64_t deadline_ms = 30'000, const std::string& job = "job") {
  v1::ClientFrame frame;
  v1::Attach& attach = *frame.mutable_attach();
  attach.set_job(job);
  attach.set_rank(rank);
  attach.set_any_tier(true);
  attach.set_deadline_ms(deadline_ms);
  if (wanted) {
    attach.set_choice(v1::Attach::CHOICE_STEP);
    attach.set_attempt(wanted->attempt);
    attach.set_step(wanted->step);
  }
  return frame;
}
v1::ClientFrame ListFrame(uint64_t deadline_ms = 0,
                          std::optional<CheckpointId> before = std::nullopt) {
  v1::ClientFrame frame;
  frame.mutable_list()->set_job("job");
  frame.mutable_list()->set_deadline_ms(deadline_ms);
  if (before) {
    frame.mutable_list()->set_before(true);
    frame.mutable_list()->set_before_attempt(before->attempt);
    frame.mutable_list()->set_before_step(before->step);
  }
  return frame;
}
int Code(absl::StatusCode code) {
  return static_cast<int>(code);
}
std::vector<std::string> Listed(const v1::Listing& listing) {
  std::vector<std::string> all;
  for (const v1::ListedCheckpoint& c : listing.checkpoints()) {
    std::string text = std::to_string(c.attempt()) + ":" + std::to_string(c.step());
    for (const std::string& tier : c.tiers()) {
      text += " " + tier;
    }
    all.push_back(text + (c.on_line() ? "" : " off"));
  }
  return all;
}

// Two ranks, two steps in all tiers, and a reader.
struct Readable : TierWorld {
  Readable() : TierWorld(2) {
    EXPECT_TRUE(Save(1));
    EXPECT_TRUE(Save(2));
  }
  TestClient Reader(uint32_t uid = 1000) { return h.Connect(next_pid++, uid); }
  void DelayOpening() {
    h.delay = [](const Action& a) { return std::holds_alternative<OpenDurable>(a); };
  }
};

// What is bad stays so: writing it anew fails.
absl::Status MendsNothing(const Action& action) {
  const auto* flush = std::get_if<FlushShard>(&action);
  return flush != nullptr && flush->replace ? absl::InternalError("mends nothing")
                                            : absl::OkStatus();
}

TEST(AttachTiers, MemoryThenNvmeThenRemote) {
  Readable w;
  TestClient reader = w.Reader();
  v1::Source got = reader.Call(AnyTier()).attach();
  EXPECT_EQ(got.tier(), "memory");
  EXPECT_NE(got.hold(), 0u);
  w.Reboot();
  reader = w.Reader();
  uint64_t id = reader.Send(AnyTier(std::nullopt, 1));
  std::optional<Answer> answer = reader.Take(id);
  ASSERT_TRUE(answer);
  got = answer->frame.attach();
  EXPECT_EQ(got.tier(), "nvme") << answer->frame.ShortDebugString();
  EXPECT_EQ(got.why(), "memory copy absent (node rebooted)");
  EXPECT_EQ(got.attempt(), 1u);
  EXPECT_EQ(got.step(), 2u);
  EXPECT_EQ(got.rank(), 1u);
  EXPECT_EQ(got.world_size(), 2u);
  EXPECT_EQ(got.hold(), 0u);
  EXPECT_EQ(got.image_bytes(), kSlot / 2);
  EXPECT_EQ(answer->descriptors, Descriptors::kOpenedCopy);
  EXPECT_TRUE(w.h.files.empty()) << "nothing was fetched for it";
  w.h.nvme.Wipe();
  w.Reboot();
  reader = w.Reader();
  got = reader.Call(AnyTier(CheckpointId{0, 1})).attach();
  EXPECT_EQ(got.tier(), "remote");
  EXPECT_EQ(got.step(), 1u);
  EXPECT_EQ(got.why(), "memory copy absent (node rebooted), nvme copy absent");
}

TEST(AttachTiers, AnOlderClientGetsMemoryOrIsToldThereIsNone) {
  Readable w;
  TestClient reader = w.Reader();
  v1::ClientFrame old = AnyTier();
  old.mutable_attach()->clear_any_tier();
  old.mutable_attach()->clear_deadline_ms();
  EXPECT_EQ(reader.Call(old).attach().tier(), "memory");
  w.Reboot();
  reader = w.Reader();
  EXPECT_EQ(reader.Reason(old), Failure::REASON_TOPOLOGY);
  EXPECT_TRUE(w.h.opened.empty());
}

TEST(AttachTiers, WhoMayRead) {
  Readable w;
  w.Reboot();
  EXPECT_EQ(w.Reader(2000).Reason(AnyTier()), Failure::REASON_OTHER_OWNER);
  EXPECT_EQ(w.Reader(2000).Reason(ListFrame()), Failure::REASON_OTHER_OWNER);
  EXPECT_TRUE(w.h.opened.empty());
  EXPECT_EQ(w.Reader(0).Call(AnyTier()).attach().tier(), "nvme");
}

TEST(AttachTiers, WhatIsNotThere) {
  Readable w;
  TestClient reader = w.Reader();
  EXPECT_EQ(reader.Reason(AnyTier(std::nullopt, 2)), Failure::REASON_TOPOLOGY);
  EXPECT_EQ(reader.Call(AnyTier(CheckpointId{0, 9})).failure().code(),
            Code(absl::StatusCode::kNotFound));
  EXPECT_EQ(reader.Reason(AnyTier(std::nullopt, 0, 1000, "none")),
            Failure::REASON_NOTHING_TO_RESTORE);
}

TEST(AttachTiers, ABadCopyIsPassedOverAndRemembered) {
  Readable w;
  w.h.fail = MendsNothing;
  w.Reboot();
  w.h.nvme.damaged.insert(w.Shard(2));
  TestClient reader = w.Reader();
  const v1::Source got = reader.Call(AnyTier()).attach();
  EXPECT_EQ(got.tier(), "remote");
  EXPECT_EQ(got.step(), 2u);
  EXPECT_THAT(got.why(), HasSubstr("nvme copy bad: the image was cut"));
  EXPECT_EQ(w.h.opened.size(), 2u);
  EXPECT_EQ(reader.Call(AnyTier()).attach().tier(), "remote");
  EXPECT_EQ(w.h.opened.size(), 3u) << "nvme is not asked again";
}

TEST(AttachTiers, ACopyThatCannotBeReadNowIsPassedOverAndNotCalledBad) {
  Readable w;
  w.Reboot();
  w.h.nvme.unreadable.insert(w.Shard(2));
  TestClient reader = w.Reader();
  const v1::Source got = reader.Call(AnyTier()).attach();
  EXPECT_EQ(got.tier(), "remote");
  EXPECT_THAT(got.why(), HasSubstr("nvme copy not readable now: input/output error"));
  w.h.nvme.unreadable.clear();
  EXPECT_EQ(reader.Call(AnyTier()).attach().tier(), "nvme");
}

TEST(AttachTiers, WithNoCopyLeftItSaysWhatIsWrongWithEach) {
  Readable w;
  w.h.fail = MendsNothing;
  w.Reboot();
  w.h.nvme.damaged.insert(w.Shard(2));
  w.h.remote.unreadable.insert(w.Shard(2));
  TestClient reader = w.Reader();
  Failure refused = reader.Call(AnyTier()).failure();
  EXPECT_EQ(refused.code(), Code(absl::StatusCode::kUnavailable)) << "one of them, perhaps later";
  EXPECT_THAT(refused.message(), HasSubstr("nvme copy bad: the image was cut"));
  EXPECT_THAT(refused.message(), HasSubstr("remote copy not readable now: input/output error"));
  w.h.remote.damaged.insert(w.Shard(2));
  refused = reader.Call(AnyTier()).failure();
  EXPECT_EQ(refused.code(), Code(absl::StatusCode::kDataLoss));
  EXPECT_EQ(reader.Call(AnyTier()).attach().step(), 1u) << "that one is known to be bad now";
}

TEST(AttachTiers, ANewerFormatIsUnreadableAndNotBad) {
  Readable w;
  w.Reboot();
  w.h.fail = [](const Action& a) {
    return std::holds_alternative<OpenDurable>(a)
               ? absl::FailedPreconditionError("the record is of version 9")
               : absl::OkStatus();
  };
  TestClient reader = w.Reader();
  const Failure refused = reader.Call(AnyTier()).failure();
  EXPECT_EQ(refused.reason(), Failure::REASON_UNREADABLE);
  EXPECT_THAT(refused.message(), HasSubstr("version 9"));
  w.h.fail = nullptr;
  EXPECT_EQ(reader.Call(AnyTier()).attach().tier(), "nvme");
}

TEST(AttachTiers, AMemoryCopyThatIsBadIsPassedOver) {
  Readable w;
  SlotId slot = 0;
  for (const auto& [id, file] : w.h.files) {
    if (file.record && file.record->id == w.Shard(2)) {
      slot = id;
    }
  }
  // Its descriptors cannot be had: nobody knew that before.
  w.h.fail = [slot](const Action& a) {
    const auto* reply = std::get_if<SendReply>(&a);
    return reply != nullptr && reply->descriptors == Descriptors::kReadOnlyImageAndRecord &&
                   reply->slot == slot
               ? absl::DataLossError("cut short")
               : absl::OkStatus();
  };
  TestClient reader = w.Reader();
  v1::Source got = reader.Call(AnyTier()).attach();
  EXPECT_EQ(got.step(), 2u);
  EXPECT_EQ(got.tier(), "nvme");
  EXPECT_THAT(got.why(), HasSubstr("memory copy bad: cut short"));
  w.h.fail = nullptr;
  got = reader.Call(AnyTier()).attach();
  EXPECT_EQ(got.tier(), "nvme") << "and from now on it is known";
  EXPECT_EQ(w.h.files.at(slot).note.readers_size(), 0);
}

TEST(AttachTiers, AMemoryCopyWhoseReaderCannotBeNotedBecauseItsFileIsGone) {
  Readable w;
  w.h.fail = [](const Action& a) {
    const auto* note = std::get_if<WriteNote>(&a);
    return note != nullptr && note->note.readers_size() > 0 ? absl::DataLossError("gone")
                                                            : absl::OkStatus();
  };
  TestClient reader = w.Reader();
  const v1::Source got = reader.Call(AnyTier()).attach();
  EXPECT_EQ(got.step(), 2u);
  EXPECT_EQ(got.tier(), "nvme");
}

TEST(AttachTiers, AMemoryCopyThatIsGivenUpMeanwhileIsPassedOver) {
  Readable w;
  TestClient reader = w.Reader();
  w.h.delay = [](const Action& a) {
    const auto* note = std::get_if<WriteNote>(&a);
    return note != nullptr && note->note.readers_size() > 0;
  };
  const uint64_t id = reader.Send(AnyTier(CheckpointId{0, 1}));
  ASSERT_EQ(w.h.delayed.size(), 1u);
  const auto note = std::get<WriteNote>(w.h.delayed[0]);
  w.h.delayed.clear();
  w.h.delay = nullptr;
  for (Step step = 3;
       w.h.files.at(note.slot).record && w.h.files.at(note.slot).record->id.step == 1 && step < 12;
       ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  w.h.Feed(NoteWritten{note.slot, note.note_version, absl::OkStatus()});
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_NE(answer->frame.attach().tier(), "memory") << answer->frame.ShortDebugString();
}

TEST(AttachTiers, TheReaderMayTurnDownTiers) {
  Readable w;
  TestClient reader = w.Reader();
  v1::ClientFrame frame = AnyTier();
  frame.mutable_attach()->add_without("memory");
  frame.mutable_attach()->add_without("a tier of a later version");
  EXPECT_EQ(reader.Call(frame).attach().tier(), "nvme");
  frame.mutable_attach()->add_without("nvme");
  EXPECT_EQ(reader.Call(frame).attach().tier(), "remote");
  frame.mutable_attach()->add_without("remote");
  EXPECT_EQ(reader.Call(frame).failure().code(), Code(absl::StatusCode::kNotFound));
}

TEST(AttachTiers, ATierThatTakesTooLongGetsHalfOfTheTimeAndTheNextOneTheRest) {
  Readable w;
  w.Reboot();
  w.DelayOpening();
  TestClient reader = w.Reader();
  const uint64_t id = reader.Send(AnyTier(std::nullopt, 0, 10'000));
  w.h.Advance(milliseconds(4'900));
  ASSERT_EQ(w.h.opened.size(), 0u);
  EXPECT_EQ(w.Delayed<OpenDurable>([](const OpenDurable& a) { return a.tier == TierKind::kNvme; }),
            1u);
  w.h.Advance(milliseconds(200));
  EXPECT_EQ(
      w.Delayed<OpenDurable>([](const OpenDurable& a) { return a.tier == TierKind::kRemote; }), 1u);
  EXPECT_FALSE(reader.Take(id));
  w.h.PerformDelayed();
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.attach().tier(), "remote");
  EXPECT_THAT(answer->frame.attach().why(), HasSubstr("nvme copy not readable now: it takes long"));
}

TEST(AttachTiers, AtTheDeadlineItIsAnsweredAndTheOpeningCancelled) {
  Readable w;
  w.h.nvme.Wipe();
  w.Reboot();
  w.DelayOpening();
  TestClient reader = w.Reader();
  const uint64_t id = reader.Send(AnyTier(std::nullopt, 0, 10'000));
  ASSERT_EQ(w.Delayed<OpenDurable>(), 1u);
  w.h.Advance(milliseconds(9'900));
  EXPECT_FALSE(reader.Take(id));
  w.h.Advance(milliseconds(200));
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().code(), Code(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(answer->frame.failure().message(), HasSubstr("remote"));
  EXPECT_EQ(w.Delayed<OpenDurable>(), 0u);
}

TEST(AttachTiers, ATierThatHangsIsLeftAtOnce) {
  Readable w;
  w.Reboot();
  w.DelayOpening();
  TestClient reader = w.Reader();
  const uint64_t id = reader.Send(AnyTier());
  ASSERT_EQ(w.Delayed<OpenDurable>(), 1u);
  const DrainId drain = std::get<OpenDurable>(w.h.delayed[0]).drain;
  w.h.delay = nullptr;
  w.h.Feed(DrainStalled{drain, true, "no progress for 60 s"});
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.attach().tier(), "remote");
  // Should it be opened after all, nobody hears of it.
  w.h.Feed(DurableOpened{drain, absl::OkStatus(), false, {}, nullptr});
}

TEST(AttachTiers, NobodyWaitsForAReaderThatIsGone) {
  Readable w;
  w.Reboot();
  w.DelayOpening();
  TestClient reader = w.Reader();
  reader.Send(AnyTier());
  ASSERT_EQ(w.Delayed<OpenDurable>(), 1u);
  w.h.Kill(reader);
  EXPECT_EQ(w.Delayed<OpenDurable>(), 0u) << "cancelled";
}

TEST(AttachTiers, AStepThatIsRemovedWhileItIsOpenedIsNotGivenOut) {
  Readable w;
  w.Reboot();
  w.DelayOpening();
  TestClient reader = w.Reader();
  const uint64_t id = reader.Send(AnyTier(CheckpointId{0, 1}));
  ASSERT_EQ(w.Delayed<OpenDurable>(), 1u);
  v1::RemoveCheckpointRequest remove;
  remove.set_job("job");
  remove.set_attempt(1);
  remove.set_step(1);
  remove.set_force(true);
  (void)w.h.Admin<v1::RemoveCheckpointReply>(remove, 0);
  ASSERT_TRUE(w.h.nvme.copies.count(w.Shard(1)) == 0);
  w.h.PerformDelayed();  // it finds nothing
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().code(), Code(absl::StatusCode::kAborted))
      << answer->frame.ShortDebugString();
}

TEST(AttachTiers, TheNewestIsNotToldBeforeTheTiersHaveBeenRead) {
  Readable w;
  w.EndAll();
  w.h.late_drives = true;
  w.h.Restart(true);
  TestClient reader = w.Reader();
  const uint64_t newest = reader.Send(AnyTier());
  const uint64_t list = reader.Send(ListFrame(10'000));
  EXPECT_FALSE(reader.Take(newest));
  EXPECT_FALSE(reader.Take(list));
  TestClient hasty = w.Reader();
  EXPECT_TRUE(hasty.Call(ListFrame()).has_list()) << "what is known now";
  w.h.AnswerDrives();
  auto answer = reader.Take(newest);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.attach().step(), 2u);
  EXPECT_EQ(answer->frame.attach().tier(), "nvme");
  answer = reader.Take(list);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.list().checkpoints_size(), 2);
}

TEST(AttachTiers, ATierThatIsNeverReadIsWaitedForUntilTheDeadline) {
  Readable w;
  w.EndAll();
  w.h.late_drives = true;
  w.h.Restart(true);
  TestClient reader = w.Reader();
  const uint64_t id = reader.Send(AnyTier(std::nullopt, 0, 5'000));
  w.h.Advance(seconds(6));
  const auto answer = reader.Take(id);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->frame.failure().code(), Code(absl::StatusCode::kDeadlineExceeded));
}

TEST(AttachTiers, AJobThatThisDaemonDoesNotKnowIsLookedForInTheTiers) {
  Readable w;
  w.EndAll();
  w.h.nvme.Wipe();
  w.h.states.clear();
  w.h.Restart(true);
  TestClient reader = w.Reader();
  const v1::DaemonFrame got = reader.Call(AnyTier());
  EXPECT_EQ(got.attach().tier(), "remote") << got.ShortDebugString();
  EXPECT_EQ(got.attach().step(), 2u);
  EXPECT_EQ(reader.Call(ListFrame()).list().checkpoints_size(), 2);
  EXPECT_EQ(w.Reader(2000).Reason(AnyTier()), Failure::REASON_OTHER_OWNER);
}

TEST(Listing, NewestFirstWithTheTiersAndTheLine) {
  Readable w;
  ASSERT_TRUE(w.Restore(nullptr, CheckpointId{1, 1}).done);
  ASSERT_TRUE(w.Save(2));
  w.FailFlushes(TierKind::kRemote, absl::UnavailableError("EIO"));
  ASSERT_TRUE(w.Save(3));
  const v1::Listing listing = w.Reader().Call(ListFrame()).list();
  const std::vector<std::string> all = Listed(listing);
  ASSERT_GE(all.size(), 3u);
  EXPECT_EQ(all[0], "2:3 memory nvme");
  EXPECT_EQ(all[1], "2:2 memory nvme remote");
  EXPECT_THAT(all, ::testing::Contains(HasSubstr("1:1 ")));
  for (const std::string& one : all) {
    EXPECT_EQ(one.find("1:2") == 0, one.find(" off") != std::string::npos) << one;
  }
  EXPECT_FALSE(listing.more());
  EXPECT_EQ(listing.checkpoints(0).world_size(), 2u);
  EXPECT_GT(listing.checkpoints(0).bytes(), 0u);
  EXPECT_GT(listing.checkpoints(0).unix_ms(), 0);
  EXPECT_EQ(listing.unread(), "");
}

TEST(Listing, InPagesThatFitAFrame) {
  TierWorld w(1, [](v1::DaemonConfig& config) {
    config.mutable_policy()->mutable_nvme()->set_keep_last(1000);
    config.mutable_policy()->mutable_remote()->set_keep_last(1000);
  });
  constexpr Step kSteps = 600;
  for (Step step = 1; step <= kSteps; ++step) {
    ASSERT_TRUE(w.Save(step));
  }
  TestClient reader = w.h.Connect(9000);
  std::optional<CheckpointId> before;
  Step next = kSteps;
  bool more = true;
  for (int pages = 0; more && pages < 10; ++pages) {
    const v1::DaemonFrame frame = reader.Call(ListFrame(0, before));
    EXPECT_LT(frame.ByteSizeLong(), 60'000u);
    ASSERT_GT(frame.list().checkpoints_size(), 0);
    for (const v1::ListedCheckpoint& c : frame.list().checkpoints()) {
      EXPECT_EQ(c.step(), next--);
      before = CheckpointId{c.attempt(), c.step()};
    }
    more = frame.list().more();
  }
  EXPECT_FALSE(more);
  EXPECT_EQ(next, 0u);
}

TEST(Listing, ATierThatCannotBeReadIsNamed) {
  Readable w;
  w.EndAll();
  w.h.remote.scan = absl::UnavailableError("Stale file handle");
  w.FailFlushes(TierKind::kRemote, absl::UnavailableError("Stale file handle"));
  w.h.Restart(true);
  const v1::Listing listing = w.Reader().Call(ListFrame()).list();
  EXPECT_THAT(listing.unread(), HasSubstr("Stale file handle"));
  EXPECT_THAT(Listed(listing), ElementsAre("1:2 nvme", "1:1 nvme"));
}

}  // namespace
}  // namespace holdfast::testing
