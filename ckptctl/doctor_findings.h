// What the parts of doctor share: how they add what they found, and read what the kernel tells.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "ckptctl/doctor.h"

namespace holdfast {

using Findings = std::vector<Finding>;

inline void Add(Findings& findings, std::string_view check, Verdict verdict, std::string text,
                std::string mend = "") {
  findings.push_back({std::string(check), verdict, std::move(text), std::move(mend)});
}

// Empty where there is no such file.
inline std::string KernelText(const std::string& path) {
  return ReadKernelFile(path).value_or("");
}

}  // namespace holdfast
