#include "client-lib/src/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/daemon_process.h"
#include "client-lib/src/quiet_wait.h"
#include "client-lib/src/read_ticket.h"
#include "client-lib/src/socket.h"
#include "client-lib/src/wait_notice.h"
#include "holdfast/version.h"

namespace holdfast::client {
namespace {

// More than any frame announces; beyond it the stream has lost its order.
constexpr size_t kWaitingDescriptorsMax = 64;
// How long a new request waits at least for the answers that are overdue.
constexpr Milliseconds kSettleTime{100};
// For all that earlier connections left: a daemon that does its work takes some microseconds each.
constexpr Milliseconds kReleaseTime{1000};
// What is mentioned to a daemon that hangs it has to read when it goes on; and the next request
// counts as unanswered together with them (socket.requests_per_connection_max).
constexpr size_t kMentionsMax = 32;
constexpr Milliseconds kBetweenMentions{250};
// Of one connection: a reader may make many short calls, each of which is kept for a second.
constexpr Milliseconds kBetweenLines = WaitNotice::kBetween / 2;

Code FromWireCode(int32_t code) {
  switch (code) {  // absl::StatusCode's numbers
    case 3:
    case 11:
      return Code::kInvalidArgument;
    case 4:
      return Code::kDeadlineExceeded;
    case 5:
      return Code::kNotFound;
    case 6:
    case 7:
    case 9:
    case 16:
      return Code::kRefused;
    case 8:
      return Code::kNoRoom;
    case 1:
    case 10:
      return Code::kAbandoned;
    case 14:
      return Code::kUnavailable;
    case 15:
      return Code::kCorrupt;
    default:
      return Code::kInternal;
  }
}

Code FromReason(wire::Reason reason, int32_t code) {
  switch (reason) {
    case wire::Reason::kNothingToRestore:
      return Code::kNothingToRestore;
    case wire::Reason::kSuperseded:
      return Code::kSuperseded;
    case wire::Reason::kShed:
      return Code::kShed;
    case wire::Reason::kAbandoned:
      return Code::kAbandoned;
    case wire::Reason::kNoRoom:
    case wire::Reason::kTooLarge:
      return Code::kNoRoom;
    case wire::Reason::kNotYet:
      return Code::kDeadlineExceeded;
    case wire::Reason::kNotRestored:
    case wire::Reason::kOtherOwner:
    case wire::Reason::kRankTaken:
      return Code::kRefused;
    case wire::Reason::kTopology:
      return Code::kTopology;
    case wire::Reason::kUnreadable:
      return Code::kUnreadable;
    case wire::Reason::kUnknownSession:
      return Code::kUnavailable;
    case wire::Reason::kUnspecified:
      break;
  }
  return FromWireCode(code);
}

Reason ReasonOf(wire::Reason reason) {
  switch (reason) {
    case wire::Reason::kNotRestored:
      return Reason::kNotRestored;
    case wire::Reason::kOtherOwner:
      return Reason::kOtherOwner;
    case wire::Reason::kTooLarge:
      return Reason::kTooLarge;
    case wire::Reason::kNotYet:
      return Reason::kNotYet;
    default:
      return Reason::kNone;
  }
}

Status ProtocolError(std::string_view what) {
  return Status(
      Code::kInternal,
      absl::StrCat("ckptd does not keep to the protocol: ", ToAbsl(what),
                   "; the connection is given up (are client and daemon of the same version?)"));
}

}  // namespace

Status FromFailure(const wire::Failure& failure) {
  return Status(FromReason(failure.reason, failure.code), failure.message,
                ReasonOf(failure.reason));
}

Result<std::shared_ptr<Connection>> Connection::Dial(const std::string& path, Deadline deadline,
                                                     BusyFlag* busy) {
  HF_TRY_ASSIGN(std::shared_ptr<Connection> connection, Connect(path, deadline));
  connection->is_readers_ = true;
  HF_TRY_ASSIGN(const uint64_t hello, connection->SayHello(busy != nullptr, deadline));
  HF_TRY(connection->TakeHello(hello, path, deadline, busy));
  return connection;
}

Result<std::shared_ptr<Connection>> Connection::Connect(const std::string& path,
                                                        Deadline deadline) {
  HF_TRY_ASSIGN(ForkClosedFd fd, ConnectUnix(path, deadline));
  return std::make_shared<Connection>(std::move(fd));
}

Result<uint64_t> Connection::SayHello(bool wants_busy_flag, Deadline deadline) {
  return Send(wire::Hello{wire::kProtocol, "libholdfast " HOLDFAST_VERSION_STRING, wants_busy_flag},
              deadline);
}

Status Connection::TakeHello(uint64_t id, const std::string& path, Deadline deadline,
                             BusyFlag* busy) {
  HF_TRY_ASSIGN(const Answer<wire::HelloReply> hello, Receive<wire::HelloReply>(id, deadline));
  if (hello.message.protocol != wire::kProtocol) {
    return Status(
        Code::kRefused,
        absl::StrCat("ckptd ", ForWire(hello.message.daemon_version, 64), " at '", path,
                     "' speaks protocol ", hello.message.protocol, ", this library ",
                     wire::kProtocol, ": use a daemon and a library that belong together"));
  }
  if (busy != nullptr && !hello.descriptors.empty()) {
    busy->Attach(hello.descriptors[0].get());
  }
  ReleaseAbandoned(path, deadline);
  return Status();
}

void Connection::ReleaseAbandoned(const std::string& path, Deadline deadline) {
  const Deadline moment = deadline.Earlier(Deadline::In(kReleaseTime));
  for (const uint64_t hold : AbandonedTickets(path)) {
    const Result<uint64_t> id = Send(wire::ReleaseRead{hold}, moment);
    if (!id.ok()) {
      return;
    }
    const Status released = Receive<wire::Done>(*id, moment).status();
    if (released.ok()) {
      SettleAbandoned(hold);
      continue;
    }
    Forget(*id);  // so that the next request is not refused for it
    if (moment.passed() || Hangs() || !alive()) {
      return;
    }
  }
}

void Connection::ReleaseLater(uint64_t hold) {
  const MutexLock lock(mutex_);
  give_back_.push_back(wire::ReleaseRead{hold});
}

bool Connection::alive() {
  const MutexLock lock(mutex_);
  if (broken_.ok() && HungUp(fd_.get())) {  // while nobody was waiting for anything
    BreakLocked(
        Status(Code::kUnavailable, "ckptd closed the connection (it was stopped or restarted)"));
  }
  return broken_.ok();
}

void Connection::Break(const Status& why) {
  const MutexLock lock(mutex_);
  BreakLocked(why);
}

void Connection::BreakLocked(const Status& why) {
  if (broken_.ok()) {
    broken_ = why;
    ::shutdown(fd_.get(), SHUT_RDWR);  // wakes whoever polls; closed when the last user lets go
  }
  changed_.NotifyAll();
}

Result<uint64_t> Connection::Send(const wire::Request& request, Deadline deadline) {
  uint64_t id = 0;
  std::vector<wire::Request> give_back;
  {
    // 1. One writer at a time: a frame must not be cut in two by another.
    const MutexLock lock(mutex_);
    HF_TRY(Settle(deadline));
    while (writing_ && broken_.ok()) {
      if (!changed_.WaitUntil(mutex_, deadline.NextLook())) {
        mutex_.Unlock();
        deadline.Look();
        mutex_.Lock();
        if (deadline.passed()) {
          return Status(Code::kDeadlineExceeded,
                        "send a request: ckptd does not read what others send");
        }
      }
    }
    if (!broken_.ok()) {
      return broken_;
    }
    writing_ = true;
    give_back.swap(give_back_);
    for (size_t i = 0; i < give_back.size(); ++i) {
      pending_[next_id_ + i].abandoned = true;
    }
    id = next_id_ + give_back.size();
    next_id_ = id + 1;
    Pending& pending = pending_[id];
    if (const auto* begin = std::get_if<wire::BeginSave>(&request)) {
      pending.step = begin->step;
    }
  }

  // 2. What late replies granted goes back first.
  Status sent;
  for (size_t i = 0; i < give_back.size() && sent.ok(); ++i) {
    sent = WriteFrame(give_back[i], id - give_back.size() + i, deadline);
  }
  if (sent.ok()) {
    sent = WriteFrame(request, id, deadline);
  }

  // 3. After a partial frame nothing that follows could be understood.
  const MutexLock lock(mutex_);
  writing_ = false;
  if (!sent.ok()) {
    pending_.erase(id);
    if (sent.code() != Code::kInvalidArgument) {
      BreakLocked(sent);
    }
  }
  changed_.NotifyAll();
  if (!sent.ok()) {
    return sent;
  }
  return id;
}

void Connection::Mention(const wire::Request& request) {
  {
    const MutexLock lock(mutex_);
    if (!mention_again_.passed()) {
      return;
    }
    mention_again_ = Deadline::In(kBetweenMentions);
  }
  SayUnheard(request);
}

void Connection::Ask() {
  {
    const MutexLock lock(mutex_);
    if (pending_.empty()) {
      return;  // nobody waits for it
    }
    asked_ = heard_;
  }
  SayUnheard(wire::ReleaseRead{0});  // nothing is held by that number
}

pid_t Connection::Process() const {
  return PeerProcess(fd_.get());
}

bool Connection::Hangs() {
  const MutexLock lock(mutex_);
  if (hangs_ && broken_.ok()) {
    ReadOrWait(Deadline::In(Milliseconds(0)));
  }
  return hangs_ && broken_.ok();
}

std::string Connection::HangText() {
  {
    const MutexLock lock(mutex_);
    if (broken_.ok() && (hangs_ || asked_ == heard_)) {
      ReadOrWait(Deadline::In(Milliseconds(0)));
    }
    if (!broken_.ok() || (!hangs_ && asked_ != heard_)) {
      return "";
    }
  }
  return client::HangText(fd_.get());
}

void Connection::SayUnheard(const wire::Request& request) {
  uint64_t id = 0;
  {
    const MutexLock lock(mutex_);
    if (writing_ || !broken_.ok() || mentioned_ >= kMentionsMax) {
      return;
    }
    writing_ = true;
    id = next_id_++;
    pending_[id].abandoned = true;
    pending_[id].mentioned = true;
    ++mentioned_;
  }
  const Result<std::string> frame = wire::EncodeFrame(id, request);
  const Result<bool> sent = frame.ok() ? TrySend(fd_.get(), *frame) : Result<bool>(frame.status());

  const MutexLock lock(mutex_);
  writing_ = false;
  if (!sent.ok() || !*sent) {
    pending_.erase(id);
    --mentioned_;
  }
  if (!sent.ok() && sent.status().code() != Code::kInvalidArgument) {
    BreakLocked(sent.status());
  }
  changed_.NotifyAll();
}

bool Connection::Answers() {
  const MutexLock lock(mutex_);
  if (silent_ && broken_.ok()) {
    ReadOrWait(Deadline::In(Milliseconds(0)));
  }
  return !silent_ || !broken_.ok();
}

Status Connection::WriteFrame(const wire::Request& request, uint64_t id, Deadline deadline) {
  HF_TRY_ASSIGN(const std::string frame, wire::EncodeFrame(id, request));
  return SendAll(fd_.get(), frame, deadline);
}

Result<Connection::Arrived> Connection::Await(uint64_t id, Deadline deadline) {
  const MutexLock lock(mutex_);
  const Status waited = WaitForLocked(id, deadline);
  const auto mine = pending_.find(id);
  if (mine == pending_.end()) {
    return waited;
  }
  if (waited.ok()) {
    Arrived value = std::move(mine->second.value);
    pending_.erase(mine);
    return value;
  }
  if (!broken_.ok()) {
    pending_.erase(mine);
    return waited;
  }
  mine->second.abandoned = true;
  mine->second.overdue = true;
  ++overdue_;
  silent_ = true;
  return waited;
}

Status Connection::WaitFor(uint64_t id, Deadline deadline) {
  const MutexLock lock(mutex_);
  // What an earlier wait was given up for may be there by now.
  if (hangs_ || deadline.passed()) {
    ReadOrWait(Deadline::In(Milliseconds(0)));
  }
  return WaitForLocked(id, deadline);
}

// Of one call: since when the daemon keeps it.
struct Connection::Kept {
  WaitNotice notice;
  const Deadline::Clock::time_point since = Deadline::Clock::now();
};

Status Connection::WaitForLocked(uint64_t id, Deadline deadline) {
  QuietWait quiet(deadline, heard_);
  Kept kept;
  while (true) {
    const auto mine = pending_.find(id);
    if (mine == pending_.end()) {
      return Status(Code::kInternal, "waited twice for one reply");
    }
    if (mine->second.arrived) {
      return Status();
    }
    if (!broken_.ok()) {
      return broken_;
    }
    if (deadline.passed()) {
      return NotInTime();
    }
    if (deadline.may_mind_silence()) {
      const QuietWait::Next next = quiet.Look(heard_);
      if (next == QuietWait::Next::kGiveUp && !hangs_) {
        hangs_ = true;
        changed_.NotifyAll();  // the others need not find out for themselves
      }
      if (hangs_ && deadline.minds_silence()) {
        return Hanging();
      }
      if (next == QuietWait::Next::kAsk) {
        mutex_.Unlock();
        Ask();
        mutex_.Lock();
        continue;
      }
    }
    ReadOrSay(kept, quiet.Slice(deadline));
  }
}

void Connection::Forget(uint64_t id) {
  const MutexLock lock(mutex_);
  const auto found = pending_.find(id);
  if (found == pending_.end()) {
    return;
  }
  if (found->second.arrived) {
    pending_.erase(found);
    return;
  }
  overdue_ -= found->second.overdue ? 1 : 0;
  found->second.overdue = false;
  found->second.abandoned = true;
}

// A daemon that let a deadline pass hangs, or was only slow. For a caller that minds silence a
// moment tells; any other one waits until it is answered again.
Status Connection::Settle(Deadline deadline) {
  if (deadline.minds_silence() && hangs_) {
    ReadOrWait(Deadline::In(Milliseconds(0)));
  }
  if (deadline.minds_silence() && hangs_ && broken_.ok()) {
    return Hanging();
  }
  const Deadline patience = deadline.Patience(kSettleTime);
  Kept kept;
  while (overdue_ != 0 && broken_.ok()) {
    if (patience.passed()) {
      return Hanging();
    }
    ReadOrSay(kept, patience);
  }
  return broken_;
}

Status Connection::Hanging() const {
  return Status(Code::kUnavailable, client::HangText(fd_.get()));
}

// With who hangs, if it says nothing to a question either.
Status Connection::NotInTime() const {
  const bool hangs = hangs_ || asked_ == heard_;
  return Status(Code::kDeadlineExceeded,
                absl::StrCat("ckptd did not answer in time",
                             hangs ? absl::StrCat("; ", client::HangText(fd_.get())) : ""));
}

// As ReadOrWait; a reader's connection says now and then what keeps its caller.
void Connection::ReadOrSay(Kept& kept, Deadline deadline) {
  if (!is_readers_) {
    ReadOrWait(deadline);
    return;
  }
  const auto so_far = Deadline::Clock::now() - kept.since;
  const WaitNotice::Next next = kept.notice.Look(so_far);
  if (next == WaitNotice::Next::kNothing) {
    ReadOrWait(deadline.Earlier(Deadline::In(Deadline::kBetweenLooks)));
    return;
  }
  const bool say = next == WaitNotice::Next::kSay && say_again_.passed();
  if (say) {
    say_again_ = Deadline::In(kBetweenLines);
  }
  mutex_.Unlock();
  if (next == WaitNotice::Next::kAsk) {
    Ask();
  }
  if (say) {
    const std::string hang = HangText();
    SayWaiting({}, "reading checkpoints", so_far,
               hang.empty() ? "ckptd still works on it, since a tier or another node is slow: see "
                              "`ckptctl status`"
                            : hang);
  }
  mutex_.Lock();
}

// Lets the lock go while it reads or waits; something may have changed when it returns.
void Connection::ReadOrWait(Deadline deadline) {
  if (reading_) {
    changed_.WaitUntil(mutex_, deadline.NextLook());
    mutex_.Unlock();
    deadline.Look();
    mutex_.Lock();
    return;
  }
  reading_ = true;
  mutex_.Unlock();
  std::vector<ForkClosedFd> descriptors;
  const Result<size_t> got = ReceiveSome(fd_.get(), buffer_, descriptors, deadline);
  mutex_.Lock();
  reading_ = false;
  Status read = got.status();
  if (read.ok()) {
    silent_ = false;
    hangs_ = false;
    ++heard_;
    inbox_.append(buffer_.data(), *got);
    std::move(descriptors.begin(), descriptors.end(), std::back_inserter(inbox_descriptors_));
    read = ParseInbox();
  }
  if (!read.ok() && read.code() != Code::kDeadlineExceeded) {
    BreakLocked(read);
  }
  changed_.NotifyAll();  // to those who got a reply, and to whoever reads next
}

Status Connection::ParseInbox() {
  size_t at = 0;
  while (inbox_.size() - at >= wire::kFrameHeaderBytes) {
    size_t length = 0;
    for (size_t i = 0; i < wire::kFrameHeaderBytes; ++i) {
      length |= static_cast<size_t>(static_cast<unsigned char>(inbox_[at + i])) << (8 * i);
    }
    if (length == 0 || length > wire::kMessageBytesMax) {
      return ProtocolError(absl::StrCat("a frame of ", length, " bytes"));
    }
    if (inbox_.size() - at - wire::kFrameHeaderBytes < length) {
      break;
    }
    Result<wire::DaemonFrame> frame =
        wire::DecodeFrame(std::string_view(inbox_).substr(at + wire::kFrameHeaderBytes, length));
    if (!frame.ok()) {
      return ProtocolError(frame.status().message());
    }
    // Descriptors come with the first byte of their frame, so a whole frame has its own at the head
    // of the queue.
    const size_t wanted = wire::DescriptorCount(frame->reply);
    if (inbox_descriptors_.size() < wanted) {
      return ProtocolError(absl::StrCat("a frame with ", inbox_descriptors_.size(), " of its ",
                                        wanted, " descriptors"));
    }
    const auto end = inbox_descriptors_.begin() + static_cast<ptrdiff_t>(wanted);
    std::vector<ForkClosedFd> descriptors(std::make_move_iterator(inbox_descriptors_.begin()),
                                          std::make_move_iterator(end));
    inbox_descriptors_.erase(inbox_descriptors_.begin(), end);
    HF_TRY(Dispatch(*std::move(frame), std::move(descriptors)));
    at += wire::kFrameHeaderBytes + length;
  }
  inbox_.erase(0, at);
  if ((inbox_.empty() && !inbox_descriptors_.empty()) ||
      inbox_descriptors_.size() > kWaitingDescriptorsMax) {
    return ProtocolError("descriptors that no frame announced");
  }
  return Status();
}

Status Connection::Dispatch(wire::DaemonFrame frame, std::vector<ForkClosedFd> descriptors) {
  const auto found = pending_.find(frame.id);
  if (found == pending_.end() || found->second.arrived) {
    return ProtocolError(
        absl::StrCat("an answer to request ", frame.id, ", which does not wait for one"));
  }
  if (found->second.abandoned) {
    overdue_ -= found->second.overdue ? 1 : 0;
    mentioned_ -= found->second.mentioned ? 1 : 0;
    GiveBack(found->second, frame.reply);
    pending_.erase(found);
    return Status();
  }
  found->second.arrived = true;
  found->second.value = {std::move(frame.reply), std::move(descriptors)};
  return Status();
}

// Nobody waits any more for what this reply grants.
void Connection::GiveBack(const Pending& pending, const wire::Reply& reply) {
  const wire::Source* source = std::get_if<wire::Source>(&reply);
  if (const auto* outcome = std::get_if<wire::SessionOutcome>(&reply);
      outcome != nullptr && outcome->source.has_value()) {
    source = &*outcome->source;
  }
  if (source != nullptr) {
    give_back_.push_back(wire::ReleaseRead{source->hold});
  }
  if (const auto* grant = std::get_if<wire::Grant>(&reply)) {
    give_back_.push_back(wire::AbortSave{pending.step, grant->slot, grant->generation,
                                         "the client had given up waiting for the slot"});
    if (grant->descriptor) {
      give_back_.push_back(wire::ReleaseSlots{{grant->slot}});
    }
  }
  if (const auto* reserved = std::get_if<wire::ReserveReply>(&reply);
      reserved != nullptr && reserved->descriptor) {
    give_back_.push_back(wire::ReleaseSlots{{reserved->slot}});
  }
}

Status Connection::Unexpected(const wire::Reply& reply) {
  if (const auto* failure = std::get_if<wire::Failure>(&reply)) {
    const Status status = FromFailure(*failure);
    if (failure->reason == wire::Reason::kUnknownSession) {
      Break(status);  // the next call joins again
    }
    return status;
  }
  const Status error = ProtocolError("an answer of the wrong kind");
  Break(error);
  return error;
}

}  // namespace holdfast::client
