// A command line as data: what shell completion and manual pages are made from. describe.h makes it
// from ckptctl's own definition; ReadHelp from what another program prints with --help.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace holdfast {

struct CliOption {
  std::vector<std::string> names;   // "-h", "--help"; empty: it is told by its place
  std::string value;                // how its value is called: "PATH"; empty: a flag
  std::vector<std::string> values;  // the only ones that there are; empty: any
  std::string about;
  std::string group;  // its title in the help
  bool required = false;
  bool many = false;  // may be told several times
};

struct CliCommand {
  std::string name;
  std::string about;
  std::string footer;
  std::vector<CliOption> options;  // those told by their place first, in order
};

struct CliModel {
  std::string program;
  std::string version;
  std::string about;
  std::string footer;
  std::vector<CliOption> options;
  std::vector<CliCommand> commands;
};

// From the text of `program --help`, of a program without commands. What it does not understand it
// leaves out.
CliModel ReadHelp(const std::string& program, const std::string& version, std::string_view help);

}  // namespace holdfast
