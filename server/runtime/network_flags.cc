#include "server/runtime/network_flags.h"

#include <sys/mman.h>

#include <cerrno>
#include <new>

#include "base/network_flag.h"
#include "base/status.h"
#include "server/runtime/sealed_memory.h"

namespace holdfast {
namespace {

// What its answer may wait for: bytes that come or go over the network, or a slot that is being
// read for such. Its own seal and commit are neither.
bool MayWaitForTraffic(const v1::ClientFrame& frame) {
  switch (frame.request_case()) {
    case v1::ClientFrame::kAwaitSave:
      return frame.await_save().stage() == v1::AwaitSave::STAGE_REMOTE ||
             frame.await_save().stage() == v1::AwaitSave::STAGE_PEER;
    case v1::ClientFrame::kReserve:
    case v1::ClientFrame::kBeginSave:
    case v1::ClientFrame::kEnterSession:
    case v1::ClientFrame::kReportLoad:
    case v1::ClientFrame::kAttach:
    case v1::ClientFrame::kReadParts:
      return true;
    default:
      return false;
  }
}

}  // namespace

class NetworkFlags::Page {
 public:
  explicit Page(void* at) : at_(at), word_(new (at) NetworkFlagWord(0)) {}
  ~Page() { ::munmap(at_, kNetworkFlagPageBytes); }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  NetworkFlag Read() const { return NetworkFlag::Of(word_->load(std::memory_order_relaxed)); }

 private:
  void* const at_;
  const NetworkFlagWord* const word_;
};

NetworkFlags::NetworkFlags(const Clock* clock) : clock_(clock) {}

NetworkFlags::~NetworkFlags() = default;

absl::StatusOr<UniqueFd> NetworkFlags::Make(ConnectionId connection) {
  HF_ASSIGN_OR_RETURN(UniqueFd fd,
                      SealedMemory("holdfast-network-flag", kNetworkFlagPageBytes, {}));
  void* const at =
      ::mmap(nullptr, kNetworkFlagPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) {
    return ErrnoStatus(errno, "mmap", "a network flag");
  }
  auto page = std::make_unique<Page>(at);
  const MutexLock lock(mutex_);
  pages_[connection] = std::move(page);
  return fd;
}

void NetworkFlags::Asked(ConnectionId connection, const v1::ClientFrame& frame) {
  if (MayWaitForTraffic(frame)) {
    const MutexLock lock(mutex_);
    asked_[connection].insert(frame.id());
  }
}

void NetworkFlags::Answered(ConnectionId connection, const v1::DaemonFrame& frame) {
  const MutexLock lock(mutex_);
  const auto it = asked_.find(connection);
  if (it != asked_.end() && it->second.erase(frame.id()) > 0 && it->second.empty()) {
    asked_.erase(it);
  }
}

void NetworkFlags::Closed(ConnectionId connection) {
  const MutexLock lock(mutex_);
  pages_.erase(connection);
  asked_.erase(connection);
  windows_.Gone(connection);
}

// What the pages say at this moment.
bool NetworkFlags::Look(MonotonicTime now) {
  for (const auto& [connection, page] : pages_) {
    windows_.Says(connection, page->Read(), now);
  }
  return asked_.empty();
}

bool NetworkFlags::Holds() {
  const MonotonicTime now = clock_->Now();
  const MutexLock lock(mutex_);
  if (!Look(now)) {
    windows_.NobodyWaits(now);
    return false;
  }
  return windows_.Holds(now);
}

void NetworkFlags::BeginWait() {
  const MutexLock lock(mutex_);
  ++waits_;
}

void NetworkFlags::EndWait() {
  const MonotonicTime now = clock_->Now();
  const MutexLock lock(mutex_);
  if (--waits_ == 0) {
    windows_.NobodyWaits(now);
  }
}

v1::NetworkQuiet NetworkFlags::Status() {
  const MonotonicTime now = clock_->Now();
  const MutexLock lock(mutex_);
  Look(now);
  v1::NetworkQuiet status;
  status.set_busy_processes(static_cast<uint32_t>(windows_.busy(now)));
  status.set_holding(windows_.holding());
  status.set_held_ms(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(windows_.held()).count()));
  return status;
}

}  // namespace holdfast
