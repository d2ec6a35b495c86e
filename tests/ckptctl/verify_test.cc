// ckptctl verify: its progress, its verdicts, and how it is stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

v1::VerifyProgress Progress(uint64_t done, uint32_t shards, bool finished) {
  v1::VerifyProgress p;
  p.set_bytes_done(done);
  p.set_bytes_total(4000);
  p.set_shards_checked(shards);
  p.set_done(finished);
  return p;
}

TEST(Verify, AllGood) {
  Kept<v1::VerifyRequest> got;
  FakeAdmin admin(
      {.verify = [&](const v1::VerifyRequest& request, const FakeAdmin::SendProgress& send) {
        got.Set(request);
        send(Progress(1000, 0, false));
        send(Progress(4000, 2, true));
        return absl::OkStatus();
      }});
  Console people(admin.socket());
  EXPECT_EQ(RunVerify(people.context(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_THAT(people.out(), HasSubstr("job llama: every digest is right: 2 shards, 3.9 KiB in "));
  EXPECT_EQ(people.err(), "");  // no progress bar where nobody looks
  EXPECT_TRUE(got.Get().newest());
  Console machine(admin.socket());
  EXPECT_EQ(RunVerify(machine.Json(), {.job = "llama", .step = 7, .attempt = 2}), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed()["ok"], true);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["shards_checked"], 2);
  EXPECT_FALSE(got.Get().newest());
  EXPECT_EQ(got.Get().step(), 7u);
  EXPECT_EQ(got.Get().attempt(), 2u);
  Console all(admin.socket());
  EXPECT_EQ(RunVerify(all.context(), {.job = "llama", .all = true}), ExitCode::kOk);
  EXPECT_TRUE(got.Get().all_steps());
  EXPECT_FALSE(got.Get().newest());
}

TEST(Verify, DrawsAndClearsItsBar) {
  FakeAdmin admin({.verify = [&](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    send(Progress(1000, 0, false));
    send(Progress(4000, 2, true));
    return absl::OkStatus();
  }});
  Console console(admin.socket());
  console.context().progress = true;
  EXPECT_EQ(RunVerify(console.context(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_THAT(
      console.err(),
      testing::StartsWith("\r\x1b[Kllama [######------------------] 25%  1000 B of 3.9 KiB"));
  EXPECT_THAT(console.err(), testing::EndsWith("\r\x1b[K"));
}

FakeAdmin::Answers Damaged() {
  return {.verify = [](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    v1::VerifyProgress p = Progress(4000, 2, true);
    auto& bad = *p.add_bad();
    bad.set_attempt(3);
    bad.set_step(900);
    bad.set_rank(1);
    bad.set_location("slot-000001");
    bad.set_what("slice 'w\x1b[2J', block at 4096: expected 1, found 2");
    send(p);
    return absl::OkStatus();
  }};
}

TEST(Verify, DamageIsNamedAndHasItsExitCode) {
  FakeAdmin admin(Damaged());
  Console people(admin.socket());
  EXPECT_EQ(RunVerify(people.context(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_THAT(
      people.out(),
      testing::StartsWith("BAD: llama step 900 (attempt 3) rank 1, slot-000001: slice 'w\\x1b[2J', "
                          "block at 4096: expected 1, found 2\n"));
  EXPECT_THAT(people.out(), HasSubstr("job llama: 1 shard is BAD: 2 shards, "));
  Console machine(admin.socket());
  EXPECT_EQ(RunVerify(machine.Json(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_EQ(machine.Parsed()["ok"], false);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["bad"][0]["rank"], 1);
}

TEST(Verify, DamageFoundBeforeAFailureIsNotForgotten) {
  FakeAdmin admin({.verify = [](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    v1::VerifyProgress p = Progress(1000, 1, false);
    p.add_bad()->set_step(9);
    send(p);
    return absl::InternalError("the disk is on fire");
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunVerify(console.Json(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_EQ(console.Parsed()["jobs"][0]["verified"], false);
  EXPECT_EQ(console.Parsed()["jobs"][0]["why_not"], "the disk is on fire");
  EXPECT_EQ(console.Parsed()["jobs"][0]["bad_count"], 1);
}

TEST(Verify, AnEarlyEndIsNoSuccess) {
  FakeAdmin admin({.verify = [](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    send(Progress(1000, 1, false));
    return absl::OkStatus();
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunVerify(console.context(), {.job = "llama"}), ExitCode::kUnreachable);
  EXPECT_THAT(console.err(), HasSubstr("ended the verification before it was done"));
}

TEST(Verify, WithoutAJobEachIsVerifiedAndEmptyOnesAreNoFailure) {
  FakeAdmin::Answers answers = TwoJobs();
  answers.verify = [](const v1::VerifyRequest& request, const FakeAdmin::SendProgress& send) {
    if (request.job() == "llama") {
      return absl::NotFoundError("nothing is committed");
    }
    send(Progress(4000, 2, true));
    return absl::OkStatus();
  };
  FakeAdmin admin(std::move(answers));
  Console all(admin.socket());
  EXPECT_EQ(RunVerify(all.context(), {}), ExitCode::kOk);
  EXPECT_THAT(
      all.out(),
      HasSubstr(
          "job llama: not verified: nothing is committed\njob mistral: every digest is right: "));
  Console one(admin.socket());
  EXPECT_EQ(RunVerify(one.context(), {.job = "llama"}), ExitCode::kRefused);
}

TEST(Verify, WithoutAnyJobs) {
  FakeAdmin admin({.get_status = [](const v1::GetStatusRequest&, v1::GetStatusReply&) {
    return absl::OkStatus();
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunVerify(console.context(), {}), ExitCode::kOk);
  EXPECT_EQ(console.out(), "no jobs of yours: nothing to verify\n");
}

TEST(Verify, AnInterruptReachesASilentDaemon) {
  std::atomic<bool> interrupted{false};
  std::atomic<bool> told{false};
  Gate returned;
  FakeAdmin::Answers answers;
  answers.verify = [&](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    send(Progress(1000, 0, false));
    interrupted = true;
    returned.Wait();
    while (send(Progress(2000, 0, false))) {
    }
    told = true;
    return absl::OkStatus();
  };
  {
    FakeAdmin admin(std::move(answers));
    Console console(admin.socket());
    console.context().interrupted = &interrupted;
    EXPECT_EQ(RunVerify(console.context(), {.job = "llama"}), ExitCode::kInterrupted);
    EXPECT_THAT(console.err(), HasSubstr("verify llama: stopped"));
    returned.Open();
  }
  EXPECT_TRUE(told);
}

TEST(Verify, AnInterruptReachesADaemonThatNeverStopsTalking) {
  std::atomic<bool> interrupted{false};
  std::atomic<int> sent{0};
  constexpr int kMessages = 20'000;
  FakeAdmin::Answers answers;
  answers.verify = [&](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    v1::VerifyProgress large = Progress(1000, 0, false);
    large.add_bad()->set_what(std::string(16'384, 'x'));
    interrupted = true;
    while (sent < kMessages && send(large)) {
      ++sent;
    }
    return absl::OkStatus();
  };
  {
    FakeAdmin admin(std::move(answers));
    Console console(admin.socket());
    console.context().interrupted = &interrupted;
    EXPECT_EQ(RunVerify(console.context(), {.job = "llama"}), ExitCode::kInterrupted);
  }
  EXPECT_LT(sent, kMessages);  // it was told, and did not run to its end
}

// ---- scrub and repair ----

v1::BadCopy BadCopyOf(Rank rank, v1::BadCopy::State state, const std::string& problem = "") {
  v1::BadCopy copy;
  copy.set_attempt(3);
  copy.set_step(900);
  copy.set_rank(rank);
  copy.set_tier("nvme");
  copy.set_node("node-a");
  copy.set_location("/mnt/nvme0/llama/900-a3/1.safetensors");
  copy.set_what("a block differs");
  copy.set_state(state);
  copy.set_problem(problem);
  return copy;
}

// Under way at first, mended when it is looked at.
FakeAdmin::Answers Mending(v1::BadCopy::State in_the_end, Kept<v1::VerifyRequest>& verify) {
  FakeAdmin::Answers answers;
  answers.verify = [&verify](const v1::VerifyRequest& request,
                             const FakeAdmin::SendProgress& send) {
    verify.Set(request);
    v1::VerifyProgress p = Progress(4000, 2, true);
    v1::BadShard& bad = *p.add_bad();
    bad.set_attempt(3);
    bad.set_step(900);
    bad.set_rank(1);
    bad.set_location("node-a: /mnt/nvme0/llama/900-a3/1.safetensors");
    send(p);
    return absl::OkStatus();
  };
  answers.repair = [in_the_end](const v1::RepairRequest& request, v1::RepairReply& reply) {
    EXPECT_EQ(request.job(), "llama");
    EXPECT_TRUE(request.all_steps());
    if (!request.look()) {
      *reply.add_copies() = BadCopyOf(1, v1::BadCopy::STATE_UNDER_WAY);
    } else if (in_the_end == v1::BadCopy::STATE_MENDED) {
      *reply.add_mended() = BadCopyOf(1, in_the_end);
      reply.mutable_mended(0)->set_source("the memory");
    } else {
      *reply.add_copies() = BadCopyOf(1, in_the_end, "there is no good copy of it anywhere");
    }
    return absl::OkStatus();
  };
  return answers;
}

TEST(Scrub, WaitsUntilWhatItFoundIsMended) {
  Kept<v1::VerifyRequest> verify;
  FakeAdmin admin(Mending(v1::BadCopy::STATE_MENDED, verify));
  Console people(admin.socket());
  EXPECT_EQ(RunScrub(people.context(), {.job = "llama", .bandwidth = 1 << 20}), ExitCode::kOk);
  EXPECT_THAT(people.out(),
              HasSubstr("MENDED: llama step 900 (attempt 3) rank 1, nvme on node-a, "
                        "/mnt/nvme0/llama/900-a3/1.safetensors: written anew from the memory; it "
                        "was bad: a block differs\njob llama: 1 copy mended, 0 are bad still\n"));
  EXPECT_THAT(people.out(),
              testing::Not(HasSubstr("A restore takes another good copy, or another step")));
  EXPECT_TRUE(verify.Get().all_steps());
  EXPECT_EQ(verify.Get().bandwidth_bytes_per_s_max(), 1u << 20);
  EXPECT_FALSE(verify.Get().no_repair());
}

TEST(Scrub, WhatStaysBadHasItsExitCode) {
  Kept<v1::VerifyRequest> verify;
  FakeAdmin admin(Mending(v1::BadCopy::STATE_NO_SOURCE, verify));
  Console machine(admin.socket());
  EXPECT_EQ(RunScrub(machine.Json(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_EQ(machine.Parsed()["ok"], false);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["copies"][0]["state"], "no_source");
  Console left(admin.socket());
  EXPECT_EQ(RunScrub(left.context(), {.job = "llama", .no_repair = true}), ExitCode::kDamaged);
  EXPECT_TRUE(verify.Get().no_repair());
  EXPECT_THAT(left.out(), testing::Not(HasSubstr("mended")));
  EXPECT_THAT(left.out(), HasSubstr("A restore takes another good copy, or another step"));
}

TEST(Scrub, StatusSaysHowFarItIs) {
  v1::ScrubStatus scrub;
  scrub.set_period_ms(604'800'000);
  scrub.set_copies(3);
  scrub.set_bytes(3 << 20);
  scrub.set_oldest_unix_ms(1);
  const auto with = [&](const auto&, v1::GetStatusReply& reply) {
    reply.mutable_daemon()->set_unix_ms(3'600'001);
    *reply.mutable_daemon()->mutable_scrub() = scrub;
    return absl::OkStatus();
  };
  FakeAdmin admin({.get_status = with});
  Console well(admin.socket());
  EXPECT_EQ(RunScrub(well.context(), {.status = true}), ExitCode::kOk);
  EXPECT_THAT(well.out(), testing::AllOf(HasSubstr("scrub: 3 copies (3 MiB) read within "),
                                         HasSubstr("longest not read: 1 h")));
  scrub.set_problem("2 copies were not read again");
  FakeAdmin behind({.get_status = with});
  Console late(behind.socket());
  EXPECT_EQ(RunScrub(late.context(), {.status = true}), ExitCode::kDamaged);
  EXPECT_THAT(late.out(), HasSubstr("BEHIND: 2 copies were not read again"));
}

TEST(Repair, SaysWhatMendedEachOrWhyNot) {
  FakeAdmin admin({.repair = [](const v1::RepairRequest& request, v1::RepairReply& reply) {
    EXPECT_EQ(request.tier(), "nvme");
    EXPECT_EQ(request.rank(), 1u);
    *reply.add_copies() =
        BadCopyOf(1, v1::BadCopy::STATE_WAITS, "from the memory: the drive is on fire");
    return absl::OkStatus();
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunRepair(console.context(), {.job = "llama", .tier = "nvme", .rank = 1}),
            ExitCode::kDamaged);
  EXPECT_THAT(console.out(),
              testing::AllOf(HasSubstr("the drive is on fire (tried again by itself)"),
                             HasSubstr("0 copies mended, 1 is bad still")));
  FakeAdmin nothing({.repair = [](const auto&, v1::RepairReply&) { return absl::OkStatus(); }});
  Console well(nothing.socket());
  EXPECT_EQ(RunRepair(well.context(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_THAT(well.out(), HasSubstr("no copy in nvme or remote is known to be bad"));
}

TEST(Repair, ARankThatThereIsNotIsNoGoodNews) {
  FakeAdmin admin({.list =
                       [](const auto&, v1::ListCheckpointsReply& reply) {
                         reply.add_checkpoints()->set_world_size(2);
                         reply.add_checkpoints()->set_world_size(4);
                         return absl::OkStatus();
                       },
                   .repair = [](const auto&, v1::RepairReply&) { return absl::OkStatus(); }});
  Console none(admin.socket());
  EXPECT_EQ(RunRepair(none.context(), {.job = "llama", .rank = 4}), ExitCode::kRefused);
  EXPECT_THAT(none.err(), HasSubstr("repair llama: it has no rank 4: at most 4 ranks saved a step "
                                    "of it, and the first one is 0"));
  EXPECT_EQ(none.out(), "");
  Console last(admin.socket());
  EXPECT_EQ(RunRepair(last.context(), {.job = "llama", .rank = 3}), ExitCode::kOk) << last.err();
}

// ckptd names so many bad copies in one answer and counts the rest: here two.
void TellTwo(const std::vector<v1::BadCopy>& bad, v1::RepairReply& reply) {
  for (size_t i = 0; i < bad.size() && i < 2; ++i) {
    *reply.add_copies() = bad[i];
  }
  reply.set_copies_bad(bad.size());
}

TEST(Repair, GoesOnWithWhatOneAnswerHasNoRoomFor) {
  std::atomic<int> looks{0};
  FakeAdmin::Answers answers;
  answers.repair = [&looks](const v1::RepairRequest& request, v1::RepairReply& reply) {
    const auto waits = v1::BadCopy::STATE_WAITS;
    const auto mended = v1::BadCopy::STATE_MENDED;
    if (!request.look()) {
      looks = 0;
      TellTwo({BadCopyOf(0, waits), BadCopyOf(1, waits), BadCopyOf(2, waits), BadCopyOf(3, waits)},
              reply);
      *reply.add_mended() = BadCopyOf(9, mended);  // before it was asked for
      return absl::OkStatus();
    }
    switch (++looks) {
      case 1:  // the newest first, which were not named
        TellTwo(
            {BadCopyOf(0, v1::BadCopy::STATE_UNDER_WAY), BadCopyOf(1, waits), BadCopyOf(2, waits)},
            reply);
        *reply.add_mended() = BadCopyOf(9, mended);
        *reply.add_mended() = BadCopyOf(3, mended);
        return absl::OkStatus();
      case 2:
        TellTwo({BadCopyOf(2, v1::BadCopy::STATE_UNDER_WAY)}, reply);
        *reply.add_mended() = BadCopyOf(0, mended);
        *reply.add_mended() = BadCopyOf(1, mended);
        return absl::OkStatus();
      default:  // and the mended ones are remembered no more
        TellTwo({BadCopyOf(2, v1::BadCopy::STATE_NO_SOURCE, "there is no good copy of it")}, reply);
        return absl::OkStatus();
    }
  };
  FakeAdmin admin(std::move(answers));
  Console people(admin.socket());
  EXPECT_EQ(RunRepair(people.context(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_THAT(people.out(),
              testing::AllOf(HasSubstr("MENDED: llama step 900 (attempt 3) rank 0,"),
                             HasSubstr("MENDED: llama step 900 (attempt 3) rank 1,"),
                             HasSubstr("BAD: llama step 900 (attempt 3) rank 2,"),
                             HasSubstr("MENDED: llama step 900 (attempt 3) rank 3,"),
                             testing::Not(HasSubstr("rank 9,")),
                             HasSubstr("job llama: 3 copies mended, 1 is bad still\n")));
  Console machine(admin.socket());
  EXPECT_EQ(RunRepair(machine.Json(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["copies_bad"], 1);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["copies_not_told"], 0);
}

// Ten seconds go by between two looks at it.
class HurriedClock final : public Clock {
 public:
  MonotonicTime Now() const override { return {seconds_.fetch_add(10) * 1'000'000'000}; }
  int64_t UnixMillis() const override { return 0; }

 private:
  mutable std::atomic<int64_t> seconds_{0};
};

TEST(Repair, WhatIsNotNamedAtAllCountsAndIsNotWaitedForForEver) {
  const auto repair = [](const v1::RepairRequest& request, v1::RepairReply& reply) {
    const std::string none = "there is no good copy of it anywhere";
    const auto state = request.look() ? v1::BadCopy::STATE_NO_SOURCE : v1::BadCopy::STATE_UNDER_WAY;
    std::vector<v1::BadCopy> bad;
    for (Rank rank = 0; rank < 5; ++rank) {
      bad.push_back(BadCopyOf(rank, state, none));
    }
    TellTwo(bad, reply);
    return absl::OkStatus();
  };
  HurriedClock clock;
  FakeAdmin admin({.repair = repair});
  Console people(admin.socket());
  people.context().clock = &clock;
  EXPECT_EQ(RunRepair(people.context(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_THAT(
      people.out(),
      HasSubstr("job llama: 0 copies mended, 5 are bad still (3 of them are not named here: "
                "ask for less, by --step, --rank or --tier)\n"));
  Console machine(admin.socket());
  machine.context().clock = &clock;
  EXPECT_EQ(RunRepair(machine.Json(), {.job = "llama"}), ExitCode::kDamaged);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["copies"].size(), 2u);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["copies_bad"], 5);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["copies_not_told"], 3);
}

}  // namespace
}  // namespace holdfast
