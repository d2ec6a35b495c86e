#include "tiers/transfer/revocable_memory.h"

#include <utility>

namespace holdfast {

RevocableMemory::RevocableMemory(std::unique_ptr<Mapping> mapping, uint64_t bytes)
    : data_(mapping->data()), bytes_(bytes), mapping_(std::move(mapping)) {}

RevocableMemory::RevocableMemory(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}

RevocableMemory::~RevocableMemory() = default;

void RevocableMemory::Revoke() {
  std::unique_ptr<Mapping> mapping;  // unmapped outside the lock: it may take a while
  {
    MutexLock lock(mutex_);
    revoked_ = true;
    while (inside_ > 0) {
      left_cv_.Wait(mutex_);
    }
    mapping = std::move(mapping_);
  }
}

bool RevocableMemory::revoked() const {
  MutexLock lock(mutex_);
  return revoked_;
}

RevocableMemory::Access::~Access() {
  if (memory_ != nullptr) {
    memory_->Leave();
  }
}

RevocableMemory::Access RevocableMemory::Enter() {
  MutexLock lock(mutex_);
  if (revoked_) {
    return Access(nullptr);
  }
  ++inside_;
  return Access(this);
}

void RevocableMemory::Leave() {
  MutexLock lock(mutex_);
  if (--inside_ == 0) {
    left_cv_.NotifyAll();
  }
}

}  // namespace holdfast
