// The clients' socket: accepts, checks who connects, cuts the stream into frames, answers Hello,
// and sends replies with their descriptors in order. What the frames mean is the core's business.
//
//   ClientServer server(reactor, config.socket(), hello, callbacks);
//   HF_RETURN_IF_ERROR(server.Listen());
//   server.Send(connection, frame, {});
//
// Every client is hostile until proven otherwise: whatever breaks the protocol closes the
// connection with a log line, and every queue has a limit from the config. A client that does not
// read takes few of the descriptors that the kernel lets be in flight: its socket holds few
// replies, and a connection that ends counts as its user's until they are read. Owner: the Daemon;
// the reactor's thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "holdfast/v1/client.pb.h"
#include "holdfast/v1/config.pb.h"
#include "server/events.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/reactor.h"
#include "server/runtime/unix_socket.h"
#include "server/runtime/unread_sockets.h"

namespace holdfast {

inline constexpr uint32_t kClientProtocol = 1;
inline constexpr uint32_t kFrameBytesMax = 65'536;

class ClientServer {
 public:
  struct Callbacks {
    std::function<void(ConnectionId, const Caller&)> opened;  // after a good Hello
    std::function<void(ConnectionId, v1::ClientFrame)> request;
    std::function<void(ConnectionId)> closed;  // of those that were opened
    std::function<void()> protocol_error;
    std::function<void(ConnectionId, const v1::DaemonFrame&)> sent;  // written to the socket whole
    // A page for a client that wants one (network_flags.h); invalid, or null: there is none.
    std::function<UniqueFd(ConnectionId)> network_flag = nullptr;
  };

  ClientServer(Reactor& reactor, const v1::SocketConfig& config, v1::HelloReply hello,
               Callbacks callbacks);
  ~ClientServer();
  ClientServer(const ClientServer&) = delete;
  ClientServer& operator=(const ClientServer&) = delete;

  absl::Status Listen();
  // Its limits, for what comes from now on; path, mode and hello_timeout_ms stay as they are.
  void Change(const v1::SocketConfig& config);
  // No new connections, no further requests; replies still go out.
  void StopListening();

  // Replies of one connection leave in the order of Reserve. A reply whose descriptors are still
  // being opened has its place already. Complete and Send do nothing when the connection is gone.
  uint64_t Reserve(ConnectionId connection);
  void Complete(ConnectionId connection, uint64_t place, v1::DaemonFrame frame,
                std::vector<UniqueFd> descriptors);
  void Complete(ConnectionId connection, uint64_t place, v1::DaemonFrame frame,
                std::shared_ptr<PassedFiles> files);
  // The request of that place is answered later, by another reply.
  void GiveUp(ConnectionId connection, uint64_t place);
  void Send(ConnectionId connection, v1::DaemonFrame frame);
  // After what is queued has been sent, or could not be for a while.
  void Close(ConnectionId connection, const std::string& why);

  size_t connections() const { return connections_.size(); }
  std::optional<uint32_t> UserOf(ConnectionId connection) const;

 private:
  // kTooManyInFlight: the kernel passes no more descriptors of this daemon now.
  enum class Written : uint8_t { kWhole, kSocketFull, kTooManyInFlight, kFailed };
  // Whether a reply answers a request that counts against the limit of unanswered ones.
  enum class Counted : uint8_t { kNo, kYes };
  struct Reply;
  struct Connection;

  void Accept();
  void Admit(UniqueFd fd);
  void OnEvents(ConnectionId id, uint32_t events);
  void Read(ConnectionId id);
  void Dispatch(ConnectionId id, v1::ClientFrame frame);
  void AnswerHello(Connection& connection, const v1::ClientFrame& frame);
  void Flush(ConnectionId id);
  void FlushLater(ConnectionId id);
  void FlushDelayed();
  Written WriteFront(Connection& connection);
  uint64_t AddReply(Connection& connection, Counted counted);
  void Break(ConnectionId id, const std::string& why);  // protocol error: closes at once
  void Drop(ConnectionId id, const std::string& why);
  void SetDeadline(Connection& connection);
  void CloseOverdue();
  void LogProtocolError(const std::string& line);
  Connection* Find(ConnectionId id);
  void Leaves(uint32_t uid);  // one connection of the user

  Reactor& reactor_;
  v1::SocketConfig config_;
  const v1::HelloReply hello_;
  const Callbacks callbacks_;
  ListeningSocket listening_;
  bool stopped_ = false;
  Reactor::TimerId deadline_timer_;
  Reactor::TimerId accept_timer_;
  ConnectionId next_id_ = 1;
  std::unordered_map<ConnectionId, std::unique_ptr<Connection>> connections_;
  std::unordered_map<uint32_t, uint32_t> per_uid_;  // connections, with those in unread_
  UnreadSockets unread_;
  // Whose next reply has descriptors that the kernel did not pass: tried again by the timer.
  std::set<ConnectionId> to_flush_later_;
  Reactor::TimerId later_timer_;
  // (when, which), in order: every deadline is the same time ahead. Entries of connections that met
  // theirs are skipped.
  std::deque<std::pair<MonotonicTime, ConnectionId>> deadlines_;
  MonotonicTime error_window_start_;
  uint32_t errors_in_window_ = 0;
};

}  // namespace holdfast
