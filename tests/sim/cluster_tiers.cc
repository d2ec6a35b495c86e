// The fake runtime of a simulated node's drive and of the remote tier that all nodes share. What is
// published there outlives daemons and reboots; both are slow, fail, hang, and rot.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"
#include "tiers/image/kept.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::seconds;

SimTier& Node::TierOf(TierKind tier) {
  return tier == TierKind::kNvme ? nvme_ : w_.remote.tier;
}

Place Node::PlaceOf(TierKind tier) const {
  return {tier, tier == TierKind::kRemote ? 0 : index};
}

Duration Node::TierLatency(TierKind tier) {
  const uint64_t most = tier == TierKind::kNvme ? 100 : 800;
  return w_.t.Millis(1, w_.stormy() && w_.t.Chance(0.03) ? 20 * most : most);
}

absl::Status Node::TierFault(TierKind kind, bool writes) {
  if (kind == TierKind::kPeer) {
    return MaybeFail(w_.stormy() ? 0.02 : 0);  // its own end of it
  }
  const SimTier& tier = TierOf(kind);
  if (tier.full && writes) {
    w_.Count(Fault::kRemoteFull);
    return absl::ResourceExhaustedError("ENOSPC");
  }
  if (tier.fails > 0 && w_.t.Chance(tier.fails)) {
    w_.Count(kind == TierKind::kNvme ? Fault::kNvmeFails : Fault::kRemoteFails);
    return absl::UnavailableError("EIO");
  }
  return absl::OkStatus();
}

// Performs it when the tier answers again; says so when that takes long.
void Node::RunDrain(DrainId id, SimDrain drain) {
  const TierKind tier = drain.tier;
  drains_[id] = std::move(drain);
  After(TierLatency(tier), [this, id] { TryDrain(id); });
}

void Node::TryDrain(DrainId id) {
  const auto it = drains_.find(id);
  if (it == drains_.end()) {
    return;
  }
  SimDrain& drain = it->second;
  const int64_t hung =
      drain.tier == TierKind::kPeer ? 0 : TierOf(drain.tier).hung_until.ns - w_.t.now();
  if (hung > 0 && !drain.cancelled) {
    w_.Count(drain.tier == TierKind::kNvme ? Fault::kNvmeHangs : Fault::kRemoteHangs);
    if (!std::exchange(drain.stalled, true)) {
      w_.counts.states["drain: stalled"]++;
      Complete(DrainStalled{id, true, "no progress"});
    }
    return After(std::min<Duration>(Duration(hung), seconds(5)) + w_.t.Millis(0, 300),
                 [this, id] { TryDrain(id); });
  }
  if (drain.stalled && !drain.cancelled) {
    Complete(DrainStalled{id, false, ""});
  }
  const SimDrain ended = std::move(drain);
  drains_.erase(it);
  ended.end(ended.cancelled && (hung > 0 || w_.t.Chance(0.7)));
}

void Node::Do(const CancelDrain& a) {
  CancelPull(a.drain);
  CancelParts(a.drain);
  const auto it = drains_.find(a.drain);
  if (it != drains_.end() && !std::exchange(it->second.cancelled, true)) {
    w_.counts.states["drain: cancelled"]++;
    After(w_.t.Millis(1, 100), [this, a] { TryDrain(a.drain); });
  }
}

void Node::Do(const FlushShard& a) {
  const FilePtr file = a.from == TierKind::kMemory ? FindFile(a.slot) : nullptr;
  if (a.from == TierKind::kMemory && (!file || !file->record || file->record->copy.id != a.key.id ||
                                      file->record->copy.generation != a.generation)) {
    return w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot, " is to be flushed as ",
                                          a.key.id.ToString(), ", and holds no such sealed copy"));
  }
  SimDrain drain{a.to, a.from, a.key.id, a.image_bytes, false, false, nullptr};
  drain.commander = CommanderOf(a.key.id.job);
  drain.begun = w_.t.now();
  drain.mends = a.replace && a.verify == v1::TierPolicy::VERIFY_ALL;
  if (drain.mends) {
    JudgeRepair(a, drain.commander);
  }
  const std::optional<FileRecord> record = file ? file->record : std::nullopt;
  drain.end = [this, a, file, record, commander = drain.commander](bool cancelled) {
    FlushEnded ended{a.drain, absl::CancelledError("as asked"), false, {}};
    if (!cancelled) {
      ended = FlushNow(a, file, record);
    }
    if (a.replace && ended.source_bad) {
      known_bad_[{a.key.id, a.from}] = {commander, w_.t.now()};
    }
    w_.counts.states[absl::StrCat(a.replace ? "replacement: " : "flush: ",
                                  ended.status.ok()  ? "written"
                                  : cancelled        ? "cancelled"
                                  : ended.source_bad ? "source bad"
                                                     : "failed")]++;
    Complete(ended);
  };
  RunDrain(a.drain, std::move(drain));
}

// Writes and publishes it. In the remote tier only the opening that has claimed the attempt may.
FlushEnded Node::FlushNow(const FlushShard& a, const FilePtr& file,
                          const std::optional<FileRecord>& record) {
  FlushEnded ended{a.drain, TierFault(a.to, true), false, {}};
  TierCopy written;
  if (file) {
    if (file->note.generation() != a.generation || FindFile(a.slot) != file) {
      w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot, " was filled again while ",
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
  // (What a manifest names anybody may mend.)
  if (a.to == TierKind::kRemote &&
      !(a.replace && w_.remote.tier.manifests.count({a.key.id.job, a.key.id.checkpoint()}) > 0)) {
    const auto [claim, fresh] =
        w_.remote.claims.try_emplace({a.key.id.job, a.key.id.attempt}, a.opening);
    if (claim->second != a.opening) {
      w_.counts.states["flush: claimed by another opening"]++;
      ended.status = absl::FailedPreconditionError("another opening claimed the attempt");
      return ended;
    }
  }
  SimTier& tier = TierOf(a.to);
  written.copy.copy.generation = 0;
  written.copy.record_crc = written.token;
  written.torn = TierCopy::Torn::kNo;
  written.copy.location =
      absl::StrCat(a.to == TierKind::kNvme ? absl::StrCat("/nvme0/", name, "/") : "/remote/",
                   a.key.id.ToString());
  if (const auto there = tier.copies.find(a.key.id);
      there != tier.copies.end() && there->second.token != written.token) {
    w_.truth.Violated(absl::StrCat(a.key.id.ToString(), " is in ", std::string(TierName(a.to)),
                                   " with other bytes"));
  }
  // What is there stays as it is, unless it is to be replaced; the image is not read.
  if (const auto there = tier.copies.find(a.key.id); there != tier.copies.end() && !a.replace) {
    known_bad_.erase({a.key.id, a.to});
    w_.counts.states[there->second.token != there->second.bytes ? "flush: a bad one is there"
                                                                : "flush: it is there"]++;
    if (there->second.torn != TierCopy::Torn::kNo) {
      ended.status = absl::DataLossError("what is there is cut");
    }
    ended.copy = there->second.copy;
    return ended;
  }
  if (a.to == TierKind::kRemote) {
    LeaveOut(a, written);
  }
  if (a.replace) {
    ++w_.written_anew[written.copy.location];
  }
  tier.copies[a.key.id] = written;
  tier.jobs[a.key.id.job] = {a.key.job_name, a.uid, a.gid};
  w_.truth.Added(a.key.id, PlaceOf(a.to));
  ended.copy = written.copy;
  return ended;
}

// What replicas share; a copy that is there stays as it is.
void Node::LeaveOut(const FlushShard& a, TierCopy& written) {
  if (const auto there = w_.remote.tier.copies.find(a.key.id);
      there != w_.remote.tier.copies.end()) {
    written.copy.file_bytes = there->second.copy.file_bytes;
    written.copy.plan = there->second.copy.plan;
    return;
  }
  if (a.replicas == nullptr) {
    return;
  }
  const std::vector<Rank>& ranks = a.replicas->ranks;
  if (a.replicas->content != written.copy.copy.likeness.content ||
      !std::binary_search(ranks.begin(), ranks.end(), a.key.id.rank)) {
    w_.truth.Violated(absl::StrCat(name, ": ", a.key.id.ToString(),
                                   " is to leave out what ranks with other bytes have"));
  }
  written.copy.plan = PlanHash(a.replicas->content, ranks);
  written.copy.file_bytes = written.copy.copy.image_bytes / 2;
  w_.remote.plans[written.copy.plan] = ranks;
  w_.counts.states["flush: shares with replicas"]++;
}

// Who leaves slices out relies on all of its group: each has all of its own, or is of the same
// plan.
void Node::CheckShared(const holdfast::PublishManifest& a, const std::string& what) {
  const auto at = [&](Rank rank) -> const DurableCopy* {
    const auto copy =
        w_.remote.tier.copies.find({a.job, a.checkpoint.attempt, a.checkpoint.step, rank});
    return copy == w_.remote.tier.copies.end() ? nullptr : &copy->second.copy;
  };
  for (Rank rank = 0; rank < a.world_size; ++rank) {
    const DurableCopy* copy = at(rank);
    if (copy == nullptr || copy->file_bytes == 0) {
      continue;
    }
    for (const Rank other : w_.remote.plans.at(copy->plan)) {
      const DurableCopy* owner = at(other);
      if (owner == nullptr || (owner->file_bytes != 0 && owner->plan != copy->plan)) {
        w_.truth.Violated(absl::StrCat(what, " names rank ", rank, ", which leaves out what rank ",
                                       other, " has not, or may leave out itself"));
      }
    }
  }
}

FilePtr Node::FindSealed(const ShardId& id) const {
  for (const auto& [slot, file] : files_) {
    if (file->record && file->record->copy.id == id) {
      return file;
    }
  }
  return nullptr;
}

// It is in this node's slot.
void Node::Fetched(const FetchShard& a, const SealedCopy& copy, uint64_t token,
                   const ShardId& content, const FilePtr& file, FetchEnded& ended) {
  ended.copy = copy;
  ended.copy.generation = a.generation;
  if (const FilePtr before = a.replaces ? FindFile(*a.replaces) : nullptr) {
    RecordGone(*before, Truth::Why::kFault);  // it is a bad one
    before->replaced = true;
  }
  file->token = token;
  file->content = content;
  file->replaced = false;
  file->record = FileRecord{ended.copy, file->token};
  w_.truth.Added(a.key.id, {TierKind::kMemory, index});
}

void Node::Do(const FetchShard& a) {
  const FilePtr file = FindFile(a.slot);
  if (!file || file->record || !file->read_by.empty() || file->note.generation() != a.generation) {
    return w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot,
                                          " is to be fetched into, and is not empty or not noted"));
  }
  const std::pair checkpoint{a.key.id.job, a.key.id.checkpoint()};
  if (a.from == TierKind::kRemote && w_.remote.tier.manifests.count(checkpoint) == 0 &&
      w_.remote.named.count(checkpoint) == 0) {
    w_.truth.Violated(absl::StrCat(name, ": ", a.key.id.ToString(),
                                   " is read from remote, and no manifest ever named it"));
  }
  SimDrain drain{a.from, std::nullopt, a.key.id, 0, false, false, nullptr};
  drain.end = [this, a, file](bool cancelled) {
    FetchEnded ended{
        a.drain,      a.slot,
        a.generation, cancelled ? absl::CancelledError("as asked") : TierFault(a.from, false),
        false,        {}};
    if (a.from == TierKind::kPeer && ended.status.ok()) {
      return Pull(a, file);
    }
    const SimTier& tier = TierOf(a.from);
    const auto source = tier.copies.find(a.key.id);
    if (ended.status.ok() && source == tier.copies.end()) {
      ended.status = absl::NotFoundError("no such copy");
      ended.source_bad = true;
    } else if (ended.status.ok() && source->second.token != source->second.bytes) {
      ended.status = absl::DataLossError("digests differ");
      ended.source_bad = true;
    } else if (ended.status.ok()) {
      Fetched(a, source->second.copy.copy, source->second.token, source->second.content, file,
              ended);
    }
    EndFetch(ended);
  };
  RunDrain(a.drain, std::move(drain));
}

void Node::EndFetch(const FetchEnded& ended) {
  w_.counts.states[ended.status.ok()  ? "fetch: read"
                   : ended.source_bad ? "fetch: source bad"
                                      : "fetch: failed"]++;
  Complete(ended);
}

// As it is now: whatever is removed later, an open file keeps its bytes.
FilePtr OpenedFile(const TierCopy& copy) {
  auto file = std::make_shared<File>();
  file->record = FileRecord{copy.copy.copy, copy.token};
  file->token = copy.bytes;
  file->content = copy.content;
  return file;
}

// (Digests are the reader's to compare.)
void Node::Do(const OpenDurable& a) {
  const std::pair checkpoint{a.key.id.job, a.key.id.checkpoint()};
  if (a.tier == TierKind::kRemote && w_.remote.tier.manifests.count(checkpoint) == 0 &&
      w_.remote.named.count(checkpoint) == 0) {
    w_.truth.Violated(absl::StrCat(name, ": ", a.key.id.ToString(),
                                   " is opened in remote, and no manifest ever named it"));
  }
  if (a.in_parts) {
    return OpenParts(a);
  }
  SimDrain drain{a.tier, std::nullopt, a.key.id, 0, false, false, nullptr};
  drain.end = [this, a](bool cancelled) {
    DurableOpened opened{a.drain,
                         cancelled ? absl::CancelledError("as asked") : TierFault(a.tier, false),
                         false,
                         {}};
    const SimTier& tier = TierOf(a.tier);
    const auto source = tier.copies.find(a.key.id);
    if (opened.status.ok() && source == tier.copies.end()) {
      opened.status = absl::NotFoundError("no such copy");
    } else if (opened.status.ok()) {
      opened.copy = source->second.copy.copy;
      // Some images are compressed: of those there are parts only.
      opened.parts_only = a.tier == TierKind::kRemote && (a.key.id.rank + a.key.id.step) % 3 == 0;
      if (!opened.parts_only) {
        auto files = std::make_shared<SimFiles>();
        files->file = OpenedFile(source->second);
        opened.files = files;
      }
    }
    Complete(opened);
  };
  RunDrain(a.drain, std::move(drain));
}

// Published once, by create-if-absent: whoever comes second adopts the first's, if it says the
// same.
void Node::Do(const PublishManifest& a) {
  SimDrain drain{TierKind::kRemote,
                 std::nullopt,
                 {a.job, a.checkpoint.attempt, a.checkpoint.step, 0},
                 0,
                 false,
                 false,
                 nullptr};
  drain.end = [this, a](bool cancelled) {
    absl::Status status =
        cancelled ? absl::CancelledError("as asked") : TierFault(TierKind::kRemote, true);
    const std::pair checkpoint{a.job, a.checkpoint};
    const std::string what = absl::StrCat(name, ": the manifest of ", a.job_name, " attempt ",
                                          a.checkpoint.attempt, " step ", a.checkpoint.step);
    std::vector<Rank> missing;
    std::vector<std::pair<ShardId, uint64_t>> named;
    for (const DurableCopy& shard : a.shards) {
      named.emplace_back(shard.copy.id, shard.record_crc);
    }
    const auto claim = w_.remote.claims.find({a.job, a.checkpoint.attempt});
    if (status.ok() && (claim == w_.remote.claims.end() || claim->second != a.opening)) {
      status = absl::FailedPreconditionError("another opening claimed the attempt");
    }
    if (status.ok() && w_.remote.tier.manifests.count(checkpoint) > 0) {
      status = w_.remote.named[checkpoint] == named
                   ? absl::OkStatus()
                   : absl::AlreadyExistsError("there is one that says something else");
      w_.counts.states[status.ok() ? "manifest: adopted" : "manifest: another one there"]++;
    } else if (status.ok()) {
      if (a.shards.size() != a.world_size) {
        w_.truth.Violated(
            absl::StrCat(what, " names ", a.shards.size(), " of ", a.world_size, " shards"));
      }
      for (Rank rank = 0; rank < a.shards.size(); ++rank) {
        const ShardId id{a.job, a.checkpoint.attempt, a.checkpoint.step, rank};
        const auto copy = w_.remote.tier.copies.find(id);
        if (named[rank].first != id || copy == w_.remote.tier.copies.end() ||
            copy->second.copy.record_crc != named[rank].second) {
          // (Whoever removed it meanwhile did so for another host; then nobody may rely on it.)
          status = absl::NotFoundError(absl::StrCat("rank ", rank, " is not there"));
        }
        if (copy == w_.remote.tier.copies.end()) {
          missing.push_back(rank);
        }
      }
      if (!missing.empty()) {
        w_.counts.states["manifest: files missing"]++;
      }
      if (status.ok()) {
        w_.remote.tier.manifests.insert(checkpoint);
        w_.remote.named[checkpoint] = named;
        CheckShared(a, what);
        w_.truth.ManifestPublished(a.job, a.checkpoint);
        w_.counts.states["manifest: published"]++;
      }
    }
    Complete(ManifestPublished{a.drain, status, missing});
  };
  RunDrain(a.drain, std::move(drain));
}

void Node::Do(const RemoveCopies& a) {
  JudgeRemoval(a);
  SimDrain drain{a.tier, std::nullopt, {a.job, a.checkpoint.attempt, a.checkpoint.step, 0},
                 0,      false,        false,
                 nullptr};
  drain.end = [this, a](bool) {
    SimTier& tier = TierOf(a.tier);
    const absl::Status status = TierFault(a.tier, false);
    if (status.ok()) {
      w_.counts.states["removal: done"]++;
      if (tier.manifests.erase({a.job, a.checkpoint}) > 0) {
        w_.truth.ManifestRemoved(a.job, a.checkpoint, Truth::Why::kCommanded);
      }
      const ShardId first{a.job, a.checkpoint.attempt, a.checkpoint.step, 0};
      for (auto it = tier.copies.lower_bound(first);
           it != tier.copies.end() && it->first.job == a.job &&
           it->first.checkpoint() == a.checkpoint;
           it = tier.copies.erase(it)) {
        w_.truth.Removed(it->first, PlaceOf(a.tier), Truth::Why::kCommanded);
      }
    } else {
      w_.counts.states["removal: failed"]++;
    }
    Complete(CopiesRemoved{a.drain, status});
  };
  RunDrain(a.drain, std::move(drain));
}

void Node::Do(const RemoveJobCopies& a) {
  w_.truth.Violated(absl::StrCat(name, ": all copies of ", a.job_name, " are removed"));
}

FoundJob Node::FoundIn(const SimTier& tier, const JobUuid& uuid) const {
  const SimTier::Job& job = tier.jobs.at(uuid);
  FoundJob found{uuid, job.name, job.uid, job.gid, {}, {}};
  for (auto it = tier.copies.lower_bound({uuid, 0, 0, 0});
       it != tier.copies.end() && it->first.job == uuid; ++it) {
    if (it->second.torn == TierCopy::Torn::kNo) {
      found.copies.push_back(it->second.copy);
    } else if (&tier == &nvme_ || tier.manifests.count({uuid, it->first.checkpoint()}) > 0) {
      found.bad.push_back({it->second.copy, "it is cut"});
      if (it->second.torn == TierCopy::Torn::kRecord) {
        DurableCopy& named = found.bad.back().copy;
        const DurableCopy& copy = it->second.copy;
        named = DurableCopy();
        named.copy.id = copy.copy.id;
        named.copy.image_bytes = copy.copy.image_bytes;
        named.location = copy.location;
      }
      w_.counts.states["scan: a bad copy"]++;
    }
  }
  for (auto it = tier.manifests.lower_bound({uuid, {}});
       it != tier.manifests.end() && it->first == uuid; ++it) {
    found.manifests.push_back(it->second);
  }
  return found;
}

void Node::Do(const ScanNvme& a) {
  After(w_.t.Millis(1, w_.stormy() ? 1500 : 200), [this, a] {
    TierScanned scanned;
    scanned.drain = a.drain;
    scanned.dir = "/nvme0";
    scanned.status = TierFault(TierKind::kNvme, false);
    for (const auto& [uuid, job] : nvme_.jobs) {
      if (scanned.status.ok()) {
        scanned.jobs.push_back(FoundIn(nvme_, uuid));
      }
    }
    Feed(scanned);
  });
}

void Node::Do(const ScanRemote& a) {
  SimDrain drain{TierKind::kRemote, std::nullopt, {}, 0, false, false, nullptr};
  drain.end = [this, a](bool) {
    const SimTier& tier = w_.remote.tier;
    TierScanned scanned;
    scanned.tier = TierKind::kRemote;
    scanned.drain = a.drain;
    scanned.job_name = a.job_name;
    scanned.status = TierFault(TierKind::kRemote, false);
    if (tier.unreadable) {
      w_.Count(Fault::kRemoteUnreadable);
      scanned.status = absl::UnavailableError("ESTALE");
    }
    for (const auto& [uuid, job] : tier.jobs) {
      if (scanned.status.ok() && (a.job_name.empty() || job.name == a.job_name)) {
        FoundJob found = FoundIn(tier, uuid);
        for (auto it = w_.remote.claims.lower_bound({uuid, 0});
             it != w_.remote.claims.end() && it->first.first == uuid; ++it) {
          found.highest_claim = it->first.second;
        }
        scanned.jobs.push_back(std::move(found));
      }
    }
    Feed(scanned);
  };
  RunDrain(a.drain, std::move(drain));
}

}  // namespace holdfast::sim::cluster
