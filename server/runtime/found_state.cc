#include "server/runtime/found_state.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "server/runtime/process_watcher.h"
#include "server/state_order.h"

namespace holdfast {
namespace {

v1::Process ToMessage(const ProcessId& process) {
  v1::Process message;
  message.set_pid(process.pid);
  message.set_start_ticks(process.start_ticks);
  return message;
}

ProcessId FromMessage(const v1::Process& message) {
  return {message.pid(), message.start_ticks()};
}

struct MergedState {
  v1::JobState state;
  bool in_catalog = false;  // this very version
  bool in_memory = false;
};

void Merge(v1::JobState state, bool MergedState::*place,
           std::map<std::string, MergedState>& merged) {
  MergedState& entry = merged[state.job_uuid()];
  const bool empty = !entry.in_catalog && !entry.in_memory;
  if (empty || IsNewerState(state, entry.state)) {
    entry = MergedState{};
    entry.state = std::move(state);
    entry.*place = true;
  } else if (!IsNewerState(entry.state, state)) {
    entry.*place = true;
  }
}

// It does not stop the daemon: it is a problem in the status. False if it failed.
bool NoteFailure(const absl::Status& status, Started& started) {
  if (!status.ok()) {
    started.problems.push_back(Message(status));
  }
  return status.ok();
}

absl::Status MergeJobStates(const MemoryScan& scan, SlotStore& store, Catalog& catalog,
                            Started& started) {
  std::map<std::string, MergedState> merged;
  if (catalog.open_status().ok()) {  // if not, its writer tells
    absl::StatusOr<std::vector<v1::JobState>> known = catalog.JobStates(&started.problems);
    if (NoteFailure(known.status(), started)) {
      for (v1::JobState& state : *known) {
        Merge(std::move(state), &MergedState::in_catalog, merged);
      }
    }
  }
  for (const std::string& encoded : scan.job_states) {
    v1::JobState state;
    if (!state.ParseFromString(encoded) || !JobUuid::FromBytes(state.job_uuid()).ok()) {
      started.problems.push_back("a job's state in memory.dir cannot be understood; left out");
      continue;
    }
    Merge(std::move(state), &MergedState::in_memory, merged);
  }
  uint64_t added = 0;
  for (auto& [uuid_bytes, entry] : merged) {
    HF_ASSIGN_OR_RETURN(const JobUuid uuid, JobUuid::FromBytes(uuid_bytes));
    added += entry.in_catalog ? 0 : 1;
    if (!entry.in_memory) {
      NoteFailure(store.WriteJobState(uuid, entry.state.SerializeAsString()), started);
    }
    if (entry.state.boot_id() != CurrentBoot()) {
      for (v1::MemberState& member : *entry.state.mutable_members()) {
        member.set_gone(true);  // its number means another process now
      }
    }
    started.jobs.push_back(std::move(entry.state));
  }
  if (catalog.created() && added > 0) {
    started.problems.push_back(
        absl::StrCat("the catalog was missing or unreadable; it was made anew with ", added,
                     " job(s) found in memory"));
  }
  return absl::OkStatus();
}

// A rank has several slots: each process is looked at once.
using AliveProcesses = std::map<ProcessId, bool>;

bool IsAlive(const ProcessId& process, AliveProcesses& known) {
  const auto [entry, added] = known.try_emplace(process, false);
  if (added) {
    entry->second = MayBeAlive(process);
  }
  return entry->second;
}

// `dying`: the daemons that had memory.dir before. What one of them was filling it may still write;
// what is sealed it was not filling any more.
FoundSlot ToFoundSlot(const StoredSlot& stored, const std::vector<ProcessId>& dying,
                      AliveProcesses& known) {
  FoundSlot found;
  found.slot = stored.slot;
  found.bytes = stored.bytes;
  SlotNote note = stored.note;
  const bool this_boot = note.boot_id == CurrentBoot();
  if (note.writer.has_value() && (!this_boot || !IsAlive(*note.writer, known))) {
    note.writer.reset();
  }
  std::erase_if(note.readers, [&](const ReadHold& hold) {
    const bool filled =
        stored.record && std::find(dying.begin(), dying.end(), hold.process) != dying.end();
    return !this_boot || filled || !IsAlive(hold.process, known);
  });
  found.note = holdfast::ToMessage(note);
  if (stored.record.has_value()) {
    found.sealed = ToSealedCopy(*stored.record);
    found.record_bytes = EncodeRecord(*stored.record).size();
  }
  return found;
}

}  // namespace

absl::StatusOr<Started> FindState(SlotStore& store, Catalog& catalog, uint64_t memory_bytes_max) {
  Started started;
  started.memory_bytes_max = memory_bytes_max;
  started.problems = catalog.TakeProblems();
  HF_ASSIGN_OR_RETURN(const MemoryScan scan, store.Scan());
  started.problems.insert(started.problems.end(), scan.problems.begin(), scan.problems.end());
  AliveProcesses known;
  for (const StoredSlot& stored : scan.slots) {
    started.slots.push_back(ToFoundSlot(stored, store.dying(), known));
  }
  for (const auto& [slot, bytes] : scan.left_alone) {
    started.left_alone.push_back({slot, bytes});
  }
  HF_RETURN_IF_ERROR(MergeJobStates(scan, store, catalog, started));
  return started;
}

SealedCopy ToSealedCopy(const ShardRecord& record) {
  SealedCopy copy;
  copy.id = record.id;
  copy.job_name = record.job_name;
  copy.world_size = record.world_size;
  copy.generation = record.generation;
  copy.image_bytes = record.image_bytes;
  copy.layout_hash = record.layout_hash;
  copy.descent = record.descent;
  copy.sealed_unix_ms = record.sealed_unix_ms;
  copy.likeness = record.likeness;
  return copy;
}

v1::SlotNote ToMessage(const SlotNote& note) {
  v1::SlotNote message;
  message.set_boot_id(note.boot_id);
  message.set_generation(note.generation);
  if (note.writer.has_value()) {
    *message.mutable_writer() = ToMessage(*note.writer);
  }
  for (const ReadHold& hold : note.readers) {
    v1::Reader& reader = *message.add_readers();
    reader.set_pid(hold.process.pid);
    reader.set_start_ticks(hold.process.start_ticks);
    reader.set_hold(hold.id);
  }
  message.set_slot_bytes(note.slot_bytes);
  message.set_replica(note.replica);
  return message;
}

SlotNote FromMessage(const v1::SlotNote& message) {
  SlotNote note;
  note.boot_id = message.boot_id().empty() ? CurrentBoot() : message.boot_id();
  note.generation = message.generation();
  if (message.has_writer()) {
    note.writer = FromMessage(message.writer());
  }
  for (const v1::Reader& reader : message.readers()) {
    note.readers.push_back({{reader.pid(), reader.start_ticks()}, reader.hold()});
  }
  note.slot_bytes = message.slot_bytes();
  note.replica = message.replica();
  return note;
}

v1::CatalogShard ToCatalogShard(const SealedCopy& copy, SlotId slot) {
  v1::CatalogShard shard;
  shard.set_job_uuid(copy.id.job.ToBytes());
  shard.set_attempt(copy.id.attempt);
  shard.set_step(copy.id.step);
  shard.set_rank(copy.id.rank);
  shard.set_world_size(copy.world_size);
  shard.set_tier(std::string(kMemoryTier));
  shard.set_location(SlotLocation(slot));
  shard.set_image_bytes(copy.image_bytes);
  shard.set_generation(copy.generation);
  shard.set_sealed_unix_ms(copy.sealed_unix_ms);
  shard.set_layout_hash(std::string(copy.layout_hash.begin(), copy.layout_hash.end()));
  return shard;
}

std::string SlotLocation(SlotId slot) {
  return absl::StrFormat("slot-%06d", slot);
}

}  // namespace holdfast
