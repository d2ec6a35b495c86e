#include "server/runtime/tiers/training_cores.h"

#include <utility>
#include <vector>

namespace holdfast {

void TrainingCores::Add(pid_t process) {
  MutexLock lock(mutex_);
  processes_.insert(process);
}

void TrainingCores::Remove(pid_t process) {
  MutexLock lock(mutex_);
  processes_.erase(process);
}

Cores TrainingCores::Beside() {
  std::vector<Cores> theirs;
  MutexLock lock(mutex_);
  for (const pid_t process : processes_) {
    if (absl::StatusOr<Cores> cores = CoresOf(process); cores.ok()) {
      theirs.push_back(*std::move(cores));
    }  // else it has ended, which is told soon
  }
  return CoresBeside(own_, theirs);
}

}  // namespace holdfast
