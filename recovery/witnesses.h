// Which drives a node has, and what of which jobs may lie on them, as several witnesses say it: the
// state directory and the drives themselves (docs/formats.md, "witness"). Tells when a job may be
// written to a drive, and what the witnesses prove of a drive that is not there.
//
//   Witnesses known(true, unix_ms);
//   known.Read(kStateWitness, told);                  // each witness file that could be read
//   known.Present(id, dir, names, had_file);          // each drive that is there
//   known.Add(id, {uuid, "demo"});
//   … write known.TextFor(id), then TextFor(each other), telling Written(…) of each …
//   if (known.MayWrite(id, "demo")) …                 // the first shard
//   for (const AbsentDrive& drive : known.Absent()) …
//
// A drive is expected from the first job on that is noted for it.
// A job is noted by more than half of the witnesses, the drive itself first, before its first shard
// is written there. So any others that are more than half have at least one that knows it.
// A state machine without I/O, for one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "holdfast/v1/state.pb.h"

namespace holdfast {

inline constexpr char kStateWitness[] = "";  // the state directory; the others are ids of drives

struct AbsentDrive {
  std::string id;
  std::string dir;  // where it was last
  bool proven = false;
  std::set<std::string> jobs;  // that may lie there, by name; all others do not if it is proven
};

class Witnesses {
 public:
  // `floor`: no lower version is given from now on; the time, say. So a drive that has lost its
  // file says nothing under a version that others know already.
  Witnesses(bool has_state_dir, uint64_t floor) : has_state_dir_(has_state_dir), floor_(floor) {}

  // ---- What is found ----

  // A witness's file, as it was read.
  void Read(const std::string& witness, const v1::Witness& told);
  // That there was such a drive, from an older source that knows nothing of its jobs.
  void Expect(const std::string& id, const std::string& dir);
  // A drive is at `dir`, and its witness file, if it has one, was read. `jobs`: the names of the
  // directories on it.
  void Present(const std::string& id, const std::string& dir, const std::set<std::string>& jobs);
  bool IsPresent(const std::string& id) const;
  bool IsForgotten(const std::string& id) const;

  // ---- What changes ----

  void Add(const std::string& drive, const std::string& uuid, const std::string& job);
  void Remove(const std::string& drive, const std::string& job);  // nothing of it lies there
  // A drive, or a remote directory, is lost for good.
  void Forget(const std::string& id);
  void SetRemote(const std::string& id, const std::string& dir);

  // ---- The witnesses' files ----

  v1::Witness TextFor(const std::string& witness) const;
  void Written(const std::string& witness, const v1::Witness& text);
  // It has not what TextFor says.
  bool IsStale(const std::string& witness) const;

  // ---- What follows ----

  // Whether the job's first shard may be written to the drive.
  bool MayWrite(const std::string& drive, const std::string& job) const;
  size_t count() const { return Voters().size(); }
  size_t HowManyKnow(const std::string& drive, const std::string& job) const;
  // Drives that were here, are not, and were not forgotten.
  std::vector<AbsentDrive> Absent() const;
  AbsentDrive Describe(const std::string& id) const;  // as if it were absent
  // The remote directory's; empty: none is noted, or that one was forgotten.
  std::string remote_id() const;
  const std::string& remote_dir() const { return remote_dir_; }

 private:
  struct Job {
    std::string uuid;
    uint64_t since = 0;  // the drive's version from which on it is named
  };
  struct Drive {
    std::string dir;
    uint64_t version = 0;  // 0: that it is expected is all that is known
    bool forgotten = false;
    bool present = false;
    bool seen = false;      // it was present once
    bool blank = false;     // it came without a witness file and without jobs, and nobody knew it
    bool returned = false;  // it had been forgotten: what it knew of others may be long past
    std::map<std::string, Job> jobs;
    v1::Witness::Drive own;  // as it itself says it, durably
  };

  // Which witnesses there are: those that were forgotten, too, until all the others know it.
  std::set<std::string> Voters() const;
  bool IsVoter(const std::string& id, const Drive& drive) const;
  bool IsProven(const std::string& id) const;
  bool Knows(const std::string& witness, const std::string& drive, uint64_t version) const;
  bool IsBelieved(const std::string& witness, const std::string& drive) const;
  bool HasNeverHeardOf(const std::string& witness, const std::string& drive) const;
  bool AnyProvesWithout(const std::set<std::string>& knowing, const std::string& drive) const;
  void MergeAbsent(const v1::Witness::Drive& told, Drive& drive) const;
  void Settle();
  void Change(Drive& drive) const;

  const bool has_state_dir_;
  const uint64_t floor_;
  std::map<std::string, Drive> drives_;
  // By witness, of each drive that it names, the version: what it has durably.
  std::map<std::string, std::map<std::string, uint64_t>> held_;
  std::map<std::string, std::string> written_;  // by witness, in this process
  std::string remote_id_;
  std::string remote_dir_;
};

}  // namespace holdfast
