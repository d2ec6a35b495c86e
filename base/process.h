// Who a process is and whether it still lives, race-free: a pidfd, confirmed by start time.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/unique_fd.h"

namespace holdfast {

// NotFound when there is no such process (a zombie counts as gone: its memory is).
absl::StatusOr<ProcessId> IdentifyProcess(int32_t pid);
ProcessId ThisProcess();
// A pidfd that turns readable when exactly this process ends; NotFound when it already has.
absl::StatusOr<UniqueFd> OpenPidfd(const ProcessId& process);
// Text of /proc/sys/kernel/random/boot_id: process ids and tmpfs contents mean nothing under
// another one.
std::string BootId();

}  // namespace holdfast
