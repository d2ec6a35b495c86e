// Manual pages, in the man(7) macros, made from command lines as data.
//
//   out << CkptctlManual(model);                         // ckptctl(1)
//   out << CkptdManual(ReadHelp("ckptd", "0.1.0", help));  // ckptd(8)
//
// Pure and thread-safe.
#pragma once

#include <string>

#include "ckptctl/cli_model.h"

namespace holdfast {

std::string CkptctlManual(const CliModel& model);
std::string CkptdManual(const CliModel& model);

}  // namespace holdfast
