// The Python package that `ckptctl import` runs.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "base/clock.h"

namespace holdfast {

// Whether `python` can be run, and has the package holdfast; else why not, and what to do. What has
// not answered within that time is killed, and waited for.
absl::Status CheckPythonPackage(const std::string& python, Duration answers_within);

}  // namespace holdfast
