// Tells when processes end, by pidfds in the reactor.
//
//   ProcessWatcher watcher(reactor, [&](const ProcessId& p) { Feed(ProcessEnded{p}); });
//   watcher.Watch(process);     // the callback comes from the loop, never from within Watch, also
//   if it is already gone
//
// Owner: the Daemon; the reactor's thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/ids.h"
#include "base/unique_fd.h"
#include "server/runtime/reactor.h"

namespace holdfast {

class ProcessWatcher {
 public:
  using EndedCallback = std::function<void(const ProcessId&)>;
  ProcessWatcher(Reactor& reactor, EndedCallback ended);
  ~ProcessWatcher();
  ProcessWatcher(const ProcessWatcher&) = delete;
  ProcessWatcher& operator=(const ProcessWatcher&) = delete;

  void Watch(const ProcessId& process);
  void Unwatch(const ProcessId& process);
  size_t watched() const { return watched_.size() + unwatchable_.size(); }

 private:
  void Try(const ProcessId& process);
  void Ended(const ProcessId& process);
  void RetryUnwatchable();

  Reactor& reactor_;
  const EndedCallback ended_;
  std::map<ProcessId, UniqueFd> watched_;
  // For which the system gave no pidfd (descriptors exhausted): tried again until it does. Not
  // knowing is never taken for the process's end.
  std::set<ProcessId> unwatchable_;
  Reactor::TimerId retry_timer_;
  // Callbacks posted after this object is gone find it expired.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

// Whether it may still be running: true also when that cannot be told.
bool MayBeAlive(const ProcessId& process);

// Process ids mean nothing under another one (base/process.h).
std::string CurrentBoot();

}  // namespace holdfast
