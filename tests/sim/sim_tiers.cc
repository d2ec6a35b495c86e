// The fake runtime of the durable tiers, and what goes wrong with them.
#include "tests/sim/sim_tiers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_world.h"

namespace holdfast::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr TierKind kDurable[] = {TierKind::kNvme, TierKind::kRemote};

std::string Name(TierKind tier) {
  return std::string(TierName(tier));
}

std::string DirOf(TierKind tier) {
  return tier == TierKind::kNvme ? "/nvme0" : "/remote";
}

}  // namespace

// Chance of its own, so that what goes wrong elsewhere is the same with and without tiers.
bool World::TierChance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(tier_random_) < probability;
}

uint64_t World::TierBelow(uint64_t limit) {
  return limit == 0 ? 0 : tier_random_() % limit;
}

void World::MakeTiers() {
  if (!TierChance(0.6)) {
    return;
  }
  tiers_ = true;
  config_.mutable_nvme()->add_dirs("/nvme0");
  config_.mutable_nvme()->set_high_watermark_percent(90);
  config_.mutable_nvme()->set_low_watermark_percent(70);
  config_.mutable_remote()->set_dir("/remote");
  for (v1::TierPolicy* policy :
       {config_.mutable_policy()->mutable_nvme(), config_.mutable_policy()->mutable_remote()}) {
    policy->set_every_steps(1 + TierBelow(4));
    policy->set_every_ms(TierChance(0.3) ? 5000 : 0);
    policy->set_keep_last(1 + static_cast<uint32_t>(TierBelow(3)));
    policy->set_keep_every_steps(TierChance(0.2) ? 50 : 0);
    policy->set_bytes_max(0);
    policy->set_verify(v1::TierPolicy::VERIFY_SAMPLE);
  }
  uint64_t ranks = 0;
  for (const JobPlan& job : jobs_) {
    ranks += job.world_size;
  }
  // Enough for what must stay of each job, and sometimes little more.
  nvme_bytes_max_ = TierChance(0.5) ? ranks * (8 + TierBelow(8)) * kSlotBytes : 0;
  oracle_.SetTiers(&nvme_, &remote_);
}

SimTier& World::TierOf(TierKind tier) {
  return tier == TierKind::kNvme ? nvme_ : remote_;
}

Duration World::TierLatency(TierKind tier) {
  const uint64_t most = tier == TierKind::kNvme ? 400 : 3000;
  return milliseconds(1 + TierBelow(stormy_ && TierChance(0.05) ? 20 * most : most));
}

// Performs it when the tier answers again; says so when that takes long.
void World::RunDrain(DrainId id, SimDrain drain) {
  const TierKind tier = drain.tier;
  drains_[id] = std::move(drain);
  After(TierLatency(tier), [this, id, life = life_] { TryDrain(id, life); });
}

void World::TryDrain(DrainId id, uint64_t life) {
  const auto it = drains_.find(id);
  if (!InLife(life) || it == drains_.end()) {
    return;
  }
  SimDrain& drain = it->second;
  const SimTier& tier = TierOf(drain.tier);
  const bool hung = tier.hung_until > now_;
  if (hung && !drain.cancelled) {
    if (!drain.stalled) {
      drain.stalled = true;
      Complete(DrainStalled{id, true, absl::StrCat("no progress: ", Name(drain.tier))});
    }
    return After(tier.hung_until - now_ + milliseconds(TierBelow(500)),
                 [this, id, life] { TryDrain(id, life); });
  }
  if (drain.stalled && !drain.cancelled) {
    Complete(DrainStalled{id, false, ""});
  }
  const SimDrain ended = std::move(drain);
  drains_.erase(it);
  ended.end(ended.cancelled && (hung || TierChance(0.7)));
}

absl::Status World::TierFault(TierKind kind) {
  const SimTier& tier = TierOf(kind);
  if (tier.away) {
    return absl::UnavailableError("it is not the directory that it was");
  }
  if (tier.full) {
    return absl::ResourceExhaustedError("ENOSPC");
  }
  return stormy_ && TierChance(tier.fails) ? absl::UnavailableError("EIO") : absl::OkStatus();
}

void World::Do(const CancelDrain& a) {
  const auto it = drains_.find(a.drain);
  if (it != drains_.end() && !it->second.cancelled) {
    it->second.cancelled = true;
    After(milliseconds(1 + TierBelow(200)), [this, a, life = life_] { TryDrain(a.drain, life); });
  }
}

void World::Do(const FlushShard& a) {
  uint64_t used = TierOf(a.to).BytesUsed() + a.image_bytes;
  for (const auto& [id, drain] : drains_) {
    used += drain.reads && drain.tier == a.to ? drain.bytes : 0;
  }
  if (a.to == TierKind::kNvme && nvme_bytes_max_ > 0 && used > nvme_bytes_max_) {
    oracle_.Violated(absl::StrCat("nvme takes ", used, " bytes with ", a.key.id.ToString(),
                                  ", its budget is ", nvme_bytes_max_));
  }
  const FilePtr file = a.from == TierKind::kMemory ? FindFile(a.slot) : nullptr;
  if (a.from == TierKind::kMemory && (!file || !file->record || file->record->copy.id != a.key.id ||
                                      file->record->copy.generation != a.generation)) {
    return oracle_.Violated(absl::StrCat("slot ", a.slot, " is to be flushed as ",
                                         a.key.id.ToString(), ", and holds no such sealed copy"));
  }
  SimDrain drain{a.to, a.from, a.key.id, a.image_bytes, false, false, nullptr};
  const std::optional<FileRecord> record = file ? file->record : std::nullopt;
  drain.end = [this, a, file, record](bool cancelled) {
    const bool there = TierOf(a.to).copies.count(a.key.id) > 0;  // from an earlier try, or life
    const FlushEnded ended = FlushNow(a, file, record, cancelled);
    if (there || !ended.status.ok()) {
      TierOf(a.to).unsynced.erase(a.key.id);
      return Complete(ended);
    }
    TierOf(a.to).unsynced[a.key.id] = life_;
    After(TierLatency(a.to), [this, a, ended, life = life_] { SyncFlushed(a, ended, life); });
  };
  RunDrain(a.drain, std::move(drain));
}

// What was published is there to stay, or could not be synced and is taken back.
void World::SyncFlushed(const FlushShard& a, FlushEnded ended, uint64_t life) {
  SimTier& tier = TierOf(a.to);
  const auto unsynced = tier.unsynced.find(a.key.id);
  if (!InLife(life)) {
    return;
  }
  if (unsynced == tier.unsynced.end()) {  // with its job, or its drive
    ended.status = absl::NotFoundError("it was removed meanwhile");
    return Complete(ended);
  }
  tier.unsynced.erase(unsynced);
  ended.status = TierFault(a.to);
  if (!ended.status.ok()) {
    tier.copies.erase(a.key.id);
  }
  Complete(ended);
}

// Writes and publishes it.
FlushEnded World::FlushNow(const FlushShard& a, const FilePtr& file,
                           const std::optional<FileRecord>& record, bool cancelled) {
  FlushEnded ended{
      a.drain, cancelled ? absl::CancelledError("as asked") : TierFault(a.to), false, {}};
  TierCopy written;
  if (file) {
    // Its bytes stay as they are while it is being read, whatever becomes of its record.
    if (file->note.generation() != a.generation || FindFile(a.slot) != file) {
      oracle_.Violated(absl::StrCat("slot ", a.slot, " was filled again while ",
                                    a.key.id.ToString(), " was being flushed from it"));
    }
    written = {{record->copy, 100, 0, false, ""}, record->token, file->token, file->content};
  } else {
    const SimTier& from = TierOf(a.from);
    const auto source = from.copies.find(a.key.id);
    if (source != from.copies.end()) {
      written = source->second;
    } else if (ended.status.ok()) {
      ended.status = absl::NotFoundError("no such copy there");
    }
  }
  if (ended.status.ok() && a.replace && TierOf(a.to).copies.count(a.key.id) == 0) {
    ended.status = absl::NotFoundError("what was to be mended was removed");
  }
  if (!ended.status.ok()) {
    return ended;
  }
  if (written.token != written.bytes) {
    ended.status = absl::DataLossError("digests differ");
    ended.source_bad = true;
    return ended;
  }
  SimTier& tier = TierOf(a.to);
  written.copy.copy.generation = 0;
  written.copy.record_crc = written.token;
  written.copy.location = absl::StrCat(DirOf(a.to), "/", a.key.id.ToString());
  tier.copies[a.key.id] = written;
  tier.jobs[a.key.id.job] = {a.key.job_name, a.uid, a.gid};
  ended.copy = written.copy;
  return ended;
}

void World::Do(const FetchShard& a) {
  const FilePtr file = FindFile(a.slot);
  if (!file || file->record || !file->read_by.empty() || file->note.generation() != a.generation) {
    return oracle_.Violated(
        absl::StrCat("slot ", a.slot, " is to be fetched into, and is not empty or not noted"));
  }
  for (const ProcessId& mapper : file->mapped_by) {
    if (!file->note.has_writer() || file->note.writer().pid() != mapper.pid) {
      oracle_.Violated(absl::StrCat("slot ", a.slot, " is fetched into while ", mapper.ToString(),
                                    " can write into it"));
    }
  }
  if (a.from == TierKind::kRemote &&
      remote_.manifests.count({a.key.id.job, a.key.id.checkpoint()}) == 0) {
    oracle_.Violated(
        absl::StrCat(a.key.id.ToString(), " is read from remote, and no manifest ", "names it"));
  }
  SimDrain drain{a.from, std::nullopt, a.key.id, 0, false, false, nullptr};
  drain.end = [this, a, file](bool cancelled) {
    FetchEnded ended{a.drain,      a.slot,
                     a.generation, cancelled ? absl::CancelledError("as asked") : TierFault(a.from),
                     false,        {}};
    if (absl::IsResourceExhausted(ended.status)) {
      ended.status = absl::OkStatus();  // a full tier can be read
    }
    const SimTier& tier = TierOf(a.from);
    const auto source = tier.copies.find(a.key.id);
    if (ended.status.ok() && source == tier.copies.end()) {
      ended.status = absl::NotFoundError("no such copy");
    } else if (ended.status.ok() && source->second.token != source->second.bytes) {
      ended.status = absl::DataLossError("digests differ");
      ended.source_bad = true;
    } else if (ended.status.ok()) {
      ended.copy = source->second.copy.copy;
      ended.copy.generation = a.generation;
      if (const FilePtr before = a.replaces ? FindFile(*a.replaces) : nullptr) {
        before->record.reset();
        before->replaced = true;
      }
      file->token = source->second.token;
      file->content = source->second.content;
      file->replaced = false;
      file->record = FileRecord{ended.copy, file->token};
      file->uid = tier.jobs.at(a.key.id.job).uid;
    }
    Complete(ended);
  };
  RunDrain(a.drain, std::move(drain));
}

void World::Do(const OpenDurable& a) {
  if (a.tier == TierKind::kRemote &&
      remote_.manifests.count({a.key.id.job, a.key.id.checkpoint()}) == 0) {
    oracle_.Violated(
        absl::StrCat(a.key.id.ToString(), " is opened in remote, and no manifest names it"));
  }
  SimDrain drain{a.tier, std::nullopt, a.key.id, 0, false, false, nullptr};
  drain.end = [this, a](bool cancelled) {
    DurableOpened opened{a.drain,
                         cancelled ? absl::CancelledError("as asked") : TierFault(a.tier),
                         false,
                         {},
                         nullptr};
    if (absl::IsResourceExhausted(opened.status)) {
      opened.status = absl::OkStatus();  // a full tier can be read
    }
    const SimTier& tier = TierOf(a.tier);
    const auto source = tier.copies.find(a.key.id);
    if (opened.status.ok() && source == tier.copies.end()) {
      opened.status = absl::NotFoundError("no such copy");
    } else if (opened.status.ok()) {
      opened.copy = source->second.copy.copy;  // (digests are the reader's to compare)
    }
    Complete(opened);
  };
  RunDrain(a.drain, std::move(drain));
}

void World::Do(const PublishManifest& a) {
  SimDrain drain{TierKind::kRemote,
                 std::nullopt,
                 {a.job, a.checkpoint.attempt, a.checkpoint.step, 0},
                 0,
                 false,
                 false,
                 nullptr};
  drain.end = [this, a](bool cancelled) {
    const absl::Status status =
        cancelled ? absl::CancelledError("as asked") : TierFault(TierKind::kRemote);
    if (status.ok()) {
      if (a.shards.size() != a.world_size) {
        oracle_.Violated("a manifest names too few shards");
      }
      for (const DurableCopy& shard : a.shards) {
        const auto copy = remote_.copies.find(shard.copy.id);
        if (copy == remote_.copies.end() || copy->second.copy.record_crc != shard.record_crc) {
          oracle_.Violated(
              absl::StrCat("a manifest names ", shard.copy.id.ToString(), ", which is not there"));
        }
      }
      // (One that is there already, and was synced, stays so: it is created, or left alone.)
      if (remote_.manifests.insert({a.job, a.checkpoint}).second) {
        remote_.unsynced_manifests[{a.job, a.checkpoint}] = life_;
      }
      return After(TierLatency(TierKind::kRemote), [this, a, life = life_] {
        if (InLife(life)) {
          remote_.unsynced_manifests.erase({a.job, a.checkpoint});
          Complete(ManifestPublished{a.drain, absl::OkStatus()});
        }
      });
    }
    Complete(ManifestPublished{a.drain, status});
  };
  RunDrain(a.drain, std::move(drain));
}

void World::Do(const RemoveCopies& a) {
  JudgeReaders(a);
  BeginRemoval(a);
  SimDrain drain{a.tier, std::nullopt, {a.job, a.checkpoint.attempt, a.checkpoint.step, 0},
                 0,      false,        false,
                 nullptr};
  drain.end = [this, a](bool) {
    SimTier& tier = TierOf(a.tier);
    absl::Status status = TierFault(a.tier);
    status = absl::IsResourceExhausted(status) ? absl::OkStatus() : status;
    if (status.ok()) {
      tier.going.erase({a.job, a.checkpoint});
      tier.manifests.erase({a.job, a.checkpoint});
      tier.unsynced_manifests.erase({a.job, a.checkpoint});
      std::erase_if(tier.unsynced, [&](const auto& c) {
        return c.first.job == a.job && c.first.checkpoint() == a.checkpoint;
      });
      std::erase_if(tier.copies, [&](const auto& c) {
        return c.first.job == a.job && c.first.checkpoint() == a.checkpoint;
      });
    }
    Complete(CopiesRemoved{a.drain, status});
  };
  RunDrain(a.drain, std::move(drain));
}

void World::Do(const RemoveJobCopies& a) {
  SimDrain drain{a.tier, std::nullopt, {a.job, 0, 0, 0}, 0, false, false, nullptr};
  drain.end = [this, a](bool) {
    SimTier& tier = TierOf(a.tier);
    std::erase_if(tier.manifests, [&](const auto& m) { return m.first == a.job; });
    std::erase_if(tier.unsynced_manifests, [&](const auto& m) { return m.first.first == a.job; });
    std::erase_if(tier.unsynced, [&](const auto& c) { return c.first.job == a.job; });
    std::erase_if(tier.copies, [&](const auto& c) { return c.first.job == a.job; });
    tier.jobs.erase(a.job);
    Complete(CopiesRemoved{a.drain, absl::OkStatus()});
  };
  RunDrain(a.drain, std::move(drain));
}

FoundJob World::FoundIn(const SimTier& tier, const JobUuid& uuid) const {
  const SimTier::Job& job = tier.jobs.at(uuid);
  FoundJob found{uuid, job.name, job.uid, job.gid, {}, {}};
  for (const auto& [id, copy] : tier.copies) {
    if (id.job == uuid && tier.unsynced.count(id) == 0) {
      found.copies.push_back(copy.copy);
    }
  }
  for (const auto& manifest : tier.manifests) {
    if (manifest.first == uuid && tier.unsynced_manifests.count(manifest) == 0) {
      found.manifests.push_back(manifest.second);
    }
  }
  return found;
}

void World::Do(const ScanNvme& a) {
  After(milliseconds(TierBelow(stormy_ ? 3000 : 300)), [this, a, life = life_] {
    if (!InLife(life)) {
      return;
    }
    TierScanned scanned;
    scanned.drain = a.drain;
    scanned.dir = "/nvme0";
    if (nvme_.away) {
      scanned.status = absl::UnavailableError("it is not the directory that it was");
      return Feed(scanned);
    }
    for (const auto& [uuid, job] : nvme_.jobs) {
      nvme_.FinishOlder(uuid, life);
      scanned.jobs.push_back(FoundIn(nvme_, uuid));
    }
    Feed(scanned);
  });
}

void World::Do(const ScanRemote& a) {
  SimDrain drain{TierKind::kRemote, std::nullopt, {}, 0, false, false, nullptr};
  drain.end = [this, a](bool) {
    TierScanned scanned;
    scanned.tier = TierKind::kRemote;
    scanned.drain = a.drain;
    scanned.job_name = a.job_name;
    if (remote_.unreadable || remote_.away) {
      scanned.status = absl::UnavailableError("ESTALE");
    } else {
      for (const auto& [uuid, job] : remote_.jobs) {
        if (a.job_name.empty() || job.name == a.job_name) {
          remote_.FinishOlder(uuid, life_);
          scanned.jobs.push_back(FoundIn(remote_, uuid));
        }
      }
    }
    Feed(scanned);
  };
  RunDrain(a.drain, std::move(drain));
}

// What was not synced may be lost, or not. Nobody has heard of it: with the tier out of reach after
// that the job may well go on without.
void World::LosePower() {
  for (SimTier* tier : {&nvme_, &remote_}) {
    for (const auto& [id, life] : tier->unsynced) {
      oracle_.job(tier->jobs.at(id.job).name).damaged.insert(id.checkpoint());
      if (TierChance(0.5)) {
        tier->copies.erase(id);
      }
    }
    for (const auto& [manifest, life] : tier->unsynced_manifests) {
      oracle_.job(tier->jobs.at(manifest.first).name).damaged.insert(manifest.second);
      if (TierChance(0.5)) {
        tier->manifests.erase(manifest);
      }
    }
    tier->unsynced.clear();
    tier->unsynced_manifests.clear();
  }
}

// The daemon dies. Some of what was under way was published, and nobody heard of it.
void World::DropDrains() {
  nvme_.going.clear();
  remote_.going.clear();
  const std::map<DrainId, SimDrain> drains = std::exchange(drains_, {});
  for (const auto& [id, drain] : drains) {
    if (drain.reads && TierChance(0.3)) {
      drain.end(false);  // (what it would have told is void with the life)
    }
  }
}

// ---- Judging ----

std::string World::TextOf(const RemoveCopies& a) const {
  return absl::StrCat("attempt ", a.checkpoint.attempt, " step ", a.checkpoint.step, " of ",
                      a.job_name, " is removed from ", Name(a.tier));
}

// Nobody reads what goes.
void World::JudgeReaders(const RemoveCopies& a) {
  for (const auto& [id, drain] : drains_) {
    if (drain.reads == a.tier && drain.id.job == a.job && drain.id.checkpoint() == a.checkpoint &&
        !drain.cancelled) {
      oracle_.Violated(TextOf(a) + " while it is read for another tier");
    }
  }
}

// It is judged once, when it is decided: that may be long before its turn has come, and a pin that
// comes meanwhile is told that it comes too late.
void World::BeginRemoval(const RemoveCopies& a) {
  if (TierOf(a.tier).going.count({a.job, a.checkpoint}) == 0) {
    JudgeRemoval(a);
    TierOf(a.tier).going.insert({a.job, a.checkpoint});
  }
}

// From outside, of what really lies there: the newest step of the line that survives each kind of
// failure is still there afterwards, and what is pinned is not touched.
void World::JudgeRemoval(const RemoveCopies& a) {
  const std::string what = TextOf(a);
  const auto state = states_.find(a.job.ToBytes());
  if (state == states_.end()) {
    return;
  }
  for (const v1::Pin& pin : state->second.pins()) {
    if (CheckpointId{pin.attempt(), pin.step()} == a.checkpoint) {
      oracle_.Violated(what + " although it is pinned");
    }
  }
  JudgeCover(a, state->second);
  const bool rotten =
      std::any_of(TierOf(a.tier).copies.begin(), TierOf(a.tier).copies.end(), [&](const auto& c) {
        return c.first.job == a.job && c.first.checkpoint() == a.checkpoint &&
               c.second.token != c.second.bytes;
      });
  if (rotten) {
    return;  // it may be known to be of no use
  }
  const std::vector<std::vector<TierKind>> survivors = {{TierKind::kNvme, TierKind::kRemote},
                                                        {TierKind::kRemote}};
  for (const std::vector<TierKind>& tiers : survivors) {
    if (std::find(tiers.begin(), tiers.end(), a.tier) == tiers.end() ||
        !Oracle::OnLine(state->second, a.checkpoint)) {
      continue;
    }
    const auto survives = [&](CheckpointId id, bool after) {
      for (Rank rank = 0; rank < a.world_size; ++rank) {
        const bool there = std::any_of(tiers.begin(), tiers.end(), [&](TierKind tier) {
          return !(after && tier == a.tier && id == a.checkpoint) &&
                 TierOf(tier).Has(tier, {a.job, id.attempt, id.step, rank}, true);
        });
        if (!there) {
          return false;
        }
      }
      return true;
    };
    if (!survives(a.checkpoint, false) || survives(a.checkpoint, true)) {
      continue;
    }
    bool newer = false;
    for (const TierKind tier : tiers) {
      for (const auto& [id, copy] : TierOf(tier).copies) {
        newer = newer ||
                (id.job == a.job && a.checkpoint < id.checkpoint() &&
                 Oracle::OnLine(state->second, id.checkpoint()) && survives(id.checkpoint(), true));
      }
    }
    // (What a person removes may have got there a moment ago, and nobody has heard of it.)
    const std::pair name_and_id{state->second.name(), a.checkpoint};
    const bool unheard_of = removed_by_hand_.count(name_and_id) > 0 &&
                            TierOf(a.tier).told_whole.count({a.job, a.checkpoint}) == 0;
    if (!newer && !unheard_of && forced_.count(name_and_id) == 0) {
      oracle_.Violated(what + ", and was the newest that would have survived a failure");
    }
  }
}

// The rule of docs/deletion.md: what is incomplete or corrupt is no reason to remove the rest. What
// goes is followed by a complete step of the line there, or, being incomplete itself, by two more
// that are, which are all that stays where room is short.
void World::JudgeCover(const RemoveCopies& a, const v1::JobState& state) {
  if (removed_by_hand_.count({state.name(), a.checkpoint}) > 0 ||
      !Oracle::OnLine(state, a.checkpoint)) {
    return;
  }
  const SimTier& tier = TierOf(a.tier);
  const auto complete = [&](CheckpointId id) {
    for (Rank rank = 0; rank < oracle_.job(state.name()).World(id.attempt); ++rank) {
      if (!tier.Has(a.tier, {a.job, id.attempt, id.step, rank}, true)) {
        return false;
      }
    }
    return true;
  };
  std::set<CheckpointId> parts;
  for (const auto& [id, copy] : tier.copies) {
    if (id.job != a.job || !(a.checkpoint < id.checkpoint())) {
      continue;
    }
    if (complete(id.checkpoint()) && Oracle::OnLine(state, id.checkpoint())) {
      return;
    }
    parts.insert(id.checkpoint());
  }
  // An ended job gives way in nvme, if remote has the step.
  bool in_remote = a.tier == TierKind::kNvme && nvme_bytes_max_ > 0;
  for (Rank rank = 0; rank < a.world_size; ++rank) {
    const ShardId shard{a.job, a.checkpoint.attempt, a.checkpoint.step, rank};
    in_remote = in_remote && remote_.Has(TierKind::kRemote, shard, true);
  }
  if (!in_remote && (complete(a.checkpoint) || parts.size() < 2)) {
    oracle_.Violated(TextOf(a) + ", and the line has no later complete step there");
  }
}

// What a person was granted may have to wait for other removals.
void World::RemovalGranted(const Report& a, CheckpointId id) {
  const v1::JobState* state = StateOf(a.job);
  if (state != nullptr && a.text.find("as asked (ckptctl rm)") != std::string::npos) {
    RemoveCopies granted;
    granted.tier = a.tier;
    granted.job = JobUuid::FromBytes(state->job_uuid()).value();
    granted.checkpoint = id;
    granted.world_size = oracle_.job(a.job).World(id.attempt);
    granted.job_name = a.job;
    BeginRemoval(granted);
  }
}

// What is called whole in a tier is that.
void World::JudgeTierCommitted(const Report& a, CheckpointId id) {
  for (const TierKind tier : kDurable) {
    if (a.text.find(absl::StrCat("is whole in ", Name(tier))) == std::string::npos) {
      continue;
    }
    ++TierOf(tier).committed;
    const v1::JobState* state = StateOf(a.job);
    if (state != nullptr) {
      TierOf(tier).told_whole.insert({JobUuid::FromBytes(state->job_uuid()).value(), id});
    }
    const uint32_t world = oracle_.job(a.job).World(id.attempt);
    for (Rank rank = 0; state != nullptr && rank < world; ++rank) {
      const JobUuid uuid = JobUuid::FromBytes(state->job_uuid()).value();
      if (!TierOf(tier).Has(tier, {uuid, id.attempt, id.step, rank}, true)) {
        oracle_.Violated(
            absl::StrCat("job ", a.job, ": ", a.text, ", and rank ", rank, " is not there"));
      }
    }
  }
}

// What is whole nowhere any more may be passed over.
void World::CopiesLost() {
  for (auto& [name, truth] : oracle_.jobs()) {
    for (const auto& [id, ranks] : truth.acknowledged) {
      if (!oracle_.Whole(name, id, files_)) {
        truth.damaged.insert(id);
      }
    }
  }
}

// ---- Trouble ----

void World::TierTrouble() {
  if (!tiers_ || !stormy_) {
    return;
  }
  After(milliseconds(500 + TierBelow(8000)), [this] { TierTrouble(); });
  const TierKind kind = TierChance(0.5) ? TierKind::kNvme : TierKind::kRemote;
  SimTier& tier = TierOf(kind);
  switch (TierBelow(11)) {
    case 0:
      tier.fails = TierChance(0.5) ? 0 : 0.3;
      return;
    case 1:
      tier.full = TierChance(0.4);
      return;
    case 2:
      tier.hung_until = now_ + seconds(1 + TierBelow(60));
      Trace(absl::StrCat(Name(kind), " hangs"));
      return;
    case 3:
      remote_.unreadable = TierChance(0.5);
      return;
    case 4:
    case 5: {
      if (tier.copies.empty()) {
        return;
      }
      auto it = tier.copies.begin();
      std::advance(it, static_cast<ptrdiff_t>(TierBelow(tier.copies.size())));
      Trace(absl::StrCat("a bit flips in ", Name(kind), ": ", it->first.ToString()));
      it->second.bytes = NewToken();
      oracle_.job(it->second.copy.copy.job_name).damaged.insert(it->first.checkpoint());
      return;
    }
    case 6:
      if (TierChance(0.3)) {
        Trace("the drive is wiped");
        KillDaemon();
        nvme_ = {};
        CopiesLost();
        After(seconds(1), [this] { StartDaemon(); });
      }
      return;
    case 7:
      if (TierChance(0.4)) {
        Reboot();
      }
      return;
    case 8:
    case 9:
      return TierAdmin(tier);
    case 10:
      return TierGoesAway(kind);
    default:
      return;
  }
}

// Its mount goes, and comes back some time later.
void World::TierGoesAway(TierKind kind) {
  SimTier& tier = TierOf(kind);
  if (tier.away) {
    return;
  }
  Trace(absl::StrCat(Name(kind), " goes away"));
  tier.away = true;
  After(milliseconds(TierBelow(2000)), [this, kind] {
    if (DaemonUp() && TierOf(kind).away) {
      Feed(TierAway{kind, DirOf(kind), absl::UnavailableError("it is not there")});
      After(milliseconds(TierBelow(5000)), [this] {  // somebody wants to make room for it
        if (DaemonUp() && stormy_) {
          MakeRoomByHand(TierChance(0.5) ? TierKind::kNvme : TierKind::kRemote);
        }
      });
    }
  });
  After(milliseconds(TierBelow(90'000)), [this, kind] { TierOf(kind).away = false; });
}

// What a person does with one of the steps that lie there.
void World::TierAdmin(SimTier& tier) {
  if (tier.copies.empty()) {
    return;
  }
  auto it = tier.copies.begin();
  std::advance(it, static_cast<ptrdiff_t>(TierBelow(tier.copies.size())));
  const std::string& job_name = it->second.copy.copy.job_name;
  const CheckpointId id = it->first.checkpoint();
  const auto job = std::find_if(jobs_.begin(), jobs_.end(),
                                [&](const JobPlan& plan) { return plan.name == job_name; });
  if (job == jobs_.end()) {
    return;
  }
  AdminRequest request{next_admin_++, Caller{{1, 1}, job->uid, job->uid}, v1::GetStatusRequest()};
  switch (TierBelow(6)) {
    case 0:
    case 1: {
      v1::PinRequest pin;
      pin.set_job(job_name);
      pin.set_attempt(id.attempt);
      pin.set_step(id.step);
      pin.set_unpin(++pins_ > 3 || TierChance(0.3));
      request.request = pin;
      break;
    }
    case 2:
    case 3: {
      v1::RemoveCheckpointRequest remove;
      remove.set_job(job_name);
      remove.set_attempt(id.attempt);
      remove.set_step(id.step);
      remove.set_tier(std::array{"", "memory", "nvme", "remote"}[TierBelow(4)]);
      remove.set_force(TierChance(0.3));
      request.request = remove;
      break;
    }
    case 4: {
      v1::CollectGarbageRequest collect;
      collect.set_job(job_name);
      request.request = collect;
      break;
    }
    default: {
      request.caller = Caller{{1, 1}, 0, 0};
      request.request = v1::RebuildRequest();
      break;
    }
  }
  AskTiers(request, job_name, id);
}

// The newest step of some job, which is often all that the job has left.
void World::MakeRoomByHand(TierKind kind) {
  const SimTier& tier = TierOf(kind);
  if (tier.copies.empty()) {
    return;
  }
  auto some = tier.copies.begin();
  std::advance(some, static_cast<ptrdiff_t>(TierBelow(tier.copies.size())));
  const std::string job_name = some->second.copy.copy.job_name;
  CheckpointId newest;
  for (const auto& [shard, copy] : tier.copies) {
    if (copy.copy.copy.job_name == job_name) {
      newest = std::max(newest, shard.checkpoint());
    }
  }
  const auto job = std::find_if(jobs_.begin(), jobs_.end(),
                                [&](const JobPlan& plan) { return plan.name == job_name; });
  if (job == jobs_.end()) {
    return;
  }
  v1::RemoveCheckpointRequest remove;
  remove.set_job(job_name);
  remove.set_attempt(newest.attempt);
  remove.set_step(newest.step);
  remove.set_tier(Name(kind));
  AskTiers({next_admin_++, Caller{{1, 1}, job->uid, job->uid}, remove}, job_name, newest);
}

void World::AskTiers(const AdminRequest& request, const std::string& job_name, CheckpointId id) {
  admin_[request.token] = absl::StrCat("request ", request.request.index(), " for step ", id.step,
                                       " of attempt ", id.attempt, " of ", job_name);
  if (const auto* remove = std::get_if<v1::RemoveCheckpointRequest>(&request.request)) {
    rm_asked_[request.token] = {job_name, id};
    removed_by_hand_.insert({job_name, id});
    if (remove->force()) {
      forced_.insert({job_name, id});
    }
  }
  Feed(request);
}

// What a person has removed is not missed.
void World::RemovalAnswered(AdminToken token, bool done) {
  const auto asked = rm_asked_.find(token);
  if (asked == rm_asked_.end()) {
    return;
  }
  if (done) {
    oracle_.job(asked->second.first).damaged.insert(asked->second.second);
  } else {
    forced_.erase(asked->second);
  }
  rm_asked_.erase(asked);
}

void World::CalmTiers() {
  for (SimTier* tier : {&nvme_, &remote_}) {
    tier->fails = 0;
    tier->full = tier->unreadable = tier->away = false;
    tier->hung_until = now_;
  }
  for (const auto& [id, drain] : drains_) {  // what hangs goes on now
    After(milliseconds(TierBelow(500)), [this, id = id, life = life_] { TryDrain(id, life); });
  }
}

void World::CheckTiersInCalm() {
  for (const TierKind tier : kDurable) {
    if (tiers_ && HasEnough() && TierOf(tier).committed < jobs_.size()) {
      oracle_.Violated(absl::StrCat("only ", TierOf(tier).committed, " commits in ", Name(tier),
                                    " by ", jobs_.size(), " healthy jobs"));
    }
  }
}

void World::CheckTiersAtTheEnd() {
  for (const TierKind tier : kDurable) {
    if (!TierOf(tier).copies.empty()) {
      oracle_.Violated(absl::StrCat(TierOf(tier).copies.begin()->first.ToString(), " is still in ",
                                    Name(tier), " after its job was removed"));
    }
  }
  if (!drains_.empty()) {
    oracle_.Violated(absl::StrCat(drains_.size(), " operations of the tiers never ended"));
  }
}

}  // namespace holdfast::sim
