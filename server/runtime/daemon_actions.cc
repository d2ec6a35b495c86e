// How the daemon performs what the core decided: one Perform for each kind of action.
#include <cassert>
#include <chrono>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/process.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "server/runtime/daemon.h"
#include "server/runtime/found_state.h"
#include "server/runtime/frames.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/tiers/training_cores.h"

namespace holdfast {
namespace {

using Lane = SerialExecutor::Lane;

// One space of keys for the executor: slots and jobs.
constexpr Duration kTiersEvery = std::chrono::seconds(1);  // while they have something to do
constexpr Duration kPlacesEvery = std::chrono::seconds(30);
constexpr SerialExecutor::Key kJobKeys = uint64_t{1} << 62;
constexpr SerialExecutor::Key kRegisterKeys = uint64_t{1} << 61;
constexpr SerialExecutor::Key kPeersKey = uint64_t{1} << 60;

// Where only the catalog can do what is asked: a disk that hangs for longer is an error, which the
// core tells, or tries again.
constexpr Duration kCatalogWait = std::chrono::seconds(5);

SerialExecutor::Key SlotKey(SlotId slot) {
  return slot;
}

// Jobs with the same key only wait for each other.
SerialExecutor::Key JobKey(const JobUuid& job) {
  return kJobKeys | (std::hash<JobUuid>()(job) >> 2);
}

LogLevel LevelOf(Report::Kind kind) {
  switch (kind) {
    case Report::Kind::kShardSealed:
    case Report::Kind::kSlotReleased:
    case Report::Kind::kStepRetired:
      return LogLevel::kDebug;
    case Report::Kind::kStepCommitted:
    case Report::Kind::kAttemptOpened:
    case Report::Kind::kSessionDecided:
    case Report::Kind::kSessionDone:
    case Report::Kind::kJobRemoved:
    case Report::Kind::kCopyGood:
    case Report::Kind::kTierCommitted:
    case Report::Kind::kTierRemoved:
    case Report::Kind::kTierWell:
    case Report::Kind::kJobStopping:
      return LogLevel::kInfo;
    case Report::Kind::kStepShed:
    case Report::Kind::kStepAbandoned:
    case Report::Kind::kSaveRefused:
    case Report::Kind::kSessionFellBack:
    case Report::Kind::kSessionFailed:
    case Report::Kind::kSlotQuarantined:
    case Report::Kind::kProtocolError:
    case Report::Kind::kTierShed:
    case Report::Kind::kTierTrouble:
    case Report::Kind::kReplicasDiverged:
    case Report::Kind::kCopyMended:
    case Report::Kind::kTrouble:
      return LogLevel::kWarning;
    case Report::Kind::kCopyBad:
    case Report::Kind::kCopyUnmended:
    case Report::Kind::kSlotLost:
      return LogLevel::kError;
  }
  return LogLevel::kInfo;
}

struct Opened {
  absl::Status status;
  std::vector<UniqueFd> descriptors;
};

Opened OpenDescriptors(SlotStore& store, const SendReply& action) {
  Opened opened;
  const bool writable = action.descriptors == Descriptors::kWritableImage;
  absl::StatusOr<UniqueFd> image = store.OpenImage(action.slot, writable);
  opened.status = image.status();
  if (!image.ok()) {
    return opened;
  }
  opened.descriptors.push_back(*std::move(image));
  if (action.descriptors == Descriptors::kReadOnlyImageAndRecord) {
    absl::StatusOr<UniqueFd> record = store.OpenRecord(action.slot);
    opened.status = record.status();
    if (record.ok()) {
      opened.descriptors.push_back(*std::move(record));
    }
  }
  return opened;
}

}  // namespace

void Daemon::RunOn(Lane lane, SerialExecutor::Key key, std::function<Completion()> work) {
  ++in_flight_;
  executor_->Submit(key, lane, [this, work = std::move(work)] {
    reactor_->Post([this, completion = work()] {
      --in_flight_;
      completion();
      StopWhenIdle();
    });
  });
}

void Daemon::RunForEvent(Lane lane, SerialExecutor::Key key, std::function<Event()> work) {
  RunOn(lane, key, [this, work = std::move(work)]() -> Completion {
    return [this, event = work()]() mutable { Feed(std::move(event)); };
  });
}

void Daemon::Perform(SendReply action) {
  if (action.descriptors == Descriptors::kNone) {
    clients_->Send(action.connection, std::move(action.frame));
  } else if (action.descriptors == Descriptors::kOpenedCopy) {
    SendOpenedCopy(std::move(action));
  } else {
    SendWithDescriptors(std::move(action));
  }
}

void Daemon::SendOpenedCopy(SendReply action) {
  const absl::Status charged = action.files == nullptr
                                   ? absl::OkStatus()
                                   : Charge(action.connection, action.files->descriptors);
  if (!charged.ok()) {
    action.files = nullptr;
    return reactor_->Post([this, action = std::move(action), charged] {
      Feed(HandOverFailed{action, charged});
    });
  }
  if (const uint64_t place = clients_->Reserve(action.connection); place != 0) {
    clients_->Complete(action.connection, place, std::move(action.frame), std::move(action.files));
  }
}

// Opened in the slot's order, after what the core wanted done to it before; the reply keeps its
// place meanwhile.
void Daemon::SendWithDescriptors(SendReply action) {
  const uint64_t place = clients_->Reserve(action.connection);
  if (place == 0) {
    return reactor_->Post([this, action = std::move(action)] {
      Feed(HandOverFailed{action, absl::CancelledError("the client has gone")});
    });
  }
  RunOn(Lane::kSlots, SlotKey(action.slot),
        [this, place, action = std::move(action)]() -> Completion {
          auto opened = std::make_shared<Opened>(OpenDescriptors(*store_, action));
          return [this, place, action, opened] {
            if (opened->status.ok()) {
              clients_->Complete(action.connection, place, action.frame,
                                 std::move(opened->descriptors));
            } else {
              clients_->GiveUp(action.connection, place);
              Feed(HandOverFailed{action, opened->status});
            }
          };
        });
}

void Daemon::Perform(CloseConnection action) {
  clients_->Close(action.connection, action.why);
}

void Daemon::Perform(WatchProcess action) {
  watcher_->Watch(action.process);
  tiers_->training_cores()->Add(action.process.pid);
}

void Daemon::Perform(UnwatchProcess action) {
  watcher_->Unwatch(action.process);
  tiers_->training_cores()->Remove(action.process.pid);
}

void Daemon::Perform(CreateSlot action) {
  RunForEvent(Lane::kAllocate, SlotKey(action.slot), [this, action]() -> Event {
    SlotCreated created{action.slot, store_->Create(action.slot, action.bytes)};
    HF_SYNC_POINT("daemon.slot.created");
    return created;
  });
}

void Daemon::Perform(PopulateSlot action) {
  RunOn(Lane::kPopulate, SlotKey(action.slot), [this, action]() -> Completion {
    const absl::Status status = populator_->Populate(action.slot, action.bytes);
    HF_SYNC_POINT("daemon.slot.populated");
    return [this, slot = action.slot, status] {
      if (!stopping_) {  // cut off by the stop: nobody is told that it failed
        Feed(SlotPopulated{slot, status});
      }
    };
  });
}

void Daemon::Perform(WriteNote action) {
  RunForEvent(Lane::kSlots, SlotKey(action.slot), [this, action]() -> Event {
    SlotNote note = FromMessage(action.note);
    if (action.daemon_fills) {
      note.readers.push_back({ThisProcess(), 0});
    }
    NoteWritten written{action.slot, action.note_version, store_->WriteNote(action.slot, note)};
    if (action.note.has_writer()) {
      HF_SYNC_POINT("daemon.begin.note_written");
    }
    return written;
  });
}

void Daemon::Perform(PublishRecord action) {
  RunOn(Lane::kSlots, SlotKey(action.slot), [this, action]() -> Completion {
    RecordPublished published;
    published.slot = action.slot;
    published.generation = action.generation;
    const RecordExpectation expected{action.expected.id, action.expected.job_name,
                                     action.expected.world_size, action.generation,
                                     action.expected.descent};
    if (fabric_ != nullptr) {
      fabric_->BecomesOf(action.slot, action.expected.id.job);
    }
    const absl::StatusOr<ShardRecord> record =
        store_->PublishRecord(action.slot, expected, action.record_offset, action.record_bytes);
    published.status = record.status();
    if (record.ok()) {
      published.copy = ToSealedCopy(*record);
      published.record_bytes = action.record_bytes;
    }
    HF_SYNC_POINT("daemon.seal.record_written");
    return [this, published, job = action.expected.id.job] {
      if (published.status.ok()) {
        RegisterAhead(published.slot, job);
      }
      Feed(published);
    };
  });
}

// It is populated now. Not in the slot's order: nobody who has to do with it waits for that.
void Daemon::RegisterAhead(SlotId slot, const JobUuid& job) {
  if (fabric_ != nullptr && fabric_->Expect(slot, job)) {
    RegisterExpected(slot);
  }
}

void Daemon::RegisterExpected(SlotId slot) {
  if (fabric_ != nullptr && !stopping_) {
    RunOn(Lane::kRegister, kRegisterKeys | slot, [this, slot]() -> Completion {
      fabric_->RegisterExpected(slot);
      return [] {};
    });
  }
}

void Daemon::Perform(RemoveRecord action) {
  RunForEvent(Lane::kSlots, SlotKey(action.slot), [this, action]() -> Event {
    RecordRemoved removed{action.slot, action.generation, store_->RemoveRecord(action.slot)};
    HF_SYNC_POINT("daemon.evict.record_removed");
    return removed;
  });
}

void Daemon::Perform(DeleteSlot action) {
  populator_->Cancel(action.slot);
  RunForEvent(Lane::kAllocate, SlotKey(action.slot), [this, action]() -> Event {
    populator_->Forget(action.slot);
    if (fabric_ != nullptr) {
      fabric_->Drop(action.slot);
    }
    SlotDeleted deleted{action.slot, store_->Delete(action.slot)};
    HF_SYNC_POINT("daemon.slot.deleted");
    return deleted;
  });
}

void Daemon::Perform(WriteJobState action) {
  const absl::StatusOr<JobUuid> job = JobUuid::FromBytes(action.state.job_uuid());
  if (!job.ok()) {
    return Feed(JobStateWritten{{}, action.state.version(), job.status()});
  }
  action.state.set_boot_id(CurrentBoot());
  RunOn(Lane::kState, JobKey(*job), [this, job = *job, action = std::move(action)]() -> Completion {
    const v1::JobState& state = action.state;
    const absl::Status status = store_->WriteJobState(job, state.SerializeAsString());
    [[maybe_unused]] const bool decided =
        !state.attempts().empty() && state.attempts(state.attempts_size() - 1).decided();
    if (decided) {
      HF_SYNC_POINT("daemon.session.decided");
    } else {
      HF_SYNC_POINT("daemon.join.state_written");
    }
    return [this, job, action, status] { JobStateTried(job, action, status); };
  });
}

// In memory.dir it outlives the daemon, and what could be restored lies nowhere else: that is
// enough unless it tells of the durable tiers, and the catalog, which outlives a loss of power,
// follows. One that fails or hangs is not waited for: the status says so. Where memory.dir is full,
// the catalog stands in.
void Daemon::JobStateTried(const JobUuid& job, const WriteJobState& action,
                           const absl::Status& status) {
  const uint64_t version = action.state.version();
  if (status.ok() && (!action.on_disk || !catalog_writer_->problem().empty())) {
    catalog_writer_->WriteJobState(action.state);
    return Feed(JobStateWritten{job, version, status});
  }
  AwaitCatalog(
      [&](CatalogWriter::Done done) {
        catalog_writer_->WriteJobState(action.state, std::move(done));
      },
      [job, version, status](const absl::Status& in_catalog) -> Event {
        return JobStateWritten{
            job, version,
            status.ok() || in_catalog.ok()
                ? absl::OkStatus()
                : Annotate(status, absl::StrCat("neither in the catalog (", in_catalog.message(),
                                                ") nor in memory.dir"))};
      });
}

void Daemon::Perform(RemoveJobState action) {
  AwaitCatalog(
      [&](CatalogWriter::Done done) {
        catalog_writer_->RemoveJobState(action.job, std::move(done));
      },
      [job = action.job](const absl::Status& status) -> Event {
        return JobStateRemoved{job, status};
      });
}

void Daemon::AwaitCatalog(const std::function<void(CatalogWriter::Done)>& ask, CatalogEvent event) {
  ++in_flight_;
  const uint64_t wait = next_catalog_wait_++;
  const MonotonicTime until = reactor_->clock().Now() + kCatalogWait;
  if (catalog_waits_.empty()) {
    reactor_->Arm(catalog_timer_, until);
  }
  catalog_waits_[wait] = {until, std::move(event)};
  ask([this, wait](const absl::Status& status) {
    reactor_->Post([this, wait, status] { EndCatalogWait(wait, status); });
  });
}

void Daemon::EndCatalogWait(uint64_t wait, const absl::Status& status) {
  const auto found = catalog_waits_.find(wait);
  if (found == catalog_waits_.end()) {
    return;  // it took too long
  }
  const CatalogEvent event = std::move(found->second.event);
  catalog_waits_.erase(found);
  --in_flight_;
  Feed(event(status));
  StopWhenIdle();
}

void Daemon::EndOverdueCatalogWaits() {
  const MonotonicTime now = reactor_->clock().Now();
  while (!catalog_waits_.empty() && catalog_waits_.begin()->second.until <= now) {
    EndCatalogWait(catalog_waits_.begin()->first,
                   absl::DeadlineExceededError(absl::StrCat(
                       "the catalog did not answer within ", FormatDuration(kCatalogWait),
                       "; does the disk under state_dir hang?")));
  }
  if (!catalog_waits_.empty()) {
    reactor_->Arm(catalog_timer_, catalog_waits_.begin()->second.until);
  }
}

void Daemon::Perform(IndexShard action) {
  v1::CatalogShard shard = ToCatalogShard(action.copy, action.slot);
  if (action.tier != TierKind::kMemory) {
    shard.set_tier(std::string(TierName(action.tier)));
    shard.set_location(action.location);
  }
  catalog_writer_->IndexShard(shard);
}

void Daemon::Perform(UnindexShard action) {
  catalog_writer_->UnindexShard(action.id);
}

void Daemon::Perform(UnindexCopies action) {
  catalog_writer_->UnindexCopies(
      {std::string(TierName(action.tier)), action.job, action.checkpoint});
}

// While anything is under way there, somebody looks whether it gets on.
void Daemon::CheckTiers() {
  tiers_->CheckStalls(reactor_->clock().Now());
  tiers_watched_ = !tiers_->idle();
  if (tiers_watched_) {
    reactor_->Arm(tiers_timer_, reactor_->clock().Now() + kTiersEvery);
  }
}

// A drive or a mount that nobody uses may go away all the same.
void Daemon::LookAtPlaces() {
  if (stopping_) {
    return;
  }
  tiers_->LookAtPlaces();
  if (cluster_ != nullptr && tiers_->remote_owner() != nullptr) {
    cluster_->AskNote();  // another node may have said that the directory was replaced
  }
  WatchTiers();
  reactor_->Arm(places_timer_, reactor_->clock().Now() + kPlacesEvery);
}

void Daemon::Perform(FlushShard action) {
  if (stopping_) {
    return;  // nothing is begun any more; the next daemon finds what there is
  }
  metrics_.transfers().Began(action, reactor_->clock().Now());
  tiers_->Perform(std::move(action));
  WatchTiers();
}

void Daemon::Perform(CancelDrain action) {
  tiers_->Perform(action);
  if (part_reader_ != nullptr) {
    part_reader_->End(action.drain);
  }
}

void Daemon::Perform(HurryFetch action) {
  tiers_->Perform(action);
}

void Daemon::Perform(FetchShard action) {
  if (stopping_) {
    return;  // nothing is begun any more; the next daemon finds what there is
  }
  metrics_.transfers().Began(action, reactor_->clock().Now());
  tiers_->Perform(std::move(action));
  WatchTiers();
}

void Daemon::Perform(OpenDurable action) {
  if (stopping_) {
    return;  // likewise
  }
  if (action.in_parts) {
    return part_reader_->Open(std::move(action));
  }
  tiers_->Perform(std::move(action));
  WatchTiers();
}

void Daemon::Perform(ReadParts action) {
  part_reader_->Read(std::move(action));
}

void Daemon::Perform(GatherRecords action) {
  record_gatherer_->Gather(std::move(action));
}

void Daemon::Perform(EndParts action) {
  if (part_reader_ != nullptr) {
    part_reader_->End(action.opened);
  }
}

void Daemon::Perform(PublishManifest action) {
  if (stopping_) {
    return;  // nothing is begun any more; the next daemon finds what there is
  }
  tiers_->Perform(std::move(action));
  WatchTiers();
}

void Daemon::Perform(RemoveCopies action) {
  if (stopping_) {
    return;  // nothing is begun any more; the next daemon finds what there is
  }
  tiers_->Perform(action);
  WatchTiers();
}

void Daemon::Perform(RemoveJobCopies action) {
  if (stopping_) {
    return;  // nothing is begun any more; the next daemon finds what there is
  }
  tiers_->Perform(action);
  WatchTiers();
}

void Daemon::Perform(ScanRemote action) {
  if (stopping_) {
    return;  // nothing is begun any more; the next daemon finds what there is
  }
  tiers_->Perform(action);
  WatchTiers();
}

void Daemon::Perform(ScanNvme action) {
  tiers_->ScanDrives(action);
  WatchTiers();
}

void Daemon::Perform(ApplyLimits action) {
  admin_context_.fabric_bandwidth_bytes_per_s_max = action.fabric.bandwidth_bytes_per_s_max();
  tiers_->Perform(action);
}

void Daemon::WatchTiers() {
  if (!tiers_watched_) {
    tiers_watched_ = true;
    reactor_->Arm(tiers_timer_, reactor_->clock().Now() + kTiersEvery);
  }
}

void Daemon::Perform(SetTimer action) {
  reactor_->Arm(core_timer_, action.at);
}

void Daemon::Perform(AdminReply action) {
  if (action.token != 0) {
    return gateway_->Deliver(std::move(action));
  }
  if (auto* status = std::get_if<v1::GetStatusReply>(&action.reply)) {
    metrics_.SetJobs(*status, status->daemon().unix_ms());  // (the time that its ages are of)
    for (const LagWatch::Change& change : lag_watch_.Look(metrics_.lags())) {
      NoteEvent(change.behind ? v1::SEVERITY_WARNING : v1::SEVERITY_INFO,
                change.behind ? "tier_lags" : "tier_caught_up", change.text, change.job);
    }
    FillDaemonStatus(*status->mutable_daemon());
    metrics_.Set(status->daemon());
    metrics_.Set(tiers_->Places());
    if (cluster_ != nullptr) {
      metrics_.Set(cluster_->View());
    }
  } else if (const auto* timeline = std::get_if<v1::TimelineReply>(&action.reply)) {
    metrics_.steps().Count(timeline_asked_, *timeline);
  }
}

// (Only a cluster's core has such wishes.)
void Daemon::Perform(PeerReads action) {
  if (peer_reader_ == nullptr) {
    return Feed(ReadForPeer{action.token, absl::InternalError("there is no cluster"), {}});
  }
  peer_reader_->Read(std::move(action));
}

void Daemon::Perform(Report action) {
  metrics_.Count(action, reactor_->clock().UnixMillis());
  if (std::optional<v1::DaemonEvent> event = EventOf(action)) {
    event->set_unix_ms(reactor_->clock().UnixMillis());
    events_of_node_.Add(*std::move(event),
                        action.job.empty() ? std::nullopt : core_->OwnerOf(action.job));
  }
  // Jobs cause these, with names and reasons of their own.
  LogFrom(LevelOf(action.kind), action.job.empty() ? "no job" : absl::StrCat("job=", action.job),
          absl::StrCat(absl::Utf8SafeCEscape(action.text),
                       action.job.empty() ? "" : " job=", action.job));
}

// The core has no such wishes unless its configuration, which is this one, has a cluster.
template <typename ClusterAction>
void Daemon::PerformInCluster(ClusterAction action) {
  if (cluster_ == nullptr) {
    LogError("an action for a cluster, and none is configured: a fault of ckptd");
    assert(false);
    return;
  }
  cluster_->Perform(std::move(action));
}

void Daemon::Perform(WatchHost action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(UnwatchHost action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(CampaignFor action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(ResignFrom action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(StoreAgreedState action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(ForgetAgreedState action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(ChangePeers action) {
  for (const auto& [node, address] : action.up) {
    NoteEvent(v1::SEVERITY_INFO, "node_up",
              absl::StrCat("node '", node, "' is a member of the cluster"));
  }
  for (const std::string& node : action.down) {
    NoteEvent(v1::SEVERITY_WARNING, "node_down",
              absl::StrCat("node '", node, "' is no member of the cluster any more"));
  }
  if (fabric_ != nullptr) {
    RunOn(Lane::kRegister, kPeersKey, [this, action]() -> Completion {
      fabric_->ChangePeers(action);
      return [] {};
    });
  }
  PerformInCluster(std::move(action));
}

void Daemon::Perform(ConnectPeer action) {
  PerformInCluster(std::move(action));
}

void Daemon::Perform(SayToPeer action) {
  PerformInCluster(std::move(action));
}

}  // namespace holdfast
