// Commands: what there is, and why.
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/arguments.h"

namespace holdfast {

void Arguments::AddStatus() {
  CLI::App* command = AddCommand(
      "status", "What survives if something dies now; memory, jobs, what was given up and why",
      "ckptctl status llama-7b", [this] { return RunStatus(context_, status_); });
  AddJob(command, status_.job, "Only this job (default: all of yours)");
}

void Arguments::AddJobs() {
  AddCommand("jobs",
             "One line for each job of the cluster: where it runs, its newest safe steps, what is "
             "wrong with it",
             "ckptctl jobs", [this] { return RunJobs(context_); });
}

void Arguments::AddNodes() {
  AddCommand("nodes",
             "The nodes of the cluster: where they are, what they host, whether they are up",
             "ckptctl nodes", [this] { return RunNodes(context_); });
}

void Arguments::AddFabric() {
  CLI::App* command =
      AddCommand("fabric",
                 "What carries shards between nodes: provider, devices, addresses; with NODE "
                 "how fast they come from its memory",
                 "ckptctl fabric n2", [this] { return RunFabric(context_, fabric_); });
  command
      ->add_option("NODE", fabric_.node,
                   "Read from this one for a second (root and the daemon's user)")
      ->type_name("")
      ->check(
          [](const std::string& name) { return name.empty() ? "no node has an empty name" : ""; });
}

void Arguments::AddList() {
  CLI::App* command =
      AddCommand("list", "A job's checkpoints: the line of descent first, then discarded branches",
                 "ckptctl list llama-7b", [this] { return RunList(context_, list_); });
  AddJob(command, list_.job, "The job")->required();
}

void Arguments::AddInspect() {
  CLI::App* command = AddCommand(
      "inspect", "What one rank's shard says of itself: slices, places, sizes, digests, descent",
      "ckptctl inspect llama-7b --step 900 --rank 1",
      [this] { return RunInspect(context_, inspect_); });
  AddJob(command, inspect_.job, "The job")->required();
  CLI::Option* step =
      AddStep(command, inspect_.step, "Of this step (default: the newest committed)");
  AddAttempt(command, inspect_.attempt)->needs(step);
  AddNumber<Rank>(command, "--rank", "R", inspect_.rank, "Of this rank (default 0)");
  command->add_flag("--all-slices", inspect_.all_slices, "List every slice (--json always does)");
}

void Arguments::AddWhere() {
  CLI::App* command = AddCommand(
      "where", "Every copy of every shard: tier, node, place, and whether it is good",
      "ckptctl where llama-7b --step 900", [this] { return RunWhere(context_, where_); });
  AddJob(command, where_.job, "The job")->required();
  CLI::Option* step = AddStep(command, where_.step, "Of this step (default: of all)");
  AddAttempt(command, where_.attempt)->needs(step);
}

void Arguments::AddExplain() {
  CLI::App* command = AddCommand(
      "explain", "What the next restore would take, and why each step can or cannot be restored",
      "ckptctl explain llama-7b", [this] { return RunExplain(context_, explain_); });
  AddJob(command, explain_.job, "The job")->required();
  CLI::Option* step = AddStep(command, explain_.step, "Only this step (default: all)");
  AddAttempt(command, explain_.attempt)->needs(step);
}

void Arguments::AddPlan() {
  CLI::App* command = AddCommand(
      "plan",
      "What another mesh of ranks would read of whom, whether anything is missing, and how long "
      "it may take",
      "ckptctl plan llama-7b --layout new.yaml --ranks-per-node 4 --rate nvme=12GB/s", [this] {
        WatchInterrupts();
        return RunPlan(context_, plan_);
      });
  AddJob(command, plan_.job, "The job")->required();
  command
      ->add_option("--layout", plan_.layout_file,
                   "A file that says how the new mesh splits tensors (docs/elastic.md)")
      ->type_name("FILE")
      ->required();
  CLI::Option* step = AddStep(command, plan_.step, "Of this step (default: the newest committed)");
  AddAttempt(command, plan_.attempt)->needs(step);
  command->add_flag("--all-ranks", plan_.all_ranks,
                    "Plan for every rank of a large mesh (default: 64 from all over it)");
  AddRates(command, plan_.rates,
           "For the estimate of the time: memory, nvme, network or remote of one node, remote-all "
           "of all nodes together; may be given again (default: what the answer says it "
           "assumes)");
  AddNumber<uint32_t>(command, "--ranks-per-node", "N", plan_.ranks_per_node,
                      "For the estimate, too: ranks that share a node's drives and network "
                      "(default 8)")
      ->check([](const std::string& text) {
        return text.find_first_not_of('0') == std::string::npos ? "a node has at least one rank"
                                                                : "";
      });
}

void Arguments::AddRates(CLI::App* command, PlanRates& target, const std::string& about) {
  const auto set = [&target](const std::vector<std::string>& rates) {
    for (const std::string& rate : rates) {
      if (const absl::Status status = SetRate(rate, target); !status.ok()) {
        throw CLI::ValidationError("--rate", Message(status));
      }
    }
  };
  command->add_option_function<std::vector<std::string>>("--rate", set, about)
      ->type_name("NAME=RATE")
      ->expected(1)
      ->take_all();
}

void Arguments::AddTimeline() {
  CLI::App* command = AddCommand(
      "timeline", "How long each save took: written, committed, in each tier; what failed",
      "ckptctl timeline llama-7b --trace saves.json",
      [this] { return RunTimeline(context_, timeline_); });
  AddJob(command, timeline_.job, "The job")->required();
  AddNumber<uint32_t>(command, "--steps", "N", timeline_.steps_max,
                      "The newest N (default: all that ckptd remembers)");
  command
      ->add_option("--trace", timeline_.trace,
                   "Also write them to FILE, for ui.perfetto.dev or chrome://tracing")
      ->type_name("FILE")
      ->check([](const std::string& file) {
        return std::string(file.empty() ? "a file name is needed" : "");
      });
}

void Arguments::AddTop() {
  CLI::App* command = AddCommand(
      "top",
      "The same view again and again: what would be lost, how far tiers lag behind, what is on "
      "the way and how fast, tiers, nodes",
      "ckptctl top llama-7b --once", [this] {
        WatchInterrupts();
        return RunTop(context_, top_);
      });
  AddJob(command, top_.job, "Only this job (default: all of yours)");
  command
      ->add_option_function<std::string>(
          "--every",
          [this](const std::string& text) {
            const auto every = ParseDuration(text);
            if (!every.ok() || *every < kTopEveryMin || *every > std::chrono::hours(24)) {
              throw CLI::ValidationError(
                  "--every", "'" + text + "' is not a time between 100ms and 24h (2s, 1min)");
            }
            top_.every = *every;
          },
          "Look again after TIME (default 2s)")
      ->type_name("TIME");
  CLI::Option* once = command->add_flag_callback(
      "--once", [this] { top_.frames_max = 1; }, "Look once");
  AddNumber<uint64_t>(command, "--count", "N", top_.frames_max,
                      "Look N times (default: until Ctrl-C)")
      ->check([](const std::string& text) {
        return text.find_first_not_of('0') == std::string::npos ? "at least once" : "";
      })
      ->excludes(once);
}

void Arguments::AddEvents() {
  CLI::App* command =
      AddCommand("events",
                 "What happened on this node: steps committed and given up, tiers in trouble, "
                 "copies that are bad, nodes that came and went",
                 "ckptctl events --least warning --since 1h", [this] {
                   WatchInterrupts();
                   return RunEvents(context_, events_);
                 });
  AddJob(command, events_.job, "Only of this job (default: of all of yours, and of the node)");
  command->add_flag("--follow,-f", events_.follow, "Go on with what happens; Ctrl-C ends it");
  command->add_option("--least", events_.least, "Only of this severity or worse")
      ->type_name("SEVERITY")
      ->check(CLI::IsMember({"info", "warning", "error"}))
      ->capture_default_str();
  command
      ->add_option_function<std::string>(
          "--since",
          [this](const std::string& text) {
            const auto since = ParseDuration(text);
            if (!since.ok()) {
              throw CLI::ValidationError("--since", std::string(since.status().message()));
            }
            events_.since = *since;
          },
          "Only what happened in the last TIME (default: all that ckptd keeps)")
      ->type_name("TIME");
}

}  // namespace holdfast
