#include "client-lib/src/busy_flag.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>

#include "base/huge_pages.h"
#include "client-lib/src/fork_guard.h"

namespace holdfast::client {
namespace {

constexpr size_t kPagesMax = 256;

}  // namespace

BusyFlag::~BusyFlag() {
  const MutexLock lock(mutex_);
  for (void* const at : mapped_) {
    ::munmap(at, kNetworkFlagPageBytes);
  }
}

void BusyFlag::Enter() noexcept {
  uint64_t before = said_.load();
  NetworkFlag after;
  do {
    after = NetworkFlag::Of(before);
    after.stretch += after.open == 0 ? 1 : 0;
    ++after.open;
  } while (!said_.compare_exchange_weak(before, after.Word()));
  Say();
}

void BusyFlag::Leave() noexcept {
  uint64_t before = said_.load();
  NetworkFlag after;
  do {
    after = NetworkFlag::Of(before);
    if (after.open == 0) {
      return;
    }
    --after.open;
  } while (!said_.compare_exchange_weak(before, after.Word()));
  Say();
}

// Whoever writes last into the page has looked after that whether it is still so: what stays there
// is what was said last, whatever the order in which threads come here.
void BusyFlag::Say() noexcept {
  uint64_t word = said_.load();
  for (;;) {
    NetworkFlagWord* const page = page_.load();
    if (page == nullptr) {
      return;
    }
    page->store(word);
    const uint64_t now = said_.load();
    if (now == word && page == page_.load()) {
      return;
    }
    word = now;
  }
}

void BusyFlag::Attach(int fd) {
  struct stat st = {};
  // One that could be cut short would be a SIGBUS in the middle of training. (-1: it knows no
  // seals.)
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (::fstat(fd, &st) != 0 || st.st_size < static_cast<off_t>(kNetworkFlagPageBytes) ||
      seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Detach();
  }
  {
    const MutexLock lock(mutex_);
    if (mapped_.size() >= kPagesMax) {  // a daemon that is started anew again and again
      return Detach();
    }
  }
  std::byte* const reserved = ReserveAligned(kNetworkFlagPageBytes);
  if (reserved == nullptr) {
    return Detach();
  }
  // A child says nothing in its parent's name.
  void* const at =
      MapNotInherited(reserved, kNetworkFlagPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
  if (at == MAP_FAILED) {
    ::munmap(reserved, kNetworkFlagPageBytes);
    return Detach();
  }
  {
    const MutexLock lock(mutex_);
    mapped_.push_back(at);
  }
  page_.store(static_cast<NetworkFlagWord*>(at));
  Say();
}

}  // namespace holdfast::client
