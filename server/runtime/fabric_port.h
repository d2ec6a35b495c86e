// This node's memory as other nodes' one-sided reads find it: slots are registered with the fabric
// when they are first asked for, and stay so until they are deleted or become another job's.
//
//   HF_ASSIGN_OR_RETURN(auto port, FabricPort::Open(config.fabric, slots, env));
//   port->Offer("tcp", shard, source);   // in the answer to a pull
//   port->Drop(slot);                            // before it is deleted
//
// Owner: the Daemon. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/config.pb.h"
#include "holdfast/v1/peer.pb.h"
#include "server/events.h"
#include "tiers/memory/slot_store.h"
#include "tiers/peer/fabric.h"
#include "tiers/peer/registration.h"

namespace holdfast {

class FabricPort {
 public:
  struct Options {
    v1::FabricConfig config;
    std::string advertise_address;  // where the other nodes reach this one: host:port
    std::shared_ptr<SlotStore> slots;
    Env* env = nullptr;
  };
  // An error says why there is none: bytes go over the daemons' own connections then.
  static absl::StatusOr<std::unique_ptr<FabricPort>> Open(Options options);
  ~FabricPort();

  Fabric& fabric() { return *fabric_; }
  // Tells in `source` where the slot is found, if the reader has the same provider and the memory
  // can be registered.
  void Offer(const std::string& provider, const ReadableShard& shard, v1::PullSource& source)
      EXCLUDES(mutex_);
  // The same of memory that is no slot's.
  void Describe(const std::string& provider, const Registration& registration,
                v1::PullSource& source) const;
  void Drop(SlotId slot) EXCLUDES(mutex_);
  // Who was told of it while it was another job's reads it no more.
  void BecomesOf(SlotId slot, const JobUuid& job) EXCLUDES(mutex_);
  // Why slots are not registered; empty: they are, or nobody asked for one.
  std::string problem() const EXCLUDES(mutex_);

 private:
  struct Slot {
    JobUuid job;
    std::unique_ptr<File> file;
    std::unique_ptr<Mapping> mapping;
    std::shared_ptr<Registration> registration;  // goes before the mapping does

    // Not once its file was cut short: then there are other pages in its place.
    bool Serves(const ReadableShard& shard) const {
      return job == shard.copy.id.job && mapping->bytes() >= shard.copy.image_bytes &&
             !registration->faulted();
    }
  };

  FabricPort(Options options, std::unique_ptr<Fabric> fabric);
  absl::StatusOr<std::shared_ptr<Slot>> Register(const ReadableShard& shard);

  const Options options_;
  const std::unique_ptr<Fabric> fabric_;
  mutable Mutex mutex_;
  std::map<SlotId, std::shared_ptr<Slot>> slots_ GUARDED_BY(mutex_);
  std::string problem_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
