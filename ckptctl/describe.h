// ckptctl's definition of its arguments (CLI11) as data.
#pragma once

#include <string>

#include "ckptctl/cli_model.h"

namespace CLI {
class App;
}

namespace holdfast {

// Without what is hidden: commands of an empty group.
CliModel Describe(const CLI::App& app, const std::string& version);

}  // namespace holdfast
