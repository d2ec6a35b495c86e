// What ckptctl inspects and verifies. The job's host knows which checkpoint is meant and who has
// copies of it (FindShard, PlanVerify); each node reads what lies there itself, and needs no
// coordinator for that.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/agent.h"
#include "server/scrub_part.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

constexpr char kOutOfReach[] = "out of reach";

bool Asked(const std::string& asked, TierKind tier) {
  return asked.empty() || asked == TierName(tier);
}

absl::Status CheckTier(const std::string& asked) {
  const bool known = std::any_of(kAllTiers.begin(), kAllTiers.end(),
                                 [&](TierKind tier) { return Asked(asked, tier); });
  return known ? absl::OkStatus()
               : absl::InvalidArgumentError(absl::StrCat("verify: there is no tier '",
                                                         asked.substr(0, 32),
                                                         "'; there are memory, nvme and remote"));
}

// The newest committed step of the line that has copies in the tier.
std::optional<CheckpointId> NewestThere(const Coordinator& job, const std::string& tier) {
  v1::ListCheckpointsReply list;
  job.FillList(list);  // the line first, its newest first
  for (const v1::Checkpoint& checkpoint : list.checkpoints()) {
    const auto& tiers = checkpoint.tiers();
    if (checkpoint.on_line() && checkpoint.state() == v1::Checkpoint::STATE_COMMITTED &&
        std::find(tiers.begin(), tiers.end(), tier) != tiers.end()) {
      return CheckpointId{checkpoint.attempt(), checkpoint.step()};
    }
  }
  return std::nullopt;
}

// A copy that was found bad, or one of a step that is not whole, can be looked at too, if it is
// named.
template <typename Request>
absl::StatusOr<CheckpointId> WhichShard(const Coordinator& job, const Request& request) {
  std::optional<CheckpointId> wanted;
  if (!request.newest()) {
    wanted = CheckpointId{request.attempt(), request.step()};
  }
  absl::StatusOr<CheckpointId> found = job.FindCommitted(wanted);
  if (!found.ok() && wanted && wanted->attempt != 0) {
    found = *wanted;
  }
  return found;
}

// Nothing: all steps.
template <typename Request>
absl::StatusOr<std::optional<CheckpointId>> WhatToVerify(const Coordinator& job,
                                                         const Request& request) {
  if (request.all_steps()) {
    return std::optional<CheckpointId>();
  }
  std::optional<CheckpointId> wanted;
  if (!request.newest()) {
    wanted = CheckpointId{request.attempt(), request.step()};
  } else if (!request.tier().empty()) {
    wanted = NewestThere(job, request.tier());  // of a tier that has none the answer says so
  }
  absl::StatusOr<CheckpointId> found = job.FindCommitted(wanted);
  if (!found.ok() && wanted && wanted->attempt != 0) {
    found = job.FindKnown(wanted->attempt, wanted->step);
  }
  HF_RETURN_IF_ERROR(found.status());
  return std::optional(*found);
}

// Why not all of what was asked for is known. (What is still being read may be told as far as it is
// known, if that is not asked for alone.)
std::string WhyNotAll(const Coordinator& job, const std::string& asked, bool any) {
  std::string unread;
  for (const TierKind tier : kDurable) {
    const bool told =
        job.Inventory(tier).kind == InventoryState::Kind::kPending && asked.empty() && any;
    if (const std::string why = job.WhyUnread(tier); Asked(asked, tier) && !told && !why.empty()) {
      absl::StrAppend(&unread, unread.empty() ? "" : "; ", why);
    }
  }
  return unread;
}

// One drive of many may be gone for good: what lies on the others can be verified all the same.
absl::Status NothingToVerify(const std::string& job, const std::string& tier,
                             const std::string& unread) {
  return !unread.empty() ? absl::UnavailableError(unread)
                         : absl::NotFoundError(absl::StrCat(
                               "job '", job, "' has no sealed copies ",
                               tier.empty() ? "" : absl::StrCat("in ", tier, " "), "to verify"));
}

absl::Status NoSuchShard(const std::string& job, CheckpointId id, Rank rank) {
  return absl::NotFoundError(absl::StrCat("job '", job, "' has no sealed shard of step ", id.step,
                                          " of attempt ", id.attempt, " for rank ", rank));
}

}  // namespace

// ---- Of the host ----

void Agent::Admin(const AdminRequest& e, const v1::FindShardRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  const absl::StatusOr<CheckpointId> found = WhichShard(**job, request);
  if (!found.ok()) {
    return RefuseAdmin(e.token, found.status());
  }
  v1::FindShardReply reply;
  reply.set_attempt(found->attempt);
  reply.set_step(found->step);
  v1::WhereReply where;
  (*job)->FillWhere(*found, where);
  std::string away;
  for (const v1::ShardCopy& copy : where.copies()) {
    if (copy.rank() != request.rank() || copy.tier() != TierName(TierKind::kMemory)) {
      continue;
    }
    if (copy.state() == kOutOfReach) {
      away = copy.node();
    } else {
      reply.set_node(copy.node());
    }
  }
  if (reply.node().empty() && !away.empty()) {
    return RefuseAdmin(e.token,
                       absl::UnavailableError(absl::StrCat("its copy in memory lies on ", away,
                                                           ", which is out of reach "
                                                           "now; try again when it is back")));
  }
  if (reply.node().empty() && clustered()) {
    return RefuseAdmin(e.token, NoSuchShard((*job)->name(), *found, request.rank()));
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::PlanVerifyRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  const auto only = WhatToVerify(**job, request);
  if (!only.ok()) {
    return RefuseAdmin(e.token, only.status());
  }
  if (const absl::Status tier = CheckTier(request.tier()); !tier.ok()) {
    return RefuseAdmin(e.token, tier);
  }
  v1::WhereReply where;
  (*job)->FillWhere(*only, where);
  std::set<std::string> nodes;
  for (const v1::ShardCopy& copy : where.copies()) {
    const bool asked = request.tier().empty() || request.tier() == copy.tier();
    if (asked && copy.state() != "writing") {
      nodes.insert(copy.node().empty() ? nodes_.Name(kHere) : copy.node());
    }
  }
  if (!clustered()) {
    nodes.insert(nodes_.Name(kHere));  // it may have what its coordinator does not count on
  }
  v1::PlanVerifyReply reply;
  reply.set_unread(WhyNotAll(**job, request.tier(), !nodes.empty()));
  if (nodes.empty()) {
    return RefuseAdmin(e.token, NothingToVerify((*job)->name(), request.tier(), reply.unread()));
  }
  if (*only) {
    reply.set_attempt((*only)->attempt);
    reply.set_step((*only)->step);
  }
  for (const std::string& node : nodes) {
    reply.add_nodes(node);
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

// ---- Of each node ----

// Whether it is hosted here or not.
absl::StatusOr<const KnownJob*> Agent::FindCopiesOf(const Caller& caller, const std::string& name) {
  const KnownJob* job = FindJob(name);
  if (job == nullptr || !Visible(caller, *job)) {
    return absl::NotFoundError(absl::StrCat("there is no job '", name.substr(0, kJobNameBytesMax),
                                            "' on this node (that uid ", caller.uid, " may see)"));
  }
  return job;
}

void Agent::Admin(const AdminRequest& e, const v1::InspectShardRequest& request) {
  const auto job = FindCopiesOf(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  absl::StatusOr<CheckpointId> found = CheckpointId{request.attempt(), request.step()};
  if ((*job)->coordinator != nullptr) {
    found = WhichShard(*(*job)->coordinator, request);
  }
  if (!found.ok()) {
    return RefuseAdmin(e.token, found.status());
  }
  Slot* slot = FindSealed({(*job)->uuid, found->attempt, found->step, request.rank()});
  if (slot == nullptr) {
    return RefuseAdmin(e.token, NoSuchShard((*job)->name, *found, request.rank()));
  }
  HandShard(e.token, *slot);
}

void Agent::ListMemory(const JobUuid& job, std::optional<CheckpointId> only,
                       ListedShards& out) const {
  for (auto it = shards_.lower_bound({job, 0, 0, 0}); it != shards_.end() && it->first.job == job;
       ++it) {
    const Slot& slot = slots_.at(it->second);
    if (slot.state == SlotState::kSealed && (!only || slot.shard.checkpoint() == *only)) {
      out.shards.push_back({slot.copy, slot.id, TierKind::kMemory, ""});
    }
  }
}

// nvme: what lies on this node's drives; remote: what its host knows there.
void Agent::ListDurable(const KnownJob& job, TierKind tier, std::optional<CheckpointId> only,
                        ListedShards& out) const {
  if (tier == TierKind::kNvme) {
    for (const DriveCopies::Copy& each : drive_copies_.Of(job.uuid)) {
      const SealedCopy& copy = each.copy.copy;
      if (each.state == DriveCopies::State::kThere && (!only || copy.id.checkpoint() == *only)) {
        out.shards.push_back({copy, 0, tier, each.copy.location});
      }
    }
    return;
  }
  if (job.coordinator == nullptr) {
    return;
  }
  v1::WhereReply where;
  job.coordinator->FillWhere(only, where);
  for (const v1::ShardCopy& copy : where.copies()) {
    if (copy.tier() != TierName(tier) || copy.state() == "writing") {
      continue;
    }
    ReadableShard shard;
    shard.copy.id = {job.uuid, copy.attempt(), copy.step(), copy.rank()};
    shard.copy.job_name = job.name;
    shard.copy.world_size = copy.world_size();
    shard.copy.image_bytes = copy.bytes();
    shard.tier = tier;
    shard.location = copy.location();
    out.shards.push_back(std::move(shard));
  }
}

void Agent::Admin(const AdminRequest& e, const v1::VerifyRequest& request) {
  const auto found = FindCopiesOf(e.caller, request.job());
  if (!found.ok()) {
    return RefuseAdmin(e.token, found.status());
  }
  const KnownJob& job = **found;
  std::optional<CheckpointId> only;
  if (!request.all_steps()) {
    only = CheckpointId{request.attempt(), request.step()};
  }
  if (job.coordinator != nullptr) {
    const auto named = WhatToVerify(*job.coordinator, request);
    if (!named.ok()) {
      return RefuseAdmin(e.token, named.status());
    }
    only = *named;
  }
  if (const absl::Status tier = CheckTier(request.tier()); !tier.ok()) {
    return RefuseAdmin(e.token, tier);
  }
  ListedShards listed;
  if (Asked(request.tier(), TierKind::kMemory)) {
    ListMemory(job.uuid, only, listed);
  }
  for (const TierKind tier : kDurable) {
    if (Asked(request.tier(), tier)) {
      ListDurable(job, tier, only, listed);
    }
  }
  if (job.coordinator != nullptr) {
    listed.unread = WhyNotAll(*job.coordinator, request.tier(), !listed.shards.empty());
  }
  if (listed.shards.empty()) {
    return RefuseAdmin(e.token, NothingToVerify(job.name, request.tier(), listed.unread));
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(listed)});
}

// Of all jobs: what the scrub reads. (What a tier's inventory does not know of is read when it
// does.)
void Agent::Admin(const AdminRequest& e, const ListCopies&) {
  ListedShards listed;
  for (const auto& [uuid, job] : jobs_) {
    if (removals_.count(uuid) > 0) {
      continue;
    }
    ListMemory(uuid, std::nullopt, listed);
    ListDurable(job, TierKind::kNvme, std::nullopt, listed);
    if (job.coordinator == nullptr) {
      listed.hosted_elsewhere.push_back(job.name);
      continue;
    }
    v1::PlanScrubReply here;
    job.coordinator->FillScrub(kHere, {}, std::numeric_limits<size_t>::max(), time_, here);
    for (const v1::ScrubCopy& copy : here.copies()) {
      listed.shards.push_back(InRemote(job.name, uuid, copy));
    }
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(listed)});
}

void Agent::Admin(const AdminRequest& e, const v1::PlanScrubRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  const std::optional<NodeId> reader = nodes_.Find(request.reader());
  if (!reader) {
    return RefuseAdmin(e.token, absl::NotFoundError(absl::StrCat(
                                    "scrub: node '", request.reader().substr(0, kJobNameBytesMax),
                                    "' has no part in job '", (*job)->name(), "'")));
  }
  v1::PlanScrubReply reply;
  (*job)->FillScrub(*reader, request, kScrubCopiesMax, time_, reply);
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::RepairRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  if (!request.tier().empty() && request.tier() != TierName(TierKind::kNvme) &&
      request.tier() != TierName(TierKind::kRemote)) {
    return RefuseAdmin(
        e.token,
        absl::InvalidArgumentError(absl::StrCat(
            "repair: '", request.tier().substr(0, 32),
            "' is no tier whose copies are mended; nvme "
            "and remote are (what is bad in memory is taken anew from a good copy by itself)")));
  }
  Send((*job)->uuid(), RepairAsked{AwaitJob(e.token, (*job)->uuid()), request});
}

void Agent::Admin(const AdminRequest& e, const HoldShard& request) {
  const auto job = FindCopiesOf(e.caller, request.job);
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  const bool of_the_job = request.id.job == (*job)->uuid;
  Slot* slot = of_the_job ? FindSealed(request.id) : nullptr;
  const bool any = request.generation == 0;
  if (request.load && of_the_job && (slot == nullptr || slot->bad)) {
    return LoadFor(e.token, request.id);
  }
  if (slot == nullptr || (any ? slot->bad : slot->generation != request.generation)) {
    return RefuseAdmin(e.token, absl::NotFoundError(absl::StrCat(request.id.ToString(),
                                                                 " was given up for newer steps")));
  }
  HandShard(e.token, *slot);
}

// The runtime does it, for other nodes alone: of its own it asks by the requests above.
template <typename NodeRequest>
void Agent::OfThisNode(const AdminRequest& e, const NodeRequest& request) {
  RefuseAdmin(e.token, absl::UnavailableError(absl::StrCat(
                           "there is no other node '", request.node().substr(0, kJobNameBytesMax),
                           "' in the cluster of ", nodes_.Name(kHere), " now")));
}

void Agent::Admin(const AdminRequest& e, const v1::ReadShardRequest& request) {
  OfThisNode(e, request);
}

void Agent::Admin(const AdminRequest& e, const v1::VerifyPartRequest& request) {
  OfThisNode(e, request);
}

void Agent::Admin(const AdminRequest& e, const v1::VerifyMoreRequest& request) {
  OfThisNode(e, request);
}

}  // namespace holdfast
