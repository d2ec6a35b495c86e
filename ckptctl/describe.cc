#include "ckptctl/describe.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_split.h"

namespace holdfast {
namespace {

// "TIER:{memory,nvme,remote}": a value's name, then what its checks say of themselves.
void ReadType(const std::string& type, CliOption& option) {
  const size_t colon = type.find(':');
  option.value = type.substr(0, colon);
  const size_t open = type.find('{');
  const size_t close = type.find('}');
  if (colon != std::string::npos && open != std::string::npos && close != std::string::npos &&
      open < close) {
    option.values = absl::StrSplit(type.substr(open + 1, close - open - 1), ',');
  }
}

CliOption DescribeOption(const CLI::Option& from) {
  CliOption option;
  for (const std::string& name : from.get_snames()) {
    option.names.push_back("-" + name);
  }
  for (const std::string& name : from.get_lnames()) {
    option.names.push_back("--" + name);
  }
  if (from.get_items_expected_max() > 0) {
    ReadType(from.get_type_name(), option);
  }
  if (option.names.empty()) {
    option.value = from.get_single_name();
  }
  option.about = from.get_description();
  option.group = from.get_group();
  option.required = from.get_required();
  option.many = from.get_items_expected_max() > 1 ||
                from.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  return option;
}

void AddOptions(const CLI::App& app, std::vector<CliOption>& options) {
  for (const CLI::Option* option : app.get_options()) {
    options.push_back(DescribeOption(*option));
  }
  // Of which one of several is wanted: groups of options are nameless commands to CLI11.
  for (const CLI::App* group : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (group->get_name().empty()) {
      AddOptions(*group, options);
    }
  }
  std::stable_partition(options.begin(), options.end(),
                        [](const CliOption& option) { return option.names.empty(); });
}

}  // namespace

CliModel Describe(const CLI::App& app, const std::string& version) {
  CliModel model{.program = app.get_name(),
                 .version = version,
                 .about = app.get_description(),
                 .footer = app.get_footer()};
  AddOptions(app, model.options);
  for (const CLI::App* from : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (from->get_group().empty() || from->get_name().empty()) {
      continue;
    }
    CliCommand& command = model.commands.emplace_back();
    command.name = from->get_name();
    command.about = from->get_description();
    command.footer = from->get_footer();
    AddOptions(*from, command.options);
  }
  return model;
}

}  // namespace holdfast
