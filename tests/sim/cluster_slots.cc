// Slots of a simulated node, with their notes and records, and the states on its disk.
#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_world.h"
#include "tiers/image/kept.h"

namespace holdfast::sim::cluster {

// Actions of one slot happen one after the other, in the order given.
void Node::OnSlot(SlotId slot, std::function<void()> effect) {
  int64_t& busy = slot_busy_until_[slot];
  busy = std::max(busy + 1, w_.t.now() + Latency().count());
  After(Duration(busy - w_.t.now()), std::move(effect));
}

void Node::Do(const CreateSlot& a) {
  OnSlot(a.slot, [this, a] {
    if (files_.count(a.slot) > 0) {
      w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot, " is made although it is there"));
    }
    auto file = std::make_shared<File>();
    file->slot = a.slot;
    file->bytes = a.bytes;
    files_[a.slot] = file;
    Complete(SlotCreated{a.slot, absl::OkStatus()});
  });
}

void Node::Do(const PopulateSlot& a) {
  OnSlot(a.slot, [this, a] { Complete(SlotPopulated{a.slot, MaybeFail(slot_failures)}); });
}

void Node::Do(const WriteNote& a) {
  OnSlot(a.slot, [this, a] {
    const absl::Status status = MaybeFail(slot_failures);
    if (status.ok() || w_.t.Chance(0.5)) {
      files_.at(a.slot)->note = a.note;
    } else {
      w_.Count(Fault::kSlotFails);
    }
    Complete(NoteWritten{a.slot, a.note_version, status});
  });
}

namespace {

// Ranks of one parity hold the same tensors; now and then one of them has other bytes.
Likeness LikenessOf(const ShardId& id) {
  const uint64_t parity = id.rank % 2;
  const uint64_t diverged = (id.attempt * 31 + id.step * 7 + id.rank) % 53 == 0 ? id.rank + 1 : 0;
  Likeness likeness;
  likeness.tensors.fill(static_cast<uint8_t>(1 + parity));
  likeness.content = PlanHash(
      likeness.tensors, std::vector<Rank>{static_cast<Rank>(id.attempt), static_cast<Rank>(id.step),
                                          static_cast<Rank>(diverged)});
  return likeness;
}

}  // namespace

void Node::Do(const PublishRecord& a) {
  OnSlot(a.slot, [this, a] {
    const FilePtr file = files_.at(a.slot);
    RecordPublished published{a.slot, a.generation, MaybeFail(slot_failures), a.expected};
    const std::optional<FileRecord>& said = file->client_record;
    if (!said || said->copy.id != a.expected.id || said->copy.generation != a.expected.generation) {
      published.status = absl::InvalidArgumentError("the record is of another shard");
    } else {
      published.copy.image_bytes = kSlotBytes / 2;
      published.copy.sealed_unix_ms = UnixMs();
      published.copy.likeness = LikenessOf(published.copy.id);
      if (published.status.ok() || w_.t.Chance(0.5)) {
        RecordGone(*file, Truth::Why::kCommanded);
        file->replaced = false;
        file->record = FileRecord{published.copy, said->token};
        const ShardId& id = published.copy.id;
        const std::string& job = published.copy.job_name;
        w_.truth.Sealed(id, job, published.copy.world_size, said->token,
                        w_.truth.HasMetHost(job, name));
        w_.truth.Added(id, {TierKind::kMemory, index});
      }
    }
    Complete(published);
  });
}

void Node::Do(const RemoveRecord& a) {
  OnSlot(a.slot, [this, a] {
    const absl::Status status = MaybeFail(slot_failures);
    if (status.ok()) {
      RecordGone(*files_.at(a.slot), Truth::Why::kCommanded);
    }
    Complete(RecordRemoved{a.slot, a.generation, status});
  });
}

void Node::Do(const DeleteSlot& a) {
  OnSlot(a.slot, [this, a] {
    const FilePtr file = files_.at(a.slot);
    if (!file->mapped_by.empty() || !file->read_by.empty()) {
      w_.truth.Violated(
          absl::StrCat(name, ": slot ", a.slot, " is deleted while a process has it mapped"));
    }
    RecordGone(*file, Truth::Why::kCommanded);
    files_.erase(a.slot);
    Complete(SlotDeleted{a.slot, absl::OkStatus()});
  });
}

// ---- States ----

// Of one job one after the other, as the runtime does it.
void Node::Do(const WriteJobState& a) {
  int64_t& busy = state_busy_until_[a.state.job_uuid()];
  busy = std::max(busy + 1, w_.t.now() + Latency().count());
  After(Duration(busy - w_.t.now()), [this, a] {
    const absl::Status status = MaybeFail(state_failures);
    if (status.ok() || w_.t.Chance(0.5)) {
      v1::JobState& stored = states_[a.state.job_uuid()];
      const auto order = [](const v1::JobState& state) {
        return std::tuple(state.epoch(), state.version(), state.highest_epoch());
      };
      if (order(a.state) < order(stored)) {
        w_.truth.Violated(absl::StrCat(name, ": an older state of ", a.state.name(), ", epoch ",
                                       a.state.epoch(), " version ", a.state.version(),
                                       ", is written over epoch ", stored.epoch(), " version ",
                                       stored.version()));
      }
      stored = a.state;
      stored.set_boot_id(absl::StrCat("boot-", index, "-", boots_));
    }
    if (!status.ok()) {
      w_.Count(Fault::kStateWriteFails);
    }
    Complete(
        JobStateWritten{JobUuid::FromBytes(a.state.job_uuid()).value(), a.state.version(), status});
  });
}

void Node::Do(const RemoveJobState& a) {
  After(Latency(), [this, a] {
    states_.erase(a.job.ToBytes());
    Complete(JobStateRemoved{a.job, absl::OkStatus()});
  });
}
}  // namespace holdfast::sim::cluster
