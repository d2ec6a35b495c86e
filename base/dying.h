// Processes that were killed and are not gone, because a thread of theirs hangs in a call that no
// signal ends: on a mount whose server is gone, on a drive that does not answer.
//
// Such a process never runs an instruction of its own again. But until the call returns the kernel
// keeps its locks, its sockets and its memory, and the call may still read and write that memory.
//
//   if (const std::optional<ProcessId> dying = FindDying(4711)) …
//
// Plain functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"

namespace holdfast {

// What the kernel says of one thread, as proc(5) has it.
struct ThreadFacts {
  char state = '?';      // of /proc/<pid>/task/<tid>/stat
  uint64_t flags = 0;    // likewise: PF_…
  uint64_t pending = 0;  // SigPnd of /proc/<pid>/task/<tid>/status: bit n-1 is signal n
};

// From the texts of the two files.
absl::StatusOr<ThreadFacts> ParseThreadFacts(const std::string& stat, const std::string& status);

// Whether no thread of a process will run again: each is dead, is exiting, or has a SIGKILL that it
// takes when its call returns. False where one is merely stopped, slow, or hangs and was not
// killed; and where there is none.
bool NeverRunsAgain(const std::vector<ThreadFacts>& threads);

// The process of that number, if it is dying. Nothing if it is gone, may run again, or cannot be
// looked at.
std::optional<ProcessId> FindDying(int32_t pid);

// Likewise, and only if that process holds the flock(2) of the file that has this number on its
// file system. A number that was read from a file may be another process here: of another
// namespace of pids, or one that got it later.
std::optional<ProcessId> FindDyingHolder(int32_t pid, uint64_t inode);

// Whether the kernel's list of locks (/proc/locks) has that one.
bool HasFlock(const std::string& locks, int32_t pid, uint64_t inode);

}  // namespace holdfast
