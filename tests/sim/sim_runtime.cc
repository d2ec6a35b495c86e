// The fake runtime: performs the core's actions late and, where events.h allows it, out of order;
// fails some of them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/sim_client.h"
#include "tests/sim/sim_rude.h"
#include "tests/sim/sim_world.h"

namespace holdfast::sim {

Duration World::Latency() {
  const uint64_t kind = Below(100);
  const uint64_t us = kind < 70               ? 50 + Below(2000)
                      : kind < 97 || !stormy_ ? Below(50'000)
                                              : Below(2'000'000);
  return std::chrono::microseconds(us);
}

void World::StartDaemon() {
  if (core_) {
    return;
  }
  ++life_;
  ++restarts_;
  Trace("daemon starts");
  core_ = std::make_unique<NodeCore>(config_, "sim", random_(), 0);
  watched_.clear();
  slot_busy_until_.clear();
  socket_busy_until_.clear();
  admin_.clear();
  const auto lives = [&](const auto& p) { return Lives({p.pid(), p.start_ticks()}); };
  seats_.clear();
  granted_.clear();
  PlantSlots();
  MarkForeign();
  Started started;
  started.memory_bytes_max = bytes_max_;
  started.nvme_bytes_max = nvme_bytes_max_;
  started.boot_id = absl::StrCat("boot-", boots_);
  for (const auto& [slot, file] : files_) {
    file->read_by.erase(ProcessId{1, 0});  // the old daemon's own readers
    if (file->left_alone) {
      started.left_alone.push_back({slot, file->bytes});
      continue;
    }
    FoundSlot found{slot, file->bytes, file->note, std::nullopt};
    if (found.note.has_writer() && !lives(found.note.writer())) {
      found.note.clear_writer();
    }
    found.note.clear_readers();
    for (const v1::Reader& reader : file->note.readers()) {
      if (lives(reader)) {
        *found.note.add_readers() = reader;
      }
    }
    if (file->record && file->record->copy.generation == file->note.generation()) {
      found.sealed = file->record->copy;
    }
    started.slots.push_back(found);
  }
  for (auto& [name, truth] : oracle_.jobs()) {
    truth.opened = 0;  // of what was opened and did not become durable nobody knows
  }
  for (const auto& [uuid, state] : states_) {
    started.jobs.push_back(state);
    oracle_.job(state.name()).opened = state.highest_attempt();
  }
  Feed(started);
  if (tiers_) {
    Do(ScanNvme{});
  }
}

// SIGKILL. What it was doing and had not done yet does not happen.
void World::KillDaemon() {
  if (!core_) {
    return;
  }
  Trace("daemon dies");
  core_.reset();
  ++life_;
  DropDrains();
  requests_.clear();
  const std::map<ConnectionId, Peer*> open = std::move(connections_);
  connections_.clear();
  for (const auto& [id, peer] : open) {
    peer->OnClosed(id);
  }
}

bool World::Lives(const ProcessId& process) const {
  const auto is = [&](const auto& peer) { return peer->alive() && peer->process() == process; };
  return std::any_of(clients_.begin(), clients_.end(), is) ||
         std::any_of(rudes_.begin(), rudes_.end(), is);
}

void World::Feed(const Event& event) {
  if (!core_) {
    return;
  }
  const Actions actions = core_->Handle(event, now_, unix_ms());
  if (const std::string broken = core_->CheckInvariants(); !broken.empty()) {
    oracle_.Violated("invariant: " + broken);
  }
  Perform(actions);
}

void World::Perform(const Actions& actions) {
  for (const Action& action : actions) {
    std::visit([&](const auto& a) { Do(a); }, action);
  }
}

// Actions of one slot happen one after the other, in the order given.
void World::OnSlot(SlotId slot, std::function<void()> effect) {
  int64_t& busy = slot_busy_until_[slot];
  busy = std::max(busy + 1, (now_ + Latency()).ns);
  After(MonotonicTime{busy} - now_, [this, life = life_, effect = std::move(effect)] {
    if (InLife(life)) {
      effect();
      oracle_.CheckNewest(states_, files_);
    }
  });
}

void World::Complete(Event event) {
  After(Latency(), [this, life = life_, event = std::move(event)] {
    if (InLife(life)) {
      Feed(event);
    }
  });
}

absl::Status World::MaybeFail(double probability) {
  return stormy_ && Chance(probability * failure_rate_) ? absl::UnavailableError("made to fail")
                                                        : absl::OkStatus();
}

// What trying this with that file ends with: for good, if its fault has come, or now and then.
absl::Status World::FaultOf(File& file, Fault fault, double probability) {
  const auto found = file.faults.find(fault);
  if (found == file.faults.end()) {
    return MaybeFail(probability);
  }
  if (absl::IsDataLoss(found->second) && file.record) {
    oracle_.job(file.record->copy.job_name).damaged.insert(file.record->copy.id.checkpoint());
  }
  return found->second;
}

void World::Do(const CreateSlot& a) {
  OnSlot(a.slot, [this, a] {
    if (tmpfs_full_) {
      return Complete(SlotCreated{a.slot, absl::ResourceExhaustedError("ENOSPC")});
    }
    if (files_.count(a.slot) > 0) {
      oracle_.Violated(absl::StrCat("slot ", a.slot, " is made although it is there"));
    }
    auto file = std::make_shared<File>();
    file->slot = a.slot;
    file->bytes = a.bytes;
    files_[a.slot] = file;
    uint64_t used = 0;
    for (const auto& [slot, other] : files_) {
      used += other->bytes;
    }
    if (used > bytes_max_) {
      oracle_.Violated(absl::StrCat("slots take ", used, " bytes, the budget is ", bytes_max_));
    }
    Complete(SlotCreated{a.slot, absl::OkStatus()});
  });
}

void World::Do(const PopulateSlot& a) {
  OnSlot(a.slot, [this, a] {
    CheckForeign(a.slot, "populated");
    Complete(SlotPopulated{a.slot, FaultOf(*files_.at(a.slot), Fault::kPopulate, 1)});
  });
}

void World::Do(const WriteNote& a) {
  OnSlot(a.slot, [this, a] {
    CheckForeign(a.slot, "noted");
    File& file = *files_.at(a.slot);
    const bool for_good = file.faults.count(Fault::kNote) > 0;
    const absl::Status status = FaultOf(file, Fault::kNote, 1);
    if (status.ok() || (!for_good && Chance(0.5))) {
      file.note = a.note;
    }
    Complete(NoteWritten{a.slot, a.note_version, status});
  });
}

void World::Do(const PublishRecord& a) {
  OnSlot(a.slot, [this, a] {
    CheckForeign(a.slot, "published");
    const FilePtr file = files_.at(a.slot);
    const bool for_good = file->faults.count(Fault::kPublish) > 0;
    RecordPublished published{a.slot, a.generation, FaultOf(*file, Fault::kPublish, 1), a.expected};
    const std::optional<FileRecord>& said = file->client_record;
    if (!said || said->copy.id != a.expected.id || said->copy.generation != a.expected.generation) {
      published.status = absl::InvalidArgumentError("the record is of another shard");
    } else {
      published.copy.image_bytes = kSlotBytes / 2;
      published.copy.sealed_unix_ms = unix_ms();
      if (published.status.ok() || (!for_good && Chance(0.5))) {
        file->replaced = false;
        file->record = FileRecord{published.copy, said->token};
      }
    }
    Complete(published);
  });
}

void World::Do(const RemoveRecord& a) {
  OnSlot(a.slot, [this, a] {
    CheckForeign(a.slot, "emptied");
    const absl::Status status = FaultOf(*files_.at(a.slot), Fault::kRemoveRecord, 0.3);
    if (status.ok()) {
      files_.at(a.slot)->record.reset();
    }
    Complete(RecordRemoved{a.slot, a.generation, status});
  });
}

void World::Do(const DeleteSlot& a) {
  OnSlot(a.slot, [this, a] {
    CheckForeign(a.slot, "deleted");
    const FilePtr file = files_.at(a.slot);
    const absl::Status status = FaultOf(*file, Fault::kDelete, 0.3);
    if (status.ok()) {
      if (!file->mapped_by.empty() || !file->read_by.empty()) {
        oracle_.Violated(
            absl::StrCat("slot ", a.slot, " is deleted while a process may have it mapped"));
      }
      files_.erase(a.slot);
    }
    Complete(SlotDeleted{a.slot, status});
  });
}

namespace {

std::string WithoutBoot(v1::JobState state) {
  state.clear_boot_id();
  return state.SerializeAsString();
}

}  // namespace

void World::Do(const WriteJobState& a) {
  After(Latency(), [this, life = life_, a] {
    if (!InLife(life)) {
      return;
    }
    const absl::Status status = MaybeFail(1);
    v1::JobState& stored = states_[a.state.job_uuid()];
    if (status.ok() || Chance(0.5)) {
      // A write that failed may have happened all the same, and is repeated as it was.
      if (stored.version() > a.state.version() ||
          (stored.version() == a.state.version() && WithoutBoot(stored) != WithoutBoot(a.state))) {
        oracle_.Violated("an older job state was written over a newer one");
      }
      const v1::JobState before = stored;
      stored = a.state;
      stored.set_boot_id(absl::StrCat("boot-", boots_));
      oracle_.StateDurable(before, stored, files_);
      oracle_.CheckNewest(states_, files_);
    } else if (stored.version() == 0) {
      states_.erase(a.state.job_uuid());
    }
    Complete(
        JobStateWritten{JobUuid::FromBytes(a.state.job_uuid()).value(), a.state.version(), status});
  });
}

void World::Do(const RemoveJobState& a) {
  After(Latency(), [this, life = life_, a] {
    if (InLife(life)) {
      const absl::Status status = MaybeFail(1);
      if (const auto state = states_.find(a.job.ToBytes()); status.ok() && state != states_.end()) {
        oracle_.jobs().erase(state->second.name());
        states_.erase(state);
      }
      Complete(JobStateRemoved{a.job, status});
    }
  });
}

void World::Do(const WatchProcess& a) {
  watched_.insert(a.process);
  if (Lives(a.process)) {
    return;
  }
  Complete(ProcessEnded{a.process});
}

void World::Do(const UnwatchProcess& a) {
  watched_.erase(a.process);
}

void World::Do(const CloseConnection& a) {
  const auto it = connections_.find(a.connection);
  if (it != connections_.end()) {
    Peer* peer = it->second;
    CloseSocket(a.connection);
    peer->OnClosed(a.connection);
  }
}

void World::Do(const SetTimer& a) {
  const uint64_t timer = ++timer_;
  After(std::max<Duration>(a.at - now_, Duration(0)) + std::chrono::microseconds(Below(5000)),
        [this, timer, life = life_] {
          if (timer == timer_ && InLife(life)) {
            Feed(TimerFired{});
          }
        });
}

// Replies to one connection keep their order; one with descriptors takes its turn among its slot's
// actions, too.
void World::Do(const SendReply& a) {
  if (a.frame.has_join()) {
    CheckAttempt(JobUuid::FromBytes(a.frame.join().job_uuid()).value(), a.frame.join().attempt());
  } else if (a.frame.has_begin_save()) {
    const v1::Grant& grant = a.frame.begin_save();
    CheckAttempt(JobUuid::FromBytes(grant.job_uuid()).value(), grant.attempt());
  }
  int64_t at = std::max(socket_busy_until_[a.connection] + 1, (now_ + Latency()).ns);
  const bool of_slot =
      a.descriptors != Descriptors::kNone && a.descriptors != Descriptors::kOpenedCopy;
  if (of_slot) {
    at = std::max(at, slot_busy_until_[a.slot] + 1);
    slot_busy_until_[a.slot] = at;
  }
  socket_busy_until_[a.connection] = at;
  After(MonotonicTime{at} - now_, [this, life = life_, a, of_slot] {
    if (InLife(life)) {
      Deliver(a, of_slot || a.frame.has_begin_save() ? FindFile(a.slot) : nullptr);
    }
  });
}

void World::Deliver(const SendReply& a, FilePtr file) {
  requests_.erase({a.connection, a.frame.id()});
  const auto it = connections_.find(a.connection);
  if (it == connections_.end() || !it->second->running()) {
    return;
  }
  Peer& peer = *it->second;
  const bool judge = !peer.Forsook(a);
  if (judge && a.descriptors != Descriptors::kNone && OpenFails(a, file)) {
    return;
  }
  if (!judge && file && file->replaced && !file->record) {
    return;  // it would have been told so, and does not listen any more
  }
  if (judge && (a.frame.has_begin_save() || a.descriptors == Descriptors::kWritableImage)) {
    CheckGrant(a, peer, file);
  }
  if (a.descriptors == Descriptors::kReadOnlyImageAndRecord) {
    const v1::Source& source =
        a.frame.has_attach() ? a.frame.attach() : a.frame.enter_session().source();
    const ShardId id{JobUuid::FromBytes(source.job_uuid()).value(), source.attempt(), source.step(),
                     source.rank()};
    if (!file || !file->record || file->foreign || file->record->copy.id != id ||
        file->record->copy.generation != source.generation()) {
      oracle_.Violated(absl::StrCat("slot ", a.slot, " was offered as ", id.ToString(),
                                    " and holds no such sealed copy"));
      return;
    }
    if (file->uid != peer.uid()) {
      oracle_.Violated(absl::StrCat("slot ", a.slot, " was handed to a reader of uid ", peer.uid(),
                                    " and holds another user's bytes"));
    }
    int noted = 0;
    for (const v1::Reader& reader : file->note.readers()) {
      noted +=
          reader.pid() == peer.process().pid && reader.start_ticks() == peer.process().start_ticks
              ? 1
              : 0;
    }
    if (noted <= file->read_by[peer.process()]) {
      oracle_.Violated(absl::StrCat("slot ", a.slot, " was handed to a reader that is not noted"));
    }
    ++file->read_by[peer.process()];
  }
  peer.OnReply(a, file);
}

// As the runtime does it: the core says what the client hears.
bool World::OpenFails(const SendReply& a, const FilePtr& file) {
  if (file && file->replaced && !file->record) {  // since the reply was sent
    Feed(HandOverFailed{a, absl::NotFoundError("no record")});
    return true;
  }
  if (!file || file->faults.count(Fault::kOpen) == 0) {
    return false;
  }
  Feed(HandOverFailed{a, FaultOf(*file, Fault::kOpen, 0)});
  return true;
}

// A verification reads one shard after the other.
void World::HoldListed(const ListedShards& listed) {
  Duration when{};
  for (const ReadableShard& shard : listed.shards) {
    when += std::chrono::milliseconds(Below(3000));
    After(when, [this, life = life_, copy = shard.copy] {
      if (InLife(life)) {
        const AdminToken token = next_admin_++;
        admin_[token] = "hold of " + copy.id.ToString();
        Feed(AdminRequest{token, Caller{{1, 1}, 0, 0},
                          HoldShard{copy.job_name, copy.id, copy.generation}});
      }
    });
  }
}

void World::Do(const AdminReply& a) {
  const auto found = admin_.find(a.token);
  const std::string what = found == admin_.end() ? "" : found->second;
  admin_.erase(a.token);
  Trace(absl::StrCat("admin ", what, ": ", a.status.ToString()));
  RemovalAnswered(a.token, a.status.ok());
  if (const auto* listed = std::get_if<ListedShards>(&a.reply)) {
    HoldListed(*listed);
  }
  const auto* readable = std::get_if<ReadableShards>(&a.reply);
  if (readable == nullptr) {
    return;
  }
  std::vector<std::pair<FilePtr, Generation>> files;
  for (const ReadableShard& shard : readable->shards) {
    if (const FilePtr file = FindFile(shard.slot)) {
      ++file->read_by[ProcessId{1, 0}];
      files.emplace_back(file, shard.copy.generation);
    }
  }
  After(std::chrono::milliseconds(Below(5000)), [this, life = life_, token = a.token, files] {
    for (const auto& [file, generation] : files) {
      if (const auto reader = file->read_by.find(ProcessId{1, 0});
          reader != file->read_by.end() && --reader->second <= 0) {
        file->read_by.erase(reader);
      }
      if (InLife(life) && file->record && file->record->token != file->token) {
        Feed(CopyFoundBad{file->slot, generation, "digests differ"});
      } else if (InLife(life) && file->record) {
        Feed(CopyFoundGood{file->slot, generation});
      }
    }
    if (InLife(life)) {
      Feed(AdminReadDone{token});
    }
  });
}

uint64_t NameHold(v1::ClientFrame& frame, uint64_t hold) {
  if (frame.has_enter_session()) {
    frame.mutable_enter_session()->set_hold(hold);
  } else if (frame.has_report_load()) {
    frame.mutable_report_load()->set_hold(hold);
  } else if (frame.has_attach()) {
    frame.mutable_attach()->set_hold(hold);
  } else {
    return 0;
  }
  return hold;
}

void World::SendFrame(ConnectionId connection, const v1::ClientFrame& frame, Duration deadline) {
  requests_[{connection, frame.id()}] = {now_ + deadline + kAnswerSlack, frame.ShortDebugString()};
  After(std::chrono::microseconds(50), [this, life = life_, connection, frame] {
    if (InLife(life) && connections_.count(connection) > 0) {
      Feed(ClientRequest{connection, frame});
    }
  });
}

ConnectionId World::Open(Peer* peer) {
  const ConnectionId id = next_connection_++;
  connections_[id] = peer;
  Feed(ConnectionOpened{id, {peer->process(), peer->uid(), peer->uid()}});
  return id;
}

void World::CloseSocket(ConnectionId connection) {
  if (connections_.erase(connection) == 0) {
    return;
  }
  std::erase_if(requests_, [&](const auto& r) { return r.first.first == connection; });
  Complete(ConnectionClosed{connection});
}

FilePtr World::FindFile(SlotId slot) {
  const auto it = files_.find(slot);
  return it == files_.end() ? nullptr : it->second;
}

}  // namespace holdfast::sim
