// Shell completion: a script for each shell, made from the command line as data. Names of jobs and
// nodes the script asks the daemon for when it is used (`ckptctl complete-names jobs`).
//
//   out << CompletionScript(model, "bash");
//
// Pure and thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "ckptctl/cli_model.h"

namespace holdfast {

// "bash", "zsh" or "fish"; empty for another one.
std::string CompletionScript(const CliModel& model, std::string_view shell);

}  // namespace holdfast
