// A rank that restores a step which another number of ranks has saved (docs/protocol.md §6,
// "Resharding"), as the client library does it: it asks for the records of all shards, opens those
// that it wants, of other nodes in parts, lets go of them, and reports. In a storm it dies, hangs
// or loses its connection in the middle of that.
#include <algorithm>
#include <chrono>
#include <memory>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_rank.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using v1::Failure;

namespace {

constexpr int kWaysMax = 6;            // to read a part that contradicts its digests
constexpr size_t kSideBySideMax = 3;   // of 4 that a connection may read in parts
constexpr uint64_t kPartBytes = 4096;  // of a run; what it is does not matter here
// A tier that answered late is a reason to offer a step again that a rank could not read.
constexpr int kOfferedAgainMax = 4;

uint64_t ToMillis(Duration d) {
  return static_cast<uint64_t>(d / milliseconds(1));
}

std::string NameOf(const Failure& failure) {
  return failure.reason() != Failure::REASON_UNSPECIFIED
             ? Failure::Reason_Name(failure.reason())
             : absl::StatusCodeToString(static_cast<absl::StatusCode>(failure.code()));
}

}  // namespace

// One shard of those who saved the step.
struct RankProcess::OldShard {
  ShardId id;
  uint64_t hold = 0;      // of the copy that is asked for, or read; 0: none
  bool may_parts = true;  // it asks for parts
  std::vector<std::string> without;
  v1::Source source;
  FilePtr file;        // what it has mapped: a slot, a file, or memory for parts
  int reads_left = 0;  // of parts
  int ways = 0;        // in which the present one was read
  bool any_bad = false;
  bool last_is_bad = false;  // what was wrong with the last copy: its bytes, or the way to it
};

struct RankProcess::Resharding {
  v1::SessionOutcome offer;
  uint32_t saved_by = 0;
  FilePtr own;               // its own shard's, which it was offered and holds meanwhile
  std::vector<Rank> wanted;  // that are still to be read
  size_t reading = 0;
  size_t side_by_side = 1;
  std::string problem;  // not empty: that ends it
  bool bad = false;     // that is that of some shard no copy will do
  bool mismatch = false;
};

void RankProcess::JudgeOffer(const v1::SessionOutcome& offer) {
  const CheckpointId id{offer.attempt(), offer.step()};
  w_.truth.StepOffered(job_.name, rank_, world_size_, id, offer.reshard());
  if (called_bad_.first == offer.session() && called_bad_.second[id] > kOfferedAgainMax) {
    w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, ": attempt ", id.attempt,
                                   " step ", id.step, ", which it could not read, is offered ",
                                   called_bad_.second[id], " times again in one session"));
  }
}

// `own`: the shard that it was offered, and that has not all that it wants.
void RankProcess::Reshard(const v1::SessionOutcome& offer, uint32_t saved_by, const FilePtr& own) {
  const auto run = std::make_shared<Resharding>();
  run->offer = offer;
  run->saved_by = saved_by;
  run->own = own;
  run->side_by_side = 1 + w_.t.Below(kSideBySideMax);
  // Each begins with another one, and many want of some alone.
  const bool all = w_.t.Chance(0.4);
  const auto first = static_cast<Rank>(uint64_t{rank_} * saved_by / world_size_);
  for (Rank i = 0; i < saved_by; ++i) {
    if (all || i == 0 || w_.t.Chance(0.4)) {
      run->wanted.push_back((first + i) % saved_by);
    }
  }
  std::reverse(run->wanted.begin(), run->wanted.end());
  w_.counts.states[own                      ? "reshard: another layout"
                   : saved_by > world_size_ ? "reshard: by fewer ranks"
                                            : "reshard: by more ranks"]++;
  v1::ClientFrame frame;
  v1::ReadRecords& read = *frame.mutable_read_records();
  read.set_job(job_.name);
  read.set_attempt(offer.attempt());
  read.set_step(offer.step());
  const Duration deadline = w_.t.Chance(0.1) ? Duration(0) : w_.t.Millis(500, 15'000);
  read.set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline, [this, run](const v1::DaemonFrame& reply, const FilePtr&) {
    w_.counts
        .states[reply.has_failure() ? absl::StrCat("reshard: records: ", NameOf(reply.failure()))
                                    : "reshard: records told"]++;
    if (!reply.has_failure() && (reply.read_records().job_uuid() != uuid_.ToBytes() ||
                                 reply.read_records().world_size() != run->saved_by)) {
      return w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_,
                                            " was told records of another job, or of ",
                                            reply.read_records().world_size(), " ranks"));
    }
    Later(w_.t.Millis(1, 50), [this, run] { ReadShards(run); });
  });
}

// (Without the records it finds out by attaching.)
void RankProcess::ReadShards(const ReshardingPtr& run) {
  while (run->problem.empty() && !run->wanted.empty() && run->reading < run->side_by_side) {
    const auto shard = std::make_shared<OldShard>();
    shard->id = {uuid_, run->offer.attempt(), run->offer.step(), run->wanted.back()};
    shard->may_parts = w_.t.Chance(0.95);
    run->wanted.pop_back();
    ++run->reading;
    AttachOld(run, shard);
  }
  if (run->reading == 0 && connection_ != 0) {
    ReportReshard(run);
  }
}

void RankProcess::AttachOld(const ReshardingPtr& run, const OldShardPtr& shard) {
  if (Falters()) {
    return;
  }
  const Duration deadline = w_.t.Chance(0.05) ? Duration(0) : w_.t.Millis(2000, 20'000);
  v1::ClientFrame frame;
  v1::Attach& attach = *frame.mutable_attach();
  attach.set_job(job_.name);
  attach.set_rank(shard->id.rank);
  attach.set_choice(v1::Attach::CHOICE_STEP);
  attach.set_attempt(shard->id.attempt);
  attach.set_step(shard->id.step);
  attach.set_any_tier(true);
  attach.set_parts(shard->may_parts);
  attach.set_parts_of_files(shard->may_parts);
  for (const std::string& tier : shard->without) {
    attach.add_without(tier);
  }
  attach.set_deadline_ms(ToMillis(deadline));
  shard->hold = w_.NewHold();
  attach.set_hold(shard->hold);
  held_[shard->hold] = nullptr;
  Call(frame, deadline, [this, run, shard](const v1::DaemonFrame& reply, const FilePtr& file) {
    reply.has_failure() ? OnOldRefused(run, shard, reply.failure())
                        : OnOldAttached(run, shard, reply.attach(), file);
  });
}

void RankProcess::OnOldAttached(const ReshardingPtr& run, const OldShardPtr& shard,
                                const v1::Source& source, const FilePtr& file) {
  const ShardId id{JobUuid::FromBytes(source.job_uuid()).value(), source.attempt(), source.step(),
                   source.rank()};
  const bool in_parts = source.parts_bytes() > 0;
  w_.counts
      .states[absl::StrCat("reshard: shard from ", source.tier(), in_parts ? ", in parts" : "")]++;
  w_.truth.ReaderTold(job_.name, id, shard->id.rank);
  const bool held = in_parts || source.tier() == TierName(TierKind::kMemory);
  if (id != shard->id || source.world_size() != run->saved_by ||
      source.hold() != (held ? shard->hold : 0) || file == nullptr) {
    return w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " asked for ",
                                          shard->id.ToString(), " of ", run->saved_by,
                                          " ranks and got ", source.ShortDebugString()));
  }
  shard->source = source;
  shard->file = file;
  if (!held) {
    held_.erase(std::exchange(shard->hold, 0));
  } else if (!in_parts) {
    held_[shard->hold] = file;
  }
  if (in_parts) {
    shard->reads_left = static_cast<int>(w_.t.Below(4));
    shard->ways = 0;
    return Later(w_.t.Millis(0, 20), [this, run, shard] { ReadOld(run, shard); });
  }
  Later(w_.t.Millis(1, w_.stormy() ? 1500 : 50),
        [this, run, shard] { IsGood(*shard) ? EndOld(run, shard) : PassOver(run, shard, true); });
}

void RankProcess::OnOldRefused(const ReshardingPtr& run, const OldShardPtr& shard,
                               const Failure& failure) {
  held_.erase(std::exchange(shard->hold, 0));
  w_.counts.states[absl::StrCat("reshard: attach: ", NameOf(failure))]++;
  if (!std::exchange(shard->may_parts, true)) {
    return AttachOld(run, shard);
  }
  const auto code = static_cast<absl::StatusCode>(failure.code());
  if (code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kPermissionDenied ||
      failure.reason() == Failure::REASON_TOPOLOGY) {
    return w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " may not read ",
                                          shard->id.ToString(), ": ", failure.message()));
  }
  const bool gone = code == absl::StatusCode::kNotFound || code == absl::StatusCode::kDataLoss;
  // That there is no other copy is not what is wrong.
  const bool bad = gone && (!shard->any_bad || shard->last_is_bad);
  if (gone && !shard->any_bad && w_.settled()) {
    w_.truth.NoCopyTold(shard->id, failure.message());
  }
  if (run->problem.empty()) {
    run->problem = absl::StrCat("rank ", shard->id.rank, "'s shard: ", failure.message());
    run->bad = bad;
  }
  EndOld(run, shard);
}

void RankProcess::ReadOld(const ReshardingPtr& run, const OldShardPtr& shard) {
  if (Falters()) {
    return;
  }
  if (!run->problem.empty() || shard->reads_left <= 0) {
    return EndOld(run, shard);
  }
  v1::ClientFrame frame;
  v1::ReadParts& read = *frame.mutable_read_parts();
  read.set_hold(shard->hold);
  const uint64_t runs = 1 + w_.t.Below(3);
  for (uint64_t i = 0; i < runs; ++i) {
    read.add_offset(w_.t.Below(shard->source.image_bytes() - kPartBytes));
    read.add_bytes(1 + w_.t.Below(kPartBytes));
    read.add_place(i * kPartBytes);
  }
  read.set_contradicted(shard->ways > 0);
  const Duration deadline = w_.t.Chance(0.05) ? Duration(0) : w_.t.Millis(500, 15'000);
  read.set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline, [this, run, shard](const v1::DaemonFrame& reply, const FilePtr&) {
    OnPartsRead(run, shard, reply);
  });
}

void RankProcess::OnPartsRead(const ReshardingPtr& run, const OldShardPtr& shard,
                              const v1::DaemonFrame& reply) {
  if (reply.has_failure()) {
    const auto code = static_cast<absl::StatusCode>(reply.failure().code());
    w_.counts.states[absl::StrCat("reshard: parts: ", NameOf(reply.failure()))]++;
    if (code != absl::StatusCode::kUnavailable && code != absl::StatusCode::kDeadlineExceeded) {
      return w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_,
                                            " may not read parts of ", shard->id.ToString(), ": ",
                                            reply.failure().message()));
    }
    // What is not read in time is not held any more.
    return PassOver(run, shard, false);
  }
  if (IsGood(*shard)) {
    w_.counts.states[shard->ways > 0 ? "reshard: parts read another way" : "reshard: parts read"]++;
    shard->ways = 0;
    --shard->reads_left;
  } else if (++shard->ways == kWaysMax) {
    return PassOver(run, shard, true);
  }
  // Now and then it copies for so long that the other node lets go.
  const bool slow = w_.stormy() && w_.t.Chance(0.02);
  Later(slow ? w_.t.Millis(10'000, 14'000) : w_.t.Millis(1, w_.stormy() ? 200 : 20),
        [this, run, shard] { ReadOld(run, shard); });
}

// False: a fault took it. Anything else than what was sealed by that name may not come.
bool RankProcess::IsGood(const OldShard& shard) {
  const File& file = *shard.file;
  const std::string what = absl::StrCat("job ", job_.name, " rank ", rank_, " reads ",
                                        shard.id.ToString(), " from ", shard.source.tier());
  if (file.content != shard.id) {
    w_.truth.Violated(absl::StrCat(what, ", and there is ", file.content.ToString()));
  }
  const uint64_t sealed = w_.truth.TokenOf(shard.id);
  // (The record of a slot that was given up meanwhile has gone; its bytes are held.)
  if (file.record && file.record->token != sealed) {
    w_.truth.Violated(what + ", whose digests are not those of what was sealed");
  }
  return file.token == sealed;
}

// This copy is of no use: the next one.
void RankProcess::PassOver(const ReshardingPtr& run, const OldShardPtr& shard, bool bad) {
  w_.counts.states[bad ? "reshard: a bad copy is passed over"
                       : "reshard: a copy that cannot be read is passed over"]++;
  LetGo(*shard);
  shard->any_bad = true;
  shard->last_is_bad = bad;
  if (shard->source.tier() == TierName(TierKind::kMemory) && w_.tracing()) {
    w_.Trace(absl::StrCat(job_.name, " rank ", rank_, ": ", shard->id.ToString(), " is bad here"));
  }
  const bool again = std::find(shard->without.begin(), shard->without.end(),
                               shard->source.tier()) != shard->without.end();
  if (again) {
    return w_.truth.Violated(absl::StrCat("job ", job_.name, " rank ", rank_, " is offered ",
                                          shard->id.ToString(), " from ", shard->source.tier(),
                                          ", which it does without"));
  }
  shard->without.push_back(shard->source.tier());
  AttachOld(run, shard);
}

void RankProcess::EndOld(const ReshardingPtr& run, const OldShardPtr& shard) {
  LetGo(*shard);
  --run->reading;
  ReadShards(run);
}

void RankProcess::LetGo(OldShard& shard) {
  const uint64_t hold = std::exchange(shard.hold, 0);
  if (hold == 0 || connection_ == 0) {
    return;
  }
  const FilePtr file = std::exchange(held_[hold], nullptr);
  if (file != nullptr && file->read_by.count(process_) > 0 && --file->read_by[process_] == 0) {
    file->read_by.erase(process_);
  }
  v1::ClientFrame frame;
  frame.mutable_release_read()->set_hold(hold);
  Call(frame, Duration(0), [this, hold](const v1::DaemonFrame& reply, const FilePtr&) {
    if (!reply.has_failure()) {
      held_.erase(hold);
    }
  });
}

// What a connection that was lost may or may not have brought.
void RankProcess::SettleHolds() {
  for (const auto& [hold, file] : std::exchange(unsettled_, {})) {
    held_[hold] = file;
    OldShard shard;
    shard.hold = hold;
    LetGo(shard);
    w_.counts.states["reshard: lets go over the next connection"]++;
  }
}

void RankProcess::ReportReshard(const ReshardingPtr& run) {
  const CheckpointId id{run->offer.attempt(), run->offer.step()};
  if (run->problem.empty() && w_.stormy()) {
    switch (w_.t.Below(150)) {
      case 0:
        run->problem = "out of memory";
        break;
      case 1:
        run->problem = "the same part contradicts itself";
        run->bad = true;
        break;
      case 2:
        run->problem = "a tensor is of another shape";
        run->mismatch = true;
        break;
      default:
        break;
    }
  }
  v1::ClientFrame frame;
  v1::ReportLoad& report = *frame.mutable_report_load();
  report.set_session(run->offer.session());
  report.set_round(run->offer.round());
  report.set_loaded(run->problem.empty());
  report.set_problem(run->problem);
  report.set_shards_are_bad(run->bad);
  report.set_wants_mismatch(run->mismatch);
  w_.counts.states[run->problem.empty() ? "reshard: loaded"
                   : run->bad           ? "reshard: shards are bad"
                   : run->mismatch      ? "reshard: wants something else"
                                        : "reshard: could not load"]++;
  if (!run->problem.empty()) {
    w_.Trace(absl::StrCat(job_.name, " rank ", rank_, " cannot read step ", id.step, " of ",
                          run->saved_by, " ranks: ", run->problem));
    w_.truth.PassedOver(job_.name, attempt_, id);
  }
  if (run->bad) {
    if (std::exchange(called_bad_.first, run->offer.session()) != run->offer.session()) {
      called_bad_.second.clear();
    }
    ++called_bad_.second[id];
  }
  loaded_ = run->problem.empty() ? std::optional(id) : std::nullopt;
  const Duration deadline = w_.t.Millis(10'000, 50'000);  // others may read for longer
  report.set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline,
       [this](const v1::DaemonFrame& reply, const FilePtr& next) { OnOutcome(reply, next); });
  if (run->own) {
    Release(run->offer.source(), run->own);
  }
}

// Dies, hangs or loses its connection. True: it does not go on.
bool RankProcess::Falters() {
  if (connection_ == 0) {
    return true;
  }
  if (!w_.stormy() || !w_.t.Chance(0.01)) {
    return false;
  }
  switch (w_.t.Below(3)) {
    case 0:
      w_.Count(Fault::kProcessKilled);
      w_.counts.states["reshard: dies"]++;
      Kill();
      w_.t.After(w_.t.Millis(1, 500), [this] { End(); });
      return true;
    case 1:
      w_.Count(Fault::kProcessHangs);
      w_.counts.states["reshard: hangs"]++;
      Hang(w_.t.Millis(1000, 60'000));
      return false;  // with what it does next
    default:
      w_.counts.states["reshard: loses its connection"]++;
      node_.CloseSocket(connection_);
      OnClosed();
      return true;
  }
}

}  // namespace holdfast::sim::cluster
