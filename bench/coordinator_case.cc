#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "bench/cases.h"
#include "bench/cost.h"
#include "server/coordinator.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kRanksPerNode = 8;
constexpr uint32_t kSlotsPerRank = 3;
constexpr uint32_t kRanks[] = {8, 96, 768, 12'288};
constexpr uint64_t kShardBytes = uint64_t{6} << 30;
constexpr uint64_t kLentBytes = 4 * kRanksPerNode * kShardBytes;  // of two steps, and as much again
constexpr uint32_t kNodesPerRack = 16;
constexpr int kStepsBefore = 5;  // so that retention has something to do in each step
constexpr double kStepBarMs = 100;
constexpr double kStepGoalMs = 20;
constexpr double kRebuildBarMs = 1000;
constexpr double kRebuildBarMb = 500;

// A job of many nodes with eight ranks each: the coordinator is the real one, its agents say what
// theirs would, and what they are told is counted.
class ManyNodes {
 public:
  ManyNodes(uint32_t ranks, uint32_t replicas)
      : ranks_(ranks), nodes_((ranks + kRanksPerNode - 1) / kRanksPerNode), replicas_(replicas) {
    for (uint32_t node = 1; node < nodes_; ++node) {
      names_.Number("node-" + std::to_string(node));
    }
    MakeCoordinator();
    job_->SetOpenedHere();
    for (NodeId node = 0; node < nodes_ && replicas_ > 0; ++node) {
      Say(node, ArrivalOf(node));
    }
    TellInventories();
    for (Rank rank = 0; rank < ranks_; ++rank) {
      Join(rank, "one");
    }
  }

  // As of models that are split by eight: every eighth rank is a replica.
  static Likeness LikenessOf(Rank rank, holdfast::Step step) {
    Likeness likeness;
    likeness.tensors.fill(static_cast<uint8_t>(rank % 8));
    likeness.content.fill(static_cast<uint8_t>(rank % 8 + 8 * step));
    return likeness;
  }

  // Everything that a step costs its coordinator: begun, room made for it, sealed, awaited,
  // committed, brought into both durable tiers and to its peers, an older one removed from these.
  double Step(holdfast::Step step) {
    step_ = step;
    told_.clear();
    messages_ = 0;
    const double before = CpuMs();
    for (NodeId node = 0; node < nodes_; ++node) {
      ForRanks(node, [&](Rank rank) { Say(node, SaveAsked{++token_, attempt(), rank, step}); });
    }
    Round(true);
    // The slots are full, and all ranks ask before any of them hears what is given up.
    if (const std::vector<CheckpointId> useful = in_memory_; useful.size() == kSlotsPerRank) {
      for (NodeId node = 0; node < nodes_; ++node) {
        ForRanks(node, [&](Rank rank) {
          Say(node, RoomAsked{++token_, attempt(), rank, step, useful});
        });
      }
      Round(true);
    }
    in_memory_.push_back({attempt(), step});
    for (NodeId node = 0; node < nodes_; ++node) {
      ForRanks(node, [&](Rank rank) {
        Say(node, ShardSealed{attempt(), rank, step, ranks_, kShardBytes, 1'000'000, true,
                              LikenessOf(rank, step)});
        Say(node, AwaitAsked{++token_, attempt(), rank, step, v1::AwaitSave::STAGE_COMMITTED});
      });
    }
    Round(true);
    while (!work_.empty()) {
      DoWork();
    }
    const double spent = CpuMs() - before;
    if (!job_->IsCommittedIn(TierKind::kRemote, {attempt(), step})) {
      std::fprintf(stderr, "coordinator: step %llu is not whole in remote\n",
                   static_cast<unsigned long long>(step));
      std::exit(1);
    }
    if (replicas_ > 0 && !job_->IsCommittedIn(TierKind::kPeer, {attempt(), step})) {
      std::fprintf(stderr, "coordinator: step %llu is not whole in peer\n",
                   static_cast<unsigned long long>(step));
      std::exit(1);
    }
    return spent;
  }
  uint64_t messages() const { return messages_; }
  uint32_t nodes() const { return nodes_; }

  // Another node takes the job over: from its agreed state and what all nodes have, to every rank
  // of the next attempt being told its source. `heap_mb`: what the coordinator takes then. `cold`:
  // only the remote tier has anything.
  double Rebuild(double& heap_mb, bool cold) {
    const v1::JobState state = state_;
    std::vector<NodeArrived> arrivals;
    std::vector<CopiesFound> drives;
    for (NodeId node = 0; node < nodes_; ++node) {
      arrivals.push_back(ArrivalOf(node));
      drives.push_back(DrivesOf(node));
      if (cold) {
        arrivals.back().shards.clear();
        drives.back().copies.clear();
      }
    }
    CopiesFound remote;
    remote.tier = TierKind::kRemote;
    remote.began = now_;
    for (const holdfast::Step step : {step_ - 1, step_}) {
      for (Rank rank = 0; rank < ranks_; ++rank) {
        remote.copies.push_back(CopyOf(rank, step, true));
      }
      remote.manifests.push_back({attempt(), step});
    }
    job_.reset();
    const double heap = HeapMb();
    const double before = CpuMs();
    MakeCoordinator();
    const absl::Status loaded = job_->Load(state);
    std::vector<ForAgent> out;
    job_->Resume({}, Time(), out);
    for (NodeId node = 0; node < nodes_; ++node) {
      Say(node, arrivals[node]);
      Say(node, drives[node]);
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(kHere, remote);
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
    for (Rank rank = 0; rank < ranks_; ++rank) {
      SeatLost lost;
      lost.attempt = 1;
      lost.rank = rank;
      lost.process = ProcessOf(rank);
      lost.how = SeatLost::How::kProcessEnded;
      Say(NodeOf(rank), lost);
    }
    ++incarnation_;
    for (Rank rank = 0; rank < ranks_; ++rank) {
      Join(rank, "two");
    }
    offered_ = offered_from_remote_ = 0;
    for (Rank rank = 0; rank < ranks_; ++rank) {
      SessionAsked asked;
      asked.token = ++token_;
      asked.attempt = attempt();
      asked.rank = rank;
      asked.process = ProcessOf(rank);
      asked.may_wait = true;
      Say(NodeOf(rank), asked);
    }
    const double spent = CpuMs() - before;
    heap_mb = HeapMb() - heap;
    const uint32_t from_remote = cold ? ranks_ : 0;
    if (!loaded.ok() || offered_ != ranks_ || offered_from_remote_ != from_remote ||
        attempt() != 2) {
      std::fprintf(stderr, "coordinator: %u of %u ranks were offered a source\n", offered_, ranks_);
      std::exit(1);
    }
    return spent;
  }

 private:
  void MakeCoordinator() {
    CoordinatorSettings settings;
    settings.commit_deadline = std::chrono::minutes(10);
    settings.slots_per_rank = kSlotsPerRank;
    settings.nvme = settings.remote = true;
    settings.peers = replicas_ > 0;
    settings.policy.set_replicas(replicas_);
    settings.nodes = &names_;
    settings.policy.mutable_remote()->set_share_replicas(true);
    for (v1::TierPolicy* tier :
         {settings.policy.mutable_nvme(), settings.policy.mutable_remote()}) {
      tier->set_every_steps(1);
      tier->set_keep_last(2);
    }
    JobUuid uuid;
    uuid.bytes[0] = 1;
    job_ = std::make_unique<Coordinator>(settings, uuid, "llama", 1000, 1000, 1);
  }
  void TellInventories() {
    for (NodeId node = 0; node < nodes_; ++node) {
      Say(node, InventoryState{TierKind::kNvme, InventoryState::Kind::kKnown, ""});
    }
    Say(kHere, InventoryState{TierKind::kRemote, InventoryState::Kind::kKnown, ""});
  }

  Attempt attempt() const { return job_->attempt(); }
  EventTime Time() const { return {now_, 1'000'000}; }
  static NodeId NodeOf(Rank rank) { return rank / kRanksPerNode; }
  ProcessId ProcessOf(Rank rank) const {
    return {static_cast<int32_t>(1000 + rank % kRanksPerNode), incarnation_, NodeOf(rank)};
  }
  template <typename Do>
  void ForRanks(NodeId node, Do&& what) const {
    for (Rank rank = node * kRanksPerNode; rank < std::min(ranks_, (node + 1) * kRanksPerNode);
         ++rank) {
      what(rank);
    }
  }
  void Join(Rank rank, const std::string& launch) {
    JoinAsked join;
    join.token = ++token_;
    join.connection = token_;
    join.caller = {ProcessOf(rank), 1000, 1000};
    join.rank = rank;
    join.world_size = ranks_;
    join.launch = launch;
    join.opening = 1;
    Say(NodeOf(rank), join);
  }

  void Say(NodeId from, const ToCoordinator& message) {
    out_.clear();
    job_->Handle(message, from, Time(), out_);
    job_->NextWake();  // (its node asks after each event)
    std::vector<ForAgent> out = std::move(out_);
    for (ForAgent& each : out) {
      if (const auto* given_up = std::get_if<GiveUp>(&each.message)) {
        std::erase(in_memory_, given_up->checkpoint);
      }
      if (const auto* persist = std::get_if<PersistState>(&each.message)) {
        state_ = persist->state;
        Say(kHere, StateWritten{state_.version(), absl::OkStatus()});
        continue;
      }
      if (const auto* offer = std::get_if<SourceOffered>(&each.message)) {
        ++offered_;
        offered_from_remote_ += offer->from == TierKind::kRemote ? 1 : 0;
      }
      if (each.to == kEveryNode) {
        for (NodeId node = 0; node < nodes_; ++node) {
          told_.insert(node);
        }
        continue;
      }
      told_.insert(each.to);
      if (std::holds_alternative<FlushWanted>(each.message) ||
          std::holds_alternative<ManifestWanted>(each.message) ||
          std::holds_alternative<RemovalWanted>(each.message)) {
        work_.push_back(std::move(each));
      }
    }
  }
  // What happened at the same time went in one message from each node, and in one to each.
  void Round(bool from_all) {
    messages_ += (from_all ? nodes_ : 0) + told_.size();
    told_.clear();
  }
  void DoWork() {
    const std::vector<ForAgent> work = std::move(work_);
    work_.clear();
    for (const ForAgent& each : work) {
      ++messages_;
      if (const auto* flush = std::get_if<FlushWanted>(&each.message)) {
        for (const FlushWanted::Shard& shard : flush->shards) {
          ShardDrained done{flush->checkpoint,
                            shard.rank,
                            flush->to,
                            shard.from,
                            absl::OkStatus(),
                            false,
                            CopyOf(shard.rank, flush->checkpoint.step, false)};
          Say(each.to, done);
        }
      } else if (const auto* manifest = std::get_if<ManifestWanted>(&each.message)) {
        Say(each.to, ManifestDone{manifest->checkpoint, absl::OkStatus()});
      } else if (const auto* removal = std::get_if<RemovalWanted>(&each.message)) {
        Say(each.to,
            RemovalDone{removal->checkpoint, removal->tier, absl::OkStatus(), std::nullopt});
      }
    }
    Round(false);
  }

  DurableCopy CopyOf(Rank rank, holdfast::Step step, bool from_manifest) const {
    DurableCopy copy;
    copy.copy.id = {job_->uuid(), 1, step, rank};
    copy.copy.job_name = "llama";
    copy.copy.world_size = ranks_;
    copy.copy.image_bytes = kShardBytes;
    copy.copy.sealed_unix_ms = 1'000'000;
    copy.copy.descent = {{1, {}}};
    copy.record_bytes = 100'000;
    copy.record_crc = rank;
    copy.from_manifest = from_manifest;
    copy.copy.likeness = LikenessOf(rank, step);
    copy.location =
        "/mnt/nvme0/llama/" + std::to_string(step) + "-a1/" + std::to_string(rank) + ".safetensors";
    return copy;
  }
  NodeArrived ArrivalOf(NodeId node) const {
    NodeArrived arrived;
    arrived.lends_bytes = replicas_ > 0 ? kLentBytes : 0;
    arrived.labels = {{"rack", std::to_string(node / kNodesPerRack)}};
    if (step_ == 0) {
      return arrived;
    }
    ForRanks(node, [&](Rank rank) {
      for (const holdfast::Step step : {step_ - 1, step_}) {
        arrived.shards.push_back({CopyOf(rank, step, false).copy, std::nullopt});
      }
      arrived.seats.push_back({1, rank, ProcessOf(rank), 1, {}, step_});
    });
    return arrived;
  }
  CopiesFound DrivesOf(NodeId node) const {
    CopiesFound found;
    found.tier = TierKind::kNvme;
    found.began = now_;
    ForRanks(node, [&](Rank rank) {
      for (const holdfast::Step step : {step_ - 1, step_}) {
        found.copies.push_back(CopyOf(rank, step, false));
      }
    });
    return found;
  }

  const uint32_t ranks_;
  const uint32_t nodes_;
  const uint32_t replicas_;
  NodeNames names_{"node-0"};
  std::unique_ptr<Coordinator> job_;
  v1::JobState state_;
  MonotonicTime now_{1'000'000'000};
  RequestToken token_ = 0;
  uint64_t incarnation_ = 1;
  holdfast::Step step_ = 0;
  std::vector<ForAgent> out_;
  std::vector<ForAgent> work_;
  std::vector<CheckpointId> in_memory_;
  std::set<NodeId> told_;
  uint64_t messages_ = 0;
  uint32_t offered_ = 0;
  uint32_t offered_from_remote_ = 0;
};

// Of the step after those that fill the tiers.
double TimedStep(ManyNodes& job) {
  for (holdfast::Step step = 1; step <= kStepsBefore; ++step) {
    job.Step(step);
  }
  return job.Step(kStepsBefore + 1);
}

}  // namespace

// What one job costs the daemon that coordinates it, on one core, from one node to 1,536.
Report RunCoordinator(const CaseOptions& options) {
  Report report{"coordinator", Better::kLower, {}};
  Progress progress("coordinator", static_cast<int>(std::size(kRanks)) * options.rounds);
  for (const uint32_t ranks : kRanks) {
    std::vector<double> steps;
    std::vector<double> rebuilds;
    std::vector<double> colds;
    std::vector<double> heaps;
    std::vector<double> messages;
    std::vector<double> kept_steps;
    for (int round = 0; round < options.rounds; ++round) {
      ManyNodes job(ranks, 0);
      steps.push_back(TimedStep(job));
      messages.push_back(static_cast<double>(job.messages()) / job.nodes());
      double heap = 0;
      rebuilds.push_back(job.Rebuild(heap, false));
      heaps.push_back(heap);
      ManyNodes kept(ranks, ranks > kRanksPerNode ? 1 : 0);
      kept_steps.push_back(TimedStep(kept));
      colds.push_back(kept.Rebuild(heap, true));
      progress.Advance(std::to_string(ranks) + " ranks");
    }
    const std::string size = std::to_string(ranks) + " ranks: ";
    const bool judged = ranks == kRanks[std::size(kRanks) - 1];
    Row step = CostRow(size + "CPU a step", "ms", steps);
    step.bar = judged ? kStepBarMs : 0;
    step.goal = judged ? kStepGoalMs : 0;
    report.rows.push_back(step);
    report.rows.push_back(CostRow(size + "messages a step and node", "", messages));
    if (ranks > kRanksPerNode) {
      report.rows.push_back(CostRow(size + "CPU a step, replicas: 1", "ms", kept_steps));
    }
    Row rebuild = CostRow(size + "CPU to rebuild and choose", "ms", rebuilds);
    rebuild.bar = judged ? kRebuildBarMs : 0;
    report.rows.push_back(rebuild);
    Row cold = CostRow(size + "CPU of a cold start", "ms", colds);
    cold.bar = judged ? kRebuildBarMs : 0;
    report.rows.push_back(cold);
    Row heap = CostRow(size + "memory then", "MB", heaps);
    heap.bar = judged ? kRebuildBarMb : 0;
    report.rows.push_back(heap);
  }
  return report;
}

}  // namespace holdfast::bench
