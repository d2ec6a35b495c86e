// Tells events to a program of the operator's choice (events.command): a page, a scheduler that is
// to drain the node, a webhook by way of curl.
//
//   EventCommand command({{"/usr/local/bin/page"}, v1::SEVERITY_WARNING, 30s, "gpu-17"}, journal);
//   command.Stop();
//
// One run at a time, with all that has happened since the last one began, at most kBatchMax events,
// one JSON object a line on stdin. A run that fails (exit code, signal, time) is tried again,
// twice, with the same events; then they are given up, and problem() says so until a run goes well.
// What happens while it fails waits in the journal, and is told how much of it went meanwhile.
//
// A thread of its own. The program runs in a process group of its own, which is killed as a whole;
// it inherits no descriptor, and of the environment a fixed PATH and HOLDFAST_NODE.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "server/runtime/event_journal.h"

namespace holdfast {

// As events.command gets it; the fields are those that `ckptctl events --json` prints.
std::string EventToJson(const v1::DaemonEvent& event, const std::string& node);

class EventCommand {
 public:
  static constexpr size_t kTriesMax = 3;

  struct Options {
    std::vector<std::string> command;  // empty: nobody is told
    v1::Severity least = v1::SEVERITY_WARNING;
    Duration timeout = std::chrono::seconds(30);
    std::string node;
    uint32_t reader = 0;                               // whose eyes it sees the journal with
    Duration pause = std::chrono::seconds(1);          // before it is tried again; four times as
                                                       // long each time
    Duration stop_patience = std::chrono::seconds(2);  // what a run that is under way gets at Stop
  };
  EventCommand(Options options, EventJournal& journal);
  ~EventCommand() { Stop(); }
  EventCommand(const EventCommand&) = delete;
  EventCommand& operator=(const EventCommand&) = delete;

  // Holds from the next run on; what has happened before is not told again.
  void Change(std::vector<std::string> command, v1::Severity least, Duration timeout)
      EXCLUDES(mutex_);
  // What was told last went wrong; empty: it did not.
  std::string problem() const EXCLUDES(mutex_);
  // The journal is stopped first. What has happened until then is told if there is time.
  void Stop() EXCLUDES(mutex_);

 private:
  void Run() EXCLUDES(mutex_);
  Options Current() const EXCLUDES(mutex_);
  void Tell(const v1::EventBatch& batch, Options options) EXCLUDES(mutex_);
  absl::Status RunOnce(const std::string& lines, const Options& options) EXCLUDES(mutex_);
  // False: it is being stopped.
  bool Pause(Duration pause) EXCLUDES(mutex_);
  // A run that may go on until `deadline`; once it is being stopped, not as long.
  bool Overdue(MonotonicTime deadline) const EXCLUDES(mutex_);
  bool Replaced(const Options& options) const EXCLUDES(mutex_);  // by another command
  void ReapLeftBehind();

  EventJournal& journal_;
  mutable Mutex mutex_;
  Options options_ GUARDED_BY(mutex_);
  CondVar changed_;
  uint64_t changes_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  MonotonicTime stop_by_ GUARDED_BY(mutex_);
  std::string problem_ GUARDED_BY(mutex_);
  uint64_t given_up_ GUARDED_BY(mutex_) = 0;
  std::vector<pid_t> left_behind_;  // killed, and still not gone: they hang in the kernel
  std::thread thread_;
};

}  // namespace holdfast
