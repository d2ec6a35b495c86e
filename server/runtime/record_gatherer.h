// Gathers the records of all shards of a step from the nodes that have them, into one file that
// clients get (docs/protocol.md §6, "Resharding"): so that a node asks each other one once,
// whatever the number of its ranks.
//
//   RecordGatherer gatherer({"n1", local, pulls, [&](Event event) { post(std::move(event)); }});
//   gatherer.Gather(action);      // → RecordsGathered, exactly one
//
// What cannot be had within kGatherLongest is left out. Owner: the Daemon. Any thread may call;
// kAtOnce threads of its own, and some while they gather. It ends before the pulls' owner does.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "server/events.h"
#include "server/runtime/local_records.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

class PullClient;

class RecordGatherer {
 public:
  static constexpr size_t kWaitingMax = 64;
  static constexpr size_t kAtOnce = 4;  // steps: one that hangs holds up no other job's
  static constexpr size_t kNodesAtOnce = 16;
  static constexpr Duration kGatherLongest = std::chrono::seconds(60);
  static constexpr uint64_t kBytesMax = uint64_t{1} << 30;  // of all records of a step
  struct Options {
    std::string node_name;
    std::shared_ptr<const LocalRecords> local;
    std::shared_ptr<PullClient> pulls;  // null: this node is alone
    std::function<void(Event)> post;
  };
  explicit RecordGatherer(Options options);
  ~RecordGatherer();
  RecordGatherer(const RecordGatherer&) = delete;
  RecordGatherer& operator=(const RecordGatherer&) = delete;

  void Gather(GatherRecords action) EXCLUDES(mutex_);

 private:
  struct Found;
  void Work() EXCLUDES(mutex_);
  RecordsGathered Do(const GatherRecords& action);
  void AskAll(const GatherRecords& action, Found& found);
  absl::Status AskOne(const GatherRecords& action, const GatherRecords::Holder& holder,
                      Found& found);
  absl::Status AskNode(const RecordsWanted& wanted, const std::string& node, Found& found);
  // One that serves as many as it may is asked again.
  absl::Status AskUntilServed(const RecordsWanted& wanted, const std::string& node, Found& found);
  bool Pause(std::chrono::milliseconds pause) EXCLUDES(mutex_);

  const Options options_;
  const std::shared_ptr<TransferControl> control_ = std::make_shared<TransferControl>();
  Mutex mutex_;
  CondVar changed_;
  std::deque<GatherRecords> waiting_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace holdfast
