#include "base/dying.h"

#include <signal.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/env.h"
#include "base/process.h"
#include "base/status.h"

namespace holdfast {
namespace {

// The kernel's PF_EXITING, which stands in no header for programs and has never changed.
constexpr uint64_t kExiting = 0x4;
// A process that is ending loses threads while one looks.
constexpr int kLooks = 3;

bool RunsNoMore(const ThreadFacts& thread) {
  const bool dead = thread.state == 'Z' || thread.state == 'X' || thread.state == 'x';
  const bool killed = (thread.pending >> (SIGKILL - 1) & 1) != 0;
  return dead || killed || (thread.flags & kExiting) != 0;
}

absl::StatusOr<std::vector<ThreadFacts>> LookAtThreads(const std::string& tasks) {
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> ids, Env::System()->List(tasks));
  std::vector<ThreadFacts> threads;
  for (const std::string& id : ids) {
    const std::string of = JoinPath(tasks, id);
    HF_ASSIGN_OR_RETURN(const std::string stat, ReadKernelFile(JoinPath(of, "stat")));
    HF_ASSIGN_OR_RETURN(const std::string status, ReadKernelFile(JoinPath(of, "status")));
    HF_ASSIGN_OR_RETURN(ThreadFacts facts, ParseThreadFacts(stat, status));
    threads.push_back(facts);
  }
  // Before it ended a thread may have started another one, which the first listing lacks.
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> now, Env::System()->List(tasks));
  if (!std::includes(ids.begin(), ids.end(), now.begin(), now.end())) {
    return absl::AbortedError(absl::StrCat("look at ", tasks, ": a thread was started meanwhile"));
  }
  return threads;
}

}  // namespace

absl::StatusOr<ThreadFacts> ParseThreadFacts(const std::string& stat, const std::string& status) {
  constexpr size_t kFlagsField = 9 - 3;  // proc(5) counts from 1; after the ')' comes field 3
  const absl::Status unknown =
      absl::InternalError("a thread's stat or status in /proc cannot be understood");
  const size_t paren = stat.rfind(')');  // the name before it may hold anything
  if (paren == std::string::npos || paren + 2 >= stat.size()) {
    return unknown;
  }
  const std::vector<std::string> fields = absl::StrSplit(stat.substr(paren + 2), ' ');
  ThreadFacts facts;
  if (fields.size() <= kFlagsField || fields[0].size() != 1 ||
      !absl::SimpleAtoi(fields[kFlagsField], &facts.flags)) {
    return unknown;
  }
  facts.state = fields[0][0];
  for (absl::string_view line : absl::StrSplit(status, '\n')) {
    if (absl::ConsumePrefix(&line, "SigPnd:")) {
      return absl::SimpleHexAtoi(absl::StripAsciiWhitespace(line), &facts.pending)
                 ? absl::StatusOr<ThreadFacts>(facts)
                 : unknown;
    }
  }
  return unknown;
}

bool NeverRunsAgain(const std::vector<ThreadFacts>& threads) {
  return !threads.empty() && std::all_of(threads.begin(), threads.end(), RunsNoMore);
}

// A line: "7: FLOCK  ADVISORY  WRITE 4711 00:1c:118 0 EOF".
bool HasFlock(const std::string& locks, int32_t pid, uint64_t inode) {
  constexpr size_t kKind = 1;
  constexpr size_t kPid = 4;
  constexpr size_t kFile = 5;
  for (const absl::string_view line : absl::StrSplit(locks, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() <= kFile || fields[kKind] != "FLOCK" || fields[kPid] != absl::StrCat(pid)) {
      continue;
    }
    if (absl::EndsWith(fields[kFile], absl::StrCat(":", inode))) {
      return true;
    }
  }
  return false;
}

std::optional<ProcessId> FindDyingHolder(int32_t pid, uint64_t inode) {
  const std::optional<ProcessId> dying = FindDying(pid);
  const absl::StatusOr<std::string> locks = ReadKernelFile("/proc/locks");
  const bool holds = dying && locks.ok() && HasFlock(*locks, pid, inode);
  return holds ? dying : std::nullopt;
}

std::optional<ProcessId> FindDying(int32_t pid) {
  const absl::StatusOr<ProcessId> process = IdentifyProcess(pid);
  if (!process.ok()) {
    return std::nullopt;
  }
  for (int look = 0; look < kLooks; ++look) {
    const absl::StatusOr<std::vector<ThreadFacts>> threads =
        LookAtThreads(absl::StrCat("/proc/", pid, "/task"));
    if (!threads.ok()) {
      continue;
    }
    // The same process before and after, so all of it was this one's.
    const absl::StatusOr<ProcessId> still = IdentifyProcess(pid);
    if (!still.ok() || *still != *process || !NeverRunsAgain(*threads)) {
      return std::nullopt;
    }
    return *process;
  }
  return std::nullopt;
}

}  // namespace holdfast
