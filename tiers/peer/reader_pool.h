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
#include <deque>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "tiers/peer/fabric_reader.h"

namespace holdfast {

class ReaderPool {
 public:
  explicit ReaderPool(size_t readers_max) : readers_max_(readers_max) {}

  class Lease {
   public:
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    FabricReader& reader() const { return *reader_; }
    // It was used by somebody before: its connection may have died since.
    bool used() const { return used_; }
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
    bool used_ = false;
    bool keep_ = false;
  };

  // `fresh`: not one that waits. ResourceExhausted when too many are open.
  absl::StatusOr<Lease> Take(std::shared_ptr<FabricDevice> device, const std::string& peer,
                             const std::string& token, bool fresh) EXCLUDES(mutex_);

 private:
  struct Idle {
    const FabricDevice* device;
    std::string peer;
    std::unique_ptr<FabricReader> reader;
  };
  void Return(Lease& lease) EXCLUDES(mutex_);

  const size_t readers_max_;
  Mutex mutex_;
  size_t leased_ GUARDED_BY(mutex_) = 0;
  std::deque<Idle> idle_ GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace holdfast
