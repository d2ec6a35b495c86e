// Shards that lie on other nodes, which a reader here gets in parts (docs/protocol.md §10,
// "Readers"): as long as its connection is there, and it has not let go.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"

namespace holdfast {
namespace {

Failure PartsFailure(absl::StatusCode code, std::string message) {
  return {code, v1::Failure::REASON_UNSPECIFIED, std::move(message)};
}

}  // namespace

// InvalidArgument: the reader's mistake; else there is no room for more.
absl::Status Agent::MayOpenParts(const Pending& pending) {
  const ReadHold hold{connections_.at(pending.connection).caller.process, pending.hold};
  if (hold.id == 0 || FindHeld(hold) != nullptr ||
      FindParts(pending.connection, pending.hold) != parts_.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attach: hold ", hold.id, " of ", hold.process.ToString(),
        hold.id == 0 ? " is no name for one" : " is taken: each needs a number of its own"));
  }
  const auto of_reader = std::count_if(parts_.begin(), parts_.end(), [&](const auto& parts) {
    return parts.second.connection == pending.connection && parts.second.hold != 0;
  });
  if (static_cast<size_t>(of_reader) >= kPartsPerReaderMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach: this connection reads ", of_reader,
                     " shards in parts already; release some of them"));
  }
  const uint32_t uid = connections_.at(pending.connection).caller.uid;
  const auto of_user = std::count_if(parts_.begin(), parts_.end(), [&](const auto& parts) {
    const auto connection = connections_.find(parts.second.connection);
    return connection != connections_.end() && connection->second.caller.uid == uid;
  });
  if (static_cast<size_t>(of_user) >= kPartsPerUserMax) {
    return absl::UnavailableError(
        absl::StrCat("processes of this user read ", of_user,
                     " shards in parts here already, as many as one user may"));
  }
  if (parts_.size() >= kPartsMax) {
    return absl::UnavailableError(
        absl::StrCat("processes of this node read ", parts_.size(),
                     " shards in parts already, as many as there may be"));
  }
  return absl::OkStatus();
}

std::map<DrainId, Agent::Parts>::iterator Agent::FindParts(ConnectionId connection, uint64_t hold) {
  return std::find_if(parts_.begin(), parts_.end(), [&](const auto& parts) {
    return parts.second.connection == connection && parts.second.hold == hold;
  });
}

void Agent::OnReadParts(ConnectionId id, const v1::ClientFrame& frame) {
  const v1::ReadParts& read = frame.read_parts();
  const auto found = FindParts(id, read.hold());
  if (found == parts_.end() || !found->second.open) {
    return RefuseNow(
        id, frame.id(),
        PartsFailure(absl::StatusCode::kUnavailable,
                     absl::StrCat("hold ", read.hold(),
                                  " is of no shard that is read in parts (any more); attach it "
                                  "again")));
  }
  Parts& parts = found->second;
  const absl::StatusOr<std::vector<PartRun>> runs = RunsOf(read, parts.bytes);
  if (!runs.ok()) {
    return RefuseNow(id, frame.id(),
                     PartsFailure(absl::StatusCode::kInvalidArgument, Message(runs.status())));
  }
  if (parts.reading != 0) {
    return RefuseNow(id, frame.id(),
                     PartsFailure(absl::StatusCode::kFailedPrecondition,
                                  absl::StrCat("parts for hold ", read.hold(),
                                               " are being read already: one call at a time")));
  }
  const RequestToken token = NewPending(
      id, frame, read.deadline_ms() == 0 ? time_.now + kSettle : Deadline(read.deadline_ms()));
  pending_.at(token).where = Where::kParts;
  parts.reading = token;
  Act(ReadParts{found->first, token, *runs, read.contradicted()});
}

absl::StatusOr<std::vector<PartRun>> Agent::RunsOf(const v1::ReadParts& read, uint64_t memory) {
  const int count = read.offset_size();
  if (count == 0 || read.bytes_size() != count || read.place_size() != count) {
    return absl::InvalidArgumentError(absl::StrCat("read parts: columns of ", count, ", ",
                                                   read.bytes_size(), " and ", read.place_size(),
                                                   " entries; each part needs one of each"));
  }
  if (static_cast<size_t>(count) > kPartRunsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("read parts: ", count, " of them; at most ", kPartRunsMax, " at a time"));
  }
  std::vector<PartRun> runs;
  runs.reserve(static_cast<size_t>(count));
  uint64_t left = memory;  // all of them fit in it beside each other
  for (int i = 0; i < count; ++i) {
    const PartRun run{read.offset(i), read.bytes(i), read.place(i)};
    const bool there = run.bytes > 0 && run.bytes <= left && run.place <= memory - run.bytes &&
                       run.offset + run.bytes >= run.offset;
    if (!there) {
      return absl::InvalidArgumentError(absl::StrCat("read parts: ", run.bytes, " bytes from ",
                                                     run.offset, " on, to ", run.place,
                                                     ": there are ", memory, " bytes of memory"));
    }
    left -= run.bytes;
    runs.push_back(run);
  }
  return runs;
}

void Agent::OnPartsRead(const PartsRead& e) {
  const auto found = parts_.find(e.opened);
  if (found == parts_.end() || found->second.reading != e.token) {
    return;  // nobody waits for it any more
  }
  found->second.reading = 0;
  if (e.status.ok()) {
    v1::DaemonFrame done;
    done.mutable_read_parts();
    return Reply(e.token, std::move(done));
  }
  if (absl::IsOutOfRange(e.status)) {  // the reader's mistake
    return Refuse(e.token, PartsFailure(absl::StatusCode::kInvalidArgument, Message(e.status)));
  }
  EndParts(e.opened);
  Refuse(e.token, PartsFailure(absl::StatusCode::kUnavailable, Message(e.status)));
}

// The memory may still be written into: what is read there from now on is nobody's.
void Agent::GiveUpParts(RequestToken token) {
  const auto found = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const auto& parts) { return parts.second.reading == token; });
  if (found != parts_.end()) {
    EndParts(found->first);
  }
  Refuse(token, PartsFailure(absl::StatusCode::kDeadlineExceeded,
                             "read parts: they did not come in time; try again"));
}

// True: there was such a hold, and it is gone.
bool Agent::ReleaseParts(ConnectionId id, uint64_t hold) {
  const auto found = FindParts(id, hold);
  if (found == parts_.end() || !found->second.open) {
    return false;  // (one that is being opened is not the client's yet)
  }
  if (found->second.reading != 0) {
    Refuse(found->second.reading,
           PartsFailure(absl::StatusCode::kAborted, "read parts: the hold was released meanwhile"));
  }
  EndParts(found->first);
  return true;
}

void Agent::EndPartsOf(ConnectionId id) {
  for (auto it = parts_.begin(); it != parts_.end();) {
    const auto parts = it++;
    if (parts->second.connection == id && parts->second.open) {
      EndParts(parts->first);
    }
  }
}

void Agent::EndParts(DrainId opened) {
  if (parts_.erase(opened) > 0) {
    Act(holdfast::EndParts{opened});
  }
}

}  // namespace holdfast
