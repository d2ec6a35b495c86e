#include "tiers/peer/reader_pool.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kIdleMax = 16;

}  // namespace

ReaderPool::Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      device_(other.device_),
      peer_(std::move(other.peer_)),
      reader_(std::move(other.reader_)),
      used_(other.used_),
      keep_(other.keep_) {}

ReaderPool::Lease::~Lease() {
  if (pool_ != nullptr) {
    pool_->Return(*this);
  }
}

absl::StatusOr<ReaderPool::Lease> ReaderPool::Take(std::shared_ptr<FabricDevice> device,
                                                   const std::string& peer,
                                                   const std::string& token, bool fresh) {
  std::vector<Idle> closing;  // after the lock
  Lease lease(*this, device.get(), peer + token);
  {
    MutexLock lock(mutex_);
    if (leased_ >= readers_max_) {
      lease.pool_ = nullptr;
      return absl::ResourceExhaustedError(absl::StrCat(
          "fabric: ", leased_, " connections read at the moment, no more are allowed"));
    }
    ++leased_;
    for (auto it = idle_.begin(); it != idle_.end();) {
      if (it->device != device.get() || it->peer != lease.peer_ || lease.reader_ != nullptr) {
        ++it;
        continue;
      }
      if (fresh) {
        closing.push_back(std::move(*it));
      } else {
        lease.reader_ = std::move(it->reader);
        lease.used_ = true;
      }
      it = idle_.erase(it);
    }
  }
  if (lease.reader_ == nullptr) {
    HF_ASSIGN_OR_RETURN(lease.reader_, FabricReader::Connect(std::move(device), peer, token));
  }
  return lease;
}

void ReaderPool::Return(Lease& lease) {
  std::vector<Idle> closing;
  const bool keep = lease.keep_ && lease.reader_ != nullptr && lease.reader_->in_flight() == 0;
  if (!keep) {
    lease.reader_.reset();
  }
  MutexLock lock(mutex_);
  --leased_;
  if (keep) {
    idle_.push_back({lease.device_, std::move(lease.peer_), std::move(lease.reader_)});
    if (idle_.size() > kIdleMax) {
      closing.push_back(std::move(idle_.front()));
      idle_.pop_front();
    }
  }
}

}  // namespace holdfast
