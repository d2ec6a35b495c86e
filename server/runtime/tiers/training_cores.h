// The cores that training processes of this node are confined to: what takes much of the processor
// (compression) runs beside them, where there are others.
//
//   TrainingCores cores;
//   cores.Add(process);                    // as they come and go
//   spec.cores = cores.Beside();           // of a copy
//   const RunsBesideTraining beside(cores, compressed);    // of this thread, for a while
//
// Where each may run is asked when it matters: launchers confine processes after they have begun.
// Thread-safe.
#pragma once

#include <sys/types.h>

#include <set>

#include "base/mutex.h"
#include "tiers/transfer/thread_cores.h"

namespace holdfast {

class TrainingCores {
 public:
  void Add(pid_t process) EXCLUDES(mutex_);
  void Remove(pid_t process) EXCLUDES(mutex_);
  // Of those that this program may run on, the ones that are nobody's in particular; all of them,
  // if none is. Empty: this system does not say.
  Cores Beside() EXCLUDES(mutex_);
  // All that this program may run on.
  const Cores& All() const { return own_; }

 private:
  const Cores own_ = CoresOf(0).value_or(Cores());
  Mutex mutex_;
  std::set<pid_t> processes_ GUARDED_BY(mutex_);
};

// The calling thread, and threads that it starts, run beside training processes while this lives.
class RunsBesideTraining {
 public:
  RunsBesideTraining(TrainingCores& cores, bool does) : cores_(cores), does_(does) {
    if (does_) {
      SetThreadCores(0, cores_.Beside()).IgnoreError();  // else it runs where it did
    }
  }
  ~RunsBesideTraining() {
    if (does_) {
      SetThreadCores(0, cores_.All()).IgnoreError();
    }
  }
  RunsBesideTraining(const RunsBesideTraining&) = delete;
  RunsBesideTraining& operator=(const RunsBesideTraining&) = delete;

 private:
  TrainingCores& cores_;
  const bool does_;
};

}  // namespace holdfast
