// ckptctl's command line: which commands and options there are, what their help says, and what each
// runs. What the commands do is in their own files.
//
//   return Arguments().Run(argc, argv);
//
// Every command has one method that defines it: Add…, in arguments_look.cc, arguments_copies.cc,
// arguments_change.cc and arguments_tools.cc; what all have in common is in arguments.cc.
#pragma once

#include <unistd.h>
#include <CLI/CLI.hpp>

#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "ckptctl/capacity_arguments.h"
#include "ckptctl/commands.h"

namespace holdfast {

// What `"$UNSET"` becomes is none of "the default".
std::string NotEmpty(const std::string& text);

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
  Arguments();
  int Run(int argc, char** argv);

 private:
  std::vector<std::string> CommandNames() const;
  bool IsCommand(const std::string& word) const;
  int Usage(const std::string& what);
  absl::Status CheckPlace(const CLI::App& command) const;
  void AddJson(CLI::App& command);
  void AddConnection(CLI::App& command);
  void SetTimeout(const std::string& text);
  CLI::App* AddCommand(const std::string& name, const std::string& about,
                       const std::string& example, std::function<ExitCode()> run);
  // One that asks no daemon.
  CLI::App* AddOwnCommand(const std::string& name, const std::string& about,
                          const std::string& example, std::function<ExitCode()> run);
  static CLI::Option* AddJob(CLI::App* command, std::string& job, const std::string& about);
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
                              const std::string& about);
  static CLI::Option* AddAttempt(CLI::App* command, Attempt& attempt);
  static CLI::Option* AddOwner(CLI::App* command, std::optional<OwnerArgument>& owner,
                               const std::string& about);
  static CLI::Option* AddTier(CLI::App* command, std::string& tier, const std::string& about,
                              const std::vector<std::string>& tiers = {"memory", "nvme", "remote"});
  // From now on Ctrl-C is the command's to see to.
  void WatchInterrupts();
  void AddStatus();
  void AddJobs();
  void AddNodes();
  void AddFabric();
  void AddList();
  void AddInspect();
  void AddVerify();
  void AddScrub();
  void AddRepair();
  void AddRestore();
  void AddWhere();
  void AddExplain();
  void AddPlan();
  static void AddRates(CLI::App* command, PlanRates& target, const std::string& about);
  void AddTimeline();
  void AddTop();
  void AddEvents();
  // Of a command that reads what was saved itself.
  void AddStepToRead(CLI::App* command, StepArguments& step);
  static void AddClientSocket(CLI::App* command, std::string& client_socket);
  static void AddOnly(CLI::App* command, std::vector<std::string>& only, const std::string& about);
  void AddExport();
  static void AddTensorPattern(CLI::App* command, std::string& pattern);
  void AddStats();
  void AddDiff();
  // "900" or "900@2".
  static void AddStepName(CLI::App* command, const std::string& name, StepArguments& step,
                          const std::string& about);
  static void AddSteps(CLI::App* command, std::vector<Step>& steps, const std::string& about);
  void AddBackup();
  void AddRestoreBackup();
  void AddImport();
  void AddGarbage();
  void AddPin(PinArguments& pin, const std::string& name, const std::string& about);
  void AddDrain();
  void AddReplace();
  void AddRemove();
  void AddForgetDrive();
  void AddAdoptRemote();
  void AddRebuild();
  void AddSet();
  // Words are wrong arguments, found before the daemon is asked.
  void CheckSet();
  void AddDoctor();
  void AddPlanCapacity();
  void AddCompletion();
  void AddManual();
  // What completion scripts ask; hidden.
  void AddCompleteNames();

  CLI::App app_;
  Context context_{.out = &std::cout,
                   .err = &std::cerr,
                   .progress = ::isatty(STDERR_FILENO) == 1,
                   .screen = ::isatty(STDOUT_FILENO) == 1};
  StatusArguments status_;
  ListArguments list_;
  InspectArguments inspect_;
  PlanArguments plan_;
  VerifyArguments verify_;
  ScrubArguments scrub_;
  RepairArguments repair_;
  RestoreArguments restore_;
  WhereArguments where_;
  ExplainArguments explain_;
  TimelineArguments timeline_;
  TopArguments top_;
  EventsArguments events_;
  BackupArguments backup_;
  RestoreBackupArguments restore_backup_;
  ImportArguments import_;
  ExportArguments export_;
  StatsArguments stats_;
  DiffArguments diff_;
  GarbageArguments garbage_;
  PinArguments pin_;
  FabricArguments fabric_;
  ReplaceArguments replace_;
  DrainArguments drain_;
  PinArguments unpin_;
  ForgetDriveArguments forget_drive_;
  AdoptRemoteArguments adopt_remote_;
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

}  // namespace holdfast
