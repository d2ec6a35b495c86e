#include "server/runtime/tiers/remote_owner.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "server/membership/cluster_config.h"
#include "tiers/durable/names.h"

namespace holdfast {
namespace {

// A start is not to report what is true for some milliseconds of each.
constexpr Duration kJustStarted = std::chrono::seconds(2);
constexpr Duration kStartWait = std::chrono::milliseconds(500);
constexpr Duration kNoteWait = std::chrono::milliseconds(500);
constexpr Duration kOrderedWait = std::chrono::seconds(5);  // somebody waits for it

std::string MemoryPath(const std::string& state_dir) {
  return state_dir.empty() ? "" : JoinPath(state_dir, "cluster");
}

// Whether an id of this node's earlier life is still its cluster's. (One without a cluster has none
// that is worth remembering.)
bool MayStillBe(const ClusterMark& before, const ClusterMark& now) {
  return before.kind == now.kind && before.name == now.name && SamePeers(before.peers, now.peers);
}

}  // namespace

RemoteOwner::RemoteOwner(Options options)
    : options_(std::move(options)), started_(Clock::System()->Now()) {
  us_.mark = options_.mark;
  known_ = !has_etcd();
  if (const std::string path = MemoryPath(options_.state_dir); !path.empty()) {
    const absl::StatusOr<std::string> text =
        ReadFile(*options_.env, path, kClusterMarkBytesMax, {.no_symlink = true});
    on_disk_ = text.value_or("");
  }
  const absl::StatusOr<ClusterMark> before = DecodeClusterMark(on_disk_);
  if (before.ok() && MayStillBe(*before, us_.mark)) {
    us_.mark.id = before->id;
  } else if (!has_etcd()) {
    us_.mark.id = NewUnique();
  }
}

std::string RemoteOwner::remembered() {
  MutexLock lock(mutex_);
  return us_.mark.id;
}

bool RemoteOwner::Agreed(const ClusterNote& note) {
  std::string noted_by_us;
  bool changed = false;
  {
    MutexLock lock(mutex_);
    changed = !known_ || us_.mark.id != note.id || us_.remote_id != note.remote;
    us_.mark.id = note.id;
    us_.remote_id = note.remote;
    known_ = true;
    noted_by_us = note.remote.empty() ? directory_ : "";  // etcd was erased
    agreed_.NotifyAll();
  }
  if (!noted_by_us.empty()) {
    options_.note_remote(noted_by_us, "");
  }
  return changed;
}

absl::StatusOr<ClusterIdentity> RemoteOwner::Us() {
  const auto until = std::chrono::steady_clock::now() + kStartWait;
  const bool starts = Clock::System()->Now() < started_ + kJustStarted;
  MutexLock lock(mutex_);
  while (!known_ && starts && agreed_.WaitUntil(mutex_, until)) {
  }
  if (!known_) {
    return absl::UnavailableError(absl::StrCat(
        "'", options_.dir, "' is not used until etcd has said which cluster this is, and which ",
        "remote directory it has; saves continue in the other tiers. ckptctl status shows what ",
        "keeps etcd from answering"));
  }
  return us_;
}

absl::Status RemoteOwner::Opened(const CopyStore& store) {
  Remember(store.cluster_id());
  const std::string id = store.place().id;
  bool noted = false;
  {
    MutexLock lock(mutex_);
    directory_ = id;
    noted = us_.remote_id == id;
  }
  // (One without an id cannot be written: only an earlier version has written there, and it is
  // read.)
  return !has_etcd() || noted || id.empty() ? absl::OkStatus() : NoteAndWait(id, kNoteWait);
}

absl::Status RemoteOwner::Replaced(const CopyStore& store) {
  return has_etcd() ? NoteAndWait(store.place().id, kOrderedWait) : absl::OkStatus();
}

absl::Status RemoteOwner::NoteAndWait(const std::string& id, Duration at_most) {
  std::string instead_of;
  {
    MutexLock lock(mutex_);
    instead_of = us_.remote_id;
  }
  if (instead_of != id) {
    options_.note_remote(id, instead_of);
  }
  const auto until = std::chrono::steady_clock::now() + at_most;
  MutexLock lock(mutex_);
  while (us_.remote_id == instead_of && instead_of != id && agreed_.WaitUntil(mutex_, until)) {
  }
  if (us_.remote_id == id) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      us_.remote_id == instead_of
          ? absl::StrCat("'", options_.dir, "' is not used until etcd has noted that it is the ",
                         "cluster's; ckptctl status shows what keeps etcd from answering")
          : RemoteIdRefusal(options_.dir, id, us_));
}

absl::Status RemoteOwner::StillOurs(const CopyStore& store) {
  MutexLock lock(mutex_);
  if (has_etcd() && store.cluster_id() != us_.mark.id) {
    return absl::UnavailableError(
        absl::StrCat("'", options_.dir, "' was opened for the cluster with id ", store.cluster_id(),
                     ", and this one has the id ", us_.mark.id, " now: its etcd was set up anew"));
  }
  const std::string id = store.place().id;
  return us_.remote_id.empty() || id.empty() || us_.remote_id == id
             ? absl::OkStatus()
             : absl::UnavailableError(RemoteIdRefusal(options_.dir, id, us_));
}

// Once it is: what was found there counts, and what state_dir had from another cluster does not.
void RemoteOwner::Remember(const std::string& id) {
  std::string text;
  {
    MutexLock lock(mutex_);
    if (!has_etcd()) {
      us_.mark.id = id;
    }
    ClusterMark mark = us_.mark;
    mark.id = id;
    text = EncodeClusterMark(mark);
    if (text == on_disk_) {
      return;
    }
  }
  const std::string path = MemoryPath(options_.state_dir);
  const absl::Status kept =
      path.empty() ? absl::OkStatus() : WriteFileAtomically(*options_.env, path, text);
  if (!kept.ok()) {
    return LogWarning(
        absl::StrCat("which cluster ", options_.dir,
                     " belongs to will not be known at the next start: ", Message(kept)));
  }
  MutexLock lock(mutex_);
  on_disk_ = text;
}

ClusterMark DescribeSelf(const v1::ClusterConfig& cluster, const std::string& node_name) {
  ClusterMark mark;
  mark.node = node_name;
  mark.kind = cluster.has_etcd()           ? ClusterKind::kEtcd
              : cluster.members_size() > 0 ? ClusterKind::kList
                                           : ClusterKind::kAlone;
  if (mark.kind == ClusterKind::kAlone) {
    return mark;
  }
  mark.name = cluster.name();
  for (const v1::ClusterMember& member : cluster.members()) {
    mark.peers.push_back(absl::StrCat(member.name(), "@", member.address()));
  }
  for (const std::string& endpoint : cluster.etcd().endpoints()) {
    mark.peers.push_back(absl::StrCat(endpoint, EtcdPrefix(cluster)));
  }
  std::sort(mark.peers.begin(), mark.peers.end());
  mark.peers.resize(std::min(mark.peers.size(), kClusterMarkPeersMax));
  return mark;
}

}  // namespace holdfast
