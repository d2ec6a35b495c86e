// ckptctl verify: its progress, its verdicts, and how it is stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

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

}  // namespace
}  // namespace holdfast
