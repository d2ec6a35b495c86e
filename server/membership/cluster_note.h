// What a cluster has agreed on for good, in etcd (docs/formats.md, "Keys in etcd"): its id, and the
// id of its remote directory. What keeps it is the Membership of a cluster with etcd.
//
//   if (ClusterNotes* notes = membership->notes(); notes != nullptr) {
//     notes->FollowNote(id_of_an_earlier_life, [](const ClusterNote& note) { … });  // before Start
//   }
//   notes->NoteRemote(directory_id, note.remote);
#pragma once

#include <functional>
#include <string>

namespace holdfast {

struct ClusterNote {
  std::string id;      // 32 hex digits
  std::string remote;  // likewise; empty: none is noted
};

class ClusterNotes {
 public:
  using Observer = std::function<void(const ClusterNote&)>;
  virtual ~ClusterNotes() = default;

  // `remembered`: what the cluster's id becomes if etcd has none (it was erased); empty: a new one.
  // The observer is told whenever etcd has answered, on the thread of Membership's observer.
  virtual void FollowNote(std::string remembered, Observer observer) = 0;
  // The calls below may come from any thread, after Membership::Start. Each has the observer told.
  virtual void AskNote() = 0;
  // If what is noted is `instead_of`: then this is noted.
  virtual void NoteRemote(std::string id, std::string instead_of) = 0;
};

}  // namespace holdfast
