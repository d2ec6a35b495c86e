#include "server/runtime/tiers/drive_witnesses.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/utf8.h"
#include "tiers/image/frame.h"

namespace holdfast {
namespace {

constexpr uint64_t kWitnessBytesMax = uint64_t{64} << 20;
constexpr size_t kShownBytes = 8;  // of an id; as few are enough to name it
constexpr size_t kJobsToldMax = 20;
constexpr auto kNoteTimeout = std::chrono::seconds(10);
constexpr auto kCancelLook = std::chrono::milliseconds(100);

std::string Short(const std::string& id) {
  return id.substr(0, kShownBytes);
}

std::string Describe(const AbsentDrive& drive) {
  return absl::StrCat("drive ", Short(drive.id), ", last at '", Utf8Text(drive.dir),
                      "', is not there");
}

std::string WayOut(const std::string& id) {
  return absl::StrCat("Put it back. If it is lost for good: ckptctl forget-drive ", Short(id));
}

}  // namespace

DriveWitnesses::DriveWitnesses(Options options, Told told, Spread spread)
    : options_(std::move(options)),
      told_(std::move(told)),
      spread_(std::move(spread)),
      known_(!options_.state_dir.empty(),
             static_cast<uint64_t>(std::max<int64_t>(Clock::System()->UnixMillis(), 1))) {
  for (size_t i = 0; i < options_.dirs.size(); ++i) {
    places_.push_back(std::make_unique<Place>());
  }
  MutexLock lock(mutex_);
  ReadState();
}

std::string DriveWitnesses::StatePath() const {
  return JoinPath(options_.state_dir, "witness");
}

void DriveWitnesses::ReadState() {
  if (options_.state_dir.empty()) {
    return;
  }
  const absl::StatusOr<std::string> bytes =
      ReadFile(*options_.env, StatePath(), kWitnessBytesMax, {.no_symlink = true});
  const absl::StatusOr<std::string_view> body =
      bytes.ok() ? DecodeFrame(FrameKind::kWitness, *bytes)
                 : absl::StatusOr<std::string_view>(bytes.status());
  v1::Witness told;
  if (body.ok() && told.ParseFromArray(body->data(), static_cast<int>(body->size()))) {
    known_.Read(kStateWitness, told);
    state_read_ = true;
  } else if (!absl::IsNotFound(body.status())) {
    LogWarning(absl::StrCat("'", StatePath(), "' does not count: ", Message(body.status())));
  }
}

// ---- Drives ----

void DriveWitnesses::Opened(size_t drive, CopyStore& store) {
  const std::string id = store.place().id;
  const absl::StatusOr<std::string> message = store.ReadWitness();
  const absl::StatusOr<std::vector<std::string>> jobs = store.JobNames();
  MutexLock lock(mutex_);
  Place& place = *places_[drive];
  place.looked = true;
  place.fails = false;
  place.id = jobs.ok() ? id : "";
  if (!place.id.empty()) {
    v1::Witness told;
    if (message.ok() && told.ParseFromString(*message)) {
      known_.Read(id, told);
    } else if (!absl::IsNotFound(message.status())) {
      LogWarning(absl::StrCat("the witness file on ", store.dir(),
                              " does not count: ", Message(message.status())));
    }
    known_.Present(id, store.dir(), std::set<std::string>(jobs->begin(), jobs->end()));
  }
  TellAbsent();
  changed_.NotifyAll();
}

void DriveWitnesses::NotOpened(size_t drive) {
  MutexLock lock(mutex_);
  places_[drive]->looked = true;
  places_[drive]->fails = true;
  TellAbsent();
  changed_.NotifyAll();
}

void DriveWitnesses::Expect(const std::string& id, const std::string& dir) {
  MutexLock lock(mutex_);
  if (!state_read_) {  // else that has all that was ever expected
    known_.Expect(id, dir);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (options_.dirs[i] == dir && places_[i]->id.empty()) {
      places_[i]->id = id;  // it can be forgotten
    }
  }
}

bool DriveWitnesses::WasForgotten(const std::string& id) {
  MutexLock lock(mutex_);
  return known_.IsForgotten(id);
}

absl::Status DriveWitnesses::Note(size_t drive, CopyStore& store, const JobIdentity& job,
                                  TransferControl& control) {
  Wanted wanted;
  std::string id;
  {
    MutexLock lock(mutex_);
    id = places_[drive]->id;
    if (known_.MayWrite(id, job.name)) {
      return absl::OkStatus();
    }
    if (!known_.IsPresent(id)) {
      return absl::UnavailableError(absl::StrCat(
          "which jobs '", store.dir(), "' has could not be noted: its directory could not be ",
          "listed, or has no id. ckptd tries again"));
    }
    known_.Add(id, job.job.ToBytes(), job.name);
    ++writes_[drive].running;
  }
  // 1. The drive itself, here.
  const absl::Status itself = Write(drive, &store);
  // 2. The others, each in its own threads.
  MutexLock lock(mutex_);
  --writes_[drive].running;
  changed_.NotifyAll();
  HF_RETURN_IF_ERROR(Annotate(itself, absl::StrCat("note that '", store.dir(), "' gets copies of ",
                                                   "job '", job.name, "'")));
  const auto until = std::chrono::steady_clock::now() + kNoteTimeout;
  while (!known_.MayWrite(id, job.name) && AnyUnderWay() && !control.cancelled() &&
         std::chrono::steady_clock::now() < until) {
    changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + kCancelLook);
  }
  if (known_.MayWrite(id, job.name)) {
    return absl::OkStatus();
  }
  std::vector<std::string> why;
  for (const auto& [witness, writes] : writes_) {
    if (!writes.failure.empty()) {
      why.push_back(writes.failure);
    }
  }
  for (const AbsentDrive& absent : known_.Absent()) {
    why.push_back(absl::StrCat(Describe(absent), " (if it is lost for good: ckptctl forget-drive ",
                               Short(absent.id), ")"));
  }
  return absl::UnavailableError(absl::StrCat(
      "job '", job.name, "' is not written to '", store.dir(), "' yet: of the ", known_.count(),
      " places that note which drive has which job (the state directory and the drives), ",
      known_.HowManyKnow(id, job.name), " have noted it, and more than half must",
      why.empty() ? "" : ": ", absl::StrJoin(why, "; "), ". ckptd tries again"));
}

void DriveWitnesses::JobGone(size_t drive, const std::string& job) {
  Wanted wanted;
  {
    MutexLock lock(mutex_);
    known_.Remove(places_[drive]->id, job);
    wanted = Stale();
  }
  SpreadTo(wanted);
}

// ---- The remote directory ----

std::string DriveWitnesses::RemoteId() {
  const std::string id = known_.remote_id();
  return known_.IsForgotten(id) ? "" : id;
}

std::optional<KnownDirectory> DriveWitnesses::RemoteMustBe() {
  MutexLock lock(mutex_);
  // Without the state directory it is the drives that know. (While one of them hangs, its tier is
  // unread.)
  const auto until = std::chrono::steady_clock::now() + kNoteTimeout;
  while (!options_.state_dir.empty() && !state_read_ && !remote_looked_ && !AllLooked() &&
         changed_.WaitUntil(mutex_, until)) {
  }
  KnownDirectory must;
  if (must.id = RemoteId(); !must.id.empty()) {
    must.by_id = true;
    return must;
  }
  must.own_mount = options_.remote_mounted;
  return options_.remote_mounted ? std::optional(must) : std::nullopt;
}

void DriveWitnesses::RemoteOpened(const std::string& id) {
  Wanted wanted;
  {
    MutexLock lock(mutex_);
    remote_open_ = id;
    remote_looked_ = true;
    changed_.NotifyAll();
    if (id.empty()) {
      return;
    }
    known_.SetRemote(id, options_.remote_dir);
    wanted = Stale();
  }
  SpreadTo(wanted);
}

// ---- The witnesses' files ----

std::string DriveWitnesses::WitnessOf(std::optional<size_t> drive) {
  return drive ? places_[*drive]->id : std::string(kStateWitness);
}

DriveWitnesses::Wanted DriveWitnesses::Stale() {
  Wanted all;
  if (!options_.state_dir.empty()) {
    all.emplace_back(std::nullopt);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (known_.IsPresent(places_[i]->id)) {
      all.emplace_back(i);
    }
  }
  Wanted stale;
  for (const std::optional<size_t>& drive : all) {
    if (!writes_[drive].queued && known_.IsStale(WitnessOf(drive))) {
      writes_[drive].queued = true;
      stale.push_back(drive);
    }
  }
  return stale;
}

void DriveWitnesses::SpreadTo(const Wanted& wanted) {
  for (const std::optional<size_t>& drive : wanted) {
    spread_(drive);
  }
}

bool DriveWitnesses::AnyUnderWay() {
  return std::any_of(writes_.begin(), writes_.end(), [](const auto& writes) {
    return writes.second.queued || writes.second.running > 0;
  });
}

void DriveWitnesses::Dropped(std::optional<size_t> drive) {
  MutexLock lock(mutex_);
  writes_[drive].queued = false;
  changed_.NotifyAll();
}

absl::Status DriveWitnesses::Write(std::optional<size_t> drive, CopyStore* store) {
  if (drive && store == nullptr) {
    Dropped(drive);
    return absl::UnavailableError("it is not open");
  }
  Wanted wanted;
  absl::Status written;
  {
    MutexLock alone(drive ? places_[*drive]->writing : state_writing_);
    std::string witness;
    v1::Witness text;
    {
      MutexLock lock(mutex_);
      witness = WitnessOf(drive);
      text = known_.TextFor(witness);
      writes_[drive].queued = false;
      ++writes_[drive].running;
    }
    const std::string message = text.SerializeAsString();
    if (message.size() + kFrameOverheadBytes > kWitnessBytesMax) {
      written = absl::FailedPreconditionError("there are too many jobs to be noted");
    } else {
      written = drive ? store->WriteWitness(message)
                      : WriteFileAtomically(*options_.env, StatePath(),
                                            EncodeFrame(FrameKind::kWitness, message));
    }
    MutexLock lock(mutex_);
    Writes& writes = writes_[drive];
    --writes.running;
    const std::string failure =
        written.ok() ? ""
                     : absl::StrCat("what ", drive ? options_.dirs[*drive] : options_.state_dir,
                                    " knows of the drives cannot be written: ", Message(written));
    if (!failure.empty() && failure != writes.failure) {
      LogWarning(failure);
    }
    writes.failure = failure;
    if (written.ok() && witness == WitnessOf(drive)) {  // (else another drive is there by now)
      known_.Written(witness, text);
      TellAbsent();
      wanted = Stale();
    }
    changed_.NotifyAll();
  }
  SpreadTo(wanted);
  return written;
}

void DriveWitnesses::LookAgain() {
  Wanted wanted;
  {
    MutexLock lock(mutex_);
    wanted = Stale();
  }
  SpreadTo(wanted);
}

// ---- For people, and the core ----

bool DriveWitnesses::AllLooked() {
  return std::all_of(places_.begin(), places_.end(),
                     [](const auto& place) { return place->looked; });
}

// Of a directory that cannot be opened its own problem says so: the drive may well be there.
std::vector<AbsentDrive> DriveWitnesses::Missing() {
  std::vector<AbsentDrive> missing = known_.Absent();
  std::erase_if(missing, [this](const AbsentDrive& drive) {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i]->fails && options_.dirs[i] == drive.dir) {
        return true;
      }
    }
    return false;
  });
  return missing;
}

TierScanned DriveWitnesses::ScanOf(const AbsentDrive& drive) const {
  TierScanned scanned;
  scanned.tier = TierKind::kNvme;
  scanned.dir = Utf8Text(absl::StrCat(drive.dir, " (drive ", Short(drive.id), ")"));
  if (!drive.proven) {
    scanned.status = absl::UnavailableError(absl::StrCat(
        Describe(drive), ", and too few of the others are there to tell which jobs it has. ",
        WayOut(drive.id)));
    return scanned;
  }
  for (const std::string& job : drive.jobs) {
    scanned.hidden[job] =
        absl::StrCat(Describe(drive), ", and may have steps of this job. ", WayOut(drive.id));
  }
  return scanned;
}

// Before the scan of the last directory is told: nobody concludes that there is nothing else.
void DriveWitnesses::TellAbsent() {
  if (places_.empty() || !AllLooked()) {
    return;
  }
  std::map<std::string, TierScanned> now;
  for (const AbsentDrive& drive : Missing()) {
    TierScanned scanned = ScanOf(drive);
    now[scanned.dir] = scanned;
  }
  for (const auto& [dir, before] : absent_told_) {
    if (!now.contains(dir)) {
      TierScanned back;
      back.tier = TierKind::kNvme;
      back.dir = dir;
      now[dir] = back;
    }
  }
  for (auto& [dir, scanned] : now) {
    const auto before = absent_told_.find(dir);
    const bool same = before != absent_told_.end() && before->second.status == scanned.status &&
                      before->second.hidden == scanned.hidden;
    if (!same) {
      for (const std::string& text :
           {Message(scanned.status),
            scanned.hidden.empty() ? std::string() : scanned.hidden.begin()->second}) {
        if (!text.empty()) {
          LogWarning(text);
        }
      }
      scanned.drain = last_scan_;
      told_(scanned);
    }
  }
  absent_told_ = std::move(now);
}

std::vector<TierScanned> DriveWitnesses::Scanned(const ScanNvme& scan) {
  MutexLock lock(mutex_);
  last_scan_ = std::max(last_scan_, scan.drain);
  std::vector<TierScanned> out;
  for (const auto& [dir, scanned] : absent_told_) {
    if (scan.dirs.empty() ||
        std::find(scan.dirs.begin(), scan.dirs.end(), dir) != scan.dirs.end()) {
      out.push_back(scanned);
      out.back().drain = scan.drain;
    }
  }
  return out;
}

std::vector<std::string> DriveWitnesses::Notes() {
  MutexLock lock(mutex_);
  std::vector<std::string> notes;
  for (const AbsentDrive& drive :
       !places_.empty() && AllLooked() ? Missing() : std::vector<AbsentDrive>()) {
    const std::string jobs =
        !drive.proven ? "any job"
        : drive.jobs.empty()
            ? "no job"
            : absl::StrCat(drive.jobs.size(), drive.jobs.size() == 1 ? " job" : " jobs");
    notes.push_back(
        absl::StrCat(Describe(drive), "; it may have steps of ", jobs, ". ", WayOut(drive.id)));
  }
  return notes;
}

bool DriveWitnesses::IsStillOpening(const std::string& dir) {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!places_[i]->looked && options_.dirs[i] == dir) {
      return true;
    }
  }
  return false;
}

// Just after the start nothing is there yet.
void DriveWitnesses::AwaitOpened() {
  const auto until = std::chrono::steady_clock::now() + kNoteTimeout;
  while ((!AllLooked() || (!options_.remote_dir.empty() && !remote_looked_)) &&
         changed_.WaitUntil(mutex_, until)) {
  }
}

absl::StatusOr<std::string> DriveWitnesses::FindForgotten(const std::string& id) {
  std::vector<std::string> absent;
  std::vector<std::string> meant;
  std::set<std::string> taken;
  const auto take = [&](const std::string& other, const std::string& dir) {
    taken.insert(other);
    absent.push_back(absl::StrCat(Short(other), " (last at '", Utf8Text(dir), "')"));
    if (id.size() >= kShownBytes && absl::StartsWith(other, id)) {
      meant.push_back(other);
    }
  };
  for (const AbsentDrive& drive : known_.Absent()) {
    if (!IsStillOpening(drive.dir)) {
      take(drive.id, drive.dir);
    }
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const std::string& was = places_[i]->id;  // there, and is not now
    if (places_[i]->fails && !was.empty() && !known_.IsForgotten(was) && !taken.contains(was)) {
      take(was, options_.dirs[i]);
    }
  }
  if (const std::string remote = RemoteId();
      !remote.empty() && remote_looked_ && remote != remote_open_) {
    take(remote, known_.remote_dir());
  }
  if (meant.size() == 1) {
    return meant.front();
  }
  const std::string there = absent.empty()
                                ? "no drive is absent here"
                                : absl::StrCat("absent are: ", absl::StrJoin(absent, ", "));
  const std::string shown = Utf8Text(id.substr(0, 64));
  for (const auto& place : places_) {
    if (id.size() >= kShownBytes && absl::StartsWith(place->id, id) &&
        known_.IsPresent(place->id)) {
      return absl::FailedPreconditionError(
          absl::StrCat("forget-drive '", shown, "': that drive is here, and is read; ", there));
    }
  }
  if (id.size() >= kShownBytes && absl::StartsWith(remote_open_, id)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "forget-drive '", shown, "': that is the remote directory, which is here; ", there));
  }
  return absl::NotFoundError(absl::StrCat("forget-drive '", shown, "': ",
                                          meant.empty()
                                              ? "no drive with that id is expected here"
                                              : "more than one id begins so; give all of it",
                                          "; ", there));
}

absl::StatusOr<std::string> DriveWitnesses::Forget(const std::string& id) {
  Wanted wanted;
  std::string text;
  {
    MutexLock lock(mutex_);
    AwaitOpened();
    HF_ASSIGN_OR_RETURN(const std::string whole, FindForgotten(id));
    if (whole == RemoteId()) {
      text = absl::StrCat("remote directory ", whole,
                          " is forgotten. The directory that is at remote.dir now is used.");
    } else {
      for (size_t i = 0; i < places_.size(); ++i) {
        if (places_[i]->id == whole) {
          known_.Expect(whole, options_.dirs[i]);
        }
      }
      const AbsentDrive drive = known_.Describe(whole);
      std::vector<std::string> jobs(drive.jobs.begin(), drive.jobs.end());
      const size_t more = jobs.size() - std::min(jobs.size(), kJobsToldMax);
      jobs.resize(jobs.size() - more);
      text = absl::StrCat(
          "drive ", whole, ", last at '", Utf8Text(drive.dir),
          "', is forgotten: nothing waits for it any more. ",
          !drive.proven  ? "It may have had copies of any job"
          : jobs.empty() ? "It had copies of no job"
                         : absl::StrCat("It may have had copies of: ", absl::StrJoin(jobs, ", ")),
          more > 0 ? absl::StrCat(" and ", more, " more") : "", ".");
    }
    known_.Forget(whole);
    TellAbsent();
    wanted = Stale();
  }
  SpreadTo(wanted);
  MutexLock lock(mutex_);
  const auto until = std::chrono::steady_clock::now() + kNoteTimeout;
  while (AnyUnderWay() && changed_.WaitUntil(mutex_, until)) {
  }
  for (const auto& [witness, writes] : writes_) {
    if (!writes.failure.empty()) {
      absl::StrAppend(&text, " Not noted everywhere yet (ckptd tries again): ", writes.failure);
    }
  }
  return text;
}

}  // namespace holdfast
