#include "client-lib/src/read_ticket.h"

#include <sys/random.h>

#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "base/mutex.h"

namespace holdfast::client {
namespace {

// At one connection at most so many are released, so that it does not take for ever.
constexpr size_t kReleasedAtOnceMax = 256;

struct Entry {
  std::string socket;
  bool abandoned = false;
};

struct Registry {
  const ForkOwner owner;
  Mutex mutex;
  std::map<uint64_t, Entry> tickets GUARDED_BY(mutex);
};

// Never destroyed: tickets may outlive static destructors. A forked child begins with none of its
// own: another thread may have held the lock as it was forked.
Registry& GetRegistry() {
  static std::atomic<Registry*> current{new Registry()};
  Registry* registry = current.load();
  if (registry->owner.forked()) {
    auto fresh = std::make_unique<Registry>();
    if (current.compare_exchange_strong(registry, fresh.get())) {
      registry = fresh.release();
    }
  }
  return *registry;
}

// Unique among all copies of this library in the process: they begin at random places.
uint64_t NextId() {
  static std::atomic<uint64_t> next{[] {
    uint64_t first = 0;
    static_cast<void>(::getrandom(&first, sizeof(first), GRND_NONBLOCK));
    return first;
  }()};
  uint64_t id = 0;
  while (id == 0) {
    id = next.fetch_add(1, std::memory_order_relaxed);
  }
  return id;
}

}  // namespace

ReadTicket::ReadTicket(std::string socket) : id_(NextId()) {
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  registry.tickets.emplace(id_, Entry{std::move(socket), false});
}

ReadTicket::~ReadTicket() {
  if (owner_.forked()) {
    return;
  }
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  if (const auto found = registry.tickets.find(id_); found != registry.tickets.end()) {
    found->second.abandoned = true;
  }
}

void ReadTicket::Settle() {
  if (!owner_.forked()) {
    SettleAbandoned(id_);
  }
}

std::vector<uint64_t> AbandonedTickets(const std::string& socket) {
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  std::vector<uint64_t> ids;
  for (const auto& [id, entry] : registry.tickets) {
    if (entry.abandoned && entry.socket == socket && ids.size() < kReleasedAtOnceMax) {
      ids.push_back(id);
    }
  }
  return ids;
}

void SettleAbandoned(uint64_t id) {
  Registry& registry = GetRegistry();
  const MutexLock lock(registry.mutex);
  registry.tickets.erase(id);
}

}  // namespace holdfast::client
