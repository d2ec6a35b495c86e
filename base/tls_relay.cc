#include "base/tls_relay.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace holdfast {
namespace {

constexpr int kRoundsPerStep = 16;

}  // namespace

TlsRelay::TlsRelay(UniqueFd socket, std::unique_ptr<TlsSession> session, UniqueFd plain)
    : socket_(std::move(socket)), session_(std::move(session)), plain_(std::move(plain)) {}

TlsRelay::Outcome TlsRelay::Step() {
  for (int round = 0; round < kRoundsPerStep; ++round) {
    if (ended_) {
      return Outcome::kEnded;
    }
    progress_ = false;
    socket_events_ = 0;
    plain_events_ = 0;
    // 1. What came by TLS to the plain side.
    if (to_plain_.empty() && !socket_ended_ && !FromSocket()) {
      return Outcome::kEnded;
    }
    ToPlain();
    // 2. And back.
    if (to_socket_.empty() && !plain_ended_) {
      FromPlain();
    }
    if (!to_socket_.empty() && !ToSocket()) {
      return Outcome::kEnded;
    }
    // 3. The end of either.
    if (plain_ended_ && to_socket_.empty() && !parting_) {
      Part();
    }
    if (socket_ended_ && to_plain_.empty()) {
      ended_ = true;
      continue;
    }
    if (!progress_) {
      return Outcome::kWaits;
    }
  }
  return ended_ ? Outcome::kEnded : Outcome::kMore;
}

bool TlsRelay::Fail(const absl::Status& status) {
  status_ = status;
  ended_ = true;
  plain_.reset();
  return false;
}

bool TlsRelay::FromSocket() {
  const absl::StatusOr<TlsStep> step = session_->Read(to_plain_.bytes);
  if (!step.ok()) {
    // Whoever has heard the farewell need not say one.
    return parting_ && session_->fault() == TlsFault::kClosed ? Fail(absl::OkStatus())
                                                              : Fail(step.status());
  }
  switch (step->kind) {
    case TlsStep::Kind::kDone:
      progress_ = true;
      if (first_bytes_.size() < kFirstBytesMax) {
        first_bytes_.append(to_plain_.bytes.data(),
                            std::min(step->bytes, kFirstBytesMax - first_bytes_.size()));
      }
      to_plain_.begin = 0;
      to_plain_.end = plain_ended_ ? 0 : step->bytes;
      break;
    case TlsStep::Kind::kEnded:
      progress_ = true;
      socket_ended_ = true;
      break;
    case TlsStep::Kind::kWantsToRead:
      socket_events_ |= POLLIN;
      break;
    case TlsStep::Kind::kWantsToWrite:
      socket_events_ |= POLLOUT;
      break;
  }
  return true;
}

bool TlsRelay::ToSocket() {
  const absl::StatusOr<TlsStep> step = session_->Write(std::string_view(
      to_socket_.bytes.data() + to_socket_.begin, to_socket_.end - to_socket_.begin));
  if (!step.ok()) {
    return Fail(step.status());
  }
  switch (step->kind) {
    case TlsStep::Kind::kDone:
      progress_ = true;
      sent_ += step->bytes;
      to_socket_.begin += step->bytes;
      break;
    case TlsStep::Kind::kEnded:
      return Fail(absl::OkStatus());
    case TlsStep::Kind::kWantsToRead:
      socket_events_ |= POLLIN;
      break;
    case TlsStep::Kind::kWantsToWrite:
      socket_events_ |= POLLOUT;
      break;
  }
  return true;
}

void TlsRelay::ToPlain() {
  while (!to_plain_.empty()) {
    const ssize_t sent = ::send(plain_.get(), to_plain_.bytes.data() + to_plain_.begin,
                                to_plain_.end - to_plain_.begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      progress_ = true;
      to_plain_.begin += static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      plain_events_ |= POLLOUT;
      return;
    } else if (errno != EINTR) {  // it has gone: what it said before may still lie there
      to_plain_.begin = to_plain_.end = 0;
    }
  }
}

void TlsRelay::FromPlain() {
  const ssize_t got =
      ::recv(plain_.get(), to_socket_.bytes.data(), to_socket_.bytes.size(), MSG_DONTWAIT);
  if (got > 0) {
    progress_ = true;
    to_socket_.begin = 0;
    to_socket_.end = static_cast<size_t>(got);
  } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    plain_events_ |= POLLIN;
  } else {
    progress_ = true;
    plain_ended_ = true;
    plain_.reset();
    to_plain_.begin = to_plain_.end = 0;
  }
}

void TlsRelay::Part() {
  if (!session_->End()) {
    socket_events_ |= POLLOUT;
    return;
  }
  progress_ = true;
  parting_ = true;
  ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace holdfast
