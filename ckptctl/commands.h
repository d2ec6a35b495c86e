// ckptctl's commands: each takes what was asked for, prints its answer, and returns the program's
// exit code. main.cc parses arguments into these; tests call them against a daemon of their own.
//
//   Context context{.out = &std::cout, .err = &std::cerr, …};
//   return static_cast<int>(RunStatus(context, {.job = "llama"}));
//
// With context.json each prints exactly one line on `out`, a JSON object, also when it fails:
// {"error": …}. Errors for people go to `err`. Not thread-safe: one command at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/ids.h"
#include "ckptctl/admin_client.h"
#include "ckptctl/plan_time.h"

namespace holdfast {

struct CapacityArguments;
struct CliModel;

enum class ExitCode {
  kOk = 0,
  kDamaged = 1,  // something is wrong with the checkpoints, or will not work
  kUsage = 2,
  kUnreachable = 3,  // the daemon is not there, or does not answer
  kRefused = 4,      // not found, not allowed, or failed otherwise
  kInterrupted = 130,
};

struct Context {
  std::ostream* out = nullptr;
  std::ostream* err = nullptr;
  bool json = false;
  bool progress = false;  // err is a terminal: progress bars make sense
  bool screen = false;    // out is a terminal: what goes on may be drawn over itself
  std::string command;    // its name, for what is said while it is under way
  std::string socket;     // as said; so are these (FindAdminPlace)
  std::string address;
  std::string tls;
  Duration timeout = std::chrono::seconds(10);
  Clock* clock = Clock::System();
  const std::atomic<bool>* interrupted = nullptr;  // set by SIGINT and SIGTERM; may be null
};

struct StatusArguments {
  std::string job;  // empty: all
};
struct ListArguments {
  std::string job;
};
struct InspectArguments {
  std::string job;
  std::optional<Step> step;  // none: the newest committed
  Attempt attempt = 0;       // 0: on the line of descent
  Rank rank = 0;
  bool all_slices = false;
};
struct VerifyArguments {
  std::string job;  // empty: every job
  std::optional<Step> step;
  Attempt attempt = 0;
  bool all = false;
  std::string tier;  // empty: wherever copies lie
};
struct ScrubArguments {
  std::string job;         // empty: every job
  std::string tier;        // empty: wherever copies lie
  uint64_t bandwidth = 0;  // bytes a second; 0: as fast as it can
  bool no_repair = false;
  bool status = false;  // how far the background scrub is, and nothing else
};
struct RepairArguments {
  std::string job;           // empty: every job
  std::optional<Step> step;  // none: all
  Attempt attempt = 0;
  std::string tier;  // empty: both
  std::optional<Rank> rank;
};
struct WhereArguments {
  std::string job;
  std::optional<Step> step;  // none: all of them
  Attempt attempt = 0;
};
struct ExplainArguments {
  std::string job;
  std::optional<Step> step;  // none: all of them
  Attempt attempt = 0;
};
struct PlanArguments {
  std::string job;
  std::optional<Step> step;  // none: the newest committed
  Attempt attempt = 0;
  std::string layout_file;
  bool all_ranks = false;
  PlanRates rates;
  std::optional<uint32_t> ranks_per_node;  // none: kRanksPerNodeAssumed
};
struct TimelineArguments {
  std::string job;
  uint32_t steps_max = 0;  // 0: all that are remembered
  std::string trace;       // a file to write Chrome's trace format to; empty: none
};
inline constexpr Duration kTopEveryMin = std::chrono::milliseconds(100);
struct TopArguments {
  std::string job;  // empty: all
  Duration every = std::chrono::seconds(2);
  uint64_t frames_max = 0;  // 0: until it is interrupted
};
struct EventsArguments {
  std::string job;  // empty: all, and the node's own
  bool follow = false;
  std::string least = "info";
  std::optional<Duration> since;  // none: all that is kept
};
struct GarbageArguments {
  std::string job;  // empty: all
  bool dry_run = false;
};
struct PinArguments {
  std::string job;
  Step step = 0;
  Attempt attempt = 0;
  bool unpin = false;
};
struct FabricArguments {
  std::string node;  // to measure; empty: only what there is
};
struct ReplaceArguments {
  std::string node;
  std::string with;
  bool forget = false;
  std::string job;  // empty: all
};
struct DrainArguments {
  std::string node;  // empty: the daemon's own
  bool undo = false;
  std::optional<Duration> wait;  // none: until nothing would be lost
};
// Of what commands that read what was saved themselves.
struct StepArguments {
  std::string job;
  std::optional<Step> step;   // none: the newest committed
  Attempt attempt = 0;        // 0: on the line of descent
  std::string client_socket;  // empty: FindClientSocket finds it
};
inline constexpr uint64_t kExportFileBytes = 5'000'000'000;  // as model hubs have it
struct ExportArguments {
  StepArguments step;
  std::string directory;
  std::vector<std::string> only;  // keys of the state; empty: everything
  std::optional<Rank> rank;       // of what is single ranks' own: that one's
  uint64_t file_bytes_max = kExportFileBytes;
};
struct StatsArguments {
  StepArguments step;
  std::vector<std::string> only;  // keys of the state; empty: everything
  std::string tensor;             // a pattern; empty: all
};
struct DiffArguments {
  StepArguments a;
  StepArguments b;
  std::vector<std::string> only;
  std::string tensor;
};
struct BackupArguments {
  std::string job;
  std::string directory;
  std::vector<Step> steps;    // empty: all of them
  std::string client_socket;  // empty: FindClientSocket finds it
};
struct OwnerArgument {
  uint32_t uid = 0;
  uint32_t gid = 0;
};
struct RestoreBackupArguments {
  std::string directory;
  std::string job;
  std::string to;
  std::vector<Step> steps;             // empty: all of them
  std::optional<OwnerArgument> owner;  // none: as in the backup
};
struct ImportArguments {
  std::string job;
  std::string source;
  Step step = 0;
  std::string key;               // empty: as the package has it
  std::string only;              // empty: everything
  std::string client_socket;     // empty: as in a training process
  std::optional<Duration> wait;  // for the tiers; none: no limit
};
struct ForgetDriveArguments {
  std::string id;
  bool yes = false;
};
struct AdoptRemoteArguments {
  std::string id;  // of the cluster that has the directory, or of the directory that was noted
  bool yes = false;
};
struct RebuildArguments {
  std::string tier;                    // empty: all
  std::string job;                     // empty: of no job in particular
  std::optional<OwnerArgument> owner;  // whose that job is
};
struct SetArguments {
  // As on the command line: a job (or none: the daemon itself), then name=value.
  std::vector<std::string> words;
  bool clear = false;
};
struct RestoreArguments {
  std::string job;
  std::optional<Step> step;
  Attempt attempt = 0;
  bool from_scratch = false;
  bool yes = false;  // with from_scratch
  bool clear = false;
};
struct RemoveArguments {
  std::string job;
  bool yes = false;          // of a whole job
  std::optional<Step> step;  // none: the whole job
  Attempt attempt = 0;
  std::string tier;  // of a step: empty: everywhere
  bool force = false;
};
struct DoctorArguments {
  std::string config;  // empty: /etc/holdfast/ckptd.yaml if there is one
};

struct CompletionArguments {
  std::string shell;
};
struct CompleteNamesArguments {
  std::string what;  // jobs, nodes
};
struct ManualArguments {
  std::string page;  // ckptctl (or empty), ckptd
};

ExitCode RunStatus(const Context& context, const StatusArguments& arguments);
ExitCode RunJobs(const Context& context);
ExitCode RunNodes(const Context& context);
ExitCode RunList(const Context& context, const ListArguments& arguments);
ExitCode RunInspect(const Context& context, const InspectArguments& arguments);
ExitCode RunVerify(const Context& context, const VerifyArguments& arguments);
ExitCode RunScrub(const Context& context, const ScrubArguments& arguments);
ExitCode RunRepair(const Context& context, const RepairArguments& arguments);
ExitCode RunWhere(const Context& context, const WhereArguments& arguments);
ExitCode RunExplain(const Context& context, const ExplainArguments& arguments);
ExitCode RunPlan(const Context& context, const PlanArguments& arguments);
ExitCode RunTimeline(const Context& context, const TimelineArguments& arguments);
ExitCode RunTop(const Context& context, const TopArguments& arguments);
ExitCode RunEvents(const Context& context, const EventsArguments& arguments);
ExitCode RunGarbage(const Context& context, const GarbageArguments& arguments);
ExitCode RunPin(const Context& context, const PinArguments& arguments);
ExitCode RunFabric(const Context& context, const FabricArguments& arguments);
ExitCode RunReplace(const Context& context, const ReplaceArguments& arguments);
ExitCode RunDrain(const Context& context, const DrainArguments& arguments);
ExitCode RunExport(const Context& context, const ExportArguments& arguments);
ExitCode RunStats(const Context& context, const StatsArguments& arguments);
ExitCode RunDiff(const Context& context, const DiffArguments& arguments);
ExitCode RunBackup(const Context& context, const BackupArguments& arguments);
ExitCode RunRestoreBackup(const Context& context, const RestoreBackupArguments& arguments);
// Returns only what went wrong before the Python package took over.
ExitCode RunImport(const Context& context, const ImportArguments& arguments);
ExitCode RunForgetDrive(const Context& context, const ForgetDriveArguments& arguments);
ExitCode RunAdoptRemote(const Context& context, const AdoptRemoteArguments& arguments);
ExitCode RunRebuild(const Context& context, const RebuildArguments& arguments);
ExitCode RunSet(const Context& context, const SetArguments& arguments);
ExitCode RunRestore(const Context& context, const RestoreArguments& arguments);
ExitCode RunRemove(const Context& context, const RemoveArguments& arguments);
ExitCode RunDoctor(const Context& context, const DoctorArguments& arguments);
ExitCode RunPlanCapacity(const Context& context, const CapacityArguments& arguments);
ExitCode RunCompletion(const Context& context, const CompletionArguments& arguments,
                       const CliModel& model);
// ckptd's page is made from what `ckptd --help` prints, which it reads from `in`.
ExitCode RunManual(const Context& context, const ManualArguments& arguments, const CliModel& model,
                   std::istream& in);
// One name a line, for a shell: only words that are harmless there; none when nobody answers.
ExitCode RunCompleteNames(const Context& context, const CompleteNamesArguments& arguments);

// Says on `err` (and as JSON) what went wrong, and gives its exit code.
ExitCode ReportError(const Context& context, const absl::Status& status);
// Likewise of wrong arguments; `command` (may be empty) has the help.
ExitCode ReportUsage(const Context& context, const absl::Status& status,
                     const std::string& command);

absl::StatusOr<std::unique_ptr<AdminClient>> ConnectAdmin(const Context& context);
// That one, or all that the caller may see.
absl::StatusOr<std::vector<std::string>> JobsOf(AdminClient& client, const std::string& job);

}  // namespace holdfast
