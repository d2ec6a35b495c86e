#include "ckptctl/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/fake_admin.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// A context whose output the test reads.
class Console {
 public:
  explicit Console(std::string socket) { context_.socket = std::move(socket); }
  Context& context() { return context_; }
  const Context& Json() {
    context_.json = true;
    return context_;
  }
  std::string out() const { return out_.str(); }
  std::string err() const { return err_.str(); }
  // The one line of JSON; a parse error fails the test by what it returns.
  json Parsed() const {
    const std::string text = out_.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    return json::parse(text, nullptr, false);
  }

 private:
  std::ostringstream out_;
  std::ostringstream err_;
  Context context_{.out = &out_, .err = &err_};
};

FakeAdmin::Answers TwoJobs() {
  return {.get_status = [](const v1::GetStatusRequest& request, v1::GetStatusReply& reply) {
    if (!request.job().empty() && request.job() != "llama") {
      return absl::NotFoundError("no job '" + request.job() + "' of yours\x1b[2J");
    }
    reply.mutable_daemon()->set_version("0.1.0");
    reply.mutable_daemon()->set_memory_dir("/dev/shm");
    reply.add_jobs()->set_name("llama");
    if (request.job().empty()) {
      reply.add_jobs()->set_name("mistral");
    }
    return absl::OkStatus();
  }};
}

TEST(Status, ShowsAllJobsOrOne) {
  FakeAdmin admin(TwoJobs());
  Console all(admin.socket());
  EXPECT_EQ(RunStatus(all.context(), {}), ExitCode::kOk);
  EXPECT_THAT(all.out(), HasSubstr("job mistral: "));
  EXPECT_THAT(all.err(), IsEmpty());
  Console one(admin.socket());
  EXPECT_EQ(RunStatus(one.Json(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_EQ(one.Parsed()["jobs"].size(), 1u);
  EXPECT_EQ(one.Parsed()["daemon"]["version"], "0.1.0");
}

TEST(Status, UnknownJobIsRefusedInBothForms) {
  FakeAdmin admin(TwoJobs());
  Console people(admin.socket());
  EXPECT_EQ(RunStatus(people.context(), {.job = "x"}), ExitCode::kRefused);
  EXPECT_EQ(people.out(), "");
  EXPECT_EQ(people.err(), "ckptctl: no job 'x' of yours\\x1b[2J\n");
  Console machine(admin.socket());
  EXPECT_EQ(RunStatus(machine.Json(), {.job = "x"}), ExitCode::kRefused);
  EXPECT_EQ(machine.Parsed()["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(machine.Parsed()["error"]["exit_code"], 4);
}

TEST(Unreachable, SaysWhatIsThereInsteadOfADaemon) {
  char directory[] = "/tmp/holdfast-ckptctl-XXXXXX";
  ASSERT_NE(::mkdtemp(directory), nullptr);
  const std::string path = std::string(directory) + "/admin.sock";

  Console none(path);
  EXPECT_EQ(RunStatus(none.context(), {}), ExitCode::kUnreachable);
  EXPECT_THAT(none.err(), HasSubstr("no socket at " + path + ": ckptd is not running"));

  std::ofstream(path) << "a file";
  Console file(path);
  EXPECT_EQ(RunList(file.context(), {.job = "llama"}), ExitCode::kUnreachable);
  EXPECT_THAT(file.err(), HasSubstr("is not a socket"));
  ASSERT_EQ(::unlink(path.c_str()), 0);

  // A socket that a killed daemon left behind.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  fd.reset();
  Console dead(path);
  EXPECT_EQ(RunVerify(dead.Json(), {.job = "llama"}), ExitCode::kUnreachable);
  EXPECT_EQ(dead.Parsed()["error"]["code"], "UNAVAILABLE");
  EXPECT_THAT(dead.err(), HasSubstr("nobody listens at "));

  Console long_path(std::string(200, 'x'));
  EXPECT_EQ(RunRestore(long_path.context(), {.job = "llama", .clear = true}), ExitCode::kRefused);
  EXPECT_THAT(long_path.err(), HasSubstr("socket path of 200 bytes"));
  ::unlink(path.c_str());
  ::rmdir(directory);
}

// Lets an answer wait until the test has seen what it wanted.
class Gate {
 public:
  void Wait() {
    MutexLock lock(mutex_);
    while (!open_) {
      cv_.Wait(mutex_);
    }
  }
  void Open() {
    MutexLock lock(mutex_);
    open_ = true;
    cv_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar cv_;
  bool open_ GUARDED_BY(mutex_) = false;
};

TEST(Timeout, ASilentDaemonIsNotWaitedForForever) {
  Gate gate;
  FakeAdmin admin({.get_status =
                       [&](const v1::GetStatusRequest&, v1::GetStatusReply&) {
                         gate.Wait();
                         return absl::OkStatus();
                       },
                   .verify =
                       [&](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
                         send(v1::VerifyProgress());
                         gate.Wait();
                         return absl::OkStatus();
                       }});
  Console status(admin.socket());
  status.context().timeout = std::chrono::milliseconds(50);
  EXPECT_EQ(RunStatus(status.context(), {}), ExitCode::kUnreachable);
  EXPECT_THAT(status.err(), HasSubstr("did not answer within 0.05 s"));
  Console verify(admin.socket());
  verify.context().timeout = std::chrono::milliseconds(50);
  EXPECT_EQ(RunVerify(verify.context(), {.job = "llama"}), ExitCode::kUnreachable);
  EXPECT_THAT(verify.err(), HasSubstr("did not answer within 0.05 s"));
  gate.Open();
}

TEST(List, AsksForTheJob) {
  FakeAdmin admin(
      {.list = [](const v1::ListCheckpointsRequest& request, v1::ListCheckpointsReply& reply) {
        EXPECT_EQ(request.job(), "llama");
        auto& c = *reply.add_checkpoints();
        c.set_step(900);
        c.set_state(v1::Checkpoint::STATE_COMMITTED);
        c.set_on_line(true);
        return absl::OkStatus();
      }});
  Console people(admin.socket());
  EXPECT_EQ(RunList(people.context(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_THAT(people.out(), HasSubstr("job llama, line of descent"));
  Console machine(admin.socket());
  EXPECT_EQ(RunList(machine.Json(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed()["job"], "llama");
  EXPECT_EQ(machine.Parsed()["checkpoints"][0]["state"], "committed");
  EXPECT_EQ(machine.Parsed()["checkpoints"][0]["step"], 900);
}

std::string SomeRecord() {
  Slice weight;
  weight.name = "weight";
  weight.dtype = DType::kF32;
  weight.global_shape = {4, 2};
  weight.place = BoxPlace{.offset = {2, 0}, .shape = {2, 2}};
  auto plan = PlanImage({weight}, 1);
  EXPECT_TRUE(plan.ok()) << plan.status();
  ShardRecord record;
  record.id.job = *JobUuid::FromString("1b4e28ba-2fa1-41d2-883f-0016d3cca427");
  record.id.attempt = 3;
  record.id.step = 900;
  record.id.rank = 1;
  record.job_name = "llama";
  record.world_size = 2;
  record.generation = 7;
  record.image_bytes = plan->layout.image_bytes;
  record.header_bytes = plan->layout.header_bytes;
  record.layout_hash = plan->layout_hash;
  record.layout_bytes = plan->layout_bytes;
  record.digests = {0x11, 0x22};
  record.descent = {{3, {2, 800}}};
  record.sealed_unix_ms = 1'714'564'800'000;
  return EncodeRecord(record);
}

FakeAdmin::Answers WithRecord(std::string bytes) {
  return {.inspect = [bytes](const v1::InspectShardRequest&, v1::InspectShardReply& reply) {
    reply.set_record(bytes);
    reply.set_location("slot-000001");
    return absl::OkStatus();
  }};
}

TEST(Inspect, DecodesTheRecord) {
  FakeAdmin admin(WithRecord(SomeRecord()));
  Console people(admin.socket());
  EXPECT_EQ(RunInspect(people.context(), {.job = "llama"}), ExitCode::kOk) << people.err();
  EXPECT_THAT(people.out(), HasSubstr("job llama, step 900 (attempt 3), rank 1 of 2\n"));
  EXPECT_THAT(people.out(), HasSubstr("F32    [4,2]  [2:4,0:2]  0000000000000022  weight\n"));
  Console machine(admin.socket());
  EXPECT_EQ(RunInspect(machine.Json(), {.job = "llama"}), ExitCode::kOk);
  const json shard = machine.Parsed();
  EXPECT_EQ(shard["job_uuid"], "1b4e28ba-2fa1-41d2-883f-0016d3cca427");
  EXPECT_EQ(shard["descent"][0]["parent_step"], 800);
  EXPECT_EQ(shard["slices"][0]["place"]["box"]["offset"], json({2, 0}));
  EXPECT_EQ(shard["slices"][0]["first_digest"], "0000000000000022");
  EXPECT_EQ(shard["slices"][0]["image_offset"], 4096);
  EXPECT_EQ(shard["header_first_digest"], "0000000000000011");
}

TEST(Inspect, PassesWhatWasAskedFor) {
  v1::InspectShardRequest got;
  FakeAdmin admin({.inspect = [&](const v1::InspectShardRequest& request, v1::InspectShardReply&) {
    got = request;
    return absl::NotFoundError("no such shard");
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunInspect(console.context(), {.job = "llama", .step = 0, .attempt = 2, .rank = 5}),
            ExitCode::kRefused);
  EXPECT_FALSE(got.newest());
  EXPECT_EQ(got.attempt(), 2u);
  EXPECT_EQ(got.rank(), 5u);
  EXPECT_EQ(RunInspect(console.context(), {.job = "llama"}), ExitCode::kRefused);
  EXPECT_TRUE(got.newest());
}

TEST(Inspect, EveryDamagedRecordIsDamage) {
  const std::string good = SomeRecord();
  std::vector<std::string> bad = {"", "garbage", good + "x", std::string(100'000, '\xff')};
  for (size_t at = 0; at < good.size(); ++at) {
    bad.push_back(good.substr(0, at));
    bad.push_back(good);
    bad.back()[at] = static_cast<char>(bad.back()[at] ^ 0x20);
  }
  std::string current;
  FakeAdmin admin({.inspect = [&](const v1::InspectShardRequest&, v1::InspectShardReply& reply) {
    reply.set_record(current);
    reply.set_location("slot-\x1b[2J");
    return absl::OkStatus();
  }});
  for (const std::string& bytes : bad) {
    current = bytes;
    Console console(admin.socket());
    ASSERT_EQ(RunInspect(console.context(), {.job = "llama"}), ExitCode::kDamaged) << bytes.size();
    ASSERT_THAT(console.err(), HasSubstr("record of slot-\\x1b[2J: "));
    ASSERT_THAT(console.err(), Not(HasSubstr("\x1b")));
    ASSERT_THAT(console.out(), IsEmpty());
  }
}

TEST(Inspect, ARecordOfManyMegabytesArrives) {
  // Beyond gRPC's own limit of 4 MiB for a message.
  FakeAdmin admin(WithRecord(std::string(20 << 20, 'x')));
  Console console(admin.socket());
  EXPECT_EQ(RunInspect(console.context(), {.job = "llama"}), ExitCode::kDamaged);
}

v1::VerifyProgress Progress(uint64_t done, uint32_t shards, bool finished) {
  v1::VerifyProgress p;
  p.set_bytes_done(done);
  p.set_bytes_total(4000);
  p.set_shards_checked(shards);
  p.set_done(finished);
  return p;
}

TEST(Verify, AllGood) {
  v1::VerifyRequest got;
  FakeAdmin admin(
      {.verify = [&](const v1::VerifyRequest& request, const FakeAdmin::SendProgress& send) {
        got = request;
        send(Progress(1000, 0, false));
        send(Progress(4000, 2, true));
        return absl::OkStatus();
      }});
  Console people(admin.socket());
  EXPECT_EQ(RunVerify(people.context(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_THAT(people.out(), HasSubstr("job llama: every digest is right: 2 shards, 3.9 KiB in "));
  EXPECT_EQ(people.err(), "");  // no progress bar where nobody looks
  EXPECT_TRUE(got.newest());
  Console machine(admin.socket());
  EXPECT_EQ(RunVerify(machine.Json(), {.job = "llama", .step = 7, .attempt = 2}), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed()["ok"], true);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["shards_checked"], 2);
  EXPECT_FALSE(got.newest());
  EXPECT_EQ(got.step(), 7u);
  EXPECT_EQ(got.attempt(), 2u);
  Console all(admin.socket());
  EXPECT_EQ(RunVerify(all.context(), {.job = "llama", .all = true}), ExitCode::kOk);
  EXPECT_TRUE(got.all_steps());
  EXPECT_FALSE(got.newest());
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

TEST(Restore, SaysWhatTheDaemonSays) {
  v1::SetRestorePointRequest got;
  FakeAdmin admin(
      {.restore = [&](const v1::SetRestorePointRequest& request, v1::SetRestorePointReply& reply) {
        got = request;
        reply.set_text("the next session of llama\x1b will begin at step 800");
        return absl::OkStatus();
      }});
  Console people(admin.socket());
  EXPECT_EQ(RunRestore(people.context(), {.job = "llama", .step = 800, .attempt = 2}),
            ExitCode::kOk);
  EXPECT_EQ(people.out(),
            "the next session of llama\\x1b will begin at step 800\n"
            "It takes effect when the job's ranks next restore. To take it back before: ckptctl "
            "restore llama --clear\n");
  EXPECT_EQ(got.step(), 800u);
  EXPECT_EQ(got.attempt(), 2u);
  Console machine(admin.socket());
  EXPECT_EQ(RunRestore(machine.Json(), {.job = "llama", .from_scratch = true}), ExitCode::kOk);
  EXPECT_TRUE(got.from_scratch());
  EXPECT_EQ(machine.Parsed()["job"], "llama");
  EXPECT_EQ(machine.Parsed()["text"], "the next session of llama\x1b will begin at step 800");
  Console clear(admin.socket());
  EXPECT_EQ(RunRestore(clear.context(), {.job = "llama", .clear = true}), ExitCode::kOk);
  EXPECT_TRUE(got.clear());
  EXPECT_THAT(clear.out(), Not(HasSubstr("--clear")));
}

TEST(Restore, Refused) {
  FakeAdmin admin({.restore = [&](const v1::SetRestorePointRequest&, v1::SetRestorePointReply&) {
    return absl::NotFoundError("no step 7 on the line of descent; there are 800, 900");
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunRestore(console.context(), {.job = "llama", .step = 7}), ExitCode::kRefused);
  EXPECT_EQ(console.err(), "ckptctl: no step 7 on the line of descent; there are 800, 900\n");
}

TEST(Remove, NeedsYes) {
  bool removed = false;
  FakeAdmin admin({.list =
                       [](const v1::ListCheckpointsRequest&, v1::ListCheckpointsReply& reply) {
                         reply.add_checkpoints()->set_bytes(1 << 20);
                         reply.add_checkpoints()->set_bytes(1 << 20);
                         return absl::OkStatus();
                       },
                   .remove =
                       [&](const v1::RemoveJobRequest& request, v1::RemoveJobReply& reply) {
                         EXPECT_EQ(request.job(), "llama");
                         removed = true;
                         reply.set_bytes_freed(2 << 20);
                         return absl::OkStatus();
                       }});
  Console careful(admin.socket());
  EXPECT_EQ(RunRemove(careful.context(), {.job = "llama"}), ExitCode::kRefused);
  EXPECT_FALSE(removed);
  EXPECT_EQ(careful.err(),
            "ckptctl: nothing was removed. It would forget job llama with 2 checkpoints, 2 MiB, "
            "for good. If that is meant: "
            "ckptctl rm llama --yes\n");
  Console sure(admin.socket());
  EXPECT_EQ(RunRemove(sure.context(), {.job = "llama", .yes = true}), ExitCode::kOk);
  EXPECT_TRUE(removed);
  EXPECT_EQ(sure.out(), "job llama is forgotten; 2 MiB are free again\n");
  Console machine(admin.socket());
  EXPECT_EQ(RunRemove(machine.Json(), {.job = "llama", .yes = true}), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed()["bytes_freed"], 2 << 20);
}

// The verdict of the finding of that name; empty when there is none.
std::string VerdictOf(const json& doctor, const std::string& check) {
  for (const json& finding : doctor["findings"]) {
    if (finding["check"] == check) {
      return finding["verdict"];
    }
  }
  return "";
}

TEST(Doctor, WorksWithoutADaemon) {
  Console machine("/tmp/holdfast-no-such-directory/admin.sock");
  EXPECT_EQ(RunDoctor(machine.Json(), {}), ExitCode::kDamaged);
  const json doctor = machine.Parsed();
  EXPECT_EQ(VerdictOf(doctor, "daemon"), "will_not_work");
  for (const char* check :
       {"kernel", "pidfd", "populate", "io_uring", "copy", "tmpfs /dev/shm", "memlock", "fabric"}) {
    EXPECT_NE(VerdictOf(doctor, check), "") << check;
  }
  Console people("/tmp/holdfast-no-such-directory/admin.sock");
  EXPECT_EQ(RunDoctor(people.context(), {}), ExitCode::kDamaged);
  EXPECT_THAT(people.out(), HasSubstr("will not work  daemon "));
}

TEST(Doctor, AsksTheDaemonForItsHealth) {
  FakeAdmin::Answers answers = TwoJobs();
  FakeAdmin admin(std::move(answers));
  Console well(admin.socket());
  RunDoctor(well.Json(), {});
  EXPECT_EQ(VerdictOf(well.Parsed(), "daemon"), "ok") << well.out();
  EXPECT_EQ(VerdictOf(well.Parsed(), "admin socket"), "ok") << well.out();
  admin.SetServing(false);
  Console unwell(admin.socket());
  EXPECT_EQ(RunDoctor(unwell.Json(), {}), ExitCode::kDamaged);
  EXPECT_EQ(VerdictOf(unwell.Parsed(), "daemon"), "will_not_work");
}

TEST(Doctor, ReadsTheConfig) {
  char path[] = "/tmp/holdfast-ckptctl-config-XXXXXX";
  const UniqueFd fd(::mkstemp(path));
  ASSERT_TRUE(fd.valid());
  std::ofstream(path) << "memory:\n  byte_max: 3\n";
  Console bad("/nonexistent");
  EXPECT_EQ(RunDoctor(bad.Json(), {.config = path}), ExitCode::kDamaged);
  EXPECT_EQ(VerdictOf(bad.Parsed(), "config"), "will_not_work");
  EXPECT_THAT(bad.out(), HasSubstr("byte_max"));
  std::ofstream(path) << "memory:\n  dir: /\n";
  Console good("/nonexistent");
  RunDoctor(good.Json(), {.config = path});
  EXPECT_EQ(VerdictOf(good.Parsed(), "config"), "ok");
  EXPECT_NE(VerdictOf(good.Parsed(), "tmpfs /"), "") << good.out();
  ::unlink(path);
  Console none("/nonexistent");
  RunDoctor(none.Json(), {.config = path});
  EXPECT_EQ(VerdictOf(none.Parsed(), "config"), "will_not_work");
}

TEST(FindAdminSocket, FlagThenEnvironmentThenWhatIsThere) {
  EXPECT_EQ(FindAdminSocket("/a/b"), "/a/b");
  ::setenv("HOLDFAST_ADMIN_SOCKET", "/from/environment", 1);
  EXPECT_EQ(FindAdminSocket(""), "/from/environment");
  EXPECT_EQ(FindAdminSocket("/a/b"), "/a/b");
  ::unsetenv("HOLDFAST_ADMIN_SOCKET");
  ::setenv("XDG_RUNTIME_DIR", "/nonexistent", 1);
  EXPECT_EQ(FindAdminSocket(""), "/run/holdfast/admin.sock");
  char directory[] = "/tmp/holdfast-xdg-XXXXXX";
  ASSERT_NE(::mkdtemp(directory), nullptr);
  const std::string inner = std::string(directory) + "/holdfast";
  ASSERT_EQ(::mkdir(inner.c_str(), 0700), 0);
  std::ofstream(inner + "/admin.sock") << "x";
  ::setenv("XDG_RUNTIME_DIR", directory, 1);
  EXPECT_EQ(FindAdminSocket(""), inner + "/admin.sock");
  ::unlink((inner + "/admin.sock").c_str());
  ::rmdir(inner.c_str());
  ::rmdir(directory);
}

}  // namespace
}  // namespace holdfast
