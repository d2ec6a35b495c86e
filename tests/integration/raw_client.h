// The client protocol by hand: frames and descriptors as they go over the socket, well-formed or
// not. For tests that do what the client library never would.
//
//   auto client = RawClient::Connect(ckptd.socket());
//   v1::ClientFrame frame; frame.mutable_join()->set_job("job");
//   const std::optional<RawReply> reply = client->Call(frame);
//
// One thread. Every wait has a deadline: an empty result says that it passed, or that the daemon
// closed the connection.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "holdfast/v1/client.pb.h"

namespace holdfast {

inline constexpr std::chrono::seconds kPatience{30};

struct RawReply {
  v1::DaemonFrame frame;
  std::vector<UniqueFd> descriptors;
};

class RawClient {
 public:
  static std::unique_ptr<RawClient> Connect(const std::string& socket);  // null when it cannot
  // Connected, and Hello said.
  static std::unique_ptr<RawClient> Greet(const std::string& socket);

  bool SendBytes(std::string_view bytes);             // false: the connection is closed
  bool SendDescriptors(const std::vector<int>& fds);  // with one byte
  // Sets the id if there is none.
  uint64_t Send(v1::ClientFrame frame);
  std::optional<RawReply> Receive(std::chrono::milliseconds at_most = kPatience);
  std::optional<RawReply> Call(v1::ClientFrame frame,
                               std::chrono::milliseconds at_most = kPatience);
  // Reads until the daemon closes; false at the deadline.
  bool WaitClosed(std::chrono::milliseconds at_most = kPatience);

  std::optional<RawReply> Join(const std::string& job, uint32_t rank, uint32_t world_size,
                               uint64_t deadline_ms = 20'000);
  std::optional<RawReply> BeginSave(uint64_t step, uint64_t slot_bytes, uint64_t deadline_ms = 0);

  int fd() const { return fd_.get(); }

 private:
  explicit RawClient(UniqueFd fd) : fd_(std::move(fd)) {}
  enum class Fill : uint8_t { kMore, kClosed, kDeadline };
  Fill FillBuffer(std::chrono::steady_clock::time_point until);

  UniqueFd fd_;
  uint64_t next_id_ = 1;
  std::string buffer_;
  std::vector<UniqueFd> received_;
};

std::string Framed(std::string_view message);

}  // namespace holdfast
