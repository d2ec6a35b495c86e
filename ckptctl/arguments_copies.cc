// Commands: copies: read, checked, mended, written out.
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/units.h"
#include "ckptctl/arguments.h"

namespace holdfast {
namespace {

constexpr char kOnlyTensors[] =
    "Only tensors under this key of the state; may be given again (default: all)";

// As chown takes it: by the number after the last one it leaves a file whose it is.
constexpr uint32_t kOwnerMax = std::numeric_limits<uint32_t>::max() - 1;

OwnerArgument ParseOwner(const std::string& text) {
  OwnerArgument owner;
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &owner.uid) ||
      !absl::SimpleAtoi(parts[1], &owner.gid) || owner.uid > kOwnerMax || owner.gid > kOwnerMax) {
    throw CLI::ValidationError(
        "--owner",
        absl::StrCat("'", text, "' is not UID:GID (1001:100), two numbers of at most ", kOwnerMax));
  }
  return owner;
}

}  // namespace

CLI::Option* Arguments::AddOwner(CLI::App* command, std::optional<OwnerArgument>& owner,
                                 const std::string& about) {
  return command
      ->add_option_function<std::string>(
          "--owner", [&owner](const std::string& text) { owner = ParseOwner(text); }, about)
      ->type_name("UID:GID");
}

void Arguments::AddVerify() {
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

void Arguments::AddScrub() {
  CLI::App* command = AddCommand(
      "scrub",
      "Reads every copy again, wherever it lies, and writes bad ones anew from good ones; Ctrl-C "
      "stops it",
      "ckptctl scrub llama-7b --bandwidth 200MiB", [this] {
        WatchInterrupts();
        return RunScrub(context_, scrub_);
      });
  CLI::Option* job = AddJob(command, scrub_.job, "Only this job (default: all of yours)");
  CLI::Option* tier =
      AddTier(command, scrub_.tier, "Only copies in this tier (default: wherever they lie)");
  CLI::Option* bandwidth =
      command
          ->add_option_function<std::string>(
              "--bandwidth",
              [this](const std::string& text) {
                const auto bytes = ParseBytes(text);
                if (!bytes.ok() || *bytes == 0) {
                  throw CLI::ValidationError("--bandwidth",
                                             "'" + text + "' is not a size (200MiB)");
                }
                scrub_.bandwidth = *bytes;
              },
              "Read so much a second on each node at most (default: as fast as it can)")
          ->type_name("SIZE");
  CLI::Option* no_repair =
      command->add_flag("--no-repair", scrub_.no_repair,
                        "Leave what is bad as it is, until `ckptctl repair` names it");
  CLI::Option* status = command->add_flag(
      "--status", scrub_.status, "Show how far the daemon's own scrub is, and read nothing");
  for (CLI::Option* other : {job, tier, bandwidth, no_repair}) {
    status->excludes(other);
  }
}

void Arguments::AddRepair() {
  CLI::App* command = AddCommand(
      "repair",
      "Writes copies that are known to be bad anew from good ones, and says what mended each, or "
      "why nothing can; Ctrl-C stops the waiting",
      "ckptctl repair llama-7b --tier nvme", [this] {
        WatchInterrupts();
        return RunRepair(context_, repair_);
      });
  CLI::Option* job = AddJob(command, repair_.job, "Only this job (default: all of yours)");
  CLI::Option* step = AddStep(command, repair_.step, "Only this step (default: all)")->needs(job);
  AddAttempt(command, repair_.attempt)->needs(step);
  AddTier(command, repair_.tier, "Only copies in this tier (default: both)", {"nvme", "remote"});
  AddNumber<Rank>(command, "--rank", "R", repair_.rank, "Only of this rank (default: of all)");
}

void Arguments::AddStepToRead(CLI::App* command, StepArguments& step) {
  AddJob(command, step.job, "The job")->required();
  CLI::Option* number = AddStep(command, step.step, "This step (default: the newest committed)");
  AddAttempt(command, step.attempt)->needs(number);
  AddClientSocket(command, step.client_socket);
}

void Arguments::AddClientSocket(CLI::App* command, std::string& client_socket) {
  command
      ->add_option("--client-socket", client_socket,
                   "ckptd's socket for training processes, through which it is read (default: "
                   "ckptd.sock beside the admin socket; without --socket $HOLDFAST_SOCKET before "
                   "that)")
      ->type_name("PATH")
      ->check(NotEmpty);
}

void Arguments::AddOnly(CLI::App* command, std::vector<std::string>& only,
                        const std::string& about) {
  command->add_option("--only", only, about)
      ->type_name("KEY")
      ->expected(1)
      ->take_all()
      ->check(NotEmpty);
}

void Arguments::AddExport() {
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

void Arguments::AddTensorPattern(CLI::App* command, std::string& pattern) {
  command
      ->add_option("--tensor", pattern,
                   "Only tensors whose whole name fits: * stands for any characters, ? for one "
                   "('*.norm.weight')")
      ->type_name("PATTERN")
      ->check(NotEmpty);
}

void Arguments::AddStats() {
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

void Arguments::AddDiff() {
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

void Arguments::AddStepName(CLI::App* command, const std::string& name, StepArguments& step,
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

void Arguments::AddSteps(CLI::App* command, std::vector<Step>& steps, const std::string& about) {
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

void Arguments::AddBackup() {
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

void Arguments::AddRestoreBackup() {
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
  AddSteps(command, restore_backup_.steps, "This step; may be given again (default: all of them)");
  AddOwner(command, restore_backup_.owner,
           "The job is this user's and this group's there (default: as in the backup)");
}

void Arguments::AddImport() {
  CLI::App* command = AddOwnCommand(
      "import",
      "Makes weights that something else has saved the first step of a new job; runs the Python "
      "package: $HOLDFAST_PYTHON, or python3, with -m holdfast import",
      "ckptctl import llama-7b consolidated.00.pth --step 0",
      [this] { return RunImport(context_, import_); });
  AddJob(command, import_.job, "The job, which must not have saved anything yet")->required();
  command
      ->add_option("SOURCE", import_.source,
                   "A file of torch.save, a directory of torch.distributed.checkpoint, a "
                   "safetensors file, or a directory of such")
      ->type_name("")
      ->required()
      ->check(NotEmpty);
  AddNumber<Step>(command, "--step", "N", import_.step, "The step that they are of")->required();
  command
      ->add_option("--key", import_.key,
                   "The key of the state under which a run restores them (default model)")
      ->type_name("KEY")
      ->check(NotEmpty);
  command->add_option("--only", import_.only, "Only what is called PREFIX.…, without the prefix")
      ->type_name("PREFIX")
      ->check(NotEmpty);
  command
      ->add_option("--client-socket", import_.client_socket,
                   "ckptd's socket for training processes (default: as in one)")
      ->type_name("PATH")
      ->check(NotEmpty);
  command
      ->add_option_function<std::string>(
          "--wait",
          [this](const std::string& text) {
            const auto wait = ParseDuration(text);
            if (!wait.ok()) {
              throw CLI::ValidationError("--wait", std::string(wait.status().message()));
            }
            import_.wait = *wait;
          },
          "Wait for the tiers for so long at most (default: as long as it takes)")
      ->type_name("TIME");
}

}  // namespace holdfast
