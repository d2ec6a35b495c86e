// Processes of a simulated node, and what goes over their sockets: requests, answers, descriptors.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::microseconds;
using std::chrono::milliseconds;

void Node::Do(const WatchProcess& a) {
  watched_.insert(a.process);
  if (living_.count(a.process) == 0) {
    Complete(ProcessEnded{a.process});
  }
}

void Node::Ended(const ProcessId& process) {
  living_.erase(process);
  for (const auto& [slot, file] : files_) {
    file->mapped_by.erase(process);
    file->read_by.erase(process);
  }
  if (core_ && watched_.count(process) > 0) {
    After(Latency(), [this, process] {
      if (watched_.count(process) > 0) {
        Feed(ProcessEnded{process});
      }
    });
  }
}

ConnectionId Node::Open(RankProcess* process) {
  const ConnectionId id = next_connection_++;
  connections_[id] = process;
  After(Duration(0), [this, id, process = process->process(), uid = process->uid()] {
    if (connections_.count(id) > 0) {
      Feed(ConnectionOpened{id, {process, uid, uid}});
    }
  });
  return id;
}

void Node::CloseSocket(ConnectionId connection) {
  if (connections_.erase(connection) == 0) {
    return;
  }
  for (auto it = requests_.lower_bound({connection, 0});
       it != requests_.end() && it->first.first == connection; it = requests_.erase(it)) {
    due_.erase({it->second.due, it->first});
  }
  Complete(ConnectionClosed{connection}, milliseconds(1) + Latency());
}

void Node::Do(const CloseConnection& a) {
  const auto it = connections_.find(a.connection);
  if (it != connections_.end()) {
    RankProcess* process = it->second;
    CloseSocket(a.connection);
    process->OnClosed();
  }
}

void Node::Send(ConnectionId connection, const v1::ClientFrame& frame, Duration deadline) {
  const std::pair key{connection, frame.id()};
  const int64_t stopped = std::max<int64_t>(suspended_until_ - w_.t.now(), 0);
  const MonotonicTime due = Local() + deadline + kAnswerSlack + Duration(stopped * 11 / 10);
  requests_[key] = {w_.tracing() || w_.options.check_every == 1 ? frame.ShortDebugString() : "",
                    due};
  due_.insert({due, key});
  After(microseconds(50), [this, connection, frame] {
    if (connections_.count(connection) > 0) {
      Feed(ClientRequest{connection, frame});
    }
  });
}

FilePtr Node::FindFile(SlotId slot) const {
  const auto it = files_.find(slot);
  return it == files_.end() ? nullptr : it->second;
}

void Node::Do(const SendReply& a) {
  NoteReader(a);
  int64_t at = std::max(socket_busy_until_[a.connection] + 1, w_.t.now() + Latency().count());
  const bool of_slot =
      a.descriptors != Descriptors::kNone && a.descriptors != Descriptors::kOpenedCopy;
  if (of_slot) {
    at = std::max(at, slot_busy_until_[a.slot] + 1);
    slot_busy_until_[a.slot] = at;
  }
  socket_busy_until_[a.connection] = at;
  After(Duration(at - w_.t.now()), [this, a, of_slot] {
    Deliver(a, of_slot || a.frame.has_begin_save() ? FindFile(a.slot) : nullptr);
  });
}

void Node::Deliver(const SendReply& a, const FilePtr& file) {
  if (const auto it = requests_.find({a.connection, a.frame.id()}); it != requests_.end()) {
    due_.erase({it->second.due, it->first});
    requests_.erase(it);
  }
  const auto it = connections_.find(a.connection);
  if (it == connections_.end() || !it->second->running()) {
    return;
  }
  RankProcess& process = *it->second;
  if (a.frame.has_begin_save() || a.descriptors == Descriptors::kWritableImage) {
    CheckGrant(a, process, file);
  }
  if (a.descriptors == Descriptors::kReadOnlyImageAndRecord) {
    if (file && file->replaced && !file->record) {  // a good copy took its place meanwhile
      return Feed(HandOverFailed{a, absl::NotFoundError("no record")});
    }
    const v1::Source& source =
        a.frame.has_attach() ? a.frame.attach() : a.frame.enter_session().source();
    const ShardId id{JobUuid::FromBytes(source.job_uuid()).value(), source.attempt(), source.step(),
                     source.rank()};
    if (!file || !file->record || file->record->copy.id != id ||
        file->record->copy.generation != source.generation()) {
      return w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot, " was offered as ",
                                            id.ToString(), " and holds no such sealed copy"));
    }
    ++file->read_by[process.process()];
  }
  if (a.descriptors == Descriptors::kOpenedCopy && a.files != nullptr) {
    CheckRecords(a);
    return process.OnReply(a, static_cast<const SimFiles&>(*a.files).file);
  }
  process.OnReply(a, file);
}

// One writer, proven gone before there is another.
void Node::CheckGrant(const SendReply& a, const RankProcess& process, const FilePtr& file) {
  const std::string what = absl::StrCat(name, ": slot ", a.slot, " generation ", a.generation,
                                        " was granted to ", process.process().ToString());
  if (!file) {
    return w_.truth.Violated(what + ", and is not there");
  }
  if (file->record) {
    w_.truth.Violated(what + ", and holds a sealed copy");
  }
  if (a.frame.has_begin_save()) {
    if (a.generation <= std::max(file->granted, granted_[a.slot])) {
      w_.truth.Violated(what + ", as another filling was before");
    }
    file->granted = granted_[a.slot] = a.generation;
  }
  if (!file->note.has_writer() || file->note.writer().pid() != process.process().pid ||
      file->note.generation() != a.generation) {
    w_.truth.Violated(what + ", and its note does not say so");
  }
  for (const ProcessId& other : file->mapped_by) {
    if (other != process.process()) {
      w_.truth.Violated(absl::StrCat(what, " while ", other.ToString(), " can write into it"));
    }
  }
  for (const auto& [reader, holds] : file->read_by) {
    if (holds > 0) {
      w_.truth.Violated(absl::StrCat(what, " while ", reader.ToString(), " reads it"));
    }
  }
}
}  // namespace holdfast::sim::cluster
