// The commands about tiers, against a daemon of the test's own.
#include "ckptctl/upkeep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

TEST(Where, AsksForOneStepOrAll) {
  Kept<v1::WhereRequest> got;
  FakeAdmin admin({.where = [&](const v1::WhereRequest& request, v1::WhereReply& reply) {
    got.Set(request);
    v1::ShardCopy& copy = *reply.add_copies();
    copy.set_step(900);
    copy.set_tier("nvme");
    copy.set_state("good");
    copy.set_location("/mnt/nvme0/x");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunWhere(people.context(), {.job = "llama", .step = 900, .attempt = 2}), ExitCode::kOk);
  EXPECT_THAT(people.out(), HasSubstr("/mnt/nvme0/x"));
  EXPECT_EQ(got.Get().step(), 900u);
  EXPECT_EQ(got.Get().attempt(), 2u);
  EXPECT_FALSE(got.Get().all_steps());
  Console machine(admin.socket());
  EXPECT_EQ(RunWhere(machine.Json(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_TRUE(got.Get().all_steps());
  EXPECT_EQ(machine.Parsed()["job"], "llama");
  EXPECT_EQ(machine.Parsed()["copies"][0]["tier"], "nvme");
}

TEST(Explain, AsksForOneStepOrAll) {
  Kept<v1::ExplainRequest> got;
  FakeAdmin admin({.explain = [&](const v1::ExplainRequest& request, v1::ExplainReply& reply) {
    got.Set(request);
    reply.set_next_restore("step 900 of attempt 2: nvme for 2 ranks");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunExplain(people.context(), {.job = "llama"}), ExitCode::kOk);
  EXPECT_EQ(people.out(),
            "the next restore of job llama: step 900 of attempt 2: nvme for 2 ranks\n");
  EXPECT_TRUE(got.Get().all_steps());
  Console machine(admin.socket());
  EXPECT_EQ(RunExplain(machine.Json(), {.job = "llama", .step = 0}), ExitCode::kOk);
  EXPECT_FALSE(got.Get().all_steps()) << "step 0 is a step";
  EXPECT_EQ(machine.Parsed()["next_restore"], "step 900 of attempt 2: nvme for 2 ranks");
}

FakeAdmin::Answers WithTimeline(Kept<v1::TimelineRequest>& got) {
  return {.timeline = [&got](const v1::TimelineRequest& request, v1::TimelineReply& reply) {
    got.Set(request);
    v1::StepTimeline& step = *reply.add_steps();
    step.set_step(900);
    v1::StageTime& time = *step.add_stages();
    time.set_stage("write");
    time.set_begin_unix_us(1'000'000);
    time.set_end_unix_us(3'000'000);
    time.set_outcome("done");
    time.set_rank(-1);
    return absl::OkStatus();
  }};
}

TEST(Timeline, WritesATraceFile) {
  char directory[] = "/tmp/holdfast-timeline-XXXXXX";
  ASSERT_NE(::mkdtemp(directory), nullptr);
  const std::string file = std::string(directory) + "/saves.json";
  Kept<v1::TimelineRequest> got;
  FakeAdmin admin(WithTimeline(got));
  Console people(admin.socket());
  EXPECT_EQ(RunTimeline(people.context(), {.job = "llama", .steps_max = 7, .trace = file}),
            ExitCode::kOk)
      << people.err();
  EXPECT_EQ(got.Get().steps_max(), 7u);
  EXPECT_THAT(people.out(), HasSubstr("written to " + file + "; open it with"));
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  const auto trace = nlohmann::json::parse(text.str(), nullptr, false);
  EXPECT_EQ(trace["traceEvents"].back()["dur"], 2'000'000);
  // Once more over what is there, and beside it in JSON.
  Console machine(admin.socket());
  EXPECT_EQ(RunTimeline(machine.Json(), {.job = "llama", .trace = file}), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed()["steps"][0]["stages"][0]["rank"], -1);
  // Where it cannot be written, nothing is answered but that.
  Console refused(admin.socket());
  EXPECT_EQ(RunTimeline(refused.context(), {.job = "llama", .trace = "/nonexistent/x.json"}),
            ExitCode::kRefused);
  EXPECT_EQ(refused.out(), "");
  EXPECT_THAT(refused.err(), HasSubstr("/nonexistent/x.json"));
  // What the machine refuses is no daemon out of reach.
  for (const auto& [place, why] : std::vector<std::pair<std::string, std::string>>{
           {directory, "open '" + std::string(directory) + "': Is a directory (EISDIR)"},
           {"/dev/full", "write '/dev/full': No space left on device (ENOSPC)"}}) {
    Console full(admin.socket());
    EXPECT_EQ(RunTimeline(full.context(), {.job = "llama", .trace = place}), ExitCode::kRefused);
    EXPECT_EQ(full.out(), "");
    EXPECT_THAT(full.err(), HasSubstr(why + "; name a file in a directory that you may write"));
  }
  EXPECT_EQ(::unlink(file.c_str()), 0);
  EXPECT_EQ(::rmdir(directory), 0) << "nothing else is left there";
}

TEST(Garbage, DryRunIsTold) {
  Kept<v1::CollectGarbageRequest> got;
  FakeAdmin admin({.collect_garbage = [&](const v1::CollectGarbageRequest& request,
                                          v1::CollectGarbageReply& reply) {
    got.Set(request);
    reply.add_verdicts()->set_why("pinned");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunGarbage(people.context(), {.job = "llama", .dry_run = true}), ExitCode::kOk);
  EXPECT_TRUE(got.Get().dry_run());
  EXPECT_EQ(got.Get().job(), "llama");
  EXPECT_THAT(people.out(), HasSubstr("nothing was removed: --dry-run"));
  Console machine(admin.socket());
  EXPECT_EQ(RunGarbage(machine.Json(), {}), ExitCode::kOk);
  EXPECT_FALSE(got.Get().dry_run());
  EXPECT_EQ(machine.Parsed()["verdicts"][0]["why"], "pinned");
}

TEST(Pin, AndUnpin) {
  Kept<v1::PinRequest> got;
  FakeAdmin admin({.pin = [&](const v1::PinRequest& request, v1::PinReply& reply) {
    got.Set(request);
    reply.set_text("step 900 of attempt 2 is pinned\x1b");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunPin(people.context(), {.job = "llama", .step = 900, .attempt = 2}), ExitCode::kOk);
  EXPECT_EQ(people.out(), "step 900 of attempt 2 is pinned\\x1b\n");
  EXPECT_EQ(got.Get().step(), 900u);
  EXPECT_EQ(got.Get().attempt(), 2u);
  EXPECT_FALSE(got.Get().unpin());
  Console machine(admin.socket());
  EXPECT_EQ(RunPin(machine.Json(), {.job = "llama", .step = 900, .unpin = true}), ExitCode::kOk);
  EXPECT_TRUE(got.Get().unpin());
  EXPECT_EQ(machine.Parsed()["job"], "llama");
}

TEST(Fabric, ShowsWhatThereIs) {
  FakeAdmin admin({.show_fabric = [](const v1::ShowFabricRequest&, v1::ShowFabricReply& reply) {
    reply.set_node("n1");
    reply.set_provider("verbs");
    reply.set_library_version("1.17");
    reply.set_bandwidth_bytes_per_s_max(1 << 30);
    v1::FabricDevice& device = *reply.add_devices();
    device.set_name("mlx5_0\x1b");
    device.set_address("10.0.0.1:7");
    device.set_numa_node(-1);
    device.set_dscp(26);
    device.set_message_bytes_max(1 << 30);
    device.set_reads_max(16);
    device.add_registration("LOCAL");
    device.add_registration("PROV_KEY");
    reply.set_problem("no room to pin 8 GiB");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunFabric(people.context(), {}), ExitCode::kOk);
  EXPECT_EQ(people.out(),
            "n1: verbs, by libfabric 1.17; replicas at most 1 GiB a second\n\n"
            "  DEVICE      ADDRESS     NUMA  DSCP  MESSAGE  READS  REGISTRATION\n"
            "  mlx5_0\\x1b  10.0.0.1:7     -    26    1 GiB     16  LOCAL,PROV_KEY\n"
            "\nPROBLEM: no room to pin 8 GiB\n");
  Console machine(admin.socket());
  EXPECT_EQ(RunFabric(machine.Json(), {}), ExitCode::kOk);
  EXPECT_EQ(machine.Parsed()["devices"][0]["dscp"], 26);
}

TEST(Fabric, SaysWhyThereIsNone) {
  FakeAdmin admin({.show_fabric = [](const v1::ShowFabricRequest&, v1::ShowFabricReply& reply) {
    reply.set_node("n1");
    reply.set_problem("it is switched off (fabric.provider: off)");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunFabric(people.context(), {}), ExitCode::kOk);
  EXPECT_THAT(people.out(), HasSubstr("no fabric: it is switched off"));
  EXPECT_THAT(people.out(), HasSubstr("the daemons' own connections"));
}

TEST(Fabric, MeasuresFromTheNodeThatIsNamed) {
  FakeAdmin admin({.measure_fabric = [](const v1::MeasureFabricRequest& request,
                                        v1::MeasureFabricReply& reply) {
    reply.set_from(request.node());
    reply.set_to("n1");
    reply.set_bytes_per_s(uint64_t{3} << 30);
    reply.set_latency_us(41.6);
    reply.set_problem("n2 has no fabric, or another provider");
    return absl::OkStatus();
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunFabric(people.context(), {.node = "n2"}), ExitCode::kOk);
  EXPECT_EQ(people.out(),
            "n2 to n1, over the daemons' own connections: 3 GiB a second, verified; 4 KiB in 42 "
            "us\nPROBLEM: not by the fabric: n2 has no fabric, or another provider\n");
}

TEST(Replace, AsksForEachJob) {
  Kept<std::vector<std::string>> asked;
  FakeAdmin admin({.get_status =
                       [](const v1::GetStatusRequest&, v1::GetStatusReply& reply) {
                         reply.add_jobs()->set_name("llama");
                         reply.add_jobs()->set_name("whale");
                         return absl::OkStatus();
                       },
                   .replace =
                       [&](const v1::ReplaceRequest& request, v1::ReplaceReply& reply) {
                         auto all = asked.Get();
                         all.push_back(request.job() + " " + request.node() + " " + request.with());
                         asked.Set(std::move(all));
                         reply.set_text("job '" + request.job() + "'\x1b");
                         reply.set_ranks(2);
                         return absl::OkStatus();
                       }});
  Console people(admin.socket());
  EXPECT_EQ(RunReplace(people.context(), {.node = "n3", .with = "n9"}), ExitCode::kOk);
  EXPECT_EQ(asked.Get(), (std::vector<std::string>{"llama n3 n9", "whale n3 n9"}));
  EXPECT_EQ(people.out(), "job 'llama'\\x1b\njob 'whale'\\x1b\n");
  Console machine(admin.socket());
  EXPECT_EQ(RunReplace(machine.Json(), {.node = "n3", .with = "n9", .job = "whale"}),
            ExitCode::kOk);
  EXPECT_EQ(asked.Get().size(), 3u);
  EXPECT_EQ(machine.Parsed()["jobs"][0]["job"], "whale");
  EXPECT_EQ(machine.Parsed()["jobs"][0]["ranks"], 2);
}

TEST(Remove, AStepAndNotTheJob) {
  Kept<v1::RemoveCheckpointRequest> got;
  FakeAdmin admin(
      {.remove =
           [](const v1::RemoveJobRequest&, v1::RemoveJobReply&) {
             ADD_FAILURE() << "the whole job was removed";
             return absl::OkStatus();
           },
       .remove_checkpoint =
           [&](const v1::RemoveCheckpointRequest& request, v1::RemoveCheckpointReply& reply) {
             got.Set(request);
             if (!request.force()) {
               return absl::FailedPreconditionError("it is what a reboot leaves");
             }
             reply.set_text("step 900 of attempt 2 goes: 2 MiB\x1b");
             reply.set_bytes_freed(2 << 20);
             return absl::OkStatus();
           }});
  Console careful(admin.socket());
  EXPECT_EQ(RunRemove(careful.context(), {.job = "llama", .yes = true, .step = 0}),
            ExitCode::kRefused);
  EXPECT_EQ(careful.err(), "ckptctl: it is what a reboot leaves\n");
  Console sure(admin.socket());
  EXPECT_EQ(RunRemove(sure.context(),
                      {.job = "llama", .step = 900, .attempt = 2, .tier = "nvme", .force = true}),
            ExitCode::kOk);
  EXPECT_EQ(sure.out(), "step 900 of attempt 2 goes: 2 MiB\\x1b\n");
  EXPECT_EQ(got.Get().job(), "llama");
  EXPECT_EQ(got.Get().step(), 900u);
  EXPECT_EQ(got.Get().attempt(), 2u);
  EXPECT_EQ(got.Get().tier(), "nvme");
}

TEST(AdoptRemote, AsksBeforeItTakesWhatAnotherHas) {
  Kept<v1::AdoptRemoteRequest> got;
  FakeAdmin admin(
      {.adopt_remote = [&](const v1::AdoptRemoteRequest& request, v1::AdoptRemoteReply& reply) {
        got.Set(request);
        reply.set_text("it is\x1b");
        return absl::OkStatus();
      }});
  const std::string id(32, 'a');
  Console unsure(admin.socket());
  EXPECT_EQ(RunAdoptRemote(unsure.context(), {.id = id}), ExitCode::kRefused);
  EXPECT_THAT(unsure.err(), HasSubstr("ckptctl adopt-remote " + id + " --yes"));
  EXPECT_EQ(got.Get().from(), "");
  Console sure(admin.socket());
  EXPECT_EQ(RunAdoptRemote(sure.context(), {.id = id, .yes = true}), ExitCode::kOk);
  EXPECT_EQ(sure.out(), "it is\\x1b\n");
  EXPECT_EQ(got.Get().from(), id);
}

TEST(Rebuild, ProblemsAreNoSuccess) {
  FakeAdmin admin({.rebuild = [](const v1::RebuildRequest& request, v1::RebuildReply& reply) {
    reply.set_shards(4);
    if (request.tier() == "nvme") {
      reply.add_problems("0.record is torn");
    }
    return absl::OkStatus();
  }});
  Console good(admin.socket());
  EXPECT_EQ(RunRebuild(good.context(), {}), ExitCode::kOk);
  EXPECT_THAT(good.out(), HasSubstr("found 4 copies"));
  Console bad(admin.socket());
  EXPECT_EQ(RunRebuild(bad.Json(), {.tier = "nvme"}), ExitCode::kDamaged);
  EXPECT_EQ(bad.Parsed()["problems"][0], "0.record is torn");
}

TEST(Rebuild, AnOwnerIsAskedForByJobAndWhatWasWrittenIsShown) {
  Kept<v1::RebuildRequest> got;
  FakeAdmin admin({.rebuild = [&](const v1::RebuildRequest& request, v1::RebuildReply& reply) {
    got.Set(request);
    reply.add_written("/mnt/nvme0: JOB was written\x1b");
    return absl::OkStatus();
  }});
  Console console(admin.socket());
  EXPECT_EQ(RunRebuild(console.context(), {.job = "llama", .owner = OwnerArgument{1000, 100}}),
            ExitCode::kOk);
  EXPECT_THAT(console.out(),
              testing::StartsWith("/mnt/nvme0: JOB was written\\x1b\nfound 0 copies"));
  EXPECT_EQ(got.Get().owner().job(), "llama");
  EXPECT_EQ(got.Get().owner().uid(), 1000u);
  EXPECT_EQ(got.Get().owner().gid(), 100u);
}

TEST(Set, AJobsPolicyOrTheDaemonsLimits) {
  Kept<v1::SetOptionsRequest> got;
  FakeAdmin admin(
      {.set_options = [&](const v1::SetOptionsRequest& request, v1::SetOptionsReply& reply) {
        got.Set(request);
        reply.set_text("set");
        return absl::OkStatus();
      }});
  Console job(admin.socket());
  EXPECT_EQ(
      RunSet(job.context(), {.words = {"llama", "nvme.every_steps=10", "remote.every_ms=1h"}}),
      ExitCode::kOk);
  EXPECT_EQ(job.out(), "set\n");
  EXPECT_EQ(got.Get().job(), "llama");
  ASSERT_EQ(got.Get().options_size(), 2);
  EXPECT_EQ(got.Get().options(1).name(), "remote.every_ms");
  EXPECT_EQ(got.Get().options(1).value(), "1h");
  Console daemon(admin.socket());
  EXPECT_EQ(RunSet(daemon.Json(), {.words = {"remote.nice=19"}}), ExitCode::kOk);
  EXPECT_EQ(got.Get().job(), "");
  EXPECT_EQ(daemon.Parsed()["text"], "set");
  Console clear(admin.socket());
  EXPECT_EQ(RunSet(clear.context(), {.words = {"llama"}, .clear = true}), ExitCode::kOk);
  EXPECT_TRUE(got.Get().clear());
  EXPECT_EQ(got.Get().options_size(), 0);
}

TEST(Set, WhatTheDaemonDoesNotTakeIsAWrongArgument) {
  FakeAdmin admin({.set_options = [](const v1::SetOptionsRequest&, v1::SetOptionsReply&) {
    return absl::InvalidArgumentError("set: nvme.keep: unknown setting; did you mean keep_last?");
  }});
  Console people(admin.socket());
  EXPECT_EQ(RunSet(people.context(), {.words = {"llama", "nvme.keep=3"}}), ExitCode::kUsage);
  EXPECT_EQ(people.err(), "ckptctl: set: nvme.keep: unknown setting; did you mean keep_last?\n");
  Console machine(admin.socket());
  EXPECT_EQ(RunSet(machine.Json(), {.words = {"llama", "nvme.keep=3"}}), ExitCode::kUsage);
  EXPECT_EQ(machine.Parsed()["error"]["exit_code"], 2);
}

TEST(Set, WrongWords) {
  EXPECT_TRUE(CheckSetWords({.words = {"a=1"}}).ok());
  EXPECT_TRUE(CheckSetWords({.words = {"j", "a=b=c"}}).ok()) << "a value may hold a =";
  EXPECT_TRUE(CheckSetWords({.words = {"j"}, .clear = true}).ok());
  for (const SetArguments& wrong :
       {SetArguments{.words = {}}, SetArguments{.words = {"j"}},
        SetArguments{.words = {"a=1", "j"}}, SetArguments{.words = {"j", "k", "a=1"}},
        SetArguments{.words = {"=1"}}, SetArguments{.words = {"j", "a="}},
        SetArguments{.words = {"../j", "a=1"}}, SetArguments{.words = {"A B=1"}},
        SetArguments{.words = {}, .clear = true},
        SetArguments{.words = {"j", "a=1"}, .clear = true}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckSetWords(wrong)));
  }
  EXPECT_THAT(
      std::string(
          CheckSetWords({.words = {"nvme.keep_last=3", "a=1", "nvme.keep_last=4"}}).message()),
      HasSubstr("nvme.keep_last is given twice"));
}

}  // namespace
}  // namespace holdfast
