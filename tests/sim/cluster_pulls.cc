// How a simulated node reads a shard from others: their real cores hold it, and bring it into
// memory first where it lies on a drive. What goes over the network is a file's content.
#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::seconds;

namespace {

constexpr Duration kSilence = seconds(10);  // from a node that was asked
// As in real pulls: one of several that contradict the digests is believed to be bad only when
// another one does not.
constexpr size_t kBadPeersBelieved = 1;

}  // namespace

void Node::Pull(const FetchShard& a, const FilePtr& into) {
  PeerPull pull;
  pull.action = a;
  pull.into = into;
  pull.ended.drain = a.drain;
  pull.ended.slot = a.slot;
  pull.ended.generation = a.generation;
  pull.ended.status = absl::UnavailableError("no node was named");
  pulls_[a.drain] = std::move(pull);
  PullFromNext(a.drain);
}

void Node::PullFromNext(DrainId drain) {
  PeerPull& pull = pulls_.at(drain);
  ++pull.turn;
  if (pull.hold) {
    LetGo(*std::exchange(pull.hold, std::nullopt));
  }
  if (pull.next == pull.action.peers.size()) {
    if (pull.ended.bad_peers.size() > kBadPeersBelieved) {
      pull.ended.bad_peers.clear();
      pull.ended.status = absl::UnavailableError("all copies contradict the digests");
    }
    pull.ended.source_bad = absl::IsDataLoss(pull.ended.status);
    return EndPull(drain);
  }
  const std::string& peer = pull.action.peers[pull.next++];
  pull.ended.peer = peer;
  Node& other = w_.node(w_.IndexOf(peer));
  if (&other == this || !other.up() || !w_.network.Reaches(index, other.index)) {
    w_.counts.states["peer: not reached"]++;
    pull.ended.status = absl::UnavailableError("the node is not reached");
    return PullFromNext(drain);
  }
  const bool load = !pull.action.background;
  pull.from_drive = other.FindSealed(pull.action.key.id) == nullptr;
  w_.t.After(w_.t.Millis(0, 5), [this, drain, turn = pull.turn, life = life_, load, &other,
                                 key = pull.action.key, others_life = other.life_] {
    other.InLife(others_life, [this, drain, turn, life, load, &other, key, others_life] {
      other.Ask(HoldShard{key.job_name, key.id, 0, load}, 0, [=, this, &other](const auto& reply) {
        const Hold hold{&other, others_life, reply.token};
        w_.t.After(w_.t.Millis(0, 5), [=, this, &other] {
          if (life != life_) {
            return reply.status.ok() ? LetGo(hold) : void();
          }
          PullHeld(drain, turn, other, hold, reply);
        });
      });
    });
  });
  AwaitPull(drain, pull.turn, other, other.life_);
}

// A node that brings it into memory first says so as long as that takes.
void Node::AwaitPull(DrainId drain, uint64_t turn, Node& other, uint64_t others_life) {
  After(kSilence, [=, this, &other] {
    PeerPull* const waits = FindPull(drain, turn);
    if (waits == nullptr || waits->hold) {
      return;
    }
    if (waits->action.background || other.life_ != others_life || !Hears(other)) {
      w_.counts.states["peer: no answer in time"]++;
      waits->ended.status = absl::DeadlineExceededError("it says nothing");
      return PullFromNext(drain);
    }
    AwaitPull(drain, turn, other, others_life);
  });
}

// The other node has said what it has, or has not.
void Node::PullHeld(DrainId drain, uint64_t turn, Node& other, const Hold& hold,
                    const AdminReply& reply) {
  PeerPull* pull = FindPull(drain, turn);
  if (!reply.status.ok()) {
    if (pull != nullptr) {
      w_.counts.states["peer: not there"]++;
      pull->ended.status = reply.status;
      PullFromNext(drain);
    }
    return;
  }
  if (pull == nullptr) {
    return LetGo(hold);
  }
  pull->hold = hold;
  const ReadableShard& shard = std::get<ReadableShards>(reply.reply).shards.at(0);
  const FilePtr source = other.FindFile(shard.slot);
  // It reads for a while: what is held must still be there then.
  const bool slow = w_.options.rates == Rates::kDrives && pull->from_drive;
  const uint64_t most_ms = slow ? 20'000 : 300;
  After(w_.t.Millis(1, most_ms), [this, drain, turn, copy = shard.copy, source] {
    if (FindPull(drain, turn) != nullptr) {
      PullRead(drain, copy, source);
    }
  });
}

void Node::PullRead(DrainId drain, const SealedCopy& held, const FilePtr& source) {
  PeerPull& pull = pulls_.at(drain);
  Node& other = *pull.hold->at;
  const bool there = other.life_ == pull.hold->life && !other.suspended() &&
                     w_.network.Reaches(index, other.index);
  if (!there) {
    w_.counts.states["peer: went meanwhile"]++;
    pull.ended.status = absl::UnavailableError("the connection broke");
    return PullFromNext(drain);
  }
  if (source == nullptr || source->note.generation() != held.generation) {
    return w_.truth.Violated(
        absl::StrCat(other.name, ": ", held.id.ToString(),
                     " is held for another node, and its slot has another filling"));
  }
  if (!source->record) {  // so it is not confirmed
    w_.counts.states["peer: given up meanwhile"]++;
    pull.ended.status = absl::NotFoundError("it was removed while it was being read");
    return PullFromNext(drain);
  }
  if (held.id != pull.action.key.id) {
    w_.truth.Violated(absl::StrCat(other.name, ": hands out ", held.id.ToString(), " for ",
                                   pull.action.key.id.ToString()));
  }
  if (source->record->token != source->token) {
    w_.counts.states["peer: source bad"]++;
    pull.ended.status = absl::DataLossError("digests differ");
    pull.ended.bad_peers.push_back(pull.ended.peer);
    return PullFromNext(drain);
  }
  w_.counts.states[pull.from_drive ? "peer: read from its drive" : "peer: read"]++;
  pull.ended.status = absl::OkStatus();
  Fetched(pull.action, source->record->copy, source->token, source->content, pull.into, pull.ended);
  EndPull(drain);
}

void Node::EndPull(DrainId drain) {
  const PeerPull pull = std::move(pulls_.extract(drain).mapped());
  if (pull.hold) {
    LetGo(*pull.hold);
  }
  EndFetch(pull.ended);
}

void Node::CancelPull(DrainId drain) {
  if (const auto pull = pulls_.find(drain); pull != pulls_.end()) {
    w_.counts.states["peer: called off"]++;
    pull->second.ended.status = absl::CancelledError("as asked");
    EndPull(drain);
  }
}

// This daemon is over: its streams break.
void Node::ForgetPulls() {
  for (const auto& [drain, pull] : std::exchange(pulls_, {})) {
    if (pull.hold) {
      LetGo(*pull.hold);
    }
  }
}

Node::PeerPull* Node::FindPull(DrainId drain, uint64_t turn) {
  const auto pull = pulls_.find(drain);
  return pull != pulls_.end() && pull->second.turn == turn ? &pull->second : nullptr;
}

void Node::LetGo(const Hold& hold) {
  w_.t.After(w_.t.Millis(0, 5), [hold] {
    hold.at->InLife(hold.life, [hold] { hold.at->Feed(AdminReadDone{hold.token}); });
  });
}

}  // namespace holdfast::sim::cluster
