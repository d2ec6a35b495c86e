// Commands: what asks no daemon, or looks at this machine.
#include "base/status.h"
#include "ckptctl/arguments.h"
#include "ckptctl/describe.h"

namespace holdfast {

void Arguments::AddDoctor() {
  CLI::App* command = AddCommand(
      "doctor", "What will not work or will be slow on this machine, and the command that mends it",
      "ckptctl doctor", [this] { return RunDoctor(context_, doctor_); });
  command
      ->add_option("--config", doctor_.config,
                   "ckptd's settings (default: those of the ckptd that runs, else "
                   "/etc/holdfast/ckptd.yaml if there is one; for users "
                   "their own, ~/.config/holdfast/ckptd.yaml, before it)")
      ->type_name("PATH")
      ->check(NotEmpty);
}

void Arguments::AddPlanCapacity() {
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

void Arguments::AddCompletion() {
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

void Arguments::AddManual() {
  CLI::App* command = AddOwnCommand(
      "man", "The manual page ckptctl(1); or ckptd(8) from what ckptd --help prints", "ckptctl man",
      [this] { return RunManual(context_, manual_, Describe(app_, HOLDFAST_VERSION), std::cin); });
  command->add_option("PAGE", manual_.page, "Of which program (default ckptctl)")
      ->type_name("PAGE")
      ->check(CLI::IsMember({"ckptctl", "ckptd"}));
}

void Arguments::AddCompleteNames() {
  CLI::App* command = app_.add_subcommand("complete-names", "Names for a completion script");
  command->group("");
  command->callback([this] { run_ = [this] { return RunCompleteNames(context_, names_); }; });
  AddConnection(*command);
  command->add_option("WHAT", names_.what)->required()->check(CLI::IsMember({"jobs", "nodes"}));
}

}  // namespace holdfast
