#include "tiers/peer/reader_pool.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/peer/fabric_address.h"

namespace holdfast {
namespace {

constexpr size_t kIdleMax = 16;
constexpr Duration kAvoidedMin = std::chrono::minutes(1);
constexpr Duration kAvoidedMax = std::chrono::minutes(16);
constexpr size_t kNotedMax = 4096;
// Until whoever tries it again knows.
constexpr Duration kTryTakes = std::chrono::seconds(20);

}  // namespace

ReaderPool::Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      device_(other.device_),
      peer_(std::move(other.peer_)),
      reader_(std::move(other.reader_)),
      opened_(other.opened_),
      used_(other.used_),
      read_(other.read_),
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
  const MonotonicTime now = Clock::System()->Now();
  lease.opened_ = now;
  {
    MutexLock lock(mutex_);
    if (leased_ >= readers_max_) {
      lease.pool_ = nullptr;
      return absl::ResourceExhaustedError(absl::StrCat(
          "fabric: ", leased_, " connections read at the moment, no more are allowed"));
    }
    ++leased_;
    for (auto it = idle_.begin(); it != idle_.end();) {
      const bool old = now - it->opened > reused_for_;
      const bool fits = it->device == device.get() && it->peer == lease.peer_;
      if (!old && (!fits || lease.reader_ != nullptr)) {
        ++it;
        continue;
      }
      if (old || fresh) {
        closing.push_back(std::move(*it));
      } else {
        lease.reader_ = std::move(it->reader);
        lease.opened_ = it->opened;
        lease.used_ = true;
      }
      it = idle_.erase(it);
    }
  }
  if (lease.reader_ == nullptr) {
    HF_ASSIGN_OR_RETURN(lease.reader_, FabricReader::Connect(std::move(device), peer,
                                                             FabricGreeting(token, reader_id_)));
  }
  return lease;
}

void ReaderPool::CloseIdle() {
  std::deque<Idle> closing;  // after the lock
  MutexLock lock(mutex_);
  closing.swap(idle_);
}

void ReaderPool::NoteLedNowhere(const FabricDevice* device, const std::string& peer_and_token,
                                std::string problem) {
  const MonotonicTime now = Clock::System()->Now();
  bool is_new = false;
  {
    MutexLock lock(mutex_);
    // (Of those that nobody has tried for long the peer has another token by now, or is gone.)
    std::erase_if(nowhere_,
                  [&](const auto& each) { return each.second.until + 2 * kAvoidedMax < now; });
    if (nowhere_.size() >= kNotedMax) {
      return;
    }
    const auto [it, added] = nowhere_.try_emplace({device, peer_and_token});
    is_new = added;
    Nowhere& noted = it->second;
    if (added || noted.until - now < kTryTakes) {  // (else others began before it was noted)
      noted.avoided = added ? kAvoidedMin : std::min(2 * noted.avoided, kAvoidedMax);
      noted.until = now + noted.avoided;
    }
    noted.problem = problem;
  }
  if (is_new && on_problem_ != nullptr) {
    on_problem_(problem);
  }
}

bool ReaderPool::LedNowhere(const FabricDevice* device, const std::string& peer_and_token) {
  const MonotonicTime now = Clock::System()->Now();
  MutexLock lock(mutex_);
  const auto known = nowhere_.find({device, peer_and_token});
  if (known == nowhere_.end()) {
    return false;
  }
  if (now < known->second.until) {
    return true;
  }
  known->second.until = now + kTryTakes;
  return false;
}

std::vector<std::string> ReaderPool::Problems() {
  const MonotonicTime now = Clock::System()->Now();
  MutexLock lock(mutex_);
  std::vector<std::string> problems;
  for (const auto& [where, noted] : nowhere_) {
    if (now < noted.until + kAvoidedMin) {
      problems.push_back(noted.problem);
    }
  }
  return problems;
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
    if (lease.read_) {
      nowhere_.erase({lease.device_, lease.peer_});
    }
    idle_.push_back(
        {lease.device_, std::move(lease.peer_), std::move(lease.reader_), lease.opened_});
    if (idle_.size() > kIdleMax) {
      closing.push_back(std::move(idle_.front()));
      idle_.pop_front();
    }
  }
}

}  // namespace holdfast
