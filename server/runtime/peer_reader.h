// What other daemons of the cluster want read of this node's copies, for those who asked there:
// records, and their part of a verification. Each verification is one that its asker goes on asking
// for; what nobody has asked for kForgotten long is given up.
//
//   PeerReader reader(context, [&](ReadForPeer done) { post(std::move(done)); });
//   reader.Read(action);      // → ReadForPeer, exactly one
//
// Owner: the Daemon. Read: any thread. A thread of its own, and one of each verification. It must
// end after the context's gateway was stopped, else it may wait for the core.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "server/events.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/verify.h"

namespace holdfast {

class PeerReader {
 public:
  static constexpr Duration kForgotten = std::chrono::seconds(30);
  static constexpr size_t kWaitingMax = 1024;
  static constexpr size_t kRunsMax = 64;         // those that have ended and were not told of, too
  static constexpr size_t kBadKeptMax = 10'000;  // of one verification; the count goes on
  static constexpr size_t kBadToldMax = 256;     // in one answer
  using Answer = std::function<void(ReadForPeer)>;

  PeerReader(AdminContext& context, Answer answer);
  ~PeerReader();
  PeerReader(const PeerReader&) = delete;
  PeerReader& operator=(const PeerReader&) = delete;

  void Read(PeerReads reads) EXCLUDES(mutex_);

 private:
  using RunId = std::pair<uint32_t, uint64_t>;  // whose, and the asker's number
  struct Run {
    std::unique_ptr<VerifyRun> verify;  // null: it has ended
    absl::Status result;                // then
    v1::VerifyProgress progress;
    std::vector<v1::BadShard> bad;
    MonotonicTime asked{};
  };

  void Work() EXCLUDES(mutex_);
  ReadForPeer Do(const PeerReads& reads);
  absl::StatusOr<v1::ReadShardReply> Do(const Caller& caller, const v1::ReadShardRequest& request);
  absl::StatusOr<v1::VerifyPartReply> Do(const Caller& caller,
                                         const v1::VerifyPartRequest& request);
  absl::StatusOr<v1::VerifyMoreReply> Do(const Caller& caller,
                                         const v1::VerifyMoreRequest& request);
  void End(const RunId& id, Run& run);
  void EndForgotten();

  AdminContext& context_;
  const Answer answer_;
  std::map<RunId, Run> runs_;  // the thread's own
  Mutex mutex_;
  CondVar changed_;
  std::deque<PeerReads> waiting_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace holdfast
