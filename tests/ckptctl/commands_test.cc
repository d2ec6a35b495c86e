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

#include "base/unique_fd.h"
#include "ckptctl/sockets.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

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

TEST(Jobs, TellsMachinesWhatTheTableTellsPeople) {
  FakeAdmin::Answers answers;
  answers.get_status = [](const v1::GetStatusRequest& request, v1::GetStatusReply& reply) {
    EXPECT_EQ(request.job(), "");
    reply.mutable_daemon()->set_unix_ms(1'700'000'000'000);
    reply.mutable_daemon()->add_problems("the jobs of node-c are not shown: it did not answer");
    v1::JobStatus& job = *reply.add_jobs();
    job.set_name("llama");
    job.set_uid(1000);
    job.set_host("node-b");
    job.set_attempt(2);
    job.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
    job.set_world_size(4);
    job.set_ranks_alive(3);
    job.set_nodes(1);
    job.add_node_names("node-b");
    v1::Protection& process = *job.add_protection();
    process.set_kind(v1::Protection::FAILURE_KIND_PROCESS);
    process.set_any(true);
    process.set_attempt(2);
    process.set_step(912);
    process.set_age_ms(200);
    return absl::OkStatus();
  };
  FakeAdmin admin(answers);
  Console people(admin.socket());
  EXPECT_EQ(RunJobs(people.context()), ExitCode::kOk);
  EXPECT_THAT(people.out(), HasSubstr("1 job: 1 running; 1 with a problem"));
  Console machine(admin.socket());
  EXPECT_EQ(RunJobs(machine.Json()), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed(), nlohmann::json::parse(R"({
    "jobs": [{"name": "llama", "uid": 1000, "host": "node-b", "attempt": 2, "phase": "running",
              "ranks_alive": 3, "world_size": 4, "nodes": 1, "node_names": ["node-b"],
              "newest": {"attempt": 2, "step": 912, "age_ms": 200}, "newest_in_remote": null,
              "lost": null, "problems": ["1 rank is gone"]}],
    "problems": ["the jobs of node-c are not shown: it did not answer"],
    "unix_ms": 1700000000000})"));
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

FakeAdmin::Answers FailingWith(absl::Status status) {
  return {
      .get_status = [status](const v1::GetStatusRequest&, v1::GetStatusReply&) { return status; },
      .verify = [status](const v1::VerifyRequest&,
                         const FakeAdmin::SendProgress&) { return status; }};
}

// The same codes as gRPC's own, for a connection that was lost or a daemon that is silent.
TEST(Unreachable, WhatTheDaemonItselfAnswersIsNoLostConnection) {
  for (const absl::Status& failure :
       {absl::UnavailableError("'/mnt/lustre' is not there: mount it again, or make it"),
        absl::DeadlineExceededError("no progress for 60 s: scan '/mnt/lustre'"),
        absl::CancelledError("the write was cancelled")}) {
    FakeAdmin admin(FailingWith(failure));
    Console people(admin.socket());
    EXPECT_EQ(RunStatus(people.context(), {}), ExitCode::kRefused);
    EXPECT_EQ(people.err(), "ckptctl: " + std::string(failure.message()) + "\n");
    Console machine(admin.socket());
    EXPECT_EQ(RunStatus(machine.Json(), {}), ExitCode::kRefused);
    EXPECT_EQ(machine.Parsed()["error"]["code"], absl::StatusCodeToString(failure.code()));
    EXPECT_EQ(machine.Parsed()["error"]["exit_code"], 4);
    EXPECT_EQ(machine.Parsed()["error"]["message"], std::string(failure.message()));
    Console verify(admin.socket());
    EXPECT_EQ(RunVerify(verify.context(), {.job = "llama"}), ExitCode::kRefused);
    EXPECT_EQ(verify.err(), "ckptctl: verify llama: " + std::string(failure.message()) + "\n");
  }
}

TEST(Unreachable, OfADaemonThatDoesNotMarkItsAnswersItMayBeEither) {
  FakeAdmin::Answers answers = FailingWith(absl::UnavailableError("the mount is away"));
  answers.marks_errors = false;
  FakeAdmin admin(std::move(answers));
  Console status(admin.socket());
  EXPECT_EQ(RunStatus(status.context(), {}), ExitCode::kUnreachable);
  EXPECT_THAT(status.err(), HasSubstr("closed the connection: the mount is away"));
  Console verify(admin.socket());
  EXPECT_EQ(RunVerify(verify.context(), {.job = "llama"}), ExitCode::kUnreachable);
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
  Kept<v1::InspectShardRequest> got;
  FakeAdmin admin({.inspect = [&](const v1::InspectShardRequest& request, v1::InspectShardReply&) {
    got.Set(request);
    return absl::NotFoundError("no such shard");
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunInspect(console.context(), {.job = "llama", .step = 0, .attempt = 2, .rank = 5}),
            ExitCode::kRefused);
  EXPECT_FALSE(got.Get().newest());
  EXPECT_EQ(got.Get().attempt(), 2u);
  EXPECT_EQ(got.Get().rank(), 5u);
  EXPECT_EQ(RunInspect(console.context(), {.job = "llama"}), ExitCode::kRefused);
  EXPECT_TRUE(got.Get().newest());
}

TEST(Inspect, EveryDamagedRecordIsDamage) {
  const std::string good = SomeRecord();
  std::vector<std::string> bad = {"", "garbage", good + "x", std::string(100'000, '\xff')};
  for (size_t at = 0; at < good.size(); ++at) {
    bad.push_back(good.substr(0, at));
    bad.push_back(good);
    bad.back()[at] = static_cast<char>(bad.back()[at] ^ 0x20);
  }
  Kept<std::string> current;
  FakeAdmin admin({.inspect = [&](const v1::InspectShardRequest&, v1::InspectShardReply& reply) {
    reply.set_record(current.Get());
    reply.set_location("slot-\x1b[2J");
    return absl::OkStatus();
  }});
  for (const std::string& bytes : bad) {
    current.Set(bytes);
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

TEST(Restore, SaysWhatTheDaemonSays) {
  Kept<v1::SetRestorePointRequest> got;
  FakeAdmin admin(
      {.restore = [&](const v1::SetRestorePointRequest& request, v1::SetRestorePointReply& reply) {
        got.Set(request);
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
  EXPECT_EQ(got.Get().step(), 800u);
  EXPECT_EQ(got.Get().attempt(), 2u);
  Console machine(admin.socket());
  EXPECT_EQ(RunRestore(machine.Json(), {.job = "llama", .from_scratch = true, .yes = true}),
            ExitCode::kOk);
  EXPECT_TRUE(got.Get().from_scratch());
  EXPECT_EQ(machine.Parsed()["job"], "llama");
  EXPECT_EQ(machine.Parsed()["text"], "the next session of llama\x1b will begin at step 800");
  Console clear(admin.socket());
  EXPECT_EQ(RunRestore(clear.context(), {.job = "llama", .clear = true}), ExitCode::kOk);
  EXPECT_TRUE(got.Get().clear());
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
  std::atomic<bool> removed{false};
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
  ::setenv("HOLDFAST_PRIVATE_DIR", "/nonexistent", 1);
  EXPECT_EQ(FindAdminSocket(""), "/run/holdfast/admin.sock");
  char directory[] = "/tmp/holdfast-xdg-XXXXXX";
  ASSERT_NE(::mkdtemp(directory), nullptr);
  const std::string inner = std::string(directory) + "/holdfast";
  ASSERT_EQ(::mkdir(inner.c_str(), 0700), 0);
  std::ofstream(inner + "/admin.sock") << "x";
  ::setenv("XDG_RUNTIME_DIR", directory, 1);
  EXPECT_EQ(FindAdminSocket(""), inner + "/admin.sock");
  ::setenv("XDG_RUNTIME_DIR", "/nonexistent", 1);
  ::setenv("HOLDFAST_PRIVATE_DIR", inner.c_str(), 1);
  if (::access("/run/holdfast/admin.sock", F_OK) != 0) {
    EXPECT_EQ(FindAdminSocket(""), inner + "/admin.sock");
  }
  ::unsetenv("HOLDFAST_PRIVATE_DIR");
  ::unlink((inner + "/admin.sock").c_str());
  ::rmdir(inner.c_str());
  ::rmdir(directory);
}

}  // namespace
}  // namespace holdfast
