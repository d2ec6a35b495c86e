// What nodes say to each other, judged where it is heard: what must have no effect has none, and
// who tells what it has is believed to have that and no more.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/v1/peer.pb.h"
#include "server/peer_codec.h"
#include "tests/sim/cluster_node.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

// Commands of an epoch below one that this node has obeyed have no effect.
void Node::CheckOldCommand(const std::string& from, const v1::PeerMessage& message,
                           const Actions& actions) {
  const auto* field = v1::PeerMessage::descriptor()->FindFieldByNumber(message.body_case());
  w_.counts.states[absl::StrCat("message: ", field == nullptr ? "?" : field->name())]++;
  if (message.has_node_arrived()) {
    w_.truth.Met(message.job_uuid(), from, message.epoch());
  }
  if (w_.options.trace_messages) {
    w_.Trace(absl::StrCat(from, " to ", name, ": ", message.ShortDebugString().substr(0, 1000)));
  }
  const std::string job =
      !message.job_name().empty() ? message.job_name() : w_.truth.NameOf(message.job_uuid());
  const int number = message.body_case();
  const bool command = number >= v1::PeerMessage::kRefused && number < v1::PeerMessage::kStateAsked;
  if (command || message.has_state_kept()) {
    if (const auto obeyed = obeyed_.find(job);
        obeyed != obeyed_.end() && message.epoch() < obeyed->second) {
      w_.counts.states["router: command of an old epoch"]++;
      for (const Action& action : actions) {
        // (Who commands may be told of the newer epoch.)
        if (!std::holds_alternative<SetTimer>(action) &&
            !std::holds_alternative<SayToPeer>(action)) {
          return w_.truth.Violated(absl::StrCat(
              name, ": what ", from, " commands for ", job, " under epoch ", message.epoch(), " (",
              field->name(), ") has an effect after epoch ", obeyed->second));
        }
      }
    }
  }
}

// What is heard of a node that was lost, before it has told again what it has, has no effect: it
// was said of what that node had before.
void Node::CheckOldMeeting(const std::string& from, const v1::PeerMessage& message,
                           const Actions& actions) {
  const Meeting meeting{from, message.job_uuid(), message.epoch()};
  if (message.has_node_arrived()) {
    met_here_.insert(meeting);
    lost_at_[from] = w_.t.now();
    return;
  }
  const int number = message.body_case();
  if (number < v1::PeerMessage::kJoinAsked || number >= v1::PeerMessage::kRefused ||
      met_here_.count(meeting) > 0) {
    return;
  }
  w_.counts.states["router: said before it told what it has"]++;
  for (const Action& action : actions) {
    if (!std::holds_alternative<SetTimer>(action)) {
      const auto* field = v1::PeerMessage::descriptor()->FindFieldByNumber(number);
      return w_.truth.Violated(absl::StrCat(name, ": what ", from, " said (", field->name(),
                                            ") before it had told what it has had an effect"));
    }
  }
}

void Node::NoteMeetings(const Event& event) {
  const auto lost = [this](const std::string& node) {
    lost_at_[node] = w_.t.now();
    std::erase_if(met_here_, [&](const Meeting& meeting) { return meeting.node == node; });
  };
  if (const auto* told = std::get_if<PeerTold>(&event)) {
    if (const auto* began = std::get_if<PeerBegan>(&told->event)) {
      lost(began->node);
    } else if (const auto* gone = std::get_if<PeerLost>(&told->event)) {
      lost(gone->node);
    } else if (const auto* silent = std::get_if<PeerSilent>(&told->event)) {
      lost_at_[silent->node] = w_.t.now();
    }
  } else if (const auto* members = std::get_if<MembershipTold>(&event)) {
    const MembershipEvent& of = members->event;
    if (std::holds_alternative<MemberGone>(of) || std::holds_alternative<MembersAre>(of) ||
        std::holds_alternative<LeaseLost>(of) || std::holds_alternative<ClusterWiped>(of) ||
        std::holds_alternative<Deposed>(of)) {
      members_at_ = w_.t.now();
    }
  }
}

// Right after a node has told what it has, no other copy in its memory counts as there.
void Node::CheckArrival(const std::string& from, const PeerSpoke& spoke,
                        const v1::PeerMessage& message) {
  const auto said = DecodePeer(spoke.message, {0, {Local(), UnixMs()}, {}});
  const auto* messages =
      said.ok() ? std::get_if<std::vector<ToCoordinator>>(&said->messages) : nullptr;
  const auto* arrived = messages != nullptr && messages->size() == 1
                            ? std::get_if<NodeArrived>(&messages->front())
                            : nullptr;
  const std::string job = w_.truth.NameOf(message.job_uuid());
  if (!core_ || arrived == nullptr || job.empty()) {
    return;
  }
  std::set<std::pair<CheckpointId, Rank>> told;
  for (const FoundShard& found : arrived->shards) {
    told.insert({found.copy.id.checkpoint(), found.copy.id.rank});
  }
  v1::WhereRequest request;
  request.set_job(job);
  request.set_all_steps(true);
  const AdminToken token = next_asked_++;
  asked_[token] = [this, from, job, told](const AdminReply& reply) {
    const auto* where = std::get_if<v1::WhereReply>(&reply.reply);
    if (where == nullptr) {
      return;
    }
    w_.counts.states["where: asked when a node had told what it has"]++;
    for (const v1::ShardCopy& copy : where->copies()) {
      if (copy.node() == from && copy.tier() == TierName(TierKind::kMemory) &&
          copy.state() != "writing" &&
          told.count({{copy.attempt(), copy.step()}, copy.rank()}) == 0) {
        return w_.truth.Violated(absl::StrCat(
            name, ": job ", job, ": ", from,
            " has not told of a copy that counts as there: ", copy.ShortDebugString()));
      }
    }
  };
  const Caller root{{1, 1}, 0, 0};
  Perform(core_->Handle(AdminRequest{token, root, request}, Local(), UnixMs()));
  if (const auto unanswered = asked_.find(token); unanswered != asked_.end()) {
    unanswered->second = nullptr;  // a later answer tells of later
  }
}

}  // namespace holdfast::sim::cluster
