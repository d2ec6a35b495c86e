#include "tiers/memory/memory_tier.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/status.h"
#include "tiers/image/layout.h"
#include "tiers/memory/slot_files.h"

namespace holdfast {
namespace {

CopyInfo InfoOf(const ShardRecord& record, std::string location) {
  return {record.id, record.world_size, record.image_bytes, record.sealed_unix_ms,
          std::move(location)};
}

// The lock on the directory proves that no other daemon writes; this one does so only through its
// writers.
bool HeldByAnother(const ProcessId& process) {
  if (process == ThisProcess()) {
    return false;
  }
  const absl::StatusOr<ProcessId> now = IdentifyProcess(process.pid);
  return now.ok() ? *now == process : !absl::IsNotFound(now.status());
}

bool NobodyHolds(const SlotNote& note) {
  return !(note.writer.has_value() && HeldByAnother(*note.writer)) &&
         std::none_of(note.readers.begin(), note.readers.end(),
                      [](const ReadHold& hold) { return HeldByAnother(hold.process); });
}

}  // namespace

struct MemoryTier::Impl {
  explicit Impl(const Options& o) : options(o), store(*o.store) {}

  // A slot of the range that this tier knows, free unless somebody has it.
  struct Slot {
    uint64_t bytes = 0;
    enum class State { kFree, kWriting, kSealed, kQuarantined } state = State::kFree;
  };

  const Options options;
  SlotStore& store;
  mutable Mutex mutex;
  std::map<SlotId, Slot> slots GUARDED_BY(mutex);
  std::map<SlotId, int> readers GUARDED_BY(mutex);
  Generation last_generation GUARDED_BY(mutex) =
      0;  // one count for all slots: never used twice, even after a deletion

  bool InRange(SlotId slot) const {
    return slot >= options.slots_begin && slot < options.slots_end;
  }

  void Learn(const MemoryScan& scan) REQUIRES(mutex);
  std::optional<SlotId> FreeSlot(uint64_t bytes) REQUIRES(mutex);
  absl::StatusOr<SlotId> NewSlot(uint64_t bytes) EXCLUDES(mutex);
  absl::StatusOr<SlotId> TakeSlot(uint64_t bytes, bool& reused) EXCLUDES(mutex);
  absl::Status DeleteFreeSlot(SlotId slot) EXCLUDES(mutex);
  absl::StatusOr<Generation> BeginFilling(SlotId slot, uint64_t bytes) EXCLUDES(mutex);
  void Set(SlotId slot, Slot::State state) EXCLUDES(mutex);
  void EndReading(SlotId slot) EXCLUDES(mutex);
};

// ---- Slots ----

// The slots as they are on disk. What this tier is creating or filling at the moment stays its
// writer's.
void MemoryTier::Impl::Learn(const MemoryScan& scan) {
  std::map<SlotId, Slot> found;
  for (const auto& [id, slot] : slots) {
    if (slot.state == Slot::State::kWriting) {
      found.emplace(id, slot);
    }
  }
  for (const StoredSlot& stored : scan.slots) {
    last_generation = std::max(last_generation, stored.note.generation);
    if (!InRange(stored.slot)) {
      continue;
    }
    Slot slot{stored.bytes, Slot::State::kFree};
    if (stored.record.has_value()) {
      slot.state = Slot::State::kSealed;
    } else if (!NobodyHolds(stored.note) || readers.contains(stored.slot)) {
      slot.state = Slot::State::kQuarantined;
    }
    found.emplace(stored.slot, slot);
  }
  slots = std::move(found);
}

std::optional<SlotId> MemoryTier::Impl::FreeSlot(uint64_t bytes) {
  for (const auto& [id, slot] : slots) {
    if (slot.state == Slot::State::kFree && (bytes == 0 || slot.bytes == bytes)) {
      return id;
    }
  }
  return std::nullopt;
}

absl::StatusOr<SlotId> MemoryTier::Impl::NewSlot(uint64_t bytes) {
  for (SlotId id = options.slots_begin; id < options.slots_end; ++id) {
    {
      MutexLock hold(mutex);
      if (!slots.emplace(id, Slot{bytes, Slot::State::kWriting}).second) {
        continue;
      }
    }
    const absl::Status status = store.Create(id, bytes);
    if (status.ok()) {
      return id;
    }
    {
      MutexLock hold(mutex);
      slots.erase(id);
    }
    if (!absl::IsAlreadyExists(status)) {  // else: one that the scan left alone
      return status;
    }
  }
  return absl::ResourceExhaustedError(absl::StrCat("memory tier '", store.dir(),
                                                   "': all slots from ", options.slots_begin,
                                                   " to ", options.slots_end, " are taken"));
}

absl::Status MemoryTier::Impl::DeleteFreeSlot(SlotId slot) {
  const absl::Status status = store.Delete(slot);
  MutexLock hold(mutex);
  if (status.ok() || absl::IsNotFound(status)) {
    slots.erase(slot);
    return absl::OkStatus();
  }
  slots[slot].state = Slot::State::kFree;
  return status;
}

// An exact fit that is free, else a new one; free ones that don't fit make room when there is none.
absl::StatusOr<SlotId> MemoryTier::Impl::TakeSlot(uint64_t bytes, bool& reused) {
  {
    MutexLock hold(mutex);
    if (const std::optional<SlotId> fit = FreeSlot(bytes)) {
      slots[*fit].state = Slot::State::kWriting;
      reused = true;
      return *fit;
    }
  }
  reused = false;
  for (;;) {
    absl::StatusOr<SlotId> made = NewSlot(bytes);
    if (!absl::IsResourceExhausted(made.status())) {
      return made;
    }
    std::optional<SlotId> other;
    {
      MutexLock hold(mutex);
      other = FreeSlot(0);
      if (!other.has_value()) {
        return made;
      }
      slots[*other].state = Slot::State::kWriting;
    }
    HF_RETURN_IF_ERROR(DeleteFreeSlot(*other));
  }
}

absl::StatusOr<Generation> MemoryTier::Impl::BeginFilling(SlotId slot, uint64_t bytes) {
  const absl::Status removed = store.RemoveRecord(slot);  // one that an earlier failure left
  if (!removed.ok() && !absl::IsNotFound(removed)) {
    return removed;
  }
  SlotNote note;
  {
    MutexLock hold(mutex);
    note.generation = ++last_generation;
  }
  note.writer = ThisProcess();
  note.slot_bytes = bytes;
  HF_RETURN_IF_ERROR(store.WriteNote(slot, note));
  return note.generation;
}

void MemoryTier::Impl::Set(SlotId slot, Slot::State state) {
  MutexLock hold(mutex);
  const auto it = slots.find(slot);
  if (it != slots.end()) {
    it->second.state = state;
  }
}

void MemoryTier::Impl::EndReading(SlotId slot) {
  MutexLock hold(mutex);
  const auto it = readers.find(slot);
  if (--it->second == 0) {
    readers.erase(it);
    // Its copy was found bad while it was being read: now the slot is free.
    const auto known = slots.find(slot);
    if (known != slots.end() && known->second.state == Slot::State::kQuarantined) {
      known->second.state = Slot::State::kFree;
    }
  }
}

// ---- Writing ----

class MemoryTier::Writer : public CopyWriter {
 public:
  Writer(Impl& tier, const ShardId& id, uint64_t image_bytes, SlotId slot, Generation generation,
         std::unique_ptr<File> image)
      : tier_(tier),
        id_(id),
        image_bytes_(image_bytes),
        slot_(slot),
        generation_(generation),
        image_(std::move(image)) {}
  ~Writer() override {
    if (!published_) {
      tier_.Set(slot_, Impl::Slot::State::kFree);
    }
  }

  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    if (published_) {
      return absl::FailedPreconditionError(
          absl::StrCat("write ", id_.ToString(), ": it is published"));
    }
    if (offset > image_bytes_ || data.size() > image_bytes_ - offset) {
      return absl::OutOfRangeError(absl::StrCat("write ", id_.ToString(), ": ", data.size(),
                                                " bytes at offset ", offset, " of an image of ",
                                                image_bytes_));
    }
    return image_->WriteAt(offset, data);
  }

  absl::Status Publish(std::string_view record_bytes) override {
    if (published_) {
      return absl::FailedPreconditionError(
          absl::StrCat("publish ", id_.ToString(), ": it is published"));
    }
    HF_ASSIGN_OR_RETURN(ShardRecord record, DecodeRecord(record_bytes));
    if (record.id != id_ || record.image_bytes != image_bytes_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "publish ", id_.ToString(), " with ", image_bytes_, " bytes: the record is of ",
          record.id.ToString(), " with ", record.image_bytes));
    }
    record.generation = generation_;
    const RecordExpectation expected{id_, record.job_name, record.world_size, generation_,
                                     record.descent};
    HF_RETURN_IF_ERROR(
        tier_.store.PublishRecordBytes(slot_, expected, EncodeRecord(record)).status());
    published_ = true;
    tier_.Set(slot_, Impl::Slot::State::kSealed);
    return absl::OkStatus();
  }

 private:
  Impl& tier_;
  const ShardId id_;
  const uint64_t image_bytes_;
  const SlotId slot_;
  const Generation generation_;
  const std::unique_ptr<File> image_;
  bool published_ = false;
};

absl::StatusOr<std::unique_ptr<CopyWriter>> MemoryTier::Create(const NewCopy& copy) {
  Impl& m = *impl_;
  const ShardId& id = copy.id;
  const uint64_t image_bytes = copy.image_bytes;
  if (image_bytes == 0 || image_bytes > kImageBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("create a copy of ", id.ToString(),
                                                   ": an image of ", image_bytes, " bytes; 1 to ",
                                                   kImageBytesMax, " are allowed"));
  }
  if (absl::StatusOr<StoredSlot> there = m.store.Find(id); there.ok()) {
    return absl::AlreadyExistsError(absl::StrCat("create a copy of ", id.ToString(), ": slot ",
                                                 there->slot, " holds one already"));
  }
  const uint64_t bytes =
      (image_bytes + kSlotBytesMultiple - 1) / kSlotBytesMultiple * kSlotBytesMultiple;
  for (;;) {
    bool reused = false;
    HF_ASSIGN_OR_RETURN(const SlotId slot, m.TakeSlot(bytes, reused));
    absl::StatusOr<Generation> generation = m.BeginFilling(slot, bytes);
    absl::StatusOr<std::unique_ptr<File>> image = absl::UnknownError("");
    if (generation.ok()) {
      image = m.store.OpenImageFile(slot, true);
      if (image.ok()) {
        return std::make_unique<Writer>(m, id, image_bytes, slot, *generation, *std::move(image));
      }
    }
    const absl::Status status = generation.ok() ? image.status() : generation.status();
    if (reused && (absl::IsDataLoss(status) || absl::IsNotFound(status))) {
      // The free slot was cut short or deleted underneath, or a scan found it so. It is replaced;
      // each round has one free slot less.
      HF_RETURN_IF_ERROR(m.DeleteFreeSlot(slot));
      continue;
    }
    m.Set(slot, Impl::Slot::State::kFree);
    return status;
  }
}

// ---- Reading ----

class MemoryTier::Reader : public CopyReader {
 public:
  Reader(Impl& tier, const StoredSlot& stored)
      : tier_(tier),
        info_(InfoOf(*stored.record, JoinPath(tier.store.dir(), ImageName(stored.slot)))),
        slot_(stored.slot),
        generation_(stored.record->generation) {}
  ~Reader() override { tier_.EndReading(slot_); }

  absl::Status OpenFiles() {
    HF_ASSIGN_OR_RETURN(image_, tier_.store.OpenImageFile(slot_, false));
    return Confirm();
  }

  const CopyInfo& info() const override { return info_; }

  absl::StatusOr<std::string> ReadRecord() override { return tier_.store.ReadRecord(slot_); }

  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    if (offset > info_.image_bytes || out.size() > info_.image_bytes - offset) {
      return absl::OutOfRangeError(absl::StrCat("read ", info_.id.ToString(), ": ", out.size(),
                                                " bytes at offset ", offset, " of an image of ",
                                                info_.image_bytes));
    }
    const absl::Status status = image_->ReadAt(offset, out);
    if (absl::IsOutOfRange(status)) {
      return absl::DataLossError(absl::StrCat("read ", info_.id.ToString(),
                                              ": its slot was cut short: ", status.message()));
    }
    return status;
  }

  absl::Status Confirm() override { return tier_.store.Confirm(slot_, generation_, *image_); }

 private:
  Impl& tier_;
  const CopyInfo info_;
  const SlotId slot_;
  const Generation generation_;
  std::unique_ptr<File> image_;
};

absl::StatusOr<std::unique_ptr<CopyReader>> MemoryTier::Open(const ShardId& id) {
  Impl& m = *impl_;
  std::unique_ptr<Reader> reader;
  {
    // Found and held in one step, so that Remove sees either no reader or no copy.
    MutexLock hold(m.mutex);
    HF_ASSIGN_OR_RETURN(const StoredSlot stored, m.store.Find(id));
    ++m.readers[stored.slot];
    reader = std::make_unique<Reader>(m, stored);
  }
  HF_RETURN_IF_ERROR(reader->OpenFiles());
  return reader;
}

absl::Status MemoryTier::Remove(const ShardId& id) {
  Impl& m = *impl_;
  MutexLock hold(m.mutex);
  HF_ASSIGN_OR_RETURN(const StoredSlot stored, m.store.Find(id));
  if (!m.InRange(stored.slot)) {
    return absl::FailedPreconditionError(absl::StrCat("remove ", id.ToString(), ": slot ",
                                                      stored.slot,
                                                      " is not this tier's; its owner removes it"));
  }
  const auto held = m.readers.find(stored.slot);
  if (held != m.readers.end()) {
    return absl::FailedPreconditionError(absl::StrCat("remove ", id.ToString(), ": ", held->second,
                                                      " readers hold slot ", stored.slot,
                                                      "; try again when they are done"));
  }
  const absl::Status status = m.store.RemoveRecord(stored.slot);
  if (m.store.Find(id).ok()) {
    return status;
  }
  // Gone, also when the error came after the record was unlinked. Processes that attached the slot
  // in an earlier life of the daemon may still read it.
  m.slots[stored.slot] = {stored.bytes, NobodyHolds(stored.note) ? Impl::Slot::State::kFree
                                                                 : Impl::Slot::State::kQuarantined};
  return status;
}

// ---- The rest ----

MemoryTier::MemoryTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MemoryTier::~MemoryTier() = default;

absl::StatusOr<std::unique_ptr<MemoryTier>> MemoryTier::Start(const Options& options) {
  auto impl = std::make_unique<Impl>(options);
  HF_ASSIGN_OR_RETURN(const MemoryScan scan, options.store->Scan());
  {
    MutexLock hold(impl->mutex);
    impl->Learn(scan);
  }
  return std::unique_ptr<MemoryTier>(new MemoryTier(std::move(impl)));
}

absl::StatusOr<Inventory> MemoryTier::Scan() {
  Impl& m = *impl_;
  // Held over the scan, so that no copy is published or removed between what it saw and what is
  // made of it.
  MutexLock hold(m.mutex);
  HF_ASSIGN_OR_RETURN(MemoryScan scan, m.store.Scan());
  m.Learn(scan);
  Inventory inventory;
  for (const StoredSlot& stored : scan.slots) {
    if (stored.record.has_value()) {
      inventory.copies.push_back(
          InfoOf(*stored.record, JoinPath(m.store.dir(), ImageName(stored.slot))));
    }
  }
  inventory.unreadable = std::move(scan.unreadable);
  return inventory;
}

uint64_t MemoryTier::bytes_free_slots() const {
  MutexLock hold(impl_->mutex);
  uint64_t bytes = 0;
  for (const auto& [id, slot] : impl_->slots) {
    bytes += slot.state == Impl::Slot::State::kFree ? slot.bytes : 0;
  }
  return bytes;
}

absl::Status MemoryTier::DeleteFreeSlots() {
  Impl& m = *impl_;
  for (;;) {
    std::optional<SlotId> slot;
    {
      MutexLock hold(m.mutex);
      slot = m.FreeSlot(0);
      if (!slot.has_value()) {
        return absl::OkStatus();
      }
      m.slots[*slot].state = Impl::Slot::State::kWriting;
    }
    HF_RETURN_IF_ERROR(m.DeleteFreeSlot(*slot));
  }
}

}  // namespace holdfast
