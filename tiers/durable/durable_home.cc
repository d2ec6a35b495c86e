// What the directory has beside copies: <dir>/.holdfast. The first preparation of a store makes it,
// finds out what the file system can do, and makes sure that the directory is the one it is taken
// for, and this node's part of it this daemon's.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/errno_status.h"
#include "base/status.h"
#include "tiers/durable/copy_store_impl.h"
#include "tiers/image/frame.h"

namespace holdfast {
namespace {

constexpr uint64_t kTextBytesMax = 4096;
constexpr size_t kIdShownBytes = 8;
constexpr uint64_t kWitnessBytesMax = uint64_t{64} << 20;  // as server/runtime writes at most

// "state <id>\nmachine <id>\n…"; what is not known is not there.
std::string EncodeOwner(const NodeOwner& owner) {
  std::string text = absl::StrCat("state ", owner.state, "\n");
  for (const auto& [key, value] : {std::pair("machine ", owner.machine), {"boot ", owner.boot}}) {
    if (!value.empty()) {
      absl::StrAppend(&text, key, value, "\n");
    }
  }
  return text;
}

NodeOwner DecodeOwner(const std::string& text) {
  NodeOwner owner;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, "state ")) {
      owner.state = std::string(line);
    } else if (absl::ConsumePrefix(&line, "machine ")) {
      owner.machine = std::string(line);
    } else if (absl::ConsumePrefix(&line, "boot ")) {
      owner.boot = std::string(line);
    }
  }
  return owner;
}

bool SameAndKnown(const std::string& a, const std::string& b) {
  return !a.empty() && a == b;
}

}  // namespace

absl::Status CopyStore::Impl::TakeLock() {
  if (remote() || lock != nullptr) {
    return absl::OkStatus();
  }
  HF_RETURN_IF_ERROR(env.CreateDirectories(options.dir, kHomeMode));
  HF_RETURN_IF_ERROR(MakeOwn(home));
  return LockHome();
}

// With what is above it, below `dir`, where others may have been first. A link of theirs, or a
// directory that they can change, would have them say where the daemon's files go.
absl::Status CopyStore::Impl::MakeOwn(const std::string& path) {
  std::string at = options.dir;
  for (const absl::string_view name :
       absl::StrSplit(path.substr(options.dir.size()), '/', absl::SkipEmpty())) {
    at = JoinPath(at, std::string(name));
    HF_RETURN_IF_ERROR(env.CreateDirectories(at, kHomeMode));
    HF_RETURN_IF_ERROR(CheckOwn(at));
  }
  return absl::OkStatus();
}

absl::Status CopyStore::Impl::CheckOwn(const std::string& directory) {
  HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(directory));
  const auto refused = [&](const std::string& why) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", directory, "' ", why,
                     ": ckptd has this directory for itself, and somebody else made "
                     "it; look at what it is, remove it, and ckptd makes it anew"));
  };
  if (!S_ISDIR(info.mode)) {
    return refused(S_ISLNK(info.mode) ? "is a symbolic link" : "is not a directory");
  }
  if ((info.mode & S_IWOTH) != 0) {
    return refused("may be written by everybody");
  }
  if (info.uid == 0 || info.uid == ::geteuid()) {
    return absl::OkStatus();
  }
  // What we make there may have another owner: a file server knows no root.
  HF_ASSIGN_OR_RETURN(const uint32_t ours, OwnerOfWhatWeMake(directory));
  return info.uid == ours ? absl::OkStatus() : refused(absl::StrCat("belongs to uid ", info.uid));
}

absl::StatusOr<uint32_t> CopyStore::Impl::OwnerOfWhatWeMake(const std::string& directory) {
  const std::string path = JoinPath(directory, absl::StrCat(ToAbsl(kHomeProbePrefix), NewUnique()));
  HF_RETURN_IF_ERROR(env.Open(path, OpenMode::kCreateExclusive, {.no_symlink = true}).status());
  const absl::StatusOr<FileInfo> info = env.Info(path);
  HF_RETURN_IF_ERROR(RemoveIfThere(path));
  HF_RETURN_IF_ERROR(info.status());
  return info->uid;
}

std::string CopyStore::Impl::LockPath() const {
  return JoinPath(home, kHomeLockName);
}

absl::Status CopyStore::Impl::LockHome() {
  HF_ASSIGN_OR_RETURN(std::unique_ptr<FileLock> taken, env.Lock(LockPath()));
  HF_ASSIGN_OR_RETURN(const FileInfo info, env.Info(LockPath()));
  lock = std::move(taken);
  lock_inode = info.inode;
  return absl::OkStatus();
}

// It keeps nobody out: another daemon locks the file that it makes.
absl::Status CopyStore::Impl::DropLockOfAFileThatIsGone() {
  if (lock == nullptr) {
    return absl::OkStatus();
  }
  const absl::StatusOr<FileInfo> info = env.Info(LockPath());
  if (!info.ok() && !absl::IsNotFound(info.status())) {
    return info.status();
  }
  if (!info.ok() || info->inode != lock_inode) {
    lock = nullptr;
  }
  return absl::OkStatus();
}

absl::Status CopyStore::Impl::Prepare() {
  const auto prepared = [this] {
    MutexLock hold(mutex);
    return capabilities.known;
  };
  if (prepared()) {
    return absl::OkStatus();
  }
  MutexLock prepare(preparing);
  if (prepared()) {
    return absl::OkStatus();  // by another call meanwhile
  }
  HF_RETURN_IF_ERROR(CheckMount());
  HF_RETURN_IF_ERROR(MarkCluster());
  HF_RETURN_IF_ERROR(DropLockOfAFileThatIsGone());
  HF_RETURN_IF_ERROR(TakeLock());
  HF_RETURN_IF_ERROR(MakeOwn(intents_dir));
  if (!remote()) {
    HF_RETURN_IF_ERROR(MakeOwn(pool_dir));
    // Once: other calls may be moving files in and out by now.
    HF_RETURN_IF_ERROR(pool_loaded ? ForgetWhatLeftThePool() : LoadPool());
    pool_loaded = true;
    HF_RETURN_IF_ERROR(TrimPool(options.pool_bytes_max));  // it may have been more
  }
  DurableCapabilities found;
  absl::Status ours = remote() ? LockName() : absl::OkStatus();
  if (ours.ok()) {
    HF_RETURN_IF_ERROR(Probe(found));
    MutexLock hold(mutex);
    capabilities.hard_links = found.hard_links;
    capabilities.rename_no_replace = found.rename_no_replace;
  }
  if (ours.ok() && remote()) {
    ours = CheckOwner();
  }
  {
    MutexLock hold(mutex);
    refusal = absl::IsUnavailable(ours) ? Message(ours) : "";
  }
  HF_RETURN_IF_ERROR(ours);
  HF_RETURN_IF_ERROR(FillReserve());
  HF_RETURN_IF_ERROR(MakeId());
  MutexLock hold(mutex);
  found.known = true;
  for (std::string& note : capabilities.notes) {
    if (std::find(found.notes.begin(), found.notes.end(), note) == found.notes.end()) {
      found.notes.push_back(std::move(note));
    }
  }
  capabilities = std::move(found);
  return absl::OkStatus();
}

// Until it is done nobody writes here: whoever made a home in the meantime has the directory.
absl::Status CopyStore::Impl::PrepareAgain() {
  {
    MutexLock hold(mutex);
    capabilities.known = false;
  }
  return Prepare();
}

// Tries each thing once, on files of its own.
absl::Status CopyStore::Impl::Probe(DurableCapabilities& found) {
  HF_ASSIGN_OR_RETURN(const FilesystemInfo filesystem, env.Filesystem(options.dir));
  found.filesystem = filesystem.type;
  HF_ASSIGN_OR_RETURN(const FileInfo directory, InfoOfDirectory());
  if ((directory.mode & S_IWOTH) != 0) {
    found.notes.push_back(absl::StrCat(
        "'", options.dir,
        "' may be written by everybody: who is there first can take the name "
        "of a job, or of ckptd's own directory; chmod o-w, or give ckptd a directory of its own"));
  }
  // 1. What an earlier probe left that was interrupted.
  HF_ASSIGN_OR_RETURN(const std::vector<std::string> names, env.List(home, kDirectoryNamesMax));
  for (const std::string& name : names) {
    if (name.starts_with(kHomeProbePrefix)) {
      HF_RETURN_IF_ERROR(RemoveIfThere(JoinPath(home, name)));
    }
  }
  // 2. A file, a second name for it, and a name that is taken.
  const std::string first = JoinPath(home, absl::StrCat(ToAbsl(kHomeProbePrefix), NewUnique()));
  const std::string second = absl::StrCat(first, "-2");
  HF_RETURN_IF_ERROR(env.Open(first, OpenMode::kCreateExclusive, {.no_symlink = true}).status());
  const absl::Status linked = env.Link(first, second);
  found.hard_links = linked.ok();
  if (!linked.ok() && !MeansNotHere(linked)) {
    return linked;
  }
  if (found.hard_links) {
    HF_RETURN_IF_ERROR(env.Unlink(second));
  } else {
    found.notes.push_back(Message(linked));
  }
  const absl::Status renamed = env.RenameNoReplace(first, second);
  found.rename_no_replace = renamed.ok();
  if (!renamed.ok() && !MeansNotHere(renamed)) {
    return renamed;
  }
  if (!renamed.ok()) {
    found.notes.push_back(Message(renamed));
    HF_RETURN_IF_ERROR(env.Rename(first, second));
  }
  // 3. Direct I/O, with an alignment that it tells.
  if (options.direct) {
    absl::Status direct;
    if (const auto file = env.Open(second, OpenMode::kReadWrite, {true, true}); file.ok()) {
      direct = (*file)->Alignment().status();
    } else {
      direct = file.status();
    }
    if (!direct.ok() && !MeansNotHere(direct)) {
      return direct;
    }
    found.direct = direct.ok();
    if (!direct.ok()) {
      found.notes.push_back(Message(direct));
    }
  }
  return env.Unlink(second);
}

// NotFound is what a copy is that is not there; that nothing can be said about copies is
// Unavailable.
absl::StatusOr<FileInfo> CopyStore::Impl::InfoOfDirectory() {
  // "/.": `dir` itself may be a symbolic link, and what counts is where it leads.
  absl::StatusOr<FileInfo> info = env.Info(JoinPath(options.dir, "."));
  if (absl::IsNotFound(info.status())) {
    return absl::UnavailableError(absl::StrCat("'", options.dir, "' is not there (",
                                               info.status().message(),
                                               "): mount it again, or make it"));
  }
  return info;
}

absl::Status CopyStore::Impl::See() {
  HF_ASSIGN_OR_RETURN(const FileInfo info, InfoOfDirectory());
  if (!S_ISDIR(info.mode)) {
    return absl::FailedPreconditionError(absl::StrCat("'", options.dir, "': not a directory"));
  }
  device = info.device;
  const absl::StatusOr<std::string> id = ReadId();
  MutexLock hold(mutex);
  directory_inode = info.inode;
  directory_born_ns = info.born_ns;
  directory_id = id.value_or("");
  return absl::OkStatus();
}

absl::Status CopyStore::Impl::SinceMounted(absl::Status status) {
  if (absl::IsNotFound(status)) {
    HF_RETURN_IF_ERROR(CheckMount());
  }
  return status;
}

absl::Status CopyStore::Impl::CheckMount() {
  HF_ASSIGN_OR_RETURN(const FileInfo info, InfoOfDirectory());
  if (info.device != device) {
    return absl::UnavailableError(absl::StrCat(
        "'", options.dir, "' is on another file system than when the daemon started: its mount ",
        "went away, or another one lies over it; mount it again"));
  }
  std::string id;
  bool same_inode = false;
  {
    MutexLock hold(mutex);
    same_inode = info.inode == directory_inode && info.born_ns == directory_born_ns;
    id = directory_id;
  }
  // A number is given again: after `rm -r` and `mkdir`, or by mkfs, another directory may have it.
  if (same_inode && (info.born_ns != 0 || id.empty())) {
    return absl::OkStatus();
  }
  // Another directory, or one of a file system that numbers its files anew, or that does not tell
  // when they were made: its id tells.
  absl::StatusOr<std::string> now = ReadIdOnce();
  if (!now.ok() || *now != id) {
    now = ReadId();
  }
  if (same_inode && absl::IsNotFound(now.status())) {
    const absl::StatusOr<bool> has_home = Exists(JoinPath(options.dir, kHomeName));
    if (has_home.ok() && *has_home) {
      return absl::OkStatus();  // somebody removed the id alone
    }
  }
  if (!now.ok() && !absl::IsNotFound(now.status())) {
    return IdUnread(now.status());
  }
  if (!now.ok() || id.empty() || *now != id) {
    return NotTheSame("another one lies in its place", now.status(), "move the old one back");
  }
  MutexLock hold(mutex);
  directory_inode = info.inode;
  directory_born_ns = info.born_ns;
  return absl::OkStatus();
}

absl::Status CopyStore::Impl::NotTheSame(std::string_view why, const absl::Status& its_id,
                                         std::string_view way_out) const {
  return absl::UnavailableError(
      absl::StrCat("'", options.dir, "' is not the directory that it was: ", ToAbsl(why), " (",
                   its_id.ok() ? "another id" : Message(its_id), "); ", ToAbsl(way_out)));
}

absl::Status CopyStore::Impl::IdUnread(const absl::Status& why) const {
  const std::string way_out =
      absl::IsPermissionDenied(why)
          ? absl::StrCat("let ckptd read that file (ls -ln '", IdPath(), "')")
      : IsErrno(why) ? "if it stays so, mount the directory again"
                     : "";  // (of what is there, the reason says it)
  return absl::UnavailableError(
      absl::StrCat("'", options.dir, "': its id cannot be read, so whether it is still the same ",
                   "directory is not known, and nothing is written there: ", Message(why),
                   way_out.empty() ? "" : "; ", way_out));
}

// ---- Whether it is the directory that it is taken for ----

std::string CopyStore::Impl::IdPath() const {
  return JoinPath(JoinPath(options.dir, kHomeName), kHomeIdName);
}

// It has no checksum, and with one wrong bit it may be another id: so two readings of three at most
// must agree.
absl::StatusOr<std::string> CopyStore::Impl::ReadId() {
  const absl::StatusOr<std::string> first = ReadIdOnce();
  DropCached(IdPath());
  absl::StatusOr<std::string> last = ReadIdOnce();
  const auto agrees = [&last](const absl::StatusOr<std::string>& other) {
    return last.ok() == other.ok() && (!last.ok() || *last == *other);
  };
  if (agrees(first)) {
    return last;
  }
  const absl::StatusOr<std::string> second = std::move(last);
  DropCached(IdPath());
  last = ReadIdOnce();
  if (last.ok() && !agrees(first) && !agrees(second)) {
    return absl::UnavailableError(
        absl::StrCat("'", IdPath(), "' reads differently each time: the drive or the mount fails"));
  }
  return last;
}

absl::StatusOr<std::string> CopyStore::Impl::ReadIdOnce() {
  HF_ASSIGN_OR_RETURN(std::string text, ReadSmallFile(IdPath(), kTextBytesMax));
  if (text.empty() || text.back() != '\n' ||
      !IsUnique(std::string_view(text).substr(0, text.size() - 1))) {
    return absl::DataLossError(absl::StrCat(
        "'", IdPath(), "': not an id; remove it, and a new one is made at the next start"));
  }
  text.pop_back();
  return text;
}

// Whether a directory lies apart from the system's own disk: on a mount, that can be missing.
absl::StatusOr<bool> CopyStore::Impl::IsOwnMount(uint64_t its_device) {
  HF_ASSIGN_OR_RETURN(const FileInfo root, env.Info("/"));
  return root.device != its_device;
}

absl::Status CopyStore::Impl::CheckSame(const KnownDirectory& before) {
  if (before.by_id) {
    return CheckHasId(before.id);
  }
  // 1. Its file system, or that in which it would be made.
  std::string there = options.dir;
  absl::StatusOr<FileInfo> info = env.Info(JoinPath(there, "."));
  while (absl::IsNotFound(info.status()) && there != "/") {
    there = ParentDirectory(there);
    info = env.Info(there);
  }
  HF_RETURN_IF_ERROR(info.status());
  HF_ASSIGN_OR_RETURN(const bool own_mount_now, IsOwnMount(info->device));
  // 2. The same, or, if it was another process that knew it, perhaps another on purpose: a new
  // drive is a mount, too. A directory on the system's disk where a mount was is none.
  const bool plausible =
      before.device != 0 ? info->device == before.device : !before.own_mount || own_mount_now;
  if (plausible) {
    return absl::OkStatus();
  }
  if (before.device == 0 && before.id.empty()) {  // it was never seen
    return absl::UnavailableError(absl::StrCat(
        "'", options.dir, "' is an empty mount point: it is on the root file system, and ",
        "remote.mounted says that it is a mount. Mount it, or set remote.mounted: false"));
  }
  // 3. A network file system may come back with another device number.
  const absl::StatusOr<std::string> now = ReadId();
  if (now.ok() && *now == before.id) {
    return absl::OkStatus();
  }
  if (!now.ok() && !absl::IsNotFound(now.status())) {
    return IdUnread(now.status());
  }
  return NotTheSame("its mount went away, or another one lies over it", now.status(),
                    "mount it again");
}

absl::Status CopyStore::Impl::CheckHasId(const std::string& id) {
  HF_RETURN_IF_ERROR(InfoOfDirectory().status());
  const absl::StatusOr<std::string> now = ReadId();
  if (now.ok() && *now == id) {
    return absl::OkStatus();
  }
  if (!now.ok() && !absl::IsNotFound(now.status())) {
    return IdUnread(now.status());
  }
  const std::string found = now.ok() ? absl::StrCat("it has id ", *now) : "it has none";
  return absl::UnavailableError(absl::StrCat(
      "'", options.dir, "' is not the directory that this node used before (id ", id, "; ", found,
      "): mount it again. If it was replaced for good: ", "ckptctl forget-drive ",
      id.substr(0, kIdShownBytes)));
}

// In a name that the next probe would remove.
absl::StatusOr<std::string> CopyStore::Impl::WriteAside(std::string_view text) {
  std::string aside = JoinPath(home, absl::StrCat(ToAbsl(kHomeProbePrefix), NewUnique()));
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                      env.Open(aside, OpenMode::kCreateExclusive, {.no_symlink = true}));
  absl::Status written = file->WriteAt(0, std::as_bytes(std::span<const char>(text)));
  if (written.ok()) {
    written = file->Sync();
  }
  if (!written.ok()) {
    RemoveIfThere(aside).IgnoreError();
    return written;
  }
  return aside;
}

// False: there is one already.
absl::StatusOr<bool> CopyStore::Impl::PublishInHome(const std::string& path,
                                                    std::string_view text) {
  HF_ASSIGN_OR_RETURN(const std::string aside, WriteAside(text));
  const absl::Status moved = MoveWithoutReplacing(aside, path);
  if (!moved.ok() && !absl::IsAlreadyExists(moved)) {
    return moved;
  }
  HF_RETURN_IF_ERROR(RemoveIfThere(aside));
  HF_RETURN_IF_ERROR(env.SyncDirectory(ParentDirectory(path)));
  return moved.ok();
}

absl::Status CopyStore::Impl::ReplaceInHome(const std::string& path, std::string_view text) {
  HF_ASSIGN_OR_RETURN(const std::string aside, WriteAside(text));
  if (absl::Status moved = env.Rename(aside, path); !moved.ok()) {
    RemoveIfThere(aside).IgnoreError();
    return moved;
  }
  return env.SyncDirectory(home);
}

absl::Status CopyStore::Impl::MakeId() {
  absl::StatusOr<std::string> there = ReadId();
  if (absl::IsNotFound(there.status())) {
    std::string id;
    {
      MutexLock hold(mutex);
      id = directory_id;  // somebody removed it: others know the directory by it, too
    }
    HF_RETURN_IF_ERROR(CheckMount());
    HF_RETURN_IF_ERROR(
        PublishInHome(IdPath(), absl::StrCat(id.empty() ? NewUnique() : id, "\n")).status());
    there = ReadId();
  }
  HF_ASSIGN_OR_RETURN(const bool apart, IsOwnMount(device));
  if (!there.ok()) {
    Note(Message(there.status()));  // less is known when the mount goes away; that is all
  }
  HF_RETURN_IF_ERROR(CheckMount());  // else that is the id of another
  MutexLock hold(mutex);
  directory_id = there.value_or("");
  own_mount = apart;
  return absl::OkStatus();
}

// ---- What the drive says of the node's drives ----

absl::StatusOr<std::string> CopyStore::ReadWitness() {
  HF_ASSIGN_OR_RETURN(const std::string bytes,
                      impl_->ReadSmallFile(impl_->WitnessPath(), kWitnessBytesMax));
  HF_ASSIGN_OR_RETURN(const std::string_view body, DecodeFrame(FrameKind::kWitness, bytes));
  return std::string(body);
}

absl::Status CopyStore::WriteWitness(std::string_view message) {
  HF_RETURN_IF_ERROR(impl_->Prepare());
  HF_RETURN_IF_ERROR(impl_->CheckMount());
  return impl_->ReplaceInHome(impl_->WitnessPath(), EncodeFrame(FrameKind::kWitness, message));
}

std::string CopyStore::Impl::WitnessPath() const {
  return JoinPath(home, kHomeWitnessName);
}

absl::StatusOr<std::vector<std::string>> CopyStore::JobNames() {
  HF_ASSIGN_OR_RETURN(std::vector<std::string> names,
                      impl_->env.List(impl_->options.dir, kDirectoryNamesMax));
  std::vector<std::string> jobs;
  for (std::string& name : names) {
    if (name == kHomeName || !CheckJobName(name).ok()) {
      continue;
    }
    const absl::StatusOr<FileInfo> info = impl_->env.Info(impl_->JobDirectory(name));
    if (!absl::IsNotFound(info.status()) && (!info.ok() || S_ISDIR(info->mode))) {
      jobs.push_back(std::move(name));
    }
  }
  HF_RETURN_IF_ERROR(impl_->CheckMount());  // else those were another directory's
  return jobs;
}

// ---- Whose part of the remote directory it is ----

// Where there are locks. This process may have it itself, for a mount that hung.
absl::Status CopyStore::Impl::LockName() {
  if (options.owner.state.empty() || lock != nullptr) {
    return absl::OkStatus();
  }
  const absl::Status locked = LockHome();
  const bool first = !options.same_as || options.same_as->device == 0;
  if (absl::IsUnavailable(locked) && first) {
    return absl::UnavailableError(
        absl::StrCat(Message(locked), "; two daemons called '", options.node_name,
                     "' would undo each other's work: give one of them another node_name"));
  }
  return absl::OkStatus();
}

// Intents of two daemons in one directory would be undone by each other.
absl::Status CopyStore::Impl::CheckOwner() {
  const NodeOwner& us = options.owner;
  if (us.state.empty()) {
    return absl::OkStatus();
  }
  const std::string path = JoinPath(home, kHomeOwnerName);
  // 1. Who had it last.
  absl::StatusOr<std::string> text = ReadSmallFile(path, kTextBytesMax);
  if (absl::IsNotFound(text.status())) {
    HF_RETURN_IF_ERROR(PublishInHome(path, EncodeOwner(us)).status());
    text = ReadSmallFile(path, kTextBytesMax);
  }
  HF_RETURN_IF_ERROR(text.status());
  const NodeOwner owner = DecodeOwner(*text);
  if (owner == us) {
    return absl::OkStatus();
  }
  // 2. The same daemon after a reboot, or after its state_dir was lost: then nobody else of this
  // machine may have the lock.
  const bool machine_known = !owner.machine.empty() && !us.machine.empty();
  const bool same_machine =
      SameAndKnown(owner.machine, us.machine) || SameAndKnown(owner.boot, us.boot);
  const bool same_state = owner.state == us.state;
  if (same_state ? same_machine || !machine_known : same_machine && lock != nullptr) {
    return WriteFileAtomically(env, path, EncodeOwner(us));
  }
  return absl::UnavailableError(absl::StrCat(
      "'", home, "' belongs to another daemon called '", options.node_name, "' (machine ",
      owner.machine.empty() ? "unknown" : owner.machine, ", this one is ",
      us.machine.empty() ? "unknown" : us.machine,
      "): give one of them another node_name; if the other is gone for good (this node was ",
      "installed anew), rm '", path, "'"));
}

}  // namespace holdfast
