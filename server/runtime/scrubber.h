// The background scrub: reads this node's copies again, one after the other, and has their digests
// compared, as ScrubSchedule says. What it finds is told to the core, as verify tells it.
//
//   Scrubber scrubber(context, {.config = config.scrub(), .state_path = state_dir + "/scrub", …});
//   scrubber.Start();
//   scrubber.Change(new_config);
//
// It gives way: one copy at a time, held (in memory) while it is read and no longer, at low
// priority, at the bandwidth of its settings, and not while processes say that their network is
// busy.
//
// One thread of its own, from Start to Stop. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "holdfast/v1/config.pb.h"
#include "server/runtime/admin_service.h"
#include "server/scrub_schedule.h"
#include "tiers/transfer/pacer.h"

namespace holdfast {

class Scrubber {
 public:
  struct Options {
    v1::ScrubConfig config;
    std::string state_path;  // when each copy was read last
    Env* env = nullptr;
    std::shared_ptr<PacerGate> gate;  // may be null
    bool remote = false;              // this node has the tier
    // A copy of which nothing is read for so long, while neither bandwidth nor gate holds it back,
    // is left for later, with all others of its tier: a mount that hangs keeps nobody from reading
    // what lies on drives.
    Duration stall_after = std::chrono::minutes(1);
    // From its thread: the period is not kept, and why; or, with an empty text, it is again.
    std::function<void(const std::string& problem)> tell;
    const Clock* clock = Clock::System();
  };
  // The context outlives it.
  Scrubber(AdminContext& context, Options options);
  ~Scrubber();  // stops it
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  void Start();
  void Stop() EXCLUDES(mutex_);
  void Change(const v1::ScrubConfig& config) EXCLUDES(mutex_);
  // Somebody else has read that copy whole.
  void NoteVerified(const ReadableShard& shard) EXCLUDES(mutex_);
  void Fill(v1::ScrubStatus& status) EXCLUDES(mutex_);

 private:
  void Run() EXCLUDES(mutex_);
  bool List() EXCLUDES(mutex_);
  // This node's part of what lies in remote of a job that another node hosts.
  std::vector<ReadableShard> PartOf(const std::string& job) EXCLUDES(mutex_);
  std::vector<ReadableShard> KnownOf(const std::string& job) EXCLUDES(mutex_);
  void ReadNext() EXCLUDES(mutex_);
  void ReadCopy(const ReadableShard& shard) EXCLUDES(mutex_);
  // Not read, that is why, and it is tried again later.
  void NoteUnread(const ScrubKey& key, const std::string& why) REQUIRES(mutex_);
  // All that is told of what could not be read.
  std::string Problem(int64_t now_unix_ms) REQUIRES(mutex_);
  void PostponeTier(TierKind tier) REQUIRES(mutex_);
  void TellProblem() EXCLUDES(mutex_);
  void LoadState() EXCLUDES(mutex_);
  void SaveState(bool now) EXCLUDES(mutex_);
  Duration ListEvery() REQUIRES(mutex_);
  // False: it is to stop.
  bool Wait(Duration at_most) EXCLUDES(mutex_);

  AdminContext& context_;
  const Options options_;
  const std::shared_ptr<Pacer> pacer_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool changed_settings_ GUARDED_BY(mutex_) = false;
  ScrubSchedule schedule_ GUARDED_BY(mutex_);
  std::map<ScrubKey, ReadableShard> there_ GUARDED_BY(mutex_);
  std::string reading_ GUARDED_BY(mutex_);
  std::string unlisted_ GUARDED_BY(mutex_);  // why there is no new list
  // Why these could not be read (of the first kUnreadMax); until they are, or are not there.
  std::map<ScrubKey, std::string> unread_ GUARDED_BY(mutex_);
  uint64_t bytes_read_ GUARDED_BY(mutex_) = 0;
  uint64_t copies_read_ GUARDED_BY(mutex_) = 0;
  uint64_t copies_bad_ GUARDED_BY(mutex_) = 0;
  // Of the thread alone.
  MonotonicTime listed_{};
  MonotonicTime saved_{};
  std::string told_;
  std::thread thread_;
};

}  // namespace holdfast
