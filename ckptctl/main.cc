// ckptctl: its arguments. What the commands do is in their own files.
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <iostream>
#include <new>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/program.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/capacity_arguments.h"
#include "ckptctl/commands.h"
#include "ckptctl/describe.h"
#include "ckptctl/sockets.h"
#include "ckptctl/text.h"
#include "ckptctl/upkeep.h"
#include "ckptctl/watchdog.h"

namespace holdfast {
namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "set by a signal handler");

// The first one asks the command to stop; a second one, with the default action back in place, ends
// the program.
void OnInterrupt(int) {
  interrupted = true;
}

// What `"$UNSET"` becomes is none of "the default".
std::string NotEmpty(const std::string& text) {
  return text.empty() ? "is empty; give a value, or leave it out" : "";
}

constexpr size_t kWordShown = 64;
constexpr char kCommonOptions[] = "Options of every command";

constexpr char kAbout[] =
    "Looks at the checkpoints of your jobs, on this node and on the others of its cluster, checks "
    "them, and says what the next restore will use.";

constexpr char kFooter[] =
    "Start here:\n"
    "  ckptctl jobs              all jobs, one line each, from any node\n"
    "  ckptctl status            what survives if something dies now, and what went wrong lately\n"
    "  ckptctl doctor            what will not work or will be slow on this machine, and the "
    "command that mends it\n"
    "\n"
    "Every command takes --json, those that ask ckptd --socket PATH (or --address HOST:PORT and "
    "--tls DIR) and --timeout TIME; `ckptctl "
    "COMMAND --help` shows an example. Shell completion: ckptctl completion --help\n"
    "\n"
    "Exit codes:\n"
    "  0    all is well\n"
    "  1    something is wrong: verify found damage, a record cannot be read, export, stats, "
    "diff, backup or restore-backup found no good copy, doctor found what will not work, plan what "
    "cannot be restored so, "
    "plan-capacity what does not fit\n"
    "  2    wrong arguments\n"
    "  3    ckptd is not reachable, or does not answer in time\n"
    "  4    refused, not found, or failed otherwise\n"
    "  130  interrupted";

// A number as people write one: decimal digits only ("010" is ten), and nothing else.
template <typename Number>
Number ParseNumber(const std::string& option, const std::string& text) {
  Number value = 0;
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || !absl::SimpleAtoi(text, &value)) {
    throw CLI::ValidationError(option, "'" + text + "' is not a whole number, or too large");
  }
  return value;
}

class Arguments {
 public:
  Arguments() {
    app_.require_subcommand(1);
    app_.set_version_flag("--version", "ckptctl " HOLDFAST_VERSION, "Show the version and leave");
    app_.footer(kFooter);
    AddJson(app_);
    AddConnection(app_);
    AddStatus();
    AddJobs();
    AddNodes();
    AddFabric();
    AddList();
    AddInspect();
    AddVerify();
    AddRestore();
    AddWhere();
    AddExplain();
    AddPlan();
    AddTimeline();
    AddTop();
    AddEvents();
    AddExport();
    AddStats();
    AddDiff();
    AddBackup();
    AddRestoreBackup();
    AddGarbage();
    AddPin(pin_, "pin", "Keeps a step: no retention removes it, however old it gets");
    AddPin(unpin_, "unpin", "Takes a pin back: retention decides about the step again");
    AddReplace();
    AddDrain();
    AddRemove();
    AddRebuild();
    AddSet();
    AddDoctor();
    AddPlanCapacity();
    AddCompletion();
    AddManual();
    AddCompleteNames();
  }

  int Run(int argc, char** argv) {
    if (argc < 2) {
      std::cerr << app_.help();
      return static_cast<int>(ExitCode::kUsage);
    }
    // Also of errors that are found before the flag is.
    context_.json = std::any_of(argv + 1, argv + argc,
                                [](const char* word) { return std::string(word) == "--json"; });
    // Before CLI11 looks: it would only say that a subcommand is required.
    if (const std::string word = argv[1]; word[0] != '-' && !IsCommand(word)) {
      return Usage(absl::StrCat("no command '", word.substr(0, kWordShown),
                                "'; commands: ", absl::StrJoin(CommandNames(), ", ")));
    }
    try {
      app_.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      const auto chosen = app_.get_subcommands();
      std::cout << (chosen.empty() ? app_.help() : chosen.front()->help("ckptctl"));
      return 0;
    } catch (const CLI::CallForVersion& version) {
      std::cout << version.what() << "\n";
      return 0;
    } catch (const CLI::Error& error) {
      return Usage(error.what());
    }
    context_.command = app_.get_subcommands().front()->get_name();
    if (const absl::Status place = CheckPlace(*app_.get_subcommands().front()); !place.ok()) {
      return Usage(Message(place));
    }
    EnableWatchdog(context_.json);
    try {
      return static_cast<int>(run_());
    } catch (const std::bad_alloc&) {
      return static_cast<int>(
          ReportError(context_, absl::ResourceExhaustedError(
                                    "out of memory; raise the limit (ulimit -v), or free some")));
    } catch (const std::system_error& error) {
      return static_cast<int>(ReportError(context_, ThreadError(error, "of ckptctl")));
    }
  }

 private:
  std::vector<std::string> CommandNames() const {
    std::vector<std::string> names;
    for (const CliCommand& command : Describe(app_, HOLDFAST_VERSION).commands) {
      names.push_back(command.name);
    }
    return names;
  }
  bool IsCommand(const std::string& word) const {
    return !app_.get_subcommands([&](const CLI::App* a) { return a->get_name() == word; }).empty();
  }
  int Usage(const std::string& what) {
    const auto chosen = app_.get_subcommands();
    return static_cast<int>(ReportUsage(context_, absl::InvalidArgumentError(what),
                                        chosen.empty() ? "" : chosen.front()->get_name()));
  }

  absl::Status CheckPlace(const CLI::App& command) const {
    if (command.get_option_no_throw("--address") == nullptr) {
      return absl::OkStatus();  // it asks no daemon
    }
    if (command.get_name() == "doctor") {
      return context_.address.empty() && context_.tls.empty()
                 ? absl::OkStatus()
                 : absl::InvalidArgumentError(
                       "doctor looks at the machine that it runs on, and asks the ckptd there: run "
                       "it on the other one, without --address and --tls");
    }
    if (command.get_option_no_throw("--client-socket") != nullptr) {
      return context_.address.empty() && context_.tls.empty()
                 ? absl::OkStatus()
                 : absl::InvalidArgumentError(absl::StrCat(
                       command.get_name(),
                       " reads through the ckptd of the machine that it runs on, which passes it "
                       "memory and files: run it on a node of the cluster, any of them, without "
                       "--address and --tls"));
    }
    return FindAdminPlace(context_.socket, context_.address, context_.tls).status();
  }
  void AddJson(CLI::App& command) {
    command
        .add_flag("--json", context_.json, "Answer with one JSON object (fields: docs/ckptctl.md)")
        ->group(kCommonOptions);
  }
  void AddConnection(CLI::App& command) {
    command
        .add_option("--socket", context_.socket,
                    "ckptd's admin socket; else $HOLDFAST_ADMIN_SOCKET, "
                    "$XDG_RUNTIME_DIR/holdfast/admin.sock, "
                    "/run/holdfast/admin.sock")
        ->type_name("PATH")
        ->check(NotEmpty)
        ->group(kCommonOptions);
    command
        .add_option("--address", context_.address,
                    "The ckptd of another machine (its admin.tls.address), by TLS; else "
                    "$HOLDFAST_ADMIN_ADDRESS")
        ->type_name("HOST:PORT")
        ->group(kCommonOptions);
    command
        .add_option("--tls", context_.tls,
                    "The directory with ca.crt, tls.crt and tls.key that --address needs; else "
                    "$HOLDFAST_ADMIN_TLS")
        ->type_name("DIR")
        ->group(kCommonOptions);
    command
        .add_option_function<std::string>(
            "--timeout", [this](const std::string& text) { SetTimeout(text); },
            "Give up when ckptd says nothing for this long (default 10s)")
        ->type_name("TIME")
        ->group(kCommonOptions);
  }
  void SetTimeout(const std::string& text) {
    const auto timeout = ParseDuration(text);
    if (!timeout.ok() || *timeout < std::chrono::milliseconds(1) ||
        *timeout > std::chrono::hours(24)) {
      throw CLI::ValidationError("--timeout",
                                 "'" + text + "' is not a time between 1ms and 24h (10s, 2min)");
    }
    context_.timeout = *timeout;
  }

  CLI::App* AddCommand(const std::string& name, const std::string& about,
                       const std::string& example, std::function<ExitCode()> run) {
    CLI::App* command = AddOwnCommand(name, about, example, std::move(run));
    AddConnection(*command);
    return command;
  }
  // One that asks no daemon.
  CLI::App* AddOwnCommand(const std::string& name, const std::string& about,
                          const std::string& example, std::function<ExitCode()> run) {
    CLI::App* command = app_.add_subcommand(name, about);
    command->footer("Example:\n  " + example);
    command->callback([this, run = std::move(run)] { run_ = run; });
    AddJson(*command);
    return command;
  }
  static CLI::Option* AddJob(CLI::App* command, std::string& job, const std::string& about) {
    return command->add_option("JOB", job, about)
        ->type_name("")
        ->check([](const std::string& name) { return Message(CheckJobName(name)); });
  }
  template <typename Number, typename Target>
  static CLI::Option* AddNumber(CLI::App* command, const std::string& option,
                                const std::string& type_name, Target& target,
                                const std::string& about) {
    const auto set = [option, &target](const std::string& text) {
      target = ParseNumber<Number>(option, text);
    };
    return command->add_option_function<std::string>(option, set, about)->type_name(type_name);
  }
  static CLI::Option* AddStep(CLI::App* command, std::optional<Step>& step,
                              const std::string& about) {
    return AddNumber<Step>(command, "--step", "N", step, about);
  }
  static CLI::Option* AddAttempt(CLI::App* command, Attempt& attempt) {
    return AddNumber<Attempt>(command, "--attempt", "A", attempt,
                              "Of this attempt (default: on the line of descent)");
  }

  static CLI::Option* AddTier(CLI::App* command, std::string& tier, const std::string& about,
                              const std::vector<std::string>& tiers = {"memory", "nvme",
                                                                       "remote"}) {
    return command->add_option("--tier", tier, about)
        ->type_name("TIER")
        ->check(CLI::IsMember(tiers));
  }

  // From now on Ctrl-C is the command's to see to.
  void WatchInterrupts() {
    struct sigaction action {};
    action.sa_handler = OnInterrupt;
    action.sa_flags = SA_RESTART | SA_RESETHAND;
    ::sigaction(SIGINT, &action, nullptr);
    ::sigaction(SIGTERM, &action, nullptr);
    context_.interrupted = &interrupted;
  }

  void AddStatus() {
    CLI::App* command = AddCommand(
        "status", "What survives if something dies now; memory, jobs, what was given up and why",
        "ckptctl status llama-7b", [this] { return RunStatus(context_, status_); });
    AddJob(command, status_.job, "Only this job (default: all of yours)");
  }
  void AddJobs() {
    AddCommand(
        "jobs",
        "One line for each job of the cluster: where it runs, its newest safe steps, what is "
        "wrong with it",
        "ckptctl jobs", [this] { return RunJobs(context_); });
  }
  void AddNodes() {
    AddCommand("nodes",
               "The nodes of the cluster: where they are, what they host, whether they are up",
               "ckptctl nodes", [this] { return RunNodes(context_); });
  }
  void AddFabric() {
    CLI::App* command =
        AddCommand("fabric",
                   "What carries shards between nodes: provider, devices, addresses; with NODE "
                   "how fast they come from its memory",
                   "ckptctl fabric n2", [this] { return RunFabric(context_, fabric_); });
    command
        ->add_option("NODE", fabric_.node,
                     "Read from this one for a second (root and the daemon's user)")
        ->type_name("")
        ->check([](const std::string& name) {
          return name.empty() ? "no node has an empty name" : "";
        });
  }
  void AddList() {
    CLI::App* command = AddCommand(
        "list", "A job's checkpoints: the line of descent first, then discarded branches",
        "ckptctl list llama-7b", [this] { return RunList(context_, list_); });
    AddJob(command, list_.job, "The job")->required();
  }
  void AddInspect() {
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
  void AddVerify() {
    CLI::App* command =
        AddCommand("verify", "Reads checkpoints again and compares every digest; Ctrl-C stops it",
                   "ckptctl verify llama-7b --all", [this] {
                     WatchInterrupts();
                     return RunVerify(context_, verify_);
                   });
    CLI::Option* job = AddJob(command, verify_.job, "Only this job (default: all of yours)");
    CLI::Option* step =
        AddStep(command, verify_.step, "This step (default: the newest committed)")->needs(job);
    AddAttempt(command, verify_.attempt)->needs(step);
    command->add_flag("--all", verify_.all, "Every checkpoint")->excludes(step);
    AddTier(command, verify_.tier, "Only copies in this tier (default: wherever they lie)");
  }
  void AddRestore() {
    CLI::App* command = AddCommand(
        "restore", "Says where the job's next restore begins: an older step, or from scratch",
        "ckptctl restore llama-7b --step 900", [this] { return RunRestore(context_, restore_); });
    AddJob(command, restore_.job, "The job")->required();
    CLI::Option_group* what = command->add_option_group("one of");
    what->require_option(1);
    AddStep(what, restore_.step,
            "At this step; later ones are discarded once the job has restored it");
    what->add_flag("--from-scratch", restore_.from_scratch,
                   "From nothing: all checkpoints so far are discarded");
    what->add_flag("--clear", restore_.clear,
                   "At the newest committed step again, as if nothing had been said");
    AddAttempt(command, restore_.attempt)->needs(what->get_option("--step"));
  }
  void AddWhere() {
    CLI::App* command = AddCommand(
        "where", "Every copy of every shard: tier, node, place, and whether it is good",
        "ckptctl where llama-7b --step 900", [this] { return RunWhere(context_, where_); });
    AddJob(command, where_.job, "The job")->required();
    CLI::Option* step = AddStep(command, where_.step, "Of this step (default: of all)");
    AddAttempt(command, where_.attempt)->needs(step);
  }
  void AddExplain() {
    CLI::App* command = AddCommand(
        "explain", "What the next restore would take, and why each step can or cannot be restored",
        "ckptctl explain llama-7b", [this] { return RunExplain(context_, explain_); });
    AddJob(command, explain_.job, "The job")->required();
    CLI::Option* step = AddStep(command, explain_.step, "Only this step (default: all)");
    AddAttempt(command, explain_.attempt)->needs(step);
  }
  void AddPlan() {
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
    CLI::Option* step =
        AddStep(command, plan_.step, "Of this step (default: the newest committed)");
    AddAttempt(command, plan_.attempt)->needs(step);
    command->add_flag("--all-ranks", plan_.all_ranks,
                      "Plan for every rank of a large mesh (default: 64 from all over it)");
    AddRates(
        command, plan_.rates,
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
  static void AddRates(CLI::App* command, PlanRates& target, const std::string& about) {
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
  void AddTimeline() {
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
  void AddTop() {
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
  void AddEvents() {
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
  // Of a command that reads what was saved itself.
  void AddStepToRead(CLI::App* command, StepArguments& step) {
    AddJob(command, step.job, "The job")->required();
    CLI::Option* number = AddStep(command, step.step, "This step (default: the newest committed)");
    AddAttempt(command, step.attempt)->needs(number);
    AddClientSocket(command, step.client_socket);
  }
  static void AddClientSocket(CLI::App* command, std::string& client_socket) {
    command
        ->add_option("--client-socket", client_socket,
                     "ckptd's socket for training processes, through which it is read (default: "
                     "ckptd.sock beside the admin socket; without --socket $HOLDFAST_SOCKET before "
                     "that)")
        ->type_name("PATH")
        ->check(NotEmpty);
  }
  static void AddOnly(CLI::App* command, std::vector<std::string>& only, const std::string& about) {
    command->add_option("--only", only, about)
        ->type_name("KEY")
        ->expected(1)
        ->take_all()
        ->check(NotEmpty);
  }
  void AddExport() {
    CLI::App* command = AddCommand(
        "export",
        "Writes a step as one set of safetensors files with an index, as model hubs have it; what "
        "ranks have split is put together; run again, it goes on where it was ended",
        "ckptctl export llama-7b ./llama-7b-900 --step 900 --only model", [this] {
          WatchInterrupts();
          return RunExport(context_, export_);
        });
    AddStepToRead(command, export_.step);
    command
        ->add_option("DIRECTORY", export_.directory,
                     "Into this one, which is made, or empty, or has the begun export of the same "
                     "step")
        ->type_name("")
        ->required()
        ->check(NotEmpty);
    AddOnly(command, export_.only,
            "Only tensors under this key of the state; with one KEY their names lose it (model: "
            "what load_state_dict wants); may be given again (default: everything)");
    command
        ->add_option_function<std::string>(
            "--rank",
            [this](const std::string& text) { export_.rank = ParseNumber<Rank>("--rank", text); },
            "Of what ranks have of their own, this one's (default: everybody's)")
        ->type_name("R");
    command
        ->add_option_function<std::string>(
            "--max-file-bytes",
            [this](const std::string& text) {
              const auto bytes = ParseBytes(text);
              if (!bytes.ok() || *bytes == 0) {
                throw CLI::ValidationError("--max-file-bytes",
                                           "'" + text + "' is not a size (5GB, 512MiB)");
              }
              export_.file_bytes_max = *bytes;
            },
            "As much in one file at most (default 5GB); a larger tensor has one of its own")
        ->type_name("SIZE");
  }
  static void AddTensorPattern(CLI::App* command, std::string& pattern) {
    command
        ->add_option("--tensor", pattern,
                     "Only tensors whose whole name fits: * stands for any characters, ? for one "
                     "('*.norm.weight')")
        ->type_name("PATTERN")
        ->check(NotEmpty);
  }
  static constexpr char kOnlyTensors[] =
      "Only tensors under this key of the state; may be given again (default: all)";
  void AddStats() {
    CLI::App* command = AddCommand(
        "stats",
        "Of each tensor of a step: NaN, infinity, zeros, minimum, maximum, mean; to find the step "
        "at which a run went bad",
        "ckptctl stats llama-7b --step 900 --only model", [this] {
          WatchInterrupts();
          return RunStats(context_, stats_);
        });
    AddStepToRead(command, stats_.step);
    AddOnly(command, stats_.only, kOnlyTensors);
    AddTensorPattern(command, stats_.tensor);
  }
  void AddDiff() {
    CLI::App* command = AddCommand(
        "diff",
        "Which tensors differ between two steps, and how far: the largest difference, the norm, "
        "how many elements",
        "ckptctl diff llama-7b 880 900@1 --only model", [this] {
          WatchInterrupts();
          return RunDiff(context_, diff_);
        });
    AddJob(command, diff_.a.job, "The job")->required();
    AddStepName(command, "A", diff_.a, "A step, or STEP@ATTEMPT (default: on the line of descent)");
    AddStepName(command, "B", diff_.b, "Another one, likewise");
    AddOnly(command, diff_.only, kOnlyTensors);
    AddTensorPattern(command, diff_.tensor);
    AddClientSocket(command, diff_.a.client_socket);
    command->parse_complete_callback([this] {
      diff_.b.job = diff_.a.job;
      diff_.b.client_socket = diff_.a.client_socket;
    });
  }
  // "900" or "900@2".
  static void AddStepName(CLI::App* command, const std::string& name, StepArguments& step,
                          const std::string& about) {
    const auto set = [name, &step](const std::string& text) {
      const size_t at = text.find('@');
      step.step = ParseNumber<Step>(name, text.substr(0, at));
      if (at != std::string::npos) {
        step.attempt = ParseNumber<Attempt>(name, text.substr(at + 1));
      }
    };
    command->add_option_function<std::string>(name, set, about)->type_name("")->required();
  }
  static void AddSteps(CLI::App* command, std::vector<Step>& steps, const std::string& about) {
    const auto add = [&steps](const std::vector<std::string>& texts) {
      for (const std::string& text : texts) {
        steps.push_back(ParseNumber<Step>("--step", text));
      }
    };
    command->add_option_function<std::vector<std::string>>("--step", add, about)
        ->type_name("N")
        ->expected(1)
        ->allow_extra_args(false)  // what follows is the next argument
        ->take_all();
  }
  void AddBackup() {
    CLI::App* command = AddCommand(
        "backup",
        "Copies every committed step of a job into a directory, from wherever it lies, verified; "
        "run again, it goes on where it was ended, and adds what is new",
        "ckptctl backup llama-7b /mnt/backup", [this] {
          WatchInterrupts();
          return RunBackup(context_, backup_);
        });
    AddJob(command, backup_.job, "The job")->required();
    command
        ->add_option("DIRECTORY", backup_.directory,
                     "Into this one, which may have other jobs' backups; it is not made")
        ->type_name("")
        ->required()
        ->check(NotEmpty);
    AddSteps(command, backup_.steps, "This step; may be given again (default: all of them)");
    AddClientSocket(command, backup_.client_socket);
  }
  void AddRestoreBackup() {
    CLI::App* command = AddOwnCommand(
        "restore-backup",
        "Copies a job out of a directory of backups into a cluster's remote directory, verified; "
        "asks no ckptd, and goes on where it was ended",
        "ckptctl restore-backup /mnt/backup llama-7b --to /mnt/new/holdfast", [this] {
          WatchInterrupts();
          return RunRestoreBackup(context_, restore_backup_);
        });
    command
        ->add_option("DIRECTORY", restore_backup_.directory,
                     "The directory of backups; or the remote.dir of another cluster")
        ->type_name("")
        ->required()
        ->check(NotEmpty);
    AddJob(command, restore_backup_.job, "The job")->required();
    command
        ->add_option("--to", restore_backup_.to,
                     "Into this one, the remote.dir of the cluster that is to have the job; it is "
                     "not made")
        ->type_name("REMOTE_DIR")
        ->required()
        ->check(NotEmpty);
    AddSteps(command, restore_backup_.steps,
             "This step; may be given again (default: all of them)");
    command
        ->add_option_function<std::string>(
            "--owner",
            [this](const std::string& text) {
              const size_t colon = text.find(':');
              if (colon == std::string::npos) {
                throw CLI::ValidationError("--owner", "'" + text + "' is not UID:GID (1001:100)");
              }
              restore_backup_.owner = {ParseNumber<uint32_t>("--owner", text.substr(0, colon)),
                                       ParseNumber<uint32_t>("--owner", text.substr(colon + 1))};
            },
            "The job is this user's and this group's there (default: as in the backup)")
        ->type_name("UID:GID");
  }
  void AddGarbage() {
    CLI::App* command =
        AddCommand("gc",
                   "Removes now what no policy keeps, and says why each of the others stays; never "
                   "what protects a job",
                   "ckptctl gc --dry-run", [this] { return RunGarbage(context_, garbage_); });
    AddJob(command, garbage_.job, "Only this job (default: all of yours)");
    command->add_flag("--dry-run", garbage_.dry_run, "Only say what would go");
  }
  void AddPin(PinArguments& pin, const std::string& name, const std::string& about) {
    pin.unpin = name == "unpin";
    CLI::App* command = AddCommand(name, about, "ckptctl " + name + " llama-7b --step 900",
                                   [this, &pin] { return RunPin(context_, pin); });
    AddJob(command, pin.job, "The job")->required();
    AddNumber<Step>(command, "--step", "N", pin.step, "This step")->required();
    AddAttempt(command, pin.attempt);
  }
  void AddDrain() {
    CLI::App* command = AddCommand(
        "drain",
        "Takes a node out: no rank is let in there any more, and what lies there alone goes to the "
        "remote tier, or into other nodes' memory; waits until nothing would be lost with it",
        "ckptctl drain n3 --wait 5min", [this] {
          WatchInterrupts();
          return RunDrain(context_, drain_);
        });
    command->add_option("NODE", drain_.node, "The node (default: this one)")
        ->type_name("")
        ->check(NotEmpty);
    CLI::Option* undo = command->add_flag("--undo", drain_.undo, "It lets ranks in again");
    command
        ->add_option_function<std::string>(
            "--wait",
            [this](const std::string& text) {
              const auto wait = ParseDuration(text);
              if (!wait.ok()) {
                throw CLI::ValidationError("--wait", std::string(wait.status().message()));
              }
              drain_.wait = *wait;
            },
            "Say after so long how far it is (default: as long as it takes)")
        ->type_name("TIME")
        ->excludes(undo);
  }
  void AddReplace() {
    CLI::App* command = AddCommand(
        "replace",
        "Copies into the memory of another node what the ranks of this one need to "
        "start there, now and at each step, until they run elsewhere; a node that is "
        "lost for good gets a spare by itself",
        "ckptctl replace n3 --with n9", [this] { return RunReplace(context_, replace_); });
    command->add_option("NODE", replace_.node, "The node that is lost, or is to be taken out")
        ->type_name("")
        ->check(NotEmpty)
        ->required();
    CLI::Option* with = command->add_option("--with", replace_.with, "The node that gets it")
                            ->type_name("NODE")
                            ->check([](const std::string& name) {
                              return name.empty() ? "no node has an empty name" : "";
                            });
    CLI::Option* forget = command->add_flag("--forget", replace_.forget,
                                            "Take it back: nothing more is copied for NODE");
    with->excludes(forget);
    command->add_option("--job", replace_.job, "Only this job (default: all of yours)")
        ->type_name("JOB")
        ->check([](const std::string& name) { return Message(CheckJobName(name)); });
    command->parse_complete_callback([this] {
      if (replace_.with.empty() && !replace_.forget) {
        throw CLI::RequiredError("--with NODE, or --forget,");
      }
    });
  }
  void AddRemove() {
    CLI::App* command = AddCommand(
        "rm", "Removes one step, or forgets a job whose processes have ended, with all of them",
        "ckptctl rm old-run --yes", [this] { return RunRemove(context_, remove_); });
    AddJob(command, remove_.job, "The job")->required();
    command->add_flag("--yes", remove_.yes,
                      "Forget the whole job; without this it only says what would be lost");
    CLI::Option* step =
        AddStep(command, remove_.step, "Only this step, at once (default: the whole job)");
    AddAttempt(command, remove_.attempt)->needs(step);
    AddTier(command, remove_.tier, "Only its copies in this tier (default: everywhere)")
        ->needs(step);
    command
        ->add_flag("--force", remove_.force,
                   "Also when something would then survive less than before")
        ->needs(step);
  }
  void AddRebuild() {
    CLI::App* command = AddCommand(
        "rebuild", "Reads the tiers again and writes the catalog anew; nothing is removed",
        "ckptctl rebuild --timeout 10min", [this] { return RunRebuild(context_, rebuild_); });
    AddTier(command, rebuild_.tier, "Only this tier (default: both)", {"nvme", "remote"});
  }
  void AddSet() {
    CLI::App* command = AddCommand(
        "set",
        "Changes a job's policy until it is cleared, or the daemon's limits until it is restarted",
        "ckptctl set llama-7b nvme.every_steps=10 remote.keep_last=5",
        [this] { return RunSet(context_, set_); });
    command
        ->add_option("WORDS", set_.words,
                     "[JOB] name=value…; names as in ckptd's settings (docs/operations.md): "
                     "with a JOB nvme. and remote. every_steps, every_ms, keep_last, "
                     "keep_every_steps, bytes_max, verify, and replicas; without one nvme. and "
                     "remote. bandwidth_bytes_per_s_max, io_priority, nice, and "
                     "fabric.bandwidth_bytes_per_s_max")
        ->type_name("")
        ->required();
    command->add_flag("--clear", set_.clear, "Forget what was set for the JOB");
    command->callback([this] { CheckSet(); });
  }
  // Words are wrong arguments, found before the daemon is asked.
  void CheckSet() {
    if (const absl::Status words = CheckSetWords(set_); !words.ok()) {
      throw CLI::ValidationError("set", Message(words));
    }
    run_ = [this] { return RunSet(context_, set_); };
  }
  void AddDoctor() {
    CLI::App* command = AddCommand(
        "doctor",
        "What will not work or will be slow on this machine, and the command that mends it",
        "ckptctl doctor", [this] { return RunDoctor(context_, doctor_); });
    command
        ->add_option("--config", doctor_.config,
                     "ckptd's settings (default: those of the ckptd that runs, else "
                     "/etc/holdfast/ckptd.yaml if there is one; for users "
                     "their own, ~/.config/holdfast/ckptd.yaml, before it)")
        ->type_name("PATH")
        ->check(NotEmpty);
  }

  void AddPlanCapacity() {
    CLI::App* command = AddOwnCommand(
        "plan-capacity",
        "What a job costs with Holdfast before there is one: memory, drives, network, remote, how "
        "far each tier lags behind, lost work a year, and the settings that follow",
        "ckptctl plan-capacity --params 405B --ranks 16384 --step-time 30s --save-every 10 "
        "--replicas 1",
        [this] { return RunPlanCapacity(context_, capacity_); });
    for (const CapacityOption& option : CapacityOptions()) {
      const auto set = [this, &option](const std::string& text) {
        if (const absl::Status status = option.set(text, capacity_); !status.ok()) {
          throw CLI::ValidationError(option.name, Message(status));
        }
      };
      CLI::Option* added = command->add_option_function<std::string>(option.name, set, option.about)
                               ->type_name(option.type_name)
                               ->group(option.group);
      if (!option.values.empty()) {
        added->check(CLI::IsMember(option.values));
      }
    }
    AddRates(command, capacity_.input.rates,
             "memory, nvme, network or remote of one node, remote-all of all nodes together; may "
             "be given again (default: what the answer says it assumes)");
  }
  void AddCompletion() {
    CLI::App* command = AddOwnCommand(
        "completion",
        "The script with which a shell completes ckptctl's commands, options, jobs and nodes",
        "ckptctl completion bash",
        [this] { return RunCompletion(context_, completion_, Describe(app_, HOLDFAST_VERSION)); });
    command->add_option("SHELL", completion_.shell, "For this one")
        ->type_name("SHELL")
        ->required()
        ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  }
  void AddManual() {
    CLI::App* command = AddOwnCommand(
        "man", "The manual page ckptctl(1); or ckptd(8) from what ckptd --help prints",
        "ckptctl man", [this] {
          return RunManual(context_, manual_, Describe(app_, HOLDFAST_VERSION), std::cin);
        });
    command->add_option("PAGE", manual_.page, "Of which program (default ckptctl)")
        ->type_name("PAGE")
        ->check(CLI::IsMember({"ckptctl", "ckptd"}));
  }
  // What completion scripts ask; hidden.
  void AddCompleteNames() {
    CLI::App* command = app_.add_subcommand("complete-names", "Names for a completion script");
    command->group("");
    command->callback([this] { run_ = [this] { return RunCompleteNames(context_, names_); }; });
    AddConnection(*command);
    command->add_option("WHAT", names_.what)->required()->check(CLI::IsMember({"jobs", "nodes"}));
  }

  CLI::App app_{kAbout, "ckptctl"};
  Context context_{.out = &std::cout,
                   .err = &std::cerr,
                   .progress = ::isatty(STDERR_FILENO) == 1,
                   .screen = ::isatty(STDOUT_FILENO) == 1};
  StatusArguments status_;
  ListArguments list_;
  InspectArguments inspect_;
  PlanArguments plan_;
  VerifyArguments verify_;
  RestoreArguments restore_;
  WhereArguments where_;
  ExplainArguments explain_;
  TimelineArguments timeline_;
  TopArguments top_;
  EventsArguments events_;
  BackupArguments backup_;
  RestoreBackupArguments restore_backup_;
  ExportArguments export_;
  StatsArguments stats_;
  DiffArguments diff_;
  GarbageArguments garbage_;
  PinArguments pin_;
  FabricArguments fabric_;
  ReplaceArguments replace_;
  DrainArguments drain_;
  PinArguments unpin_;
  RebuildArguments rebuild_;
  SetArguments set_;
  RemoveArguments remove_;
  DoctorArguments doctor_;
  CapacityArguments capacity_;
  CompletionArguments completion_;
  ManualArguments manual_;
  CompleteNamesArguments names_;
  std::function<ExitCode()> run_;
};

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  holdfast::OpenStandardDescriptors();
  holdfast::Arguments arguments;
  const int exit_code = arguments.Run(argc, argv);
  std::cout.flush();
  if (const absl::Status written = holdfast::FinishStandardOutput(); !written.ok()) {
    std::cerr << "ckptctl: " << holdfast::Message(written) << "\n";
    return static_cast<int>(holdfast::ExitCode::kRefused);
  }
  return exit_code;
}
