// One connection to ckptd: requests out, replies in, matched by id. Several threads may have
// requests under way; none of them belongs to the library: whoever waits first reads the socket and
// hands the others their replies.
//
//   HF_TRY_ASSIGN(std::shared_ptr<Connection> connection, Connection::Dial(path, deadline));
//   HF_TRY_ASSIGN(Answer<wire::Grant> grant, connection->Call<wire::Grant>(wire::BeginSave{…},
//   deadline)); Map(grant.descriptors[0]);
//
// Once anything is wrong with the stream (closed, garbage, descriptors missing, half a request
// sent) the connection is broken for good: every call answers with the reason, and alive() is
// false. A deadline that passes breaks nothing: the late reply is thrown away, and what it granted
// is given back. Until it has come, a further request is not sent: it waits for that. A call whose
// deadline minds silence ends early when the daemon says nothing at all, not even to a question
// that it answers at once. Calls of that kind that follow end without waiting, until something has
// come. Shared by the job, its saves and its handles; the descriptor is closed when the last lets
// go.
#pragma once

#include <sys/types.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "client-lib/src/busy_flag.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/wire.h"

namespace holdfast::client {

template <typename Message>
struct Answer {
  Message message;
  std::vector<ForkClosedFd> descriptors;
};

// A failure that the daemon answered with, as the caller will see it.
Status FromFailure(const wire::Failure& failure);

class Connection {
 public:
  // Connects (one attempt) and says hello. `busy` (may be null) gets what the daemon gives for it.
  // For readers, which have no DaemonLink: this connection itself says what keeps its callers
  // (wait_notice.h).
  static Result<std::shared_ptr<Connection>> Dial(const std::string& path, Deadline deadline,
                                                  BusyFlag* busy = nullptr);

  // The same in steps, for those who go on with it in a later call: connects; says hello; and, when
  // that was answered (WaitFor), takes the answer and lets go of what earlier connections left.
  static Result<std::shared_ptr<Connection>> Connect(const std::string& path, Deadline deadline);
  Result<uint64_t> SayHello(bool wants_busy_flag, Deadline deadline);
  Status TakeHello(uint64_t id, const std::string& path, Deadline deadline, BusyFlag* busy);

  explicit Connection(ForkClosedFd fd) : fd_(std::move(fd)) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Send alone, for those who do something between request and reply; then Receive with the id that
  // it gave.
  Result<uint64_t> Send(const wire::Request& request, Deadline deadline);
  template <typename Message>
  Result<Answer<Message>> Receive(uint64_t id, Deadline deadline) {
    HF_TRY_ASSIGN(Arrived arrived, Await(id, deadline));
    if (auto* message = std::get_if<Message>(&arrived.reply)) {
      return Answer<Message>{std::move(*message), std::move(arrived.descriptors)};
    }
    return Unexpected(arrived.reply);
  }
  // Until the reply is there, for a Receive that follows. When it is not there in time it is still
  // wanted: call again, or Forget.
  Status WaitFor(uint64_t id, Deadline deadline);
  // Said without waiting for anything, also where earlier requests are unanswered; nobody hears the
  // reply. Left out when another one was said a moment ago, too many are unanswered, or there is no
  // room: for what the next one says as well.
  void Mention(const wire::Request& request);
  // Whether anything has come from the daemon since somebody waited in vain; looks at the socket,
  // without waiting.
  bool Answers();
  // Asks what any daemon answers at once, and does not wait: a moment later HangText knows.
  void Ask();
  // What is wrong with a daemon that has said nothing since it was asked, and what to do; "" if it
  // answers, or was not asked. Looks at the socket, without waiting; as Hangs does.
  std::string HangText();
  // The daemon's; 0: unknown (daemon_process.h).
  pid_t Process() const;
  // Whether a wait was given up since the daemon says nothing, and nothing has come since.
  bool Hangs();
  // Nobody waits for that reply any more, and a daemon that leaves it out does not hang for that.
  void Forget(uint64_t id);
  template <typename Message>
  Result<Answer<Message>> Call(const wire::Request& request, Deadline deadline) {
    HF_TRY_ASSIGN(const uint64_t id, Send(request, deadline));
    return Receive<Message>(id, deadline);
  }
  // Nobody needs the answer: a daemon that is slow with it does not hang for that.
  template <typename Message>
  Result<Answer<Message>> CallInPassing(const wire::Request& request, Deadline deadline) {
    HF_TRY_ASSIGN(const uint64_t id, Send(request, deadline));
    Result<Answer<Message>> answer = Receive<Message>(id, deadline);
    Forget(id);
    return answer;
  }

  // Lets go of a copy when the next request is sent, without waiting for the answer.
  void ReleaseLater(uint64_t hold);
  bool alive();  // looks at the socket, without waiting
  // From any thread: everybody who waits on it gets `why`.
  void Break(const Status& why);

 private:
  struct Kept;
  // What this process may still hold for reading at that daemon, by an earlier connection, and
  // nobody wants any more. What cannot be released now is left to the next connection.
  void ReleaseAbandoned(const std::string& path, Deadline deadline);
  struct Arrived {
    wire::Reply reply;
    std::vector<ForkClosedFd> descriptors;
  };
  // A request that somebody waits for; or nobody any more (overdue), or never (what was given
  // back).
  struct Pending {
    uint64_t step = 0;  // of BeginSave
    bool abandoned = false;
    bool overdue = false;
    bool mentioned = false;
    bool arrived = false;
    Arrived value;
  };

  Result<Arrived> Await(uint64_t id, Deadline deadline);
  Status Unexpected(const wire::Reply& reply);
  Status WriteFrame(const wire::Request& request, uint64_t id, Deadline deadline) EXCLUDES(mutex_);
  Status WaitForLocked(uint64_t id, Deadline deadline) REQUIRES(mutex_);
  void SayUnheard(const wire::Request& request) EXCLUDES(mutex_);
  Status Settle(Deadline deadline) REQUIRES(mutex_);
  Status Hanging() const;  // what a call that is given up for that ends with
  Status NotInTime() const REQUIRES(mutex_);
  void ReadOrWait(Deadline deadline) REQUIRES(mutex_);
  void ReadOrSay(Kept& kept, Deadline deadline) REQUIRES(mutex_);
  Status ParseInbox() REQUIRES(mutex_);
  Status Dispatch(wire::DaemonFrame frame, std::vector<ForkClosedFd> descriptors) REQUIRES(mutex_);
  void GiveBack(const Pending& pending, const wire::Reply& reply) REQUIRES(mutex_);
  void BreakLocked(const Status& why) REQUIRES(mutex_);

  const ForkClosedFd fd_;
  bool is_readers_ = false;  // made by Dial
  Mutex mutex_;
  CondVar changed_;
  Status broken_ GUARDED_BY(mutex_);
  bool reading_ GUARDED_BY(mutex_) = false;  // somebody is reading in ReadOrWait, without the lock
  bool writing_ GUARDED_BY(mutex_) = false;  // somebody is in WriteFrame
  uint64_t next_id_ GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, Pending> pending_ GUARDED_BY(mutex_);
  size_t overdue_ GUARDED_BY(mutex_) = 0;    // abandoned because their deadline passed
  bool silent_ GUARDED_BY(mutex_) = false;   // nothing has come since a deadline passed
  bool hangs_ GUARDED_BY(mutex_) = false;    // nor since somebody gave it up for that
  uint64_t heard_ GUARDED_BY(mutex_) = 1;    // grows with whatever comes
  uint64_t asked_ GUARDED_BY(mutex_) = 0;    // heard_, as Ask was called
  size_t mentioned_ GUARDED_BY(mutex_) = 0;  // and not answered
  Deadline mention_again_ GUARDED_BY(mutex_) = Deadline::In(Milliseconds(0));
  Deadline say_again_ GUARDED_BY(mutex_) = Deadline::In(Milliseconds(0));
  std::string inbox_ GUARDED_BY(mutex_);
  std::vector<ForkClosedFd> inbox_descriptors_ GUARDED_BY(mutex_);
  std::vector<wire::Request> give_back_ GUARDED_BY(mutex_);  // to be sent before the next request
  std::array<char, 16 * 1024> buffer_;                       // of the one who is reading
};

}  // namespace holdfast::client
