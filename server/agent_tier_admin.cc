// What ckptctl asks of copies in every tier: where, explain, timeline, gc, pin, rm of a step,
// rebuild, set (proto/holdfast/v1/admin.proto).
#include <algorithm>
#include <array>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/config.h"
#include "base/status.h"
#include "base/units.h"
#include "recovery/policy.h"
#include "server/agent.h"
#include "server/tier_limits.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

constexpr size_t kOptionsMax = 64;
constexpr size_t kOptionBytesMax = 128;

// What may be set by hand while the daemon runs.
constexpr std::array<absl::string_view, 7> kLimits = {
    "nvme.bandwidth_bytes_per_s_max",   "nvme.io_priority",   "nvme.nice",
    "remote.bandwidth_bytes_per_s_max", "remote.io_priority", "remote.nice",
    "fabric.bandwidth_bytes_per_s_max"};

// As the configuration file would say it, so that names, units and ranges are judged alike.
absl::StatusOr<std::string> AsYaml(const v1::SetOptionsRequest& request) {
  if (request.options().empty() || static_cast<size_t>(request.options_size()) > kOptionsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("set: 1 to ", kOptionsMax, " settings are needed, as in nvme.keep_last=3"));
  }
  std::map<std::string, std::string> by_section;
  std::set<std::string> names;
  std::string yaml;
  for (const v1::SetOptionsRequest::Option& option : request.options()) {
    const std::vector<std::string> path = absl::StrSplit(option.name(), '.');
    const bool plain = std::all_of(option.value().begin(), option.value().end(), [](char c) {
      return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == ' ';
    });
    const bool named = std::all_of(option.name().begin(), option.name().end(), [](char c) {
      return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_';
    });
    const bool whole = path.size() == 1 && !path[0].empty();  // of no tier: replicas
    if ((!whole && (path.size() != 2 || path[0].empty() || path[1].empty())) || !named ||
        option.value().empty() || option.name().size() + option.value().size() > kOptionBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "set: '", option.name().substr(0, 64), "=", option.value().substr(0, 64),
          "': expected TIER.SETTING=VALUE, as in remote.every_ms=10min or nvme.keep_last=3, or "
          "replicas=1"));
    }
    if (!plain) {
      return absl::InvalidArgumentError(
          absl::StrCat("set: ", option.name(), ": '", option.value(),
                       "' is neither a number (10) nor a size (4GiB), a time (10min) or a word"));
    }
    if (!names.insert(option.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("set: ", option.name(), ": given twice; leave one out"));
    }
    if (whole) {
      absl::StrAppend(&yaml, path[0], ": ", option.value(), "\n");
    } else {
      absl::StrAppend(&by_section[path[0]], "  ", path[1], ": ", option.value(), "\n");
    }
  }
  for (const auto& [section, lines] : by_section) {
    absl::StrAppend(&yaml, section, ":\n", lines);
  }
  return yaml;
}

// As whoever typed it knows the setting: without its line in the text that AsYaml made.
absl::Status SetError(const absl::Status& parsed) {
  absl::string_view what = parsed.message();
  if (absl::ConsumePrefix(&what, "set:")) {
    what.remove_prefix(std::min(what.find_first_not_of("0123456789: "), what.size()));
  } else {
    absl::ConsumePrefix(&what, "policy: ");
  }
  return absl::Status(parsed.code(), absl::StrCat("set: ", what));
}

std::string OptionsText(const v1::SetOptionsRequest& request) {
  std::string text;
  for (const v1::SetOptionsRequest::Option& option : request.options()) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", option.name(), "=", option.value());
  }
  return text;
}

}  // namespace

void Agent::Admin(const AdminRequest& e, const v1::WhereRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  std::optional<CheckpointId> only;
  if (!request.all_steps()) {
    const absl::StatusOr<CheckpointId> found = (*job)->FindKnown(request.attempt(), request.step());
    if (!found.ok()) {
      return RefuseAdmin(e.token, found.status());
    }
    only = *found;
  }
  v1::WhereReply reply;
  (*job)->FillWhere(only, reply, time_);
  for (v1::ShardCopy& copy : *reply.mutable_copies()) {
    const auto slot = shards_.find({(*job)->uuid(), copy.attempt(), copy.step(), copy.rank()});
    if (copy.tier() == TierName(TierKind::kMemory) && slot != shards_.end()) {
      copy.set_location(
          absl::StrCat(config_.memory().dir(), "/slot-", absl::Dec(slot->second, absl::kZeroPad6)));
    }
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::ExplainRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  v1::ExplainReply reply;
  (*job)->FillExplain(request, time_, reply);
  if (!request.all_steps() && reply.steps().empty()) {
    return RefuseAdmin(
        e.token, absl::NotFoundError(absl::StrCat(
                     "explain: job '", (*job)->name(), "' has no step ", request.step(),
                     request.attempt() == 0 ? "" : absl::StrCat(" of attempt ", request.attempt()),
                     ", and what became of one is not remembered; ckptctl list ", (*job)->name(),
                     " shows what there is")));
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::TimelineRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  v1::TimelineReply reply;
  (*job)->FillTimeline(request.steps_max(), reply);
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::CollectGarbageRequest& request) {
  if (!request.job().empty()) {
    if (const auto job = FindVisible(e.caller, request.job()); !job.ok()) {
      return RefuseAdmin(e.token, job.status());
    }
  }
  v1::CollectGarbageReply reply;
  for (const auto& [name, uuid] : names_) {
    const KnownJob& job = jobs_.at(uuid);
    if ((!request.job().empty() && request.job() != name) || !Visible(e.caller, job) ||
        job.coordinator == nullptr) {
      continue;
    }
    job.coordinator->FillGarbage(time_.unix_ms, reply);
    if (!request.dry_run()) {
      Send(uuid, CollectGarbageAsked{});
    }
  }
  if (e.caller.uid == 0 || e.caller.uid == daemon_uid_) {
    for (const std::string& file : unknown_files_) {
      reply.add_unknown_files(file);
    }
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

// The job's coordinator answers, when what it decides is durable.
RequestToken Agent::AwaitJob(AdminToken admin, const JobUuid& job) {
  const RequestToken token = next_token_++;
  const uint32_t timeout_ms = config_.admin().request_timeout_ms();
  const MonotonicTime deadline =
      time_.now +
      (timeout_ms > 0 ? Duration(std::chrono::milliseconds(timeout_ms)) : Duration(kSettle));
  admin_waits_[token] = {admin, deadline, job};
  deadlines_.insert({deadline, token});
  return token;
}

void Agent::Admin(const AdminRequest& e, const v1::PinRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  Send((*job)->uuid(), PinAsked{AwaitJob(e.token, (*job)->uuid()), request});
}

void Agent::Admin(const AdminRequest& e, const v1::ReplaceRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  Send((*job)->uuid(), ReplaceAsked{AwaitJob(e.token, (*job)->uuid()), request});
}

// Of this node: what lies here alone gets elsewhere (Coordinator::Rescue), and nothing new here.
// Until it is undone, or the daemon is started anew.
void Agent::Admin(const AdminRequest& e, const v1::DrainRequest& request) {
  const std::string& self = nodes_.Name(kHere);
  if (!request.node().empty() && request.node() != self) {
    return RefuseAdmin(e.token,
                       absl::NotFoundError(absl::StrCat("drain: no node is called '",
                                                        request.node().substr(0, kJobNameBytesMax),
                                                        "', or it is none now (ckptctl nodes lists "
                                                        "them)")));
  }
  if (e.caller.uid != 0 && e.caller.uid != daemon_uid_) {
    return RefuseAdmin(
        e.token, absl::PermissionDeniedError("drain: root's and the daemon's own user's to do"));
  }
  if (!request.look() && draining_ == request.undo()) {
    draining_ = !request.undo();
    for (const auto& [uuid, job] : jobs_) {
      if (Told(job)) {
        Send(uuid, NodeLeaving{draining_});
      }
    }
  }
  v1::DrainReply reply;
  reply.set_node(self);
  reply.set_ranks(static_cast<uint32_t>(
      std::count_if(seats_.all().begin(), seats_.all().end(),
                    [](const auto& seat) { return !seat.second.superseded; })));
  reply.set_draining(draining_);
  for (const auto& [uuid, job] : jobs_) {
    if (HasAnything(uuid)) {
      v1::DrainReply::Job& there = *reply.add_jobs();
      there.set_name(job.name);
      there.set_uuid(uuid.ToString());
    }
  }
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

void Agent::Admin(const AdminRequest& e, const v1::RemoveCheckpointRequest& request) {
  const auto job = FindVisible(e.caller, request.job());
  if (!job.ok()) {
    return RefuseAdmin(e.token, job.status());
  }
  Send((*job)->uuid(), RemoveCheckpointAsked{AwaitJob(e.token, (*job)->uuid()), request});
}

void Agent::TakeMessage(const JobUuid&, const AdminAnswered& m) {
  const auto wait = admin_waits_.find(m.token);
  if (wait == admin_waits_.end()) {
    return;
  }
  AdminReply reply{wait->second.token, absl::OkStatus(), std::monostate()};
  std::visit([&](const auto& answer) { reply.reply = answer; }, m.reply);
  Act(std::move(reply));
  deadlines_.erase({*wait->second.deadline, m.token});
  admin_waits_.erase(wait);
}

void Agent::Admin(const AdminRequest& e, const v1::SetOptionsRequest& request) {
  const bool of_job = !request.job().empty();
  if (request.clear() && of_job && request.options().empty()) {
    const auto job = FindVisible(e.caller, request.job());
    if (!job.ok()) {
      return RefuseAdmin(e.token, job.status());
    }
    return Send((*job)->uuid(),
                SetPolicyAsked{AwaitJob(e.token, (*job)->uuid()), {}, "what was set is forgotten"});
  }
  const absl::StatusOr<std::string> yaml = AsYaml(request);
  if (!yaml.ok()) {
    return RefuseAdmin(e.token, yaml.status());
  }
  if (of_job) {
    const auto job = FindVisible(e.caller, request.job());
    if (!job.ok()) {
      return RefuseAdmin(e.token, job.status());
    }
    v1::Policy policy = request.clear() ? v1::Policy() : (*job)->policy_set();
    absl::Status parsed = ParseConfig(*yaml, "set", policy);
    if (parsed.ok()) {
      parsed = CheckPolicy(policy);
    }
    if (!parsed.ok()) {
      return RefuseAdmin(e.token, SetError(parsed));
    }
    return Send((*job)->uuid(),
                SetPolicyAsked{AwaitJob(e.token, (*job)->uuid()), policy,
                               absl::StrCat("job '", request.job(), "': ", OptionsText(request))});
  }
  if (e.caller.uid != 0 && e.caller.uid != daemon_uid_) {
    return RefuseAdmin(e.token, absl::PermissionDeniedError(
                                    "the daemon's limits are root's and its own user's to set; "
                                    "name a job of yours to set its policy"));
  }
  for (const v1::SetOptionsRequest::Option& option : request.options()) {
    if (std::find(kLimits.begin(), kLimits.end(), absl::string_view(option.name())) ==
        kLimits.end()) {
      return RefuseAdmin(
          e.token,
          absl::InvalidArgumentError(absl::StrCat(
              "set: '", option.name().substr(0, 64),
              "' cannot be set; these can: ", absl::StrJoin(kLimits, ", "),
              "; others are changed in the settings' file, and read again (SIGHUP, or systemctl "
              "reload ckptd)")));
    }
  }
  v1::DaemonConfig changed = config_;
  absl::Status parsed = ParseConfig(*yaml, "set", changed);
  for (const SettingRange& range : TierRanges(changed.nvme(), changed.remote(), changed.fabric())) {
    const bool may_change =
        std::find(kLimits.begin(), kLimits.end(), ToAbsl(range.setting)) != kLimits.end();
    if (parsed.ok() && may_change) {
      parsed = Annotate(CheckRange(range), "set");
    }
  }
  if (!parsed.ok()) {
    return RefuseAdmin(e.token, SetError(parsed));
  }
  *config_.mutable_nvme() = changed.nvme();
  *config_.mutable_remote() = changed.remote();
  *config_.mutable_fabric() = changed.fabric();
  for (const v1::SetOptionsRequest::Option& option : request.options()) {
    limits_set_[option.name()] = option.value();
  }
  Act(ApplyLimits{config_.nvme(), config_.remote(), config_.fabric()});
  v1::SetOptionsReply reply;
  const bool priority = std::any_of(request.options().begin(), request.options().end(),
                                    [](const v1::SetOptionsRequest::Option& option) {
                                      return absl::StrContains(option.name(), "io_priority") ||
                                             absl::StrContains(option.name(), ".nice");
                                    });
  reply.set_text(absl::StrCat(
      "until ckptd is restarted: ", OptionsText(request),
      priority ? "; the kernel lets only root raise a priority: if it refuses, ckptd's log says so"
               : ""));
  Act(AdminReply{e.token, absl::OkStatus(), std::move(reply)});
}

// What waits for memory may get it now. Where there is less of it, what is in use stays, and no
// more is taken until so much is free.
void Agent::OnSettingsChanged(const SettingsChanged& e) {
  config_ = e.config;
  v1::SetOptionsRequest set;
  for (const auto& [name, value] : limits_set_) {
    v1::SetOptionsRequest::Option& option = *set.add_options();
    option.set_name(name);
    option.set_value(value);
  }
  if (!limits_set_.empty()) {
    // (It was parsed when it was set, and its limits depend on no other setting.)
    const absl::StatusOr<std::string> yaml = AsYaml(set);
    const absl::Status parsed = yaml.ok() ? ParseConfig(*yaml, "set", config_) : yaml.status();
    if (!parsed.ok()) {
      AddProblem(absl::StrCat("what was set is forgotten: ", Message(SetError(parsed))));
      limits_set_.clear();
    }
  }
  bytes_max_ = config_.memory().bytes_max();
  slots_changed_ = true;
  for (const RequestToken token : waiting_for_room_) {
    pending_.at(token).no_create = false;
  }
  Act(ApplyLimits{config_.nvme(), config_.remote(), config_.fabric()});
}

// ---- Rebuild ----

void Agent::Admin(const AdminRequest& e, const v1::RebuildRequest& request) {
  if (e.caller.uid != 0 && e.caller.uid != daemon_uid_) {
    return RefuseAdmin(
        e.token, absl::PermissionDeniedError("rebuild: root's and the daemon's own user's to do"));
  }
  if (rebuild_) {
    return RefuseAdmin(e.token, absl::AlreadyExistsError("rebuild: one is under way already"));
  }
  const auto asked = [&](TierKind tier) {
    return HasTier(tier) && (request.tier().empty() || request.tier() == TierName(tier));
  };
  if (request.tier() == TierName(TierKind::kMemory)) {
    return RefuseAdmin(e.token,
                       absl::InvalidArgumentError(
                           "rebuild: what lies in memory is read when ckptd starts, and known from "
                           "then on; name nvme or remote, or no tier for both"));
  }
  if (!request.tier().empty() && !asked(TierKind::kNvme) && !asked(TierKind::kRemote)) {
    return RefuseAdmin(e.token, absl::InvalidArgumentError(absl::StrCat(
                                    "rebuild: there is no tier '", request.tier(), "' here")));
  }
  rebuild_ = RebuildRun();
  rebuild_->token = e.token;
  rebuild_->since = time_.now;
  unknown_files_.clear();
  if (asked(TierKind::kNvme)) {
    for (const auto& [dir, drive] : drives_) {
      rebuild_->drives.insert(dir);
    }
    rebuild_->nvme_read = true;
    for (const auto& [uuid, job] : jobs_) {
      if (Tells(job, TierKind::kNvme)) {
        Send(uuid, InventoryState{TierKind::kNvme, InventoryState::Kind::kPending, ""});
      }
    }
    rebuild_->nvme_scan = next_drain_;
    ScanDrives();
  }
  if (asked(TierKind::kRemote)) {
    for (const auto& [uuid, job] : jobs_) {
      if (Tells(job, TierKind::kRemote)) {
        Send(uuid, InventoryState{TierKind::kRemote, InventoryState::Kind::kPending, ""});
      }
    }
    DrainOp op;
    op.kind = DrainOp::Kind::kScan;
    op.tier = TierKind::kRemote;
    rebuild_->remote_asked = true;
    rebuild_->remote = BeginDrain(std::move(op));
    Act(ScanRemote{rebuild_->remote, ""});
  }
  AdvanceRebuild();
}

// When all tiers have answered: what is not there any more is forgotten, of jobs that have nothing
// left, too.
void Agent::AdvanceRebuild() {
  if (!rebuild_ || rebuild_->told || !rebuild_->drives.empty() || rebuild_->remote != 0) {
    return;
  }
  rebuild_->told = true;
  const bool drives_whole = std::all_of(drives_.begin(), drives_.end(), [](const auto& drive) {
    return drive.second.hidden.empty();
  });
  if (rebuild_->nvme_read && drives_whole) {
    IndexAnew(TierKind::kNvme, rebuild_->nvme);
  }
  const std::map<std::string, std::string>& hidden = rebuild_->hidden_in_remote;
  if (rebuild_->remote_read && hidden.empty()) {
    IndexAnew(TierKind::kRemote, rebuild_->in_remote);
  }
  for (const auto& [uuid, job] : jobs_) {
    if (rebuild_->nvme_read) {
      CopiesFound all = std::move(rebuild_->nvme[uuid]);
      all.tier = TierKind::kNvme;
      all.began = rebuild_->since;
      all.as_of = HiddenOnDrives(job.name).empty() ? rebuild_->since : MonotonicTime();
      std::set<ShardId> seen;
      for (const DurableCopy& copy : all.copies) {
        seen.insert(copy.copy.id);
      }
      for (const BadDurableCopy& bad : all.bad) {
        seen.insert(bad.copy.copy.id);
      }
      drive_copies_.DropUnseen(uuid, all.as_of, seen);
      if (Tells(job, TierKind::kNvme)) {
        Send(uuid, std::move(all));
      }
    }
    if (rebuild_->remote_read && rebuild_->asked_anew.count(uuid) == 0 &&
        Tells(job, TierKind::kRemote)) {
      CopiesFound all = std::move(rebuild_->in_remote[uuid]);
      all.tier = TierKind::kRemote;
      all.began = rebuild_->since;
      if (const auto why = hidden.find(job.name); why != hidden.end()) {
        remote_known_.erase(uuid);
        remote_problems_[uuid] = why->second;
        rescan_at_[job.name] = time_.now + kRescan;
      } else {
        all.as_of = rebuild_->since;
        remote_known_.insert(uuid);
        remote_problems_.erase(uuid);
        remote_away_bytes_.erase(uuid);
        rescan_at_.erase(job.name);
      }
      Send(uuid, std::move(all));
    }
  }
  for (const auto& [uuid, job] : jobs_) {
    TellInventory(uuid, TierKind::kNvme);
    TellInventory(uuid, TierKind::kRemote);
  }
}

// As the scans found it, and as it was changed while they looked.
void Agent::IndexAnew(TierKind tier, const std::map<JobUuid, CopiesFound>& found) {
  Act(UnindexCopies{tier, std::nullopt, std::nullopt});
  for (const auto& [uuid, copies] : found) {
    for (const DurableCopy& copy : copies.copies) {
      Act(IndexShard{copy.copy, tier, 0, copy.location});
    }
  }
  for (const auto& change : rebuild_->changes) {
    std::visit(
        [&](const auto& action) {
          if (action.tier == tier) {
            Act(action);
          }
        },
        change);
  }
}

void Agent::ChangeIndex(std::variant<IndexShard, UnindexCopies> change) {
  std::visit([this](const auto& action) { Act(action); }, change);
  if (rebuild_ && !rebuild_->told) {
    rebuild_->changes.push_back(std::move(change));
  }
}

// The coordinators have heard all that was found.
void Agent::AnswerRebuild() {
  RebuildRun run = *std::exchange(rebuild_, std::nullopt);
  for (const auto& [dir, drive] : drives_) {
    if (!drive.problem.empty()) {
      run.reply.add_problems(drive.problem);
    }
  }
  for (const auto& [uuid, job] : jobs_) {
    if (job.coordinator == nullptr) {
      continue;
    }
    const Coordinator& coordinator = *job.coordinator;
    run.reply.set_jobs(run.reply.jobs() + 1);
    run.reply.set_checkpoints(run.reply.checkpoints() +
                              static_cast<uint32_t>(coordinator.AllCheckpoints().size()));
    v1::WhereReply where;
    coordinator.FillWhere(std::nullopt, where);
    run.reply.set_shards(run.reply.shards() + static_cast<uint32_t>(where.copies_size()));
  }
  for (const auto& [shard, slot] : shards_) {
    if (slots_.at(slot).state == SlotState::kSealed) {
      Act(IndexShard{slots_.at(slot).copy, TierKind::kMemory, slot, ""});
    }
  }
  for (const std::string& problem : problems_.All()) {
    run.reply.add_problems(problem);
  }
  for (const std::string& file : unknown_files_) {
    run.reply.add_unknown_files(file);
  }
  Act(AdminReply{run.token, absl::OkStatus(), std::move(run.reply)});
}

// What the core knows of the tiers; the runtime adds what its drives and mounts say.
void Agent::FillTierStatus(v1::DaemonStatus& daemon) const {
  for (const TierKind tier : kDrained) {
    if (!HasTier(tier)) {
      continue;
    }
    v1::TierStatus& status = *daemon.add_tiers();
    status.set_tier(std::string(TierName(tier)));
    status.set_bytes_used(TierBytesUsed(tier));
    status.set_healthy(true);
    status.set_state("ok");
    if (tier == TierKind::kNvme) {
      status.set_bytes_max(nvme_bytes_max_);
      *status.mutable_dirs() = config_.nvme().dirs();
      status.set_bandwidth_bytes_per_s_max(config_.nvme().bandwidth_bytes_per_s_max());
      for (const auto& [dir, drive] : drives_) {
        if (!drive.answered) {
          status.set_state(absl::StrCat("what lies in ", dir, " is still being read"));
        }
        if (!drive.problem.empty()) {
          status.set_state(status.healthy() ? drive.problem
                                            : absl::StrCat(status.state(), "; ", drive.problem));
          status.set_healthy(false);
        }
      }
    } else if (tier == TierKind::kPeer) {
      status.set_bytes_used(LentBytes());
      status.set_bytes_max(LendsBytes());
      status.set_bandwidth_bytes_per_s_max(config_.fabric().bandwidth_bytes_per_s_max());
    } else {
      status.set_bytes_max(config_.remote().bytes_max());
      status.add_dirs(config_.remote().dir());
      status.set_bandwidth_bytes_per_s_max(config_.remote().bandwidth_bytes_per_s_max());
      if (!remote_problems_.empty()) {
        status.set_healthy(false);
        status.set_state(remote_problems_.begin()->second);
      }
    }
    for (const auto& [id, op] : drains_) {
      const bool flush = (op.kind == DrainOp::Kind::kFlush ||
                          (op.kind == DrainOp::Kind::kFetch && tier == TierKind::kPeer)) &&
                         op.tier == tier;
      status.set_flushes(status.flushes() + (flush ? 1 : 0));
      if (op.tier == tier && !op.stalled.empty()) {
        status.set_stalled(status.stalled() + 1);
        status.set_healthy(false);
        status.set_state(op.stalled);
      }
    }
  }
}

}  // namespace holdfast
