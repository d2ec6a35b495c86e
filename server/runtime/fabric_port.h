// This node's memory as other nodes' one-sided reads find it: slots are registered with the fabric
// when a job has first sealed something there, or when they are first asked for, and stay so until
// they are deleted or become another job's.
//
//   HF_ASSIGN_OR_RETURN(auto port, FabricPort::Open(config.fabric, slots, env));
//   if (port->Expect(slot, job)) {       // it is populated
//     port->RegisterExpected(slot);      // in another thread: seconds, where devices pin memory
//   }
//   port->Offer("tcp", shard, source);   // in the answer to a pull
//   port->Drop(slot);                            // before it is deleted
//
// Owner: the Daemon. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/config.pb.h"
#include "holdfast/v1/peer.pb.h"
#include "server/events.h"
#include "server/peers/peer_events.h"
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
    uint64_t incarnation = 0;  // as membership tells it to the other nodes
    // Has RegisterExpected called for it in some thread, soon; any thread. Null: in the asker's.
    std::function<void(SlotId)> begin = nullptr;
  };
  // An error says why there is none: bytes go over the daemons' own connections then.
  static absl::StatusOr<std::unique_ptr<FabricPort>> Open(Options options);
  ~FabricPort();

  Fabric& fabric() { return *fabric_; }
  // False: it is registered for that job, or about to be.
  bool Expect(SlotId slot, const JobUuid& job) EXCLUDES(mutex_);
  // Unless it was dropped since, or is another job's.
  void RegisterExpected(SlotId slot) EXCLUDES(mutex_);
  // Tells in `source` where the slot is found, if the reader has the same provider and the memory
  // is registered, or is within 2 s.
  void Offer(const std::string& provider, const ReadableShard& shard, v1::PullSource& source)
      EXCLUDES(mutex_);
  // The same of memory that is no slot's.
  void Describe(const std::string& provider, const Registration& registration,
                v1::PullSource& source) const;
  void Drop(SlotId slot) EXCLUDES(mutex_);
  // Connections of nodes that are gone, or were started anew, are closed. May take milliseconds.
  void ChangePeers(const holdfast::ChangePeers& change) EXCLUDES(mutex_);
  // Who was told of it while it was another job's reads it no more.
  void BecomesOf(SlotId slot, const JobUuid& job) EXCLUDES(mutex_);
  // Why slots are not registered, and devices not used; empty: they are.
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
  std::shared_ptr<Slot> Registered(const ReadableShard& shard) EXCLUDES(mutex_);
  absl::StatusOr<std::shared_ptr<Slot>> Make(SlotId slot, const JobUuid& job) const;
  void Note(SlotId slot, const absl::Status& made, const absl::Status& left_out) REQUIRES(mutex_);
  std::shared_ptr<Slot> Forget(SlotId slot) REQUIRES(mutex_);

  const Options options_;
  const std::unique_ptr<Fabric> fabric_;
  mutable Mutex mutex_;
  CondVar registered_;
  std::map<SlotId, std::shared_ptr<Slot>> slots_ GUARDED_BY(mutex_);
  // Slots' numbers are used again: `number` tells one expectation from the next.
  struct Expected {
    JobUuid job;
    uint64_t number = 0;
  };
  std::map<SlotId, Expected> expected_ GUARDED_BY(mutex_);
  uint64_t last_expected_ GUARDED_BY(mutex_) = 0;
  std::map<SlotId, std::string> problems_ GUARDED_BY(mutex_);  // of those that could not be
  std::map<std::string, uint64_t> peers_ GUARDED_BY(mutex_);   // the incarnation of each
};

}  // namespace holdfast
