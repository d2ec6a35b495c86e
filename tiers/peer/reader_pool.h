// How many connections may be open for reading, and those that wait for the next one who reads from
// the same peer. Internal to tiers/peer/.
//
//   HF_ASSIGN_OR_RETURN(ReaderPool::Lease lease, fabric.readers().Take(device, peer, …));
//   … lease.reader() …
//   lease goes: back to the pool when nothing is in flight and KeepOpen was called, else closed
//
// Thread-safe; leases are not, and end before the pool does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "tiers/peer/fabric_reader.h"

namespace holdfast {

class ReaderPool {
 public:
  // `reused_for`: after it was opened, a connection waits for no further reader.
  // `reader_id`, `on_problem`: FabricOptions.
  ReaderPool(size_t readers_max, Duration reused_for, uint64_t reader_id,
             std::function<void(const std::string&)> on_problem)
      : readers_max_(readers_max),
        reused_for_(reused_for),
        reader_id_(reader_id),
        on_problem_(std::move(on_problem)) {}

  class Lease {
   public:
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    FabricReader& reader() const { return *reader_; }
    // It was used by somebody before: its connection may have died since.
    bool used() const { return used_; }
    // Something was read over it: the device leads there.
    void NoteRead() { read_ = true; }
    // All went well: the next one may have it.
    void KeepOpen() { keep_ = true; }

   private:
    friend class ReaderPool;
    Lease(ReaderPool& pool, const FabricDevice* device, std::string peer)
        : pool_(&pool), device_(device), peer_(std::move(peer)) {}
    ReaderPool* pool_;
    const FabricDevice* device_;
    std::string peer_;  // and what it wants to hear: another one may listen there by now
    std::unique_ptr<FabricReader> reader_;
    MonotonicTime opened_;
    bool used_ = false;
    bool read_ = false;
    bool keep_ = false;
  };

  // `fresh`: not one that waits. ResourceExhausted when too many are open.
  absl::StatusOr<Lease> Take(std::shared_ptr<FabricDevice> device, const std::string& peer,
                             const std::string& token, bool fresh) EXCLUDES(mutex_);

  // Those that wait for the next reader wait no more.
  void CloseIdle() EXCLUDES(mutex_);

  // Nothing could be read from that peer over that device: whoever reads next does without it, for
  // a minute, then longer each time. `problem`: for people.
  void NoteLedNowhere(const FabricDevice* device, const std::string& peer_and_token,
                      std::string problem) EXCLUDES(mutex_);
  // When the time is up, one is told false, and tries.
  bool LedNowhere(const FabricDevice* device, const std::string& peer_and_token) EXCLUDES(mutex_);
  // What is noted at the moment.
  std::vector<std::string> Problems() EXCLUDES(mutex_);

 private:
  struct Idle {
    const FabricDevice* device;
    std::string peer;
    std::unique_ptr<FabricReader> reader;
    MonotonicTime opened;
  };
  void Return(Lease& lease) EXCLUDES(mutex_);

  const size_t readers_max_;
  const Duration reused_for_;
  const uint64_t reader_id_;
  const std::function<void(const std::string&)> on_problem_;
  Mutex mutex_;
  size_t leased_ GUARDED_BY(mutex_) = 0;
  std::deque<Idle> idle_ GUARDED_BY(mutex_);  // the oldest first
  // Gone when something was read there.
  struct Nowhere {
    MonotonicTime until;
    Duration avoided{};
    std::string problem;
  };
  std::map<std::pair<const FabricDevice*, std::string>, Nowhere> nowhere_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
