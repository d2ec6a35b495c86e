// What a program sees to before it does anything else: standard descriptors that exist, and
// whether it can have the threads that it is about to start. Libraries that cannot get one abort or
// wait for ever, so it is asked beforehand.
//
//   OpenStandardDescriptors();
//   HF_RETURN_IF_ERROR(CheckThreads(16));
//
// Plain functions. OpenStandardDescriptors: before threads; the others: any thread.
#pragma once

#include <string>
#include <system_error>

#include "absl/status/status.h"

namespace holdfast {

// Opens /dev/null as 0, 1 and 2 where they are closed: else the first socket becomes stderr.
void OpenStandardDescriptors();

// Starts `count` threads at once and ends them again. ResourceExhausted, with the way out, when one
// of them cannot be started.
absl::Status CheckThreads(int count);

// What std::thread threw, as a status: "start a thread (for `what`): …", with the way out.
absl::Status ThreadError(const std::system_error& error, const std::string& what);

}  // namespace holdfast
