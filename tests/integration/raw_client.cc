#include "tests/integration/raw_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace holdfast {
namespace {

using SteadyClock = std::chrono::steady_clock;

int MillisUntil(SteadyClock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(until - SteadyClock::now()).count();
  return static_cast<int>(std::max<int64_t>(left, 0)) + 1;
}

}  // namespace

std::string Framed(std::string_view message) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) {
    bytes.push_back(static_cast<char>(message.size() >> (8 * i)));
  }
  return bytes.append(message);
}

std::unique_ptr<RawClient> RawClient::Connect(const std::string& socket) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  socket.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return nullptr;
  }
  return std::unique_ptr<RawClient>(new RawClient(std::move(fd)));
}

std::unique_ptr<RawClient> RawClient::Greet(const std::string& socket) {
  std::unique_ptr<RawClient> client = Connect(socket);
  if (client != nullptr) {
    v1::ClientFrame frame;
    frame.mutable_hello()->set_protocol(1);
    frame.mutable_hello()->set_client("raw test client");
    const std::optional<RawReply> reply = client->Call(frame);
    if (!reply.has_value() || !reply->frame.has_hello()) {
      return nullptr;
    }
  }
  return client;
}

bool RawClient::SendBytes(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR) {
      return false;
    }
    bytes.remove_prefix(sent > 0 ? static_cast<size_t>(sent) : 0);
  }
  return true;
}

bool RawClient::SendDescriptors(const std::vector<int>& fds) {
  char byte = 1;
  iovec data = {&byte, 1};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) == 1;
}

uint64_t RawClient::Send(v1::ClientFrame frame) {
  if (frame.id() == 0) {
    frame.set_id(next_id_++);
  }
  const uint64_t id = frame.id();
  SendBytes(Framed(frame.SerializeAsString()));
  return id;
}

RawClient::Fill RawClient::FillBuffer(SteadyClock::time_point until) {
  pollfd readable = {fd_.get(), POLLIN, 0};
  if (::poll(&readable, 1, MillisUntil(until)) <= 0) {
    return SteadyClock::now() < until ? Fill::kMore : Fill::kDeadline;
  }
  std::array<char, 4096> bytes;
  iovec data = {bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) {
    return got < 0 && errno == EINTR ? Fill::kMore : Fill::kClosed;
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    std::vector<int> fds((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(fds.data(), CMSG_DATA(header), fds.size() * sizeof(int));
    for (const int fd : fds) {
      received_.emplace_back(fd);
    }
  }
  buffer_.append(bytes.data(), static_cast<size_t>(got));
  return Fill::kMore;
}

std::optional<RawReply> RawClient::Receive(std::chrono::milliseconds at_most) {
  const auto until = SteadyClock::now() + at_most;
  for (;;) {
    if (buffer_.size() >= 4) {
      uint32_t length = 0;
      std::memcpy(&length, buffer_.data(), 4);
      if (buffer_.size() - 4 >= length) {
        RawReply reply;
        const bool parsed =
            reply.frame.ParseFromArray(buffer_.data() + 4, static_cast<int>(length));
        buffer_.erase(0, 4 + length);
        // The kernel ends a read after the frame that descriptors came with, so they are this
        // one's.
        reply.descriptors = std::exchange(received_, {});
        return parsed ? std::optional<RawReply>(std::move(reply)) : std::nullopt;
      }
    }
    if (FillBuffer(until) != Fill::kMore) {
      return std::nullopt;
    }
  }
}

std::optional<RawReply> RawClient::Call(v1::ClientFrame frame, std::chrono::milliseconds at_most) {
  const uint64_t id = Send(std::move(frame));
  std::optional<RawReply> reply = Receive(at_most);
  while (reply.has_value() && reply->frame.id() != id) {
    reply = Receive(at_most);
  }
  return reply;
}

bool RawClient::WaitClosed(std::chrono::milliseconds at_most) {
  const auto until = SteadyClock::now() + at_most;
  Fill fill = Fill::kMore;
  while (fill == Fill::kMore) {
    fill = FillBuffer(until);
  }
  return fill == Fill::kClosed;
}

std::optional<RawReply> RawClient::Join(const std::string& job, uint32_t rank, uint32_t world_size,
                                        uint64_t deadline_ms) {
  v1::ClientFrame frame;
  frame.mutable_join()->set_job(job);
  frame.mutable_join()->set_rank(rank);
  frame.mutable_join()->set_world_size(world_size);
  frame.mutable_join()->set_deadline_ms(deadline_ms);
  return Call(std::move(frame));
}

std::optional<RawReply> RawClient::BeginSave(uint64_t step, uint64_t slot_bytes,
                                             uint64_t deadline_ms) {
  v1::ClientFrame frame;
  frame.mutable_begin_save()->set_step(step);
  frame.mutable_begin_save()->set_slot_bytes(slot_bytes);
  frame.mutable_begin_save()->set_deadline_ms(deadline_ms);
  return Call(std::move(frame));
}

}  // namespace holdfast
