#include "server/runtime/client_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "server/runtime/frames.h"

namespace holdfast {
namespace {

// Per wake-up, so that one client that floods does not starve the others.
constexpr size_t kReadBytesMax = 64 * 1024;
constexpr int kAcceptsMax = 64;
constexpr Duration kErrorWindow = std::chrono::seconds(10);
constexpr uint32_t kErrorsPerWindowMax = 50;
// Of a socket. The kernel doubles it, and counts some 800 bytes for a small reply: about ten of
// them may be unread, with two descriptors each.
constexpr int kSendBufferBytes = 4096;
// Until descriptors are passed again of which too many were in flight.
constexpr Duration kInFlightPause = std::chrono::milliseconds(50);

}  // namespace

struct ClientServer::Reply {
  uint64_t place = 0;
  bool ready = false;
  bool counted = false;  // answers a request that counts against the limit of unanswered ones
  v1::DaemonFrame frame;
  std::string bytes;  // length and message
  size_t written = 0;
  std::shared_ptr<PassedFiles> files;  // that go with its first byte; null: none
};

struct ClientServer::Connection {
  ConnectionId id = 0;
  UniqueFd fd;
  Caller caller;
  bool opened = false;        // Hello was good: the core knows it
  bool closing = false;       // nothing is read any more; ends when all is written
  bool has_deadline = false;  // Hello or the end of closing is awaited
  bool writable_watched = false;
  std::string why;  // closing
  FrameReader reader{kFrameBytesMax};
  uint64_t last_request = 0;
  uint32_t unanswered = 0;
  std::deque<Reply> replies;
  uint64_t next_place = 1;
  uint64_t backlog_bytes = 0;
};

ClientServer::ClientServer(Reactor& reactor, const v1::SocketConfig& config, v1::HelloReply hello,
                           Callbacks callbacks)
    : reactor_(reactor),
      config_(config),
      hello_(std::move(hello)),
      callbacks_(std::move(callbacks)),
      deadline_timer_(reactor.AddTimer([this] { CloseOverdue(); })),
      accept_timer_(reactor.AddTimer([this] {
        if (!stopped_) {
          reactor_.Change(listening_.fd(), EPOLLIN);
        }
      })),
      unread_(reactor, [this](uint32_t uid) { Leaves(uid); }),
      later_timer_(reactor.AddTimer([this] { FlushDelayed(); })) {}

ClientServer::~ClientServer() {
  StopListening();
  for (const auto& [id, connection] : connections_) {
    reactor_.Unwatch(connection->fd.get());
  }
  reactor_.Disarm(deadline_timer_);
  reactor_.Disarm(later_timer_);
}

absl::Status ClientServer::Listen() {
  HF_ASSIGN_OR_RETURN(listening_, ListeningSocket::Open(config_.path(), config_.mode()));
  return reactor_.Watch(listening_.fd(), EPOLLIN, [this](uint32_t) { Accept(); });
}

void ClientServer::Change(const v1::SocketConfig& config) {
  config_.set_connections_max(config.connections_max());
  config_.set_connections_per_uid_max(config.connections_per_uid_max());
  config_.set_requests_per_connection_max(config.requests_per_connection_max());
  config_.set_reply_backlog_bytes_max(config.reply_backlog_bytes_max());
}

void ClientServer::StopListening() {
  if (stopped_) {
    return;
  }
  stopped_ = true;
  reactor_.Disarm(accept_timer_);
  if (listening_.fd() >= 0) {
    reactor_.Unwatch(listening_.fd());
  }
  listening_.Close();
  for (const auto& [id, connection] : connections_) {
    reactor_.Change(connection->fd.get(), connection->writable_watched ? uint32_t{EPOLLOUT} : 0);
  }
}

ClientServer::Connection* ClientServer::Find(ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : found->second.get();
}

std::optional<uint32_t> ClientServer::UserOf(ConnectionId id) const {
  const auto found = connections_.find(id);
  return found == connections_.end() ? std::nullopt
                                     : std::optional<uint32_t>(found->second->caller.uid);
}

void ClientServer::Accept() {
  for (int i = 0; i < kAcceptsMax; ++i) {
    UniqueFd fd(::accept4(listening_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      Admit(std::move(fd));
      continue;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      // The waiting connection would wake us at once again, for ever.
      LogWarning(absl::StrCat("cannot accept a client: ", std::strerror(errno), "; trying again"));
      reactor_.Change(listening_.fd(), 0);
      reactor_.Arm(accept_timer_, reactor_.clock().Now() + kAcceptPause);
    }
    return;
  }
}

void ClientServer::Admit(UniqueFd fd) {
  const absl::StatusOr<Peer> peer = IdentifyPeer(fd.get());
  if (!peer.ok()) {
    LogProtocolError(absl::StrCat("client turned away: ", Message(peer.status())));
    return;
  }
  unread_.LookAt(peer->uid);
  std::string refused;
  if (const size_t all = connections_.size() + unread_.size(); all >= config_.connections_max()) {
    refused = absl::StrCat("the daemon has ", all, " connections (socket.connections_max)");
  } else if (const auto uid = per_uid_.find(peer->uid);
             uid != per_uid_.end() && uid->second >= config_.connections_per_uid_max()) {
    refused = absl::StrCat("uid ", peer->uid, " has ", uid->second,
                           " connections (socket.connections_per_uid_max)");
  }
  if (!refused.empty()) {
    LogProtocolError(absl::StrCat("client turned away: ", peer->process.ToString(),
                                  " uid=", peer->uid, ": ", refused));
    // Best effort: the frame fits into a fresh socket's buffer. Id 1 is what a client's Hello has.
    v1::DaemonFrame frame;
    frame.set_id(1);
    SetFailure(absl::ResourceExhaustedError(refused), frame);
    const std::string bytes = EncodeFrame(frame);
    [[maybe_unused]] const ssize_t sent =
        ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return;
  }
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
  auto connection = std::make_unique<Connection>();
  const ConnectionId id = next_id_++;
  connection->id = id;
  connection->caller = Caller{peer->process, peer->uid, peer->gid};
  const absl::Status watched =
      reactor_.Watch(fd.get(), EPOLLIN, [this, id](uint32_t events) { OnEvents(id, events); });
  if (!watched.ok()) {
    LogWarning(absl::StrCat("client turned away: ", Message(watched)));
    return;
  }
  connection->fd = std::move(fd);
  ++per_uid_[peer->uid];
  Connection& admitted = *connections_.emplace(id, std::move(connection)).first->second;
  SetDeadline(admitted);
}

void ClientServer::OnEvents(ConnectionId id, uint32_t events) {
  if ((events & EPOLLOUT) != 0) {
    Flush(id);
  }
  const Connection* connection = Find(id);
  if (connection == nullptr) {
    return;
  }
  if ((events & EPOLLIN) != 0 && !connection->closing && !stopped_) {
    Read(id);
  } else if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
    Drop(id, connection->closing ? connection->why : "closed by the client");
  }
}

void ClientServer::Read(ConnectionId id) {
  Connection* connection = Find(id);
  std::array<char, kReadBytesMax> buffer;
  iovec data = {buffer.data(), buffer.size()};
  // No room for descriptors: the kernel closes whatever the client sends, and says so.
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  const ssize_t got = ::recvmsg(connection->fd.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno != EAGAIN && errno != EINTR) {
      Drop(id, std::strerror(errno));
    }
    return;
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return Break(id, "it sent descriptors; clients send none");
  }
  if (got == 0) {
    return Drop(id, "closed by the client");
  }
  connection->reader.Append({buffer.data(), static_cast<size_t>(got)});
  // The client may go away in any callback: look it up again for every frame.
  while ((connection = Find(id)) != nullptr && !connection->closing) {
    const absl::StatusOr<std::optional<std::string_view>> bytes = connection->reader.Next();
    if (!bytes.ok()) {
      return Break(id, Message(bytes.status()));
    }
    if (!bytes->has_value()) {
      return;
    }
    v1::ClientFrame frame;
    if (!frame.ParseFromArray((*bytes)->data(), static_cast<int>((*bytes)->size())) ||
        frame.request_case() == v1::ClientFrame::REQUEST_NOT_SET) {
      return Break(id, absl::StrCat("a frame of ", (*bytes)->size(),
                                    " bytes is no request of protocol ", kClientProtocol));
    }
    Dispatch(id, std::move(frame));
  }
}

void ClientServer::Dispatch(ConnectionId id, v1::ClientFrame frame) {
  Connection& connection = *Find(id);
  if (frame.id() <= connection.last_request) {
    return Break(id, absl::StrCat("request id ", frame.id(), " after ", connection.last_request,
                                  "; ids must grow"));
  }
  connection.last_request = frame.id();
  if (frame.has_hello() == connection.opened) {
    return Break(id, connection.opened ? "a second Hello" : "its first request is not Hello");
  }
  if (!connection.opened) {
    return AnswerHello(connection, frame);
  }
  if (connection.unanswered >= config_.requests_per_connection_max()) {
    v1::DaemonFrame refusal;
    refusal.set_id(frame.id());
    SetFailure(
        absl::ResourceExhaustedError(absl::StrCat(
            connection.unanswered,
            " requests of this connection are unanswered (socket.requests_per_connection_max)")),
        refusal);
    return Complete(id, AddReply(connection, Counted::kNo), std::move(refusal), nullptr);
  }
  ++connection.unanswered;
  callbacks_.request(id, std::move(frame));
}

void ClientServer::AnswerHello(Connection& connection, const v1::ClientFrame& frame) {
  const ConnectionId id = connection.id;
  const std::string client = absl::CEscape(frame.hello().client().substr(0, 64));
  v1::DaemonFrame reply;
  reply.set_id(frame.id());
  if (frame.hello().protocol() != kClientProtocol) {
    const std::string why =
        absl::StrCat("the client (", client, ") speaks protocol ", frame.hello().protocol(),
                     ", this daemon (ckptd ", hello_.daemon_version(), ") speaks protocol ",
                     kClientProtocol, "; install the same version on both sides");
    SetFailure(absl::FailedPreconditionError(why), reply);
    callbacks_.protocol_error();
    Complete(id, AddReply(connection, Counted::kNo), std::move(reply), nullptr);
    return Close(id, why);
  }
  connection.opened = true;
  connection.has_deadline = false;
  LogDebug(absl::StrCat("client connected ", connection.caller.process.ToString(),
                        " uid=", connection.caller.uid, " client=", client));
  *reply.mutable_hello() = hello_;
  std::vector<UniqueFd> descriptors;
  if (frame.hello().network_flag() && callbacks_.network_flag != nullptr) {
    if (UniqueFd flag = callbacks_.network_flag(id); flag.valid()) {
      descriptors.push_back(std::move(flag));
      reply.mutable_hello()->set_network_flag(true);
    }
  }
  Complete(id, AddReply(connection, Counted::kNo), std::move(reply), std::move(descriptors));
  if (const Connection* still = Find(id); still != nullptr) {
    callbacks_.opened(id, still->caller);
  }
}

uint64_t ClientServer::Reserve(ConnectionId id) {
  Connection* connection = Find(id);
  if (connection == nullptr) {
    return 0;
  }
  return AddReply(*connection, Counted::kYes);
}

uint64_t ClientServer::AddReply(Connection& connection, Counted counted) {
  Reply& reply = connection.replies.emplace_back();
  reply.place = connection.next_place++;
  reply.counted = counted == Counted::kYes;
  return reply.place;
}

void ClientServer::Complete(ConnectionId id, uint64_t place, v1::DaemonFrame frame,
                            std::vector<UniqueFd> descriptors) {
  std::shared_ptr<PassedFiles> files;
  if (!descriptors.empty()) {
    files = std::make_shared<PassedFiles>();
    files->descriptors = std::move(descriptors);
  }
  Complete(id, place, std::move(frame), std::move(files));
}

void ClientServer::Complete(ConnectionId id, uint64_t place, v1::DaemonFrame frame,
                            std::shared_ptr<PassedFiles> files) {
  Connection* connection = Find(id);
  if (connection == nullptr) {
    return;
  }
  for (Reply& reply : connection->replies) {
    if (reply.place == place) {
      reply.ready = true;
      reply.bytes = EncodeFrame(frame);
      if (reply.bytes.size() > kFrameBytesMax) {
        const size_t bytes = reply.bytes.size();
        const uint64_t request = frame.id();
        frame.Clear();
        frame.set_id(request);
        SetFailure(absl::ResourceExhaustedError(absl::StrCat(
                       "the reply has ", bytes, " bytes; a frame holds ", kFrameBytesMax)),
                   frame);
        files.reset();
        reply.bytes = EncodeFrame(frame);
      }
      reply.frame = std::move(frame);
      reply.files = std::move(files);
      connection->backlog_bytes += reply.bytes.size();
      break;
    }
  }
  Flush(id);
  connection = Find(id);
  if (connection != nullptr && connection->backlog_bytes > config_.reply_backlog_bytes_max()) {
    Break(id, absl::StrCat("it does not read its replies: ", connection->backlog_bytes,
                           " bytes are waiting (socket.reply_backlog_bytes_max)"));
  }
}

void ClientServer::GiveUp(ConnectionId id, uint64_t place) {
  Connection* connection = Find(id);
  if (connection == nullptr) {
    return;
  }
  std::erase_if(connection->replies, [place](const Reply& reply) { return reply.place == place; });
  Flush(id);  // what stood behind it may go
}

void ClientServer::Send(ConnectionId id, v1::DaemonFrame frame) {
  const uint64_t place = Reserve(id);
  if (place != 0) {
    Complete(id, place, std::move(frame), nullptr);
  }
}

ClientServer::Written ClientServer::WriteFront(Connection& connection) {
  Reply& reply = connection.replies.front();
  while (reply.written < reply.bytes.size()) {
    iovec data = {reply.bytes.data() + reply.written, reply.bytes.size() - reply.written};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control = {};
    if (reply.written == 0 && reply.files != nullptr) {
      std::array<int, 2> fds = {};
      const size_t count = std::min(reply.files->descriptors.size(), fds.size());
      for (size_t i = 0; i < count; ++i) {
        fds[i] = reply.files->descriptors[i].get();
      }
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), count * sizeof(int));
    }
    const ssize_t sent = ::sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == EAGAIN) {
        return Written::kSocketFull;
      }
      return errno == ETOOMANYREFS ? Written::kTooManyInFlight : Written::kFailed;
    }
    reply.files.reset();
    reply.written += static_cast<size_t>(sent);
  }
  return Written::kWhole;
}

void ClientServer::Flush(ConnectionId id) {
  Connection* connection = Find(id);
  Written written = Written::kWhole;
  while (connection != nullptr && !connection->replies.empty() &&
         connection->replies.front().ready) {
    written = WriteFront(*connection);
    if (written == Written::kSocketFull || written == Written::kTooManyInFlight) {
      break;
    }
    if (written == Written::kFailed) {
      return Drop(id, std::strerror(errno));
    }
    const Reply reply = std::move(connection->replies.front());
    connection->replies.pop_front();
    connection->backlog_bytes -= reply.bytes.size();
    connection->unanswered -= reply.counted ? 1 : 0;
    callbacks_.sent(id, reply.frame);
    connection = Find(id);
  }
  if (connection == nullptr) {
    return;
  }
  if (connection->closing && connection->replies.empty()) {
    return Drop(id, connection->why);
  }
  if (written == Written::kTooManyInFlight) {
    FlushLater(id);
  } else {
    to_flush_later_.erase(id);
  }
  const bool wants = written == Written::kSocketFull;
  if (wants != connection->writable_watched) {
    connection->writable_watched = wants;
    const uint32_t reading = connection->closing || stopped_ ? 0 : uint32_t{EPOLLIN};
    reactor_.Change(connection->fd.get(), reading | (wants ? uint32_t{EPOLLOUT} : 0));
  }
}

// No fault of this client's: others have not read what they were sent.
void ClientServer::FlushLater(ConnectionId id) {
  if (to_flush_later_.empty()) {
    LogFrom(LogLevel::kWarning, "client socket",
            "answers with descriptors wait: other clients do not read theirs, and the kernel "
            "lets no more be unread than ckptd's limit of open files. Raise LimitNOFILE=, or end "
            "the processes that do not read (ss -xp shows them: Recv-Q)");
    reactor_.Arm(later_timer_, reactor_.clock().Now() + kInFlightPause);
  }
  to_flush_later_.insert(id);
}

void ClientServer::FlushDelayed() {
  for (const ConnectionId id : std::set<ConnectionId>(to_flush_later_)) {
    Flush(id);
  }
  if (!to_flush_later_.empty()) {
    reactor_.Arm(later_timer_, reactor_.clock().Now() + kInFlightPause);
  }
}

void ClientServer::Close(ConnectionId id, const std::string& why) {
  Connection* connection = Find(id);
  if (connection == nullptr || connection->closing) {
    return;
  }
  connection->closing = true;
  connection->why = why;
  SetDeadline(*connection);
  reactor_.Change(connection->fd.get(), connection->writable_watched ? uint32_t{EPOLLOUT} : 0);
  Flush(id);
}

void ClientServer::Break(ConnectionId id, const std::string& why) {
  const Connection& connection = *Find(id);
  LogProtocolError(absl::StrCat("client connection closed: ", connection.caller.process.ToString(),
                                " uid=", connection.caller.uid, ": ", why));
  Drop(id, why);
}

void ClientServer::Drop(ConnectionId id, const std::string& why) {
  const auto found = connections_.find(id);
  const std::unique_ptr<Connection> connection = std::move(found->second);
  connections_.erase(found);
  to_flush_later_.erase(id);
  reactor_.Unwatch(connection->fd.get());
  unread_.Keep(connection->caller.uid, std::move(connection->fd));
  LogDebug(absl::StrCat("client gone ", connection->caller.process.ToString(), ": ", why));
  if (connection->opened) {
    callbacks_.closed(id);
  }
}

void ClientServer::Leaves(uint32_t uid) {
  if (--per_uid_[uid] == 0) {
    per_uid_.erase(uid);
  }
}

void ClientServer::SetDeadline(Connection& connection) {
  connection.has_deadline = true;
  const MonotonicTime at =
      reactor_.clock().Now() + std::chrono::milliseconds(config_.hello_timeout_ms());
  deadlines_.emplace_back(at, connection.id);
  if (deadlines_.size() == 1) {
    reactor_.Arm(deadline_timer_, at);
  }
}

void ClientServer::CloseOverdue() {
  const MonotonicTime now = reactor_.clock().Now();
  while (!deadlines_.empty()) {
    const auto [at, id] = deadlines_.front();
    const Connection* connection = Find(id);
    const bool awaited = connection != nullptr && connection->has_deadline;
    if (awaited && at > now) {
      return reactor_.Arm(deadline_timer_, at);
    }
    deadlines_.pop_front();
    if (awaited && connection->closing) {
      Drop(id, connection->why);
    } else if (awaited) {
      Break(id, absl::StrCat("no Hello within ", config_.hello_timeout_ms(),
                             " ms (socket.hello_timeout_ms)"));
    }
  }
}

void ClientServer::LogProtocolError(const std::string& line) {
  callbacks_.protocol_error();
  const MonotonicTime now = reactor_.clock().Now();
  if (now - error_window_start_ >= kErrorWindow) {
    if (errors_in_window_ > kErrorsPerWindowMax) {
      LogWarning(
          absl::StrCat(errors_in_window_ - kErrorsPerWindowMax, " more such lines left out"));
    }
    error_window_start_ = now;
    errors_in_window_ = 0;
  }
  if (++errors_in_window_ <= kErrorsPerWindowMax) {
    LogWarning(line);
  }
}

}  // namespace holdfast
