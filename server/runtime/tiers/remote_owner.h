// Which cluster this daemon is of, for the remote directory: what etcd says, or what state_dir
// remembers, and which directory the cluster has noted as its own.
//
//   RemoteOwner owner(options);
//   owner.Agreed(note);                              // etcd's word, whenever it comes
//   HF_ASSIGN_OR_RETURN(options.cluster, owner.Us());    // Unavailable: etcd has not said yet
//   HF_RETURN_IF_ERROR(owner.Opened(*store));        // before anything else is done with it
//
// Shared by the remote directory's TierPlace, its operations and the daemon; any thread.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/mutex.h"
#include "server/membership/cluster_note.h"
#include "tiers/durable/cluster_mark.h"
#include "tiers/durable/copy_store.h"

namespace holdfast {

namespace v1 {
class ClusterConfig;
}

class RemoteOwner {
 public:
  struct Options {
    Env* env = nullptr;
    std::string state_dir;  // empty: nothing is remembered
    std::string dir;        // the remote directory, for errors
    ClusterMark mark;       // what this daemon is, but for the id: DescribeSelf
    // Has the note of etcd changed, and Agreed told; any thread, does not wait.
    std::function<void(std::string id, std::string instead_of)> note_remote;
  };
  // Reads state_dir, and writes nothing.
  explicit RemoteOwner(Options options);

  // Of a cluster with etcd: the id that this node remembers, if it may still be the cluster's.
  std::string remembered() EXCLUDES(mutex_);
  // Whether it says something new.
  bool Agreed(const ClusterNote& note) EXCLUDES(mutex_);

  // Waits for etcd, but only just after the start, and for less than a second.
  absl::StatusOr<ClusterIdentity> Us() EXCLUDES(mutex_);
  // The directory is this cluster's: has that remembered, and noted in etcd (Unavailable until it
  // is). May write to state_dir.
  absl::Status Opened(const CopyStore& store) EXCLUDES(mutex_);
  // A store that was opened before: whether the cluster is what it was, and has that directory.
  absl::Status StillOurs(const CopyStore& store) EXCLUDES(mutex_);
  // By a person's order, `store` is the cluster's directory now, whatever was noted; waits for
  // etcd.
  absl::Status Replaced(const CopyStore& store) EXCLUDES(mutex_);

 private:
  bool has_etcd() const { return options_.mark.kind == ClusterKind::kEtcd; }
  absl::Status NoteAndWait(const std::string& id, Duration at_most) EXCLUDES(mutex_);
  void Remember(const std::string& id) EXCLUDES(mutex_);

  const Options options_;
  const MonotonicTime started_;
  Mutex mutex_;
  CondVar agreed_;
  ClusterIdentity us_ GUARDED_BY(mutex_);
  bool known_ GUARDED_BY(mutex_) = false;     // us_ is: etcd has said, or there is none
  std::string directory_ GUARDED_BY(mutex_);  // the id of the one that was opened
  std::string on_disk_ GUARDED_BY(mutex_);    // what state_dir has
};

// Sorted, and no more than a mark has.
ClusterMark DescribeSelf(const v1::ClusterConfig& cluster, const std::string& node_name);

}  // namespace holdfast
