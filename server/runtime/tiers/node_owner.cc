#include "server/runtime/tiers/node_owner.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

constexpr uint64_t kIdBytesMax = 4096;

std::string FirstLine(const absl::StatusOr<std::string>& text) {
  const std::string line = text.ok() ? text->substr(0, text->find('\n')) : "";
  return std::string(absl::StripAsciiWhitespace(line));
}

std::string StateId(Env& env, const std::string& state_dir) {
  const std::string path = JoinPath(state_dir, "node-id");
  const std::string there = FirstLine(ReadFile(env, path, kIdBytesMax));
  if (IsUnique(there)) {
    return there;
  }
  const std::string made = NewUnique();
  if (absl::Status kept = WriteFileAtomically(env, path, made + "\n"); !kept.ok()) {
    LogWarning(absl::StrCat(
        "this daemon will be another to the remote directory at its next start: ", Message(kept)));
  }
  return made;
}

}  // namespace

NodeOwner AskNodeOwner(Env& env, const std::string& state_dir) {
  NodeOwner owner;
  owner.state = StateId(env, state_dir);
  owner.machine = FirstLine(ReadFile(env, "/etc/machine-id", kIdBytesMax));
  owner.boot = FirstLine(ReadKernelFile("/proc/sys/kernel/random/boot_id"));
  return owner;
}

}  // namespace holdfast
