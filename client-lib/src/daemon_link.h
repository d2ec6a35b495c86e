// This rank's place in its job, over whatever connection there is: joins when it opens, and joins
// again, under the same attempt, when the connection was lost.
//
//   DaemonLink link(identity);
//   HF_TRY(link.Open(deadline));
//   HF_TRY_ASSIGN(std::shared_ptr<Connection> connection, link.Get(deadline, Patience::kOnce));
//   // one operation uses one connection: when it breaks, the operation fails, and the next Get
//   makes another
//
// A caller that waits for a daemon keeps no other: each try is one exchange, and between two tries
// anybody may make one. What a caller that minds silence does not get within that time (a hello, a
// join) stays asked for: the next Get looks whether it has come, without waiting again.
//
// While a connection is silent, a Get leaves it for a ckptd that has taken its place (successor.h).
//
// Thread-safe. Shared by the job and its save handles; closed by the job.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/ids.h"
#include "base/mutex.h"
#include "client-lib/src/busy_flag.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/successor.h"

namespace holdfast::client {

struct RankIdentity {
  std::string job;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string launch;
  std::string socket;
  std::string policy = {};  // encoded, for the Join
};

enum class Patience { kOnce, kUntilDeadline };  // when the daemon cannot be reached

class DaemonLink {
 public:
  explicit DaemonLink(RankIdentity identity) : identity_(std::move(identity)) {}
  DaemonLink(const DaemonLink&) = delete;
  DaemonLink& operator=(const DaemonLink&) = delete;

  const RankIdentity& identity() const { return identity_; }
  uint64_t attempt();
  JobUuid job_uuid();

  // Takes the rank; waits for a daemon that is not there yet.
  Status Open(Deadline deadline);
  // A connection on which this rank has joined.
  Result<std::shared_ptr<Connection>> Get(Deadline deadline, Patience patience);
  // The one there is, if it lives and nobody is just making another; or null. Waits for nothing.
  std::shared_ptr<Connection> Current();
  // For a line about a call that waits (wait_notice.h). Ask sends the daemon a question, without
  // waiting; a moment later Holdup says what is wrong with it, and what to do. "": it answers.
  void Ask();
  std::string Holdup();
  // Leaves the attempt for the next one.
  Status NextAttempt(Deadline deadline);
  // What was asked and not answered yet is of no interest any more; the next Get connects again.
  void Disconnect(const Status& why);
  // Nothing is to be had from it afterwards.
  void Close();
  // The rank has gone on beyond that step; told with every join from now on.
  void SetPassed(uint64_t step);
  std::optional<uint64_t> passed();
  // Said over whatever connection there is.
  BusyFlag& busy() { return busy_; }

 private:
  struct ConnectingEnds;
  struct Joining;
  enum class Purpose { kThisAttempt, kNextAttempt };

  Result<std::shared_ptr<Connection>> Connect(Purpose purpose, Deadline deadline,
                                              Patience patience);
  Result<std::shared_ptr<Connection>> Try(Purpose purpose, Deadline deadline);
  Result<wire::JoinReply> GoOn(Joining& joining, Deadline deadline) EXCLUDES(mutex_);
  Status Greet(Joining& joining, Deadline deadline) EXCLUDES(mutex_);
  Status Answered(const Joining& joining, uint64_t id, Deadline deadline) EXCLUDES(mutex_);
  wire::Join JoinOf(const Joining& joining, Deadline deadline) EXCLUDES(mutex_);
  void BeginJoining(Purpose purpose) REQUIRES(mutex_);
  void SentNow(Joining& joining) EXCLUDES(mutex_);
  std::shared_ptr<Connection> Newest() EXCLUDES(mutex_);
  std::shared_ptr<Connection> WaitedInVainFor() EXCLUDES(mutex_);
  void LeaveIfReplaced(Connection& silent);
  Status WaitUntilNobodyConnects(Deadline deadline) REQUIRES(mutex_);
  Status Accept(const wire::JoinReply& reply, uint64_t wanted_attempt) REQUIRES(mutex_);

  const RankIdentity identity_;
  BusyFlag busy_;
  Successor successor_;
  Mutex mutex_;
  CondVar changed_;
  bool connecting_ GUARDED_BY(mutex_) = false;  // somebody goes on with joining_
  std::shared_ptr<Joining> joining_ GUARDED_BY(mutex_);
  Status trouble_ GUARDED_BY(mutex_);  // of the last try
  bool closed_ GUARDED_BY(mutex_) = false;
  std::shared_ptr<Connection> connection_ GUARDED_BY(mutex_);
  uint64_t attempt_ GUARDED_BY(mutex_) = 0;
  JobUuid job_uuid_ GUARDED_BY(mutex_);
  std::optional<uint64_t> passed_ GUARDED_BY(mutex_);  // in that attempt
};

}  // namespace holdfast::client
