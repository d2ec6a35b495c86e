#include "tiers/memory/slot_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "tiers/image/frame.h"
#include "tiers/memory/slot_note.h"
#include "tiers/memory/slot_scan.h"
#include "tiers/memory/slot_store_impl.h"

namespace holdfast {
namespace {

// A record has 8 bytes per MiB, and some hundred per slice: this is ample but for slots of nothing
// but tiny tensors.
constexpr uint64_t kRecordShare = 256;
constexpr uint64_t kRecordRoomBytesMin = 64 * kKiB;

// A directory that others could change would let them take slots over or hand us theirs.
absl::Status CheckDirectory(Env& env, const std::string& dir) {
  HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(dir));
  if (!S_ISDIR(info.mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("memory.dir '", dir, "': not a directory; remove it, or name another"));
  }
  if (info.uid != ::geteuid() || (info.mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("memory.dir '", dir, "': owned by uid ", info.uid, " with mode 0",
                     absl::Hex((info.mode >> 6) & 7), absl::Hex((info.mode >> 3) & 7),
                     absl::Hex(info.mode & 7), "; it must be uid ", ::geteuid(),
                     "'s and writable by nobody else: remove it, or name another"));
  }
  return absl::OkStatus();
}

absl::Status CheckFilesystem(Env& env, const std::string& dir, uint64_t bytes_max) {
  HF_ASSIGN_OR_RETURN(const FilesystemInfo fs, env.Filesystem(dir));
  if (fs.type != "tmpfs") {
    return absl::FailedPreconditionError(absl::StrCat(
        "memory.dir '", dir, "': on ", fs.type,
        ", but slots must lie in memory: name a directory on a tmpfs, /dev/shm for example"));
  }
  if (bytes_max > fs.bytes_total) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory.dir '", dir, "': memory.bytes_max is ", FormatBytes(bytes_max),
                     ", its tmpfs holds ", FormatBytes(fs.bytes_total),
                     "; lower memory.bytes_max, or 'mount -o remount,size=", bytes_max, "' it"));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Duplicate(const File& file) {
  UniqueFd fd(::fcntl(file.fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd.valid()) {
    return ErrnoStatus(errno, "duplicate the descriptor of", file.path());
  }
  return fd;
}

}  // namespace

// ---- Opening and scanning ----

SlotStore::SlotStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SlotStore::~SlotStore() = default;

absl::StatusOr<std::unique_ptr<SlotStore>> SlotStore::Open(const Options& options) {
  if (options.boot_id.empty()) {
    return absl::InvalidArgumentError(
        "open the memory tier: no boot id, so notes could not be told from old ones");
  }
  if (options.bytes_max < kSlotBytesMultiple) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory.bytes_max: ", FormatBytes(options.bytes_max),
                     " is less than one slot of ", FormatBytes(kSlotBytesMultiple)));
  }
  auto impl = std::make_unique<Impl>(options);
  HF_RETURN_IF_ERROR(impl->env.CreateDirectories(options.dir, 0700));
  HF_RETURN_IF_ERROR(CheckDirectory(impl->env, options.dir));
  HF_RETURN_IF_ERROR(CheckFilesystem(impl->env, options.dir, options.bytes_max));
  HF_ASSIGN_OR_RETURN(impl->lock, DaemonLock::Take(impl->env, JoinPath(options.dir, kLockName),
                                                   options.find_dying));
  HF_RETURN_IF_ERROR(impl->CountWhatIsThere());
  impl->reserve.Refill();
  return std::unique_ptr<SlotStore>(new SlotStore(std::move(impl)));
}

// So that the budget is right even before the first scan.
absl::Status SlotStore::Impl::CountWhatIsThere() {
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env.List(options.dir));
  MutexLock hold(mutex);
  for (const std::string& name : names) {
    const ParsedName parsed = ParseFileName(name);
    if (parsed.role != FileRole::kImage) {
      continue;
    }
    HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(JoinPath(options.dir, name)));
    SlotEntry& entry = entries[parsed.slot];
    entry.state = SlotEntry::State::kNotOurs;
    entry.bytes = info.bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<MemoryScan> SlotStore::Scan() {
  Impl& m = *impl_;
  const std::unique_lock<std::shared_mutex> alone(m.directory_mutex);
  SlotScanInput input;
  input.env = &m.env;
  input.dir = m.options.dir;
  input.boot_id = m.options.boot_id;
  input.awaits_note = [&m](SlotId slot) {
    MutexLock hold(m.mutex);
    const auto it = m.entries.find(slot);
    return it != m.entries.end() && it->second.state == SlotEntry::State::kReady &&
           !it->second.has_note;
  };
  HF_ASSIGN_OR_RETURN(SlotScanResult found, ScanSlots(input));

  std::map<SlotId, SlotEntry> entries;
  for (const StoredSlot& slot : found.scan.slots) {
    SlotEntry& entry = entries[slot.slot];
    entry.bytes = slot.bytes;
    entry.has_note = !slot.note.boot_id.empty();
    entry.note = slot.note;
    entry.record = slot.record;
  }
  for (const auto& [slot, bytes] : found.scan.left_alone) {
    SlotEntry& entry = entries[slot];
    entry.state = SlotEntry::State::kNotOurs;
    entry.bytes = bytes;
  }
  MutexLock hold(m.mutex);
  m.entries = std::move(entries);
  return std::move(found.scan);
}

// ---- Slots ----

absl::StatusOr<SlotEntry> SlotStore::Impl::Ready(SlotId slot) {
  MutexLock hold(mutex);
  const auto it = entries.find(slot);
  if (it == entries.end() || it->second.state == SlotEntry::State::kCreating) {
    return absl::NotFoundError(absl::StrCat("slot '", ImagePath(slot), "': there is none"));
  }
  if (it->second.state == SlotEntry::State::kNotOurs) {
    return absl::FailedPreconditionError(
        absl::StrCat("slot '", ImagePath(slot),
                     "': the scan left it alone (its problems say why), or has not run yet"));
  }
  return it->second;
}

absl::Status SlotStore::Impl::ReserveBudget(SlotId slot, uint64_t bytes) {
  MutexLock hold(mutex);
  if (entries.contains(slot)) {
    return absl::AlreadyExistsError(
        absl::StrCat("create slot '", ImagePath(slot), "': there is one already"));
  }
  const uint64_t used = BytesUsed();
  const uint64_t budget = bytes_max;
  if (used > budget || bytes > budget - used) {
    return absl::ResourceExhaustedError(
        absl::StrCat("create slot '", ImagePath(slot), "': ", FormatBytes(bytes), " wanted, ",
                     FormatBytes(used), " of the budget of ", FormatBytes(budget),
                     " are in use; raise memory.bytes_max, or remove checkpoints"));
  }
  SlotEntry entry;
  entry.state = SlotEntry::State::kCreating;
  entry.bytes = bytes;
  entries.emplace(slot, std::move(entry));
  return absl::OkStatus();
}

absl::Status SlotStore::Impl::NoRoom(uint64_t wanted, std::string_view what) {
  const absl::StatusOr<FilesystemInfo> fs = env.Filesystem(options.dir);
  const std::string room =
      fs.ok() ? absl::StrCat(FormatBytes(fs->bytes_free), " of ", FormatBytes(fs->bytes_total))
              : std::string("an unknown part");
  uint64_t used = 0;
  {
    MutexLock hold(mutex);
    used = BytesUsed();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(ToAbsl(what), ": ", FormatBytes(wanted), " wanted, the tmpfs has ", room,
                   " free; the budget is ", FormatBytes(bytes_max.load()), ", ", FormatBytes(used),
                   " of it in use with this slot, and some room is kept for records. Enlarge the "
                   "tmpfs ('mount -o remount,size=…'), free what else lies on it, or lower ",
                   "memory.bytes_max"));
}

// Room for notes and records of all slots, the new one included: a tmpfs filled up by images could
// seal nothing.
uint64_t SlotStore::Impl::RecordRoom() {
  MutexLock hold(mutex);
  return BytesUsed() / kRecordShare + entries.size() * kRecordRoomBytesMin;
}

absl::Status SlotStore::Impl::MakeImage(SlotId slot, uint64_t bytes) {
  const std::string path = ImagePath(slot);
  const std::string what = absl::StrCat("create slot '", path, "'");
  // 1. Ask before taking: a reservation that can't succeed would first drain the machine's memory.
  HF_ASSIGN_OR_RETURN(const FilesystemInfo fs, env.Filesystem(options.dir));
  if (fs.bytes_free < bytes || fs.bytes_free - bytes < RecordRoom()) {
    return NoRoom(bytes, what);
  }
  // 2. The name, exclusively.
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kCreateExclusive));
  HF_SYNC_POINT("memory.create.after_open");
  // 3. Its memory; all of it or no slot.
  absl::Status status = file->Allocate(0, bytes);
  if (status.ok()) {
    HF_SYNC_POINT("memory.create.after_allocate");
    status = env.SyncDirectory(options.dir);
  }
  if (!status.ok()) {
    env.Unlink(path).IgnoreError();  // the next scan removes what this leaves
    return absl::IsResourceExhausted(status) ? NoRoom(bytes, what) : status;
  }
  return absl::OkStatus();
}

absl::Status SlotStore::Create(SlotId slot, uint64_t bytes) {
  Impl& m = *impl_;
  if (bytes == 0 || bytes % kSlotBytesMultiple != 0) {
    return absl::InvalidArgumentError(absl::StrCat("create slot '", m.ImagePath(slot), "': ", bytes,
                                                   " bytes is not a positive multiple of ",
                                                   kSlotBytesMultiple));
  }
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  HF_RETURN_IF_ERROR(m.ReserveBudget(slot, bytes));
  const absl::Status status = m.MakeImage(slot, bytes);
  MutexLock hold(m.mutex);
  if (!status.ok()) {
    m.entries.erase(slot);
    return status;
  }
  m.entries[slot].state = SlotEntry::State::kReady;
  return absl::OkStatus();
}

absl::Status SlotStore::Impl::CheckImage(SlotId slot, uint64_t bytes, File& image) {
  HF_ASSIGN_OR_RETURN(const FileInfo open, image.Info());
  const absl::StatusOr<FileInfo> named = env.Info(ImagePath(slot));
  if (open.links == 0 || absl::IsNotFound(named.status())) {
    return absl::DataLossError(
        absl::StrCat("slot '", ImagePath(slot), "': its file was deleted while it was in use"));
  }
  HF_RETURN_IF_ERROR(named.status());
  if (named->inode != open.inode) {
    return absl::DataLossError(absl::StrCat(
        "slot '", ImagePath(slot), "': its file was replaced by another while it was in use"));
  }
  if (open.bytes != bytes) {
    return absl::DataLossError(absl::StrCat("slot '", ImagePath(slot), "': its file has ",
                                            open.bytes, " bytes instead of ", bytes,
                                            ": it was cut or extended while it was in use"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> SlotStore::Impl::OpenWhole(SlotId slot, bool writable,
                                                                 SlotEntry& entry) {
  HF_ASSIGN_OR_RETURN(entry, Ready(slot));
  absl::StatusOr<std::unique_ptr<File>> file =
      env.Open(ImagePath(slot), writable ? OpenMode::kReadWrite : OpenMode::kRead);
  if (absl::IsNotFound(file.status())) {
    return absl::DataLossError(
        absl::StrCat("slot '", ImagePath(slot), "': its file was deleted while it was in use"));
  }
  HF_RETURN_IF_ERROR(file.status());
  HF_RETURN_IF_ERROR(CheckImage(slot, entry.bytes, **file));
  return file;
}

absl::Status SlotStore::Populate(SlotId slot, uint64_t offset, uint64_t bytes) {
  SlotEntry entry;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, impl_->OpenWhole(slot, true, entry));
  if (offset % kSlotBytesMultiple != 0 || offset > entry.bytes || bytes > entry.bytes - offset) {
    return absl::InvalidArgumentError(absl::StrCat(
        "populate slot '", impl_->ImagePath(slot), "': ", bytes, " bytes at offset ", offset,
        " of ", entry.bytes, "; the offset must be a multiple of ", kSlotBytesMultiple));
  }
  if (bytes == 0) {
    return absl::OkStatus();
  }
  // The pages stay in the file when the mapping goes.
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<Mapping> mapping,
                      impl_->env.Map(*file, offset, bytes, true));
  const absl::Status status = impl_->env.Populate(*mapping, 0, bytes);
  return absl::IsResourceExhausted(status) ? impl_->NoRoom(bytes, Message(status)) : status;
}

absl::Status SlotStore::WriteNote(SlotId slot, const SlotNote& note) {
  Impl& m = *impl_;
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  const std::string what = absl::StrCat("note slot '", m.ImagePath(slot), "'");
  HF_ASSIGN_OR_RETURN(const SlotEntry entry, m.Ready(slot));
  SlotNote complete = note;
  if (complete.boot_id.empty()) {
    complete.boot_id = m.options.boot_id;
  }
  // 1. A new filling begins only where no record tells of an old one.
  if (complete.boot_id != m.options.boot_id) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the note is of another boot"));
  }
  if (entry.has_note && complete.generation < entry.note.generation) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": generation ", complete.generation,
                                                      " after generation ", entry.note.generation));
  }
  if (!entry.has_note || complete.generation != entry.note.generation) {
    const absl::Status record = m.env.Info(m.RecordPath(slot)).status();
    if (!absl::IsNotFound(record)) {
      return record.ok() ? absl::FailedPreconditionError(absl::StrCat(
                               what, ": generation ", complete.generation,
                               " can't begin before the record of the earlier filling is removed"))
                         : record;
    }
  }
  // 2. On a file that is what the note says.
  const absl::StatusOr<FileInfo> image = m.env.Info(m.ImagePath(slot));
  if (absl::IsNotFound(image.status())) {
    return absl::DataLossError(absl::StrCat(what, ": its file was deleted while it was in use"));
  }
  HF_RETURN_IF_ERROR(image.status());
  const uint64_t made = entry.has_note ? entry.note.slot_bytes : entry.bytes;
  if (image->bytes != complete.slot_bytes || made != complete.slot_bytes) {
    return absl::DataLossError(absl::StrCat(what, ": the note says ", complete.slot_bytes,
                                            " bytes, the slot was made with ", made,
                                            ", its file has ", image->bytes));
  }
  HF_ASSIGN_OR_RETURN(const std::string bytes, EncodeSlotNote(complete));
  HF_RETURN_IF_ERROR(m.PrepareSmallFile(m.NotePath(slot), bytes));
  HF_SYNC_POINT("memory.note.before_rename");
  HF_RETURN_IF_ERROR(CommitFile(m.env, m.NotePath(slot)));
  HF_SYNC_POINT("memory.note.after_rename");

  MutexLock hold(m.mutex);
  SlotEntry& kept = m.entries[slot];
  kept.has_note = true;
  kept.note = std::move(complete);
  return absl::OkStatus();
}

absl::Status SlotStore::RemoveRecord(SlotId slot) {
  Impl& m = *impl_;
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  HF_RETURN_IF_ERROR(m.Ready(slot).status());
  const absl::Status unlinked = m.env.Unlink(m.RecordPath(slot));
  if (!unlinked.ok() && !absl::IsNotFound(unlinked)) {
    return unlinked;
  }
  {
    MutexLock hold(m.mutex);
    m.entries[slot].record.reset();
  }
  HF_RETURN_IF_ERROR(unlinked);
  HF_SYNC_POINT("memory.remove.after_unlink");
  return m.env.SyncDirectory(m.options.dir);
}

absl::Status SlotStore::Delete(SlotId slot) {
  Impl& m = *impl_;
  const std::shared_lock<std::shared_mutex> changing(m.directory_mutex);
  HF_RETURN_IF_ERROR(m.Ready(slot).status());
  // Files that are gone already were taken away underneath: all the better.
  absl::Status status = RemoveFile(m.env, m.RecordPath(slot));
  if (!status.ok() && !absl::IsNotFound(status)) {
    return status;
  }
  {
    MutexLock hold(m.mutex);
    m.entries[slot].record.reset();
  }
  HF_SYNC_POINT("memory.delete.after_record");
  status = RemoveFile(m.env, m.NotePath(slot));
  if (!status.ok() && !absl::IsNotFound(status)) {
    return status;
  }
  status = m.env.Unlink(m.ImagePath(slot));
  if (!status.ok() && !absl::IsNotFound(status)) {
    return status;
  }
  {
    MutexLock hold(m.mutex);
    m.entries.erase(slot);
  }
  return m.env.SyncDirectory(m.options.dir);
}

// ---- Reading ----

absl::StatusOr<UniqueFd> SlotStore::OpenImage(SlotId slot, bool writable) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, OpenImageFile(slot, writable));
  return Duplicate(*file);
}

absl::StatusOr<std::unique_ptr<File>> SlotStore::OpenImageFile(SlotId slot, bool writable) {
  SlotEntry entry;
  return impl_->OpenWhole(slot, writable, entry);
}

absl::StatusOr<UniqueFd> SlotStore::OpenRecord(SlotId slot) {
  HF_RETURN_IF_ERROR(impl_->Ready(slot).status());
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                      impl_->env.Open(impl_->RecordPath(slot), OpenMode::kRead));
  return Duplicate(*file);
}

absl::StatusOr<std::string> SlotStore::ReadRecord(SlotId slot) {
  HF_RETURN_IF_ERROR(impl_->Ready(slot).status());
  return ReadFile(impl_->env, impl_->RecordPath(slot), kRecordBytesMax);
}

absl::Status SlotStore::ReadAt(SlotId slot, uint64_t offset, std::span<std::byte> out) {
  SlotEntry entry;
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, impl_->OpenWhole(slot, false, entry));
  return file->ReadAt(offset, out);
}

absl::StatusOr<StoredSlot> SlotStore::Find(const ShardId& shard) const {
  MutexLock hold(impl_->mutex);
  for (const auto& [slot, entry] : impl_->entries) {
    if (entry.record.has_value() && entry.record->id == shard) {
      return StoredSlot{slot, entry.bytes, entry.note, entry.record};
    }
  }
  return absl::NotFoundError(
      absl::StrCat("memory tier '", impl_->options.dir, "': no copy of ", shard.ToString()));
}

std::vector<StoredSlot> SlotStore::Sealed() const {
  MutexLock hold(impl_->mutex);
  std::vector<StoredSlot> sealed;
  for (const auto& [slot, entry] : impl_->entries) {
    if (entry.record.has_value()) {
      sealed.push_back({slot, entry.bytes, entry.note, entry.record});
    }
  }
  return sealed;
}

std::vector<SlotId> SlotStore::Slots() const {
  MutexLock hold(impl_->mutex);
  std::vector<SlotId> slots;
  for (const auto& [slot, entry] : impl_->entries) {
    if (entry.state == SlotEntry::State::kReady) {
      slots.push_back(slot);
    }
  }
  return slots;
}

absl::Status SlotStore::Confirm(SlotId slot, Generation generation, File& image) {
  Impl& m = *impl_;
  const absl::Status gone =
      absl::NotFoundError(absl::StrCat("slot '", m.ImagePath(slot), "': its copy of filling ",
                                       generation, " was removed while it was being read"));
  // 1. What this store knows.
  const absl::StatusOr<SlotEntry> entry = m.Ready(slot);
  if (absl::IsNotFound(entry.status())) {
    return gone;
  }
  HF_RETURN_IF_ERROR(entry.status());
  if (entry->note.generation != generation || !entry->record.has_value()) {
    return gone;
  }
  // 2. What the files say: record, generation, whole image, in this order: a refill removes the
  // record first.
  HF_RETURN_IF_ERROR(m.CheckImage(slot, entry->bytes, image));
  HF_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(m.env, m.NotePath(slot), kNoteBytesMax));
  HF_ASSIGN_OR_RETURN(const SlotNote note, DecodeSlotNote(bytes));
  const absl::Status record = m.env.Info(m.RecordPath(slot)).status();
  if (note.generation != generation || absl::IsNotFound(record)) {
    return gone;
  }
  return record;
}

void SlotStore::SetBytesMax(uint64_t bytes_max) {
  impl_->bytes_max = bytes_max;
}

uint64_t SlotStore::bytes_max() const {
  return impl_->bytes_max;
}

uint64_t SlotStore::bytes_used() const {
  MutexLock hold(impl_->mutex);
  return impl_->BytesUsed();
}

const std::string& SlotStore::dir() const {
  return impl_->options.dir;
}

const std::vector<ProcessId>& SlotStore::dying() const {
  return impl_->lock.dying();
}

}  // namespace holdfast
