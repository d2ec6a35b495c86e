// Reads sealed copies, in memory itself and in the durable tiers through their workers, and
// compares every digest: what `ckptctl verify` asks for.
//
//   VerifyRun run(store, std::move(shards), {.hold = …, .bad = …, .good = …});
//   while (!run.WaitFor(200ms, &progress)) stream << progress;
//   return run.result();
//
// Each copy in memory is held while it is read and no longer, so that saves find room; one that has
// made room before its turn came is skipped. Files are not held: where a copy's are gone or hold
// something else, the core says whether it gave the copy up itself (skipped) or counts on it still
// (bad). What keeps it from reading a copy (too many open files, a tier's directory that is away)
// says nothing about the copy: it ends the run, and is its result.
//
// One thread of its own, at low priority, from construction until it is done or cancelled. WaitFor
// and Cancel: the owner's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "server/events.h"
#include "server/runtime/admin_gateway.h"
#include "tiers/memory/slot_store.h"
#include "tiers/transfer/pacer.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

// Of an error of reading a sealed copy's files: whether the copy is what is wrong.
bool IsBadCopy(const absl::Status& read);

class VerifyRun {
 public:
  // All from the run's thread.
  struct Callbacks {
    // Keeps a copy until the lease goes. NotFound: it is gone.
    std::function<absl::StatusOr<std::unique_ptr<ReadLease>>(const ReadableShard&)> hold;
    std::function<void(const ReadableShard&, const std::string& what)> bad;
    std::function<void(const ReadableShard&)> good;
    // Of a copy in a durable tier: what is wrong with it, empty when nothing is; NotFound: it is
    // gone. `advance` is told how far it is, and answers false when nobody asks any more.
    // What it reads goes by the pacer.
    std::function<absl::StatusOr<std::string>(const ReadableShard&,
                                              const std::function<bool(uint64_t)>& advance,
                                              std::shared_ptr<Pacer> pacer)>
        durable;
    // Of a copy in a durable tier that looks bad, or gone: whether the core counts on it still.
    std::function<absl::StatusOr<bool>(const ReadableShard&)> listed;
  };
  // `pacer`: for what it reads; null: as fast as it can.
  VerifyRun(SlotStore& store, std::vector<ReadableShard> shards, Callbacks callbacks,
            std::shared_ptr<Pacer> pacer = nullptr);
  ~VerifyRun();  // cancels and waits
  VerifyRun(const VerifyRun&) = delete;
  VerifyRun& operator=(const VerifyRun&) = delete;

  // Waits until done or `at_most` has passed, and gives what is new. True when done.
  bool WaitFor(Duration at_most, v1::VerifyProgress* progress) EXCLUDES(mutex_);
  void Cancel() EXCLUDES(mutex_);
  // Once done: OK when every copy was looked at, good or bad, or skipped.
  absl::Status result() EXCLUDES(mutex_);

 private:
  void Run() EXCLUDES(mutex_);
  absl::Status VerifyAll() EXCLUDES(mutex_);
  // False: it was cancelled.
  bool Pay(uint64_t bytes);
  // `bytes`: how many of its image were read.
  void Count(const ReadableShard& shard, uint64_t bytes, const std::string& what) EXCLUDES(mutex_);
  void Skip(const ReadableShard& shard) EXCLUDES(mutex_);
  absl::Status Judge(const ReadableShard& shard, uint64_t bytes, const std::string& what)
      EXCLUDES(mutex_);
  bool cancelled() EXCLUDES(mutex_);
  // What is wrong with it; empty when nothing is. An error: it could not be looked at.
  absl::StatusOr<std::string> Check(const ReadableShard& shard);
  bool Advance(uint64_t bytes_of_shard) EXCLUDES(mutex_);

  SlotStore& store_;
  const std::vector<ReadableShard> shards_;
  const Callbacks callbacks_;
  const std::shared_ptr<Pacer> pacer_;
  TransferControl control_;  // of what waits for the pacer
  Mutex mutex_;
  CondVar changed_;
  v1::VerifyProgress progress_ GUARDED_BY(mutex_);
  uint64_t bytes_before_ GUARDED_BY(mutex_) = 0;  // of the shards before this one
  absl::Status result_ GUARDED_BY(mutex_);
  bool cancelled_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace holdfast
