// Carries bytes between a TLS connection and a plain socket, for those who cannot speak TLS on a
// descriptor that they are given.
//
//   TlsRelay relay(std::move(socket), std::move(session), std::move(plain));
//   while (relay.Step() == TlsRelay::Outcome::kMore) {}   // when one of the two is ready
//   // poll() for relay.socket_events() and relay.plain_events(), and again
//
// What is ahead of a reader that does not read is bounded: one buffer in each direction, and the
// sockets' own. Where the plain side ends, what it said goes out first, then TLS's farewell; what
// still comes is thrown away until the other side has ended, too, so that nothing is lost by a
// reset. One thread; nothing here waits: deadlines are its owner's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/tls.h"
#include "base/unique_fd.h"

namespace holdfast {

class TlsRelay {
 public:
  enum class Outcome { kWaits, kMore, kEnded };
  // After the session's handshake; both do not block.
  TlsRelay(UniqueFd socket, std::unique_ptr<TlsSession> session, UniqueFd plain);

  // Moves what can be moved now, and not more than somebody else can wait for.
  Outcome Step();

  int socket() const { return socket_.get(); }
  int plain() const { return plain_.get(); }  // -1: it has ended
  // poll()'s: what the next step waits for.
  int16_t socket_events() const { return socket_events_; }
  int16_t plain_events() const { return plain_events_; }

  // After kEnded: OK: one side said that it is done.
  const absl::Status& status() const { return status_; }
  TlsFault fault() const { return session_->fault(); }

  bool parting() const { return parting_; }  // the plain side has ended, all is said
  // The other side does not take what it is to get.
  bool owes() const { return !to_socket_.empty() || (plain_ended_ && !parting_); }
  uint64_t sent() const { return sent_; }  // bytes that it took
  // The first bytes that came by TLS, at most so many.
  static constexpr size_t kFirstBytesMax = 4096;
  const std::string& first_bytes() const { return first_bytes_; }

 private:
  // Bytes under way, between `begin` and `end`.
  struct Buffer {
    std::vector<char> bytes = std::vector<char>(16 << 10);
    size_t begin = 0;
    size_t end = 0;
    bool empty() const { return begin == end; }
  };
  bool Fail(const absl::Status& status);
  bool FromSocket();
  bool ToSocket();
  void ToPlain();
  void FromPlain();
  void Part();

  const UniqueFd socket_;
  const std::unique_ptr<TlsSession> session_;
  UniqueFd plain_;
  Buffer to_socket_;
  Buffer to_plain_;
  bool socket_ended_ = false;  // nothing more comes from there
  bool plain_ended_ = false;
  bool parting_ = false;
  bool progress_ = false;
  bool ended_ = false;
  int16_t socket_events_ = 0;
  int16_t plain_events_ = 0;
  uint64_t sent_ = 0;
  std::string first_bytes_;
  absl::Status status_;
};

}  // namespace holdfast
