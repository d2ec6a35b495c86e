// Commands: what the daemons are told.
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/arguments.h"
#include "ckptctl/upkeep.h"

namespace holdfast {
namespace {

constexpr size_t kIdDigits = 32;

// Of a drive or a directory, or that many of its first digits at least.
std::function<std::string(const std::string&)> IsId(size_t digits_min) {
  return [digits_min](const std::string& id) -> std::string {
    const bool digits = id.find_first_not_of("0123456789abcdef") == std::string::npos;
    return digits && id.size() >= digits_min && id.size() <= kIdDigits
               ? ""
               : absl::StrCat(
                     "is no id: ", digits_min == kIdDigits ? "" : absl::StrCat(digits_min, " to "),
                     kIdDigits, " hexadecimal digits, as ckptctl status shows them");
  };
}

}  // namespace

void Arguments::AddRestore() {
  CLI::App* command = AddCommand(
      "restore", "Says where the job's next restore begins: an older step, or from scratch",
      "ckptctl restore llama-7b --step 900", [this] { return RunRestore(context_, restore_); });
  AddJob(command, restore_.job, "The job")->required();
  CLI::Option_group* what = command->add_option_group("one of");
  what->require_option(1);
  AddStep(what, restore_.step,
          "At this step; later ones are discarded once the job has restored it");
  what->add_flag("--from-scratch", restore_.from_scratch,
                 "From nothing; what was saved so far goes when its grace time is over");
  what->add_flag("--clear", restore_.clear,
                 "At the newest committed step again, as if nothing had been said");
  AddAttempt(command, restore_.attempt)->needs(what->get_option("--step"));
  command
      ->add_flag("--yes", restore_.yes,
                 "Start over; without this --from-scratch only says what would happen")
      ->needs(what->get_option("--from-scratch"));
}

void Arguments::AddGarbage() {
  CLI::App* command =
      AddCommand("gc",
                 "Removes now what no policy keeps, and says why each of the others stays; never "
                 "what protects a job",
                 "ckptctl gc --dry-run", [this] { return RunGarbage(context_, garbage_); });
  AddJob(command, garbage_.job, "Only this job (default: all of yours)");
  command->add_flag("--dry-run", garbage_.dry_run, "Only say what would go");
}

void Arguments::AddPin(PinArguments& pin, const std::string& name, const std::string& about) {
  pin.unpin = name == "unpin";
  CLI::App* command = AddCommand(name, about, "ckptctl " + name + " llama-7b --step 900",
                                 [this, &pin] { return RunPin(context_, pin); });
  AddJob(command, pin.job, "The job")->required();
  AddNumber<Step>(command, "--step", "N", pin.step, "This step")->required();
  AddAttempt(command, pin.attempt);
}

void Arguments::AddDrain() {
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

void Arguments::AddReplace() {
  CLI::App* command =
      AddCommand("replace",
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

void Arguments::AddRemove() {
  CLI::App* command = AddCommand(
      "rm", "Removes one step, or forgets a job whose processes have ended, with all of them",
      "ckptctl rm old-run --yes", [this] { return RunRemove(context_, remove_); });
  AddJob(command, remove_.job, "The job")->required();
  command->add_flag("--yes", remove_.yes,
                    "Forget the whole job; without this it only says what would be lost");
  CLI::Option* step =
      AddStep(command, remove_.step, "Only this step, at once (default: the whole job)");
  AddAttempt(command, remove_.attempt)->needs(step);
  AddTier(command, remove_.tier, "Only its copies in this tier (default: everywhere)")->needs(step);
  command
      ->add_flag("--force", remove_.force,
                 "Also when something would then survive less than before")
      ->needs(step);
}

void Arguments::AddAdoptRemote() {
  CLI::App* command =
      AddCommand("adopt-remote", "Takes over a remote directory whose cluster is gone for good",
                 "ckptctl adopt-remote 0123456789abcdef0123456789abcdef --yes",
                 [this] { return RunAdoptRemote(context_, adopt_remote_); });
  command
      ->add_option("ID", adopt_remote_.id,
                   "Who has it now: the id that ckptd's refusal names (ckptctl status)")
      ->type_name("")
      ->check(IsId(kIdDigits))
      ->required();
  command->add_flag("--yes", adopt_remote_.yes,
                    "Do it; without this it only says what would happen");
}

void Arguments::AddForgetDrive() {
  CLI::App* command = AddCommand("forget-drive", "Stop waiting for a drive that is lost for good",
                                 "ckptctl forget-drive 3f2a91c0 --yes",
                                 [this] { return RunForgetDrive(context_, forget_drive_); });
  command
      ->add_option("ID", forget_drive_.id,
                   "The drive's id, or its first 8 digits, as ckptctl status shows them")
      ->type_name("")
      ->check(IsId(8))
      ->required();
  command->add_flag("--yes", forget_drive_.yes,
                    "Do it; without this it only says what would happen");
}

void Arguments::AddRebuild() {
  CLI::App* command = AddCommand("rebuild",
                                 "Reads the tiers again and writes the catalog anew; with --owner "
                                 "also a JOB file that is lost",
                                 "ckptctl rebuild --timeout 10min",
                                 [this] { return RunRebuild(context_, rebuild_); });
  CLI::Option* tier =
      AddTier(command, rebuild_.tier, "Only this tier (default: both)", {"nvme", "remote"});
  CLI::Option* job = AddJob(command, rebuild_.job, "The job whose file JOB is lost or damaged");
  CLI::Option* owner = AddOwner(command, rebuild_.owner,
                                "Write the JOB's file JOB again wherever it is lost: the job is "
                                "this user's and this group's");
  owner->needs(job)->excludes(tier);
  job->needs(owner);
}

void Arguments::AddSet() {
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

void Arguments::CheckSet() {
  if (const absl::Status words = CheckSetWords(set_); !words.ok()) {
    throw CLI::ValidationError("set", Message(words));
  }
  run_ = [this] { return RunSet(context_, set_); };
}

}  // namespace holdfast
