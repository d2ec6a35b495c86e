#include "server/runtime/tiers/durable_tiers.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/units.h"
#include "server/runtime/passed_on.h"
#include "server/runtime/remote_parts.h"
#include "server/runtime/tiers/drain_operations.h"
#include "server/runtime/tiers/durable_tiers_parts.h"
#include "server/runtime/tiers/node_owner.h"
#include "server/runtime/tiers/nvme_budget.h"
#include "server/runtime/tiers/remote_owner.h"

namespace holdfast {
namespace {

// Of verifications, which nobody's training waits for; of the mount's, so many may hang.
constexpr ThreadPriority kVerifyPriority{kIoPriorityIdle - 1, 19};
constexpr size_t kRemoteVerifiers = 4;
// Of a drive's: one that reads slowly, as it was told to, does not keep others waiting for days.
constexpr size_t kDriveVerifiers = 4;
constexpr size_t kRemoteOpeners = 4;  // so many of the mount's calls may hang, too
// More than an agent has replicas and prefetches under way: a restore does not wait for those.
constexpr size_t kPullsAtOnce = 12;
// As many as a node has ranks, or more.
constexpr size_t kRemoteFetchesAtOnce = 32;
constexpr Duration kPeerStallTimeout = std::chrono::seconds(30);

ThreadPriority PriorityOf(uint32_t io, uint32_t nice) {
  return {static_cast<int>(io), static_cast<int>(nice)};
}

void AddNotes(const CopyStore& store, v1::TierStatus& tier) {
  const DurableCapabilities can = store.capabilities();
  if (can.one_node_only()) {
    tier.add_notes(absl::StrCat(store.dir(),
                                ": it may serve one node only: it has neither hard links nor "
                                "renameat2 (RENAME_NOREPLACE), so two nodes could replace each "
                                "other's files"));
  }
  for (const std::string& note : can.notes) {
    tier.add_notes(absl::StrCat(store.dir(), ": ", note));
  }
}

// The table counts what lies there as if it lasted.
void AddMemoryNote(const TierPlace& place, const std::string& filesystem, v1::TierStatus& tier) {
  if (filesystem == "tmpfs" || filesystem == "ramfs") {
    tier.add_notes(absl::StrCat(
        place.dir(), ": it lies on a ", filesystem, ", and is empty after a reboot; use a ",
        tier.tier() == TierName(TierKind::kNvme) ? "drive" : "file system that outlives the node"));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<DurableTiers>> DurableTiers::Create(Options options) {
  std::unique_ptr<DurableTiers> tiers(new DurableTiers(std::move(options)));
  HF_RETURN_IF_ERROR(tiers->Open());
  return tiers;
}

DurableTiers::DurableTiers(Options options)
    : options_(std::move(options)),
      outlet_(std::make_shared<EventOutlet>(options_.post)),
      shared_(std::make_shared<Shared>(outlet_)) {}

DurableTiers::~DurableTiers() {
  Cancel();
  outlet_->Close();
  drives_.clear();
  state_writer_.reset();
  remote_.reset();
  remote_verifier_.reset();
  remote_opener_.reset();
  remote_fetcher_.reset();
  peers_.reset();
}

std::vector<WorkerGroup*> DurableTiers::Groups() const {
  std::vector<WorkerGroup*> groups;
  for (const std::unique_ptr<Drive>& drive : drives_) {
    for (WorkerGroup* group :
         {drive->group.get(), drive->relay.get(), drive->verifier.get(), drive->opener.get()}) {
      groups.push_back(group);
    }
  }
  groups.push_back(state_writer_.get());
  groups.push_back(remote_.get());
  groups.push_back(remote_verifier_.get());
  groups.push_back(remote_opener_.get());
  groups.push_back(remote_fetcher_.get());
  groups.push_back(peers_.get());
  std::erase(groups, nullptr);
  return groups;
}

absl::Status DurableTiers::Open() {
  DrainContext& context = *shared_->context;
  const v1::NvmeConfig& nvme = options_.config.nvme();
  const v1::RemoteConfig& remote = options_.config.remote();
  context.env = options_.env;
  context.node_name = options_.config.node_name();
  context.passed_on = std::make_shared<PassedOn>();
  context.slots = options_.slots;
  context.nvme = nvme;
  context.nvme_priority.Set(PriorityOf(nvme.io_priority(), nvme.nice()));
  context.nvme_pacer->SetRate(nvme.bandwidth_bytes_per_s_max());
  context.remote_pacer = std::make_shared<Pacer>(remote.bandwidth_bytes_per_s_max(), options_.gate);
  context.read_back_pacer = std::make_shared<Pacer>(0, options_.gate);
  context.peer_pacer =
      std::make_shared<Pacer>(options_.config.fabric().bandwidth_bytes_per_s_max(), options_.gate);
  const bool root = ::geteuid() == 0;
  const NvmeBudget budget = AskNvmeBudget(*options_.env, nvme);
  const std::string& state_dir = options_.config.state_dir();
  const std::string places = state_dir.empty() ? "" : JoinPath(state_dir, "places");
  HF_RETURN_IF_ERROR(MakeWitnesses());
  for (const std::string& dir : nvme.dirs()) {
    CopyStore::Options store;
    store.env = options_.env;
    store.kind = DurableKind::kNvme;
    store.dir = dir;
    store.node_name = options_.config.node_name();
    store.pool_bytes_max = budget.pool_bytes;
    store.direct = true;
    store.set_owner = root;
    context.drives.push_back(
        std::make_shared<TierPlace>(std::move(store), places, context.witnesses, drives_.size()));
    WorkerGroup::Options group;
    group.name = absl::StrCat("nvme-", drives_.size());
    group.stall_timeout = std::chrono::milliseconds(nvme.stall_timeout_ms());
    group.priority = PriorityOf(nvme.io_priority(), nvme.nice());
    HF_ASSIGN_OR_RETURN(std::unique_ptr<WorkerGroup> workers, WorkerGroup::Create(group, outlet_));
    WorkerGroup::Options verifies = group;
    verifies.name = absl::StrCat("verify-", drives_.size());
    verifies.threads = kDriveVerifiers;
    verifies.priority = kVerifyPriority;
    HF_ASSIGN_OR_RETURN(std::unique_ptr<WorkerGroup> verifier,
                        WorkerGroup::Create(verifies, outlet_));
    drives_.push_back(
        std::make_unique<Drive>(drives_.size(), context.drives.back(), std::move(workers)));
    drives_.back()->verifier = std::move(verifier);
    group.name = absl::StrCat("open-", drives_.back()->index);
    group.priority = {};
    HF_ASSIGN_OR_RETURN(drives_.back()->opener, WorkerGroup::Create(group, outlet_));
    shared_->witness_writers->drives.push_back(drives_.back()->opener);
  }
  if (!remote.dir().empty()) {
    CopyStore::Options store;
    store.env = options_.env;
    store.kind = DurableKind::kRemote;
    store.dir = remote.dir();
    store.node_name = options_.config.node_name();
    store.set_owner = root;
    store.owner = AskNodeOwner(*options_.env, state_dir);
    if (remote.stripe_count() > 0 || remote.stripe_bytes() > 0) {
      // 0: as the directory says; so Lustre itself has it.
      store.striping = Striping{static_cast<int32_t>(remote.stripe_count()),
                                static_cast<uint32_t>(remote.stripe_bytes())};
    }
    remote_owner_ = std::make_shared<RemoteOwner>(
        RemoteOwner::Options{options_.env, state_dir, remote.dir(),
                             DescribeSelf(options_.config.cluster(), options_.config.node_name()),
                             options_.note_remote});
    context.remote = std::make_shared<TierPlace>(std::move(store), "", context.witnesses,
                                                 std::nullopt, remote_owner_);
    CopyPoolOptions pool;
    pool.threads = remote.writers();
    pool.piece_bytes = remote.piece_bytes();
    pool.priority = PriorityOf(remote.io_priority(), remote.nice());
    pool.stuck_after = std::chrono::milliseconds(remote.stall_timeout_ms());
    pool.threads_max = 2 * size_t{remote.writers()};
    HF_ASSIGN_OR_RETURN(context.pool, CopyPool::Start(pool));
    WorkerGroup::Options group;
    group.name = "remote";
    group.threads = remote.writers();
    group.stall_timeout = std::chrono::milliseconds(remote.stall_timeout_ms());
    group.priority = pool.priority;
    HF_ASSIGN_OR_RETURN(remote_, WorkerGroup::Create(group, outlet_));
    WorkerGroup::Options verifier = group;
    verifier.name = "verify-remote";
    verifier.threads = kRemoteVerifiers;
    verifier.priority = kVerifyPriority;
    HF_ASSIGN_OR_RETURN(remote_verifier_, WorkerGroup::Create(verifier, outlet_));
    WorkerGroup::Options opener = group;
    opener.name = "open-remote";
    opener.threads = kRemoteOpeners;
    opener.priority = {};
    HF_ASSIGN_OR_RETURN(remote_opener_, WorkerGroup::Create(opener, outlet_));
    remote_parts_ = MakeRemoteParts(remote_opener_);
    if (!drives_.empty()) {
      pool.threads = (size_t{remote.writers()} + drives_.size() - 1) / drives_.size();
      pool.threads_max = 2 * pool.threads;
      group.threads = pool.threads;
    }
    for (const std::unique_ptr<Drive>& drive : drives_) {
      group.name = absl::StrCat("relay-", drive->index);
      HF_ASSIGN_OR_RETURN(drive->relay, WorkerGroup::Create(group, outlet_));
      HF_ASSIGN_OR_RETURN(std::shared_ptr<CopyPool> relay, CopyPool::Start(pool));
      context.relays.push_back(std::move(relay));
    }
  }
  return absl::OkStatus();
}

absl::Status DurableTiers::MakeWitnesses() {
  DriveWitnesses::Options options;
  options.env = options_.env;
  options.state_dir = options_.config.state_dir();
  options.dirs = {options_.config.nvme().dirs().begin(), options_.config.nvme().dirs().end()};
  options.remote_dir = options_.config.remote().dir();
  options.remote_mounted = options_.config.remote().mounted();
  if (!options.state_dir.empty() && (!options.dirs.empty() || !options.remote_dir.empty())) {
    WorkerGroup::Options group;
    group.name = "witness";
    HF_ASSIGN_OR_RETURN(state_writer_, WorkerGroup::Create(group, outlet_));
    shared_->witness_writers->state = state_writer_;
  }
  // Each in threads that nothing waits for which only flushes.
  const auto spread = [weak = std::weak_ptr<DrainContext>(shared_->context),
                       writers = shared_->witness_writers,
                       next = next_own_](std::optional<size_t> drive) {
    const Context context = weak.lock();
    const std::shared_ptr<WorkerGroup> group =
        drive ? writers->drives[*drive].lock() : writers->state.lock();
    if (context == nullptr) {
      return;
    }
    if (group == nullptr) {
      return context->witnesses->Dropped(drive);
    }
    auto operation = std::make_shared<Operation>(
        (*next)++,
        [context, drive](Operation& op) -> Event {
          const std::string where = drive ? context->drives[*drive]->dir() : "the state directory";
          const TransferControl::Call call(op.control().get(), "note the drives in", where);
          const std::shared_ptr<CopyStore> store =
              drive ? context->drives[*drive]->OpenStore() : nullptr;
          context->witnesses->Write(drive, store.get()).IgnoreError();
          return TimerFired{};
        },
        [context, drive]() -> Event {
          context->witnesses->Dropped(drive);
          return TimerFired{};
        });
    operation->AnswersItself();
    group->Submit(std::move(operation), false);
  };
  shared_->context->witnesses = std::make_shared<DriveWitnesses>(
      std::move(options),
      [outlet = outlet_](TierScanned scanned) { outlet->Post(std::move(scanned)); }, spread);
  return absl::OkStatus();
}

absl::StatusOr<std::string> DurableTiers::ForgetDrive(const std::string& id) {
  return shared_->context->witnesses->Forget(id);
}

absl::Status DurableTiers::SetPeers(std::shared_ptr<PullClient> pulls, FabricPort* fabric) {
  shared_->context->pulls = std::move(pulls);
  shared_->context->fabric = fabric;
  WorkerGroup::Options group;
  group.name = "peers";
  group.threads = kPullsAtOnce;
  group.stall_timeout = kPeerStallTimeout;
  HF_ASSIGN_OR_RETURN(peers_, WorkerGroup::Create(group, outlet_));
  if (remote_ != nullptr) {
    const v1::RemoteConfig& remote = options_.config.remote();
    group.name = "fetch-remote";
    group.threads = kRemoteFetchesAtOnce;
    group.stall_timeout = std::chrono::milliseconds(remote.stall_timeout_ms());
    group.priority = PriorityOf(remote.io_priority(), remote.nice());
    HF_ASSIGN_OR_RETURN(remote_fetcher_, WorkerGroup::Create(group, outlet_));
    remote_parts_ = MakeRemoteParts(remote_fetcher_);
  }
  return absl::OkStatus();
}

// (What may hang is done, and let go of, by the group's threads.)
std::shared_ptr<RemoteParts> DurableTiers::MakeRemoteParts(
    const std::shared_ptr<WorkerGroup>& workers) {
  RemoteParts::Options options;
  options.run = [group = std::weak_ptr<WorkerGroup>(workers),
                 next = next_own_](const RemoteParts::Work& work) {
    const std::shared_ptr<WorkerGroup> threads = group.lock();
    if (threads == nullptr) {
      return work(false);
    }
    auto operation = std::make_shared<Operation>(
        (*next)++,
        [work](Operation& op) -> Event {
          const TransferControl::Call call(op.control().get(), "read parts in", "the remote tier");
          work(true);
          return TimerFired{};
        },
        [work]() -> Event {
          work(false);
          return TimerFired{};
        });
    operation->AnswersItself();
    threads->Submit(std::move(operation), false);
  };
  options.open = [context = shared_->context, run = options.run](const CopyKey& key, bool whole) {
    return OpenForParts(context, key, whole, run);
  };
  return std::make_shared<RemoteParts>(std::move(options));
}

std::shared_ptr<TrainingCores> DurableTiers::training_cores() const {
  return shared_->context->training_cores;
}

std::shared_ptr<PassedOn> DurableTiers::passed_on() const {
  return shared_->context->passed_on;
}

void DurableTiers::Perform(const ApplyLimits& action) {
  shared_->context->nvme_pacer->SetRate(action.nvme.bandwidth_bytes_per_s_max());
  shared_->context->remote_pacer->SetRate(action.remote.bandwidth_bytes_per_s_max());
  shared_->context->peer_pacer->SetRate(action.fabric.bandwidth_bytes_per_s_max());
  const auto tell = [](const absl::Status& set) {
    if (!set.ok()) {
      LogWarning(absl::StrCat("set: the priority stays as it was: ", Message(set)));
    }
  };
  const ThreadPriority nvme = PriorityOf(action.nvme.io_priority(), action.nvme.nice());
  const ThreadPriority remote = PriorityOf(action.remote.io_priority(), action.remote.nice());
  shared_->context->nvme_priority.Set(nvme);
  for (const std::unique_ptr<Drive>& drive : drives_) {
    tell(drive->group->SetPriority(nvme));
    if (drive->relay != nullptr) {
      tell(drive->relay->SetPriority(remote));
      tell(shared_->context->relays[drive->index]->SetPriority(remote));
    }
  }
  if (remote_ != nullptr) {
    tell(remote_->SetPriority(remote));
    if (remote_fetcher_ != nullptr) {
      tell(remote_fetcher_->SetPriority(remote));
    }
    tell(shared_->context->pool->SetPriority(remote));
  }
}

void DurableTiers::CheckStalls(MonotonicTime now) {
  for (WorkerGroup* group : Groups()) {
    group->CheckStalls(now);
  }
}

// A directory that nobody uses may go away, too, and a mount may be missing from the beginning.
void DurableTiers::LookAtPlaces() {
  if (remote_parts_ != nullptr) {
    remote_parts_->Trim(Clock::System()->Now());
  }
  const Context context = shared_->context;
  context->witnesses->LookAgain();
  const auto look = [&](WorkerGroup& group, std::optional<size_t> drive) {
    if (!group.idle()) {
      return;  // what runs there notices it; or hangs, and one call that hangs is enough
    }
    auto operation = std::make_shared<Operation>((*next_own_)++,
                                                 [context, drive](Operation& op) -> Event {
                                                   LookAt(context, drive, op);
                                                   return TimerFired{};
                                                 },
                                                 []() -> Event { return TimerFired{}; });
    operation->AnswersItself();
    Start(group, std::move(operation), false);
  };
  for (const std::unique_ptr<Drive>& drive : drives_) {
    look(*drive->group, drive->index);
  }
  if (remote_ != nullptr) {
    look(*remote_, std::nullopt);
  }
}

bool DurableTiers::idle() const {
  const std::vector<WorkerGroup*> groups = Groups();
  return std::all_of(groups.begin(), groups.end(),
                     [](const WorkerGroup* group) { return group->idle(); });
}

void DurableTiers::Cancel() {
  for (WorkerGroup* group : Groups()) {
    group->CancelAll();
  }
}

std::vector<DurableTiers::PlaceState> DurableTiers::Places() {
  std::vector<PlaceState> places;
  for (const std::unique_ptr<Drive>& drive : drives_) {
    places.push_back({TierKind::kNvme, drive->place->dir(), drive->place->health()});
  }
  if (TierPlace* remote = shared_->context->remote.get()) {
    places.push_back({TierKind::kRemote, remote->dir(), remote->health()});
  }
  return places;
}

void DurableTiers::FillStatus(v1::DaemonStatus& status) {
  for (v1::TierStatus& tier : *status.mutable_tiers()) {
    const bool nvme = tier.tier() == TierName(TierKind::kNvme);
    std::set<std::string> engines;
    std::set<uint64_t> devices;  // drives' directories may lie on one file system
    std::string problem;
    const auto add = [&](TierPlace& place, const WorkerGroup& group) {
      const TierPlace::Health health = place.health();
      if (health.device == 0 || devices.insert(health.device).second) {
        tier.set_bytes_free(tier.bytes_free() + health.bytes_free);
      }
      tier.set_bytes_written(tier.bytes_written() + health.written.bytes);
      tier.set_bytes_read(tier.bytes_read() + health.read.bytes);
      tier.set_bytes_shared(tier.bytes_shared() + health.bytes_shared);
      tier.set_bytes_compressed_away(tier.bytes_compressed_away() + health.bytes_compressed_away);
      if (!health.engine.empty()) {
        engines.insert(health.engine);
      }
      AddMemoryNote(place, health.filesystem, tier);
      if (!health.problem.empty()) {
        problem = absl::StrCat(place.dir(), ": ", health.problem);
      }
      if (const std::shared_ptr<CopyStore> store = place.OpenStore()) {
        tier.set_bytes_recyclable(tier.bytes_recyclable() + store->pool_bytes());
        AddNotes(*store, tier);
        if (const std::string refusal = store->refusal(); problem.empty() && !refusal.empty()) {
          problem = refusal;
        }
      }
      // Also what the core has not asked for, or has heard the end of.
      if (const std::string stall = group.stall(); problem.empty() && !stall.empty()) {
        problem = absl::StrCat(place.dir(), " hangs: ", stall,
                               "; see whether its drive, or its server and the network, answer");
      }
    };
    if (nvme) {
      for (const std::unique_ptr<Drive>& drive : drives_) {
        add(*drive->place, *drive->group);
      }
      for (std::string& note : shared_->context->witnesses->Notes()) {
        problem = problem.empty() ? note : problem;
        tier.add_notes(std::move(note));
      }
    } else if (tier.tier() == TierName(TierKind::kRemote) && shared_->context->remote != nullptr) {
      add(*shared_->context->remote, *remote_);
      engines.insert("threads");
    }
    tier.set_engine(absl::StrJoin(engines, ", "));
    if (!problem.empty() && tier.healthy()) {
      tier.set_healthy(false);
      tier.set_state(problem);
    }
  }
}

}  // namespace holdfast
