#include "server/runtime/tiers/directory_look.h"

#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/errno_status.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast {
namespace {

constexpr size_t kDepthMax = 256;

std::string NameOf(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

absl::StatusOr<DirectoryLook> Look(Env& env, const std::string& dir) {
  DirectoryLook look;
  look.there = NormalPath(dir);
  // 1. What exists of it. ("/.": a symbolic link is where it leads.)
  absl::StatusOr<FileInfo> info = env.Info(JoinPath(look.there, "."));
  while (look.there != "/" && absl::IsNotFound(info.status())) {
    look.missing.insert(look.missing.begin(), NameOf(look.there));
    look.there = ParentDirectory(look.there);
    info = env.Info(JoinPath(look.there, "."));
  }
  if (IsNotADirectory(info.status())) {
    while (IsNotADirectory(env.Info(look.there).status())) {
      look.there = ParentDirectory(look.there);
    }
    return absl::FailedPreconditionError(
        absl::StrCat("'", look.there, "' is a file, not a directory"));
  }
  HF_RETURN_IF_ERROR(info.status());
  look.device = info->device;
  // 2. Where it lies: up from the directory itself, whatever its name says.
  std::string up = JoinPath(look.there, ".");
  while (info.ok() && look.above.size() < kDepthMax) {
    const std::pair<uint64_t, uint64_t> identity(info->device, info->inode);
    if (!look.above.empty() && look.above.back() == identity) {
      break;  // the root is above itself
    }
    look.above.push_back(identity);
    up = JoinPath(up, "..");
    info = env.Info(up);
  }
  // 3. On what. The last call: after it nothing here is touched any more but the answer.
  HF_ASSIGN_OR_RETURN(look.filesystem, env.Filesystem(look.there));
  return look;
}

struct Answers {
  explicit Answers(size_t count) : looks(count) {}
  Mutex mutex;
  CondVar cv;
  std::vector<std::optional<absl::StatusOr<DirectoryLook>>> looks GUARDED_BY(mutex);
  size_t left GUARDED_BY(mutex) = 0;
};

}  // namespace

std::vector<absl::StatusOr<DirectoryLook>> LookAtDirectories(Env& env,
                                                             const std::vector<std::string>& dirs,
                                                             Duration timeout) {
  const auto answers = std::make_shared<Answers>(dirs.size());
  const auto answer = [answers](size_t index, absl::StatusOr<DirectoryLook> look) {
    MutexLock lock(answers->mutex);
    answers->looks[index] = std::move(look);
    --answers->left;
    answers->cv.NotifyAll();
  };
  {
    MutexLock lock(answers->mutex);
    answers->left = dirs.size();
  }
  for (size_t i = 0; i < dirs.size(); ++i) {
    std::thread thread;
    const absl::Status started = StartThread(
        "look-at-dir", [answer, i, dir = dirs[i], &env] { answer(i, Look(env, dir)); }, thread);
    if (started.ok()) {
      thread.detach();
    } else {
      answer(i, started);
    }
  }
  const auto until = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(answers->mutex);
  while (answers->left > 0 && answers->cv.WaitUntil(answers->mutex, until)) {
  }
  std::vector<absl::StatusOr<DirectoryLook>> looks;
  looks.reserve(dirs.size());
  for (size_t i = 0; i < dirs.size(); ++i) {
    const std::optional<absl::StatusOr<DirectoryLook>>& look = answers->looks[i];
    looks.push_back(look ? *look
                         : absl::DeadlineExceededError(absl::StrCat(
                               "'", dirs[i], "' did not answer within ", FormatDuration(timeout))));
  }
  return looks;
}

std::string NormalPath(std::string_view path) {
  std::vector<absl::string_view> names;
  for (const absl::string_view name : absl::StrSplit(ToAbsl(path), '/', absl::SkipEmpty())) {
    if (name == ".." && !names.empty()) {
      names.pop_back();
    } else if (name != "." && name != "..") {
      names.push_back(name);
    }
  }
  return absl::StrCat("/", absl::StrJoin(names, "/"));
}

bool IsWithin(const DirectoryLook& inner, const DirectoryLook& outer) {
  if (inner.above.empty() || outer.above.empty()) {
    return false;
  }
  if (outer.missing.empty()) {
    return std::find(inner.above.begin(), inner.above.end(), outer.above.front()) !=
           inner.above.end();
  }
  return inner.above.front() == outer.above.front() &&
         inner.missing.size() >= outer.missing.size() &&
         std::equal(outer.missing.begin(), outer.missing.end(), inner.missing.begin());
}

}  // namespace holdfast
