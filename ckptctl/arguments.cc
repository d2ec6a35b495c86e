// What all commands have in common, and what becomes of a command line.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <new>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/program.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/arguments.h"
#include "ckptctl/describe.h"
#include "ckptctl/sockets.h"
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
    "  1    something is wrong: verify found damage, scrub or repair left some, a record cannot be "
    "read, export, stats, "
    "diff, backup or restore-backup found no good copy, doctor found what will not work, plan what "
    "cannot be restored so, "
    "plan-capacity what does not fit\n"
    "  2    wrong arguments\n"
    "  3    ckptd is not reachable, or does not answer in time\n"
    "  4    refused, not found, or failed otherwise\n"
    "  130  interrupted";

}  // namespace

std::string NotEmpty(const std::string& text) {
  return text.empty() ? "is empty; give a value, or leave it out" : "";
}

Arguments::Arguments() : app_(kAbout, "ckptctl") {
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
  AddScrub();
  AddRepair();
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
  AddImport();
  AddGarbage();
  AddPin(pin_, "pin", "Keeps a step: no retention removes it, however old it gets");
  AddPin(unpin_, "unpin", "Takes a pin back: retention decides about the step again");
  AddReplace();
  AddDrain();
  AddRemove();
  AddForgetDrive();
  AddAdoptRemote();
  AddRebuild();
  AddSet();
  AddDoctor();
  AddPlanCapacity();
  AddCompletion();
  AddManual();
  AddCompleteNames();
}

int Arguments::Run(int argc, char** argv) {
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
    return static_cast<int>(ReportError(
        context_,
        absl::ResourceExhaustedError("out of memory; raise the limit (ulimit -v), or free some")));
  } catch (const std::system_error& error) {
    return static_cast<int>(ReportError(context_, ThreadError(error, "of ckptctl")));
  }
}

std::vector<std::string> Arguments::CommandNames() const {
  std::vector<std::string> names;
  for (const CliCommand& command : Describe(app_, HOLDFAST_VERSION).commands) {
    names.push_back(command.name);
  }
  return names;
}

bool Arguments::IsCommand(const std::string& word) const {
  return !app_.get_subcommands([&](const CLI::App* a) { return a->get_name() == word; }).empty();
}

int Arguments::Usage(const std::string& what) {
  const auto chosen = app_.get_subcommands();
  return static_cast<int>(ReportUsage(context_, absl::InvalidArgumentError(what),
                                      chosen.empty() ? "" : chosen.front()->get_name()));
}

absl::Status Arguments::CheckPlace(const CLI::App& command) const {
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

void Arguments::AddJson(CLI::App& command) {
  command
      .add_flag("--json", context_.json, "Answer with one JSON object (fields: docs/ckptctl.md)")
      ->group(kCommonOptions);
}

void Arguments::AddConnection(CLI::App& command) {
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

void Arguments::SetTimeout(const std::string& text) {
  const auto timeout = ParseDuration(text);
  if (!timeout.ok() || *timeout < std::chrono::milliseconds(1) ||
      *timeout > std::chrono::hours(24)) {
    throw CLI::ValidationError("--timeout",
                               "'" + text + "' is not a time between 1ms and 24h (10s, 2min)");
  }
  context_.timeout = *timeout;
}

CLI::App* Arguments::AddCommand(const std::string& name, const std::string& about,
                                const std::string& example, std::function<ExitCode()> run) {
  CLI::App* command = AddOwnCommand(name, about, example, std::move(run));
  AddConnection(*command);
  return command;
}

CLI::App* Arguments::AddOwnCommand(const std::string& name, const std::string& about,
                                   const std::string& example, std::function<ExitCode()> run) {
  CLI::App* command = app_.add_subcommand(name, about);
  command->footer("Example:\n  " + example);
  command->callback([this, run = std::move(run)] { run_ = run; });
  AddJson(*command);
  return command;
}

CLI::Option* Arguments::AddJob(CLI::App* command, std::string& job, const std::string& about) {
  return command->add_option("JOB", job, about)->type_name("")->check([](const std::string& name) {
    return Message(CheckJobName(name));
  });
}

CLI::Option* Arguments::AddStep(CLI::App* command, std::optional<Step>& step,
                                const std::string& about) {
  return AddNumber<Step>(command, "--step", "N", step, about);
}

CLI::Option* Arguments::AddAttempt(CLI::App* command, Attempt& attempt) {
  return AddNumber<Attempt>(command, "--attempt", "A", attempt,
                            "Of this attempt (default: on the line of descent)");
}

CLI::Option* Arguments::AddTier(CLI::App* command, std::string& tier, const std::string& about,
                                const std::vector<std::string>& tiers) {
  return command->add_option("--tier", tier, about)->type_name("TIER")->check(CLI::IsMember(tiers));
}

void Arguments::WatchInterrupts() {
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  // A terminal that ends sends it more than once, nohup has it ignored.
  struct sigaction before {};
  if (::sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) {
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGHUP, &action, nullptr);
  }
  context_.interrupted = &interrupted;
}

}  // namespace holdfast
