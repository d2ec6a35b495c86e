#include "recovery/witnesses.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "base/ids.h"

namespace holdfast {
namespace {

constexpr size_t kIdBytes = 32;
constexpr size_t kDirBytesMax = 4096;
constexpr int kDrivesMax = 4096;
constexpr uint64_t kVersionMax = uint64_t{1} << 62;
// Of witnesses that do not know a job, so many are looked at in all their combinations.
constexpr size_t kIgnorantMax = 12;

// A file in a shared directory may say anything.
bool IsId(const std::string& id) {
  return id.size() == kIdBytes && std::all_of(id.begin(), id.end(), [](unsigned char c) {
           return absl::ascii_isxdigit(c) != 0;
         });
}

bool IsSound(const v1::Witness::Drive& drive) {
  return IsId(drive.id()) && drive.dir().size() <= kDirBytesMax && drive.version() <= kVersionMax;
}

std::string Text(const v1::Witness& witness) {
  return witness.SerializeAsString();  // (repeated fields alone, which we order)
}

}  // namespace

void Witnesses::Change(Drive& drive) const {
  drive.version = std::max(drive.version + 1, floor_);
}

// ---- What is found ----

void Witnesses::MergeAbsent(const v1::Witness::Drive& told, Drive& drive) const {
  if (told.version() < drive.version || told.version() == 0) {
    drive.dir = drive.dir.empty() ? told.dir() : drive.dir;
    return;
  }
  const bool newer = told.version() > drive.version;
  if (newer) {
    drive.jobs.clear();
    drive.dir = told.dir();
    drive.version = told.version();
  }
  // (Two that differ under one version: neither has seen the other's. Both may be right.)
  drive.forgotten = told.forgotten() && (newer || drive.forgotten);
  for (const v1::Witness::Job& job : told.jobs()) {
    if (CheckJobName(job.name()).ok()) {
      drive.jobs[job.name()] = {job.uuid(), drive.version};
    }
  }
}

void Witnesses::Read(const std::string& witness, const v1::Witness& told) {
  int left = kDrivesMax;
  for (const v1::Witness::Drive& entry : told.drives()) {
    if (!IsSound(entry) || left-- == 0) {
      continue;
    }
    uint64_t& held = held_[witness][entry.id()];
    held = std::max(held, entry.version());
    Drive& drive = drives_[entry.id()];
    drive.blank = false;
    if (!drive.present) {
      MergeAbsent(entry, drive);
    } else if (entry.version() >= drive.version) {
      drive.returned = drive.returned || entry.forgotten();
      // Of a drive that is here nobody knows more than it: what the other has is past.
      drive.version = entry.version();
      Change(drive);
      for (auto& [name, job] : drive.jobs) {
        job.since = drive.version;
      }
    }
    if (entry.id() == witness && entry.version() > 0) {
      drive.own = entry;
    }
  }
  if (IsId(told.remote_id()) && (witness == kStateWitness || remote_id_.empty())) {
    remote_id_ = told.remote_id();
    remote_dir_ = told.remote_dir().substr(0, kDirBytesMax);
  }
}

void Witnesses::Expect(const std::string& id, const std::string& dir) {
  if (IsId(id) && !drives_.contains(id)) {
    drives_[id].dir = dir;
  }
}

// What lies there is what is true of it. (Of a drive that was here before nothing is taken away: a
// job may be noted whose directory is still to be made.)
void Witnesses::Present(const std::string& id, const std::string& dir,
                        const std::set<std::string>& jobs) {
  for (auto& [other_id, other] : drives_) {
    other.present = other.present && (other_id == id || other.dir != dir);
  }
  const bool known = drives_.contains(id);
  Drive& drive = drives_[id];
  const bool first = !drive.seen;
  drive.blank = first ? !known && jobs.empty() && !held_.contains(id) : drive.blank;
  bool changed = drive.version > 0 && (drive.forgotten || drive.dir != dir);
  if (first) {
    changed =
        std::erase_if(drive.jobs, [&](const auto& job) { return !jobs.contains(job.first); }) > 0 ||
        changed;
  }
  std::vector<std::string> unknown;
  std::copy_if(jobs.begin(), jobs.end(), std::back_inserter(unknown),
               [&](const std::string& name) { return !drive.jobs.contains(name); });
  if (changed || !unknown.empty()) {
    Change(drive);
  }
  for (const std::string& name : unknown) {
    drive.jobs[name] = {"", drive.version};
  }
  drive.dir = dir;
  drive.returned = drive.returned || drive.forgotten;
  drive.forgotten = false;
  drive.present = drive.seen = true;
}

bool Witnesses::IsPresent(const std::string& id) const {
  const auto drive = drives_.find(id);
  return drive != drives_.end() && drive->second.present;
}

bool Witnesses::IsForgotten(const std::string& id) const {
  const auto drive = drives_.find(id);
  return drive != drives_.end() && drive->second.forgotten;
}

// ---- What changes ----

void Witnesses::Add(const std::string& drive, const std::string& uuid, const std::string& job) {
  Drive& on = drives_[drive];
  const auto known = on.jobs.find(job);
  if (known != on.jobs.end() && known->second.uuid == uuid) {
    return;
  }
  Change(on);
  const uint64_t since = known != on.jobs.end() ? known->second.since : on.version;
  on.jobs[job] = {uuid, since};
}

void Witnesses::Remove(const std::string& drive, const std::string& job) {
  if (const auto on = drives_.find(drive); on != drives_.end() && on->second.jobs.erase(job) > 0) {
    Change(on->second);
  }
}

void Witnesses::Forget(const std::string& id) {
  Drive& drive = drives_[id];
  drive.forgotten = true;
  drive.present = false;
  drive.jobs.clear();
  Change(drive);
  if (id == remote_id_) {
    drive.dir.clear();  // (it is no witness, and nothing is to be waited for)
  }
  Settle();
}

void Witnesses::SetRemote(const std::string& id, const std::string& dir) {
  remote_id_ = id;
  remote_dir_ = dir;
  if (const auto drive = drives_.find(id); drive != drives_.end() && drive->second.forgotten) {
    drive->second.forgotten = false;
    Change(drive->second);
  }
}

// A drive that was forgotten is a witness until all the others are here and have been told what is
// known: what only it knew may be of one of them.
void Witnesses::Settle() {
  const auto waits = [](const auto& drive) {
    return drive.second.forgotten && !drive.second.dir.empty();
  };
  if (std::none_of(drives_.begin(), drives_.end(), waits)) {
    return;
  }
  std::vector<std::string> witnesses;
  for (const auto& [id, drive] : drives_) {
    if (id == remote_id_ || drive.forgotten) {
      continue;
    }
    if (!drive.present) {
      return;
    }
    witnesses.push_back(id);
  }
  if (has_state_dir_) {
    witnesses.emplace_back(kStateWitness);
  }
  if (std::any_of(witnesses.begin(), witnesses.end(),
                  [this](const std::string& witness) { return IsStale(witness); })) {
    return;
  }
  for (auto& [id, drive] : drives_) {
    if (drive.forgotten && !drive.dir.empty()) {
      drive.dir.clear();
      Change(drive);
    }
  }
}

// ---- The witnesses' files ----

// Of a drive that is here others say what it says itself, and nothing before it does. Of one that
// is not they say what is proven, or what they knew; else only that there is such a drive.
v1::Witness Witnesses::TextFor(const std::string& witness) const {
  v1::Witness text;
  for (const auto& [id, drive] : drives_) {
    if (drive.present && drive.version == 0) {
      continue;  // nothing was ever saved there, and nobody will miss it
    }
    v1::Witness::Drive& entry = *text.add_drives();
    const bool itself = id == witness;
    if (!itself && drive.present && !drive.own.id().empty()) {
      entry = drive.own;
      continue;
    }
    entry.set_id(id);
    entry.set_dir(drive.dir);
    const bool told =
        itself || drive.forgotten || (!drive.present && (IsProven(id) || IsBelieved(witness, id)));
    if (!told) {
      continue;
    }
    entry.set_version(drive.version);
    entry.set_forgotten(drive.forgotten);
    for (const auto& [name, job] : drive.jobs) {
      v1::Witness::Job& out = *entry.add_jobs();
      out.set_uuid(job.uuid);
      out.set_name(name);
    }
  }
  text.set_remote_id(remote_id_);
  text.set_remote_dir(remote_dir_);
  return text;
}

void Witnesses::Written(const std::string& witness, const v1::Witness& text) {
  std::map<std::string, uint64_t>& held = held_[witness];
  held.clear();
  for (const v1::Witness::Drive& entry : text.drives()) {
    held[entry.id()] = entry.version();
    if (entry.id() == witness) {
      drives_[witness].own = entry;
    }
  }
  written_[witness] = Text(text);
  Settle();
}

bool Witnesses::IsStale(const std::string& witness) const {
  const auto written = written_.find(witness);
  return written == written_.end() || written->second != Text(TextFor(witness));
}

// ---- What follows ----

bool Witnesses::IsVoter(const std::string& id, const Drive& drive) const {
  return id != remote_id_ && !(drive.forgotten && drive.dir.empty());
}

std::set<std::string> Witnesses::Voters() const {
  std::set<std::string> voters;
  if (has_state_dir_) {
    voters.insert(kStateWitness);
  }
  for (const auto& [id, drive] : drives_) {
    if (IsVoter(id, drive)) {
      voters.insert(id);
    }
  }
  return voters;
}

bool Witnesses::Knows(const std::string& witness, const std::string& drive,
                      uint64_t version) const {
  const auto held = held_.find(witness);
  if (held == held_.end()) {
    return false;
  }
  const auto of = held->second.find(drive);
  return of != held->second.end() && of->second >= version;
}

// Of what a drive has that is absent.
bool Witnesses::IsBelieved(const std::string& witness, const std::string& drive) const {
  const auto itself = drives_.find(witness);
  return Knows(witness, drive, 1) && (itself == drives_.end() || !itself->second.returned);
}

// (A state directory that has not may have been lost. A drive says so if its file was.)
bool Witnesses::HasNeverHeardOf(const std::string& witness, const std::string& drive) const {
  const auto held = held_.find(witness);
  return witness != kStateWitness && held != held_.end() && !held->second.contains(drive);
}

// A blank drive came when the one that is absent had gone: it was never asked to know anything.
// More than half are there: they know the drive, or had their last word before it came. And those
// that know it leave too few for a job to have been noted without them.
bool Witnesses::IsProven(const std::string& id) const {
  size_t all = 0;
  size_t here = 0;
  size_t know = 0;
  for (const std::string& voter : Voters()) {
    const auto drive = drives_.find(voter);
    if (drive == drives_.end() || !drive->second.blank) {
      ++all;
      const bool knows = IsBelieved(voter, id);
      know += knows ? 1 : 0;
      here += knows || HasNeverHeardOf(voter, id) ? 1 : 0;
    }
  }
  return 2 * here > all && 2 * know >= all;
}

// Whether a later start, with some of those that do not know it, could take it for proven. It
// counts the witnesses that those name, which may be fewer than there are: one that could not be
// written has not heard of the newest.
bool Witnesses::AnyProvesWithout(const std::set<std::string>& knowing,
                                 const std::string& drive) const {
  std::vector<std::string> ignorant;
  for (const std::string& voter : Voters()) {
    const auto itself = drives_.find(voter);
    const bool seen = voter == kStateWitness || (itself != drives_.end() && itself->second.seen);
    if (!knowing.contains(voter) && (!seen || Knows(voter, drive, 1))) {
      ignorant.push_back(voter);
    }
  }
  if (ignorant.size() > kIgnorantMax) {
    return true;
  }
  for (uint32_t chosen = 1; chosen < uint32_t{1} << ignorant.size(); ++chosen) {
    std::set<std::string> named = {drive};
    if (has_state_dir_) {
      named.insert(kStateWitness);
    }
    size_t count = 0;
    for (size_t i = 0; i < ignorant.size(); ++i) {
      if ((chosen >> i & 1) == 0) {
        continue;
      }
      ++count;
      named.insert(ignorant[i]);
      if (const auto held = held_.find(ignorant[i]); held != held_.end()) {
        for (const auto& [id, version] : held->second) {
          if (const auto of = drives_.find(id); of != drives_.end() && IsVoter(id, of->second)) {
            named.insert(id);
          }
        }
      }
    }
    // (By half of them nothing is proven unless another drive is there that never heard of it.)
    const size_t others = named.size() - count - (has_state_dir_ ? 2 : 1);
    if (2 * count > named.size() || (2 * count == named.size() && others > 0)) {
      return true;
    }
  }
  return false;
}

size_t Witnesses::HowManyKnow(const std::string& drive, const std::string& job) const {
  const auto on = drives_.find(drive);
  if (on == drives_.end() || !on->second.jobs.contains(job)) {
    return 0;
  }
  const uint64_t since = on->second.jobs.at(job).since;
  const std::set<std::string> voters = Voters();
  return static_cast<size_t>(
      std::count_if(voters.begin(), voters.end(),
                    [&](const std::string& voter) { return Knows(voter, drive, since); }));
}

bool Witnesses::MayWrite(const std::string& drive, const std::string& job) const {
  const auto on = drives_.find(drive);
  if (on == drives_.end() || !on->second.present || !on->second.jobs.contains(job)) {
    return false;
  }
  const uint64_t since = on->second.jobs.at(job).since;
  const std::set<std::string> voters = Voters();
  std::set<std::string> knowing;
  std::copy_if(voters.begin(), voters.end(), std::inserter(knowing, knowing.end()),
               [&](const std::string& voter) { return Knows(voter, drive, since); });
  return knowing.contains(drive) && 2 * knowing.size() > voters.size() &&
         !AnyProvesWithout(knowing, drive);
}

std::vector<AbsentDrive> Witnesses::Absent() const {
  std::vector<AbsentDrive> absent;
  for (const auto& [id, drive] : drives_) {
    if (drive.present || drive.forgotten || id == remote_id_) {
      continue;
    }
    absent.push_back(Describe(id));
  }
  return absent;
}

AbsentDrive Witnesses::Describe(const std::string& id) const {
  const Drive& drive = drives_.at(id);
  AbsentDrive out{id, drive.dir, IsProven(id), {}};
  for (const auto& [name, job] : drive.jobs) {
    out.jobs.insert(name);
  }
  return out;
}

std::string Witnesses::remote_id() const {
  return IsForgotten(remote_id_) ? "" : remote_id_;
}

}  // namespace holdfast
