// What a program sees to before it does anything else: standard descriptors that exist, and
// whether it can have the threads that it is about to start. Libraries that cannot get one abort or
// wait for ever, so it is asked beforehand. And last of all: whether what it has said got anywhere.
//
//   OpenStandardDescriptors();
//   HF_RETURN_IF_ERROR(CheckThreads(16));
//   …
//   HF_RETURN_IF_ERROR(FinishStandardOutput());
//
// Plain functions. OpenStandardDescriptors: before threads; the others: any thread.
#pragma once

#include <string>
#include <system_error>

#include "absl/status/status.h"

namespace holdfast {

// Opens /dev/null as 0, 1 and 2 where they are closed: else the first socket becomes stderr.
void OpenStandardDescriptors();

// Writes what is left of standard output, once all is said. An error, with the cause, when not all
// of it could be written.
absl::Status FinishStandardOutput();

// Starts `count` threads at once and ends them again. ResourceExhausted, with the way out, when one
// of them cannot be started.
absl::Status CheckThreads(int count);

// What std::thread threw, as a status: "start a thread (for `what`): …", with the way out.
absl::Status ThreadError(const std::system_error& error, const std::string& what);

}  // namespace holdfast
