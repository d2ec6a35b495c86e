// Where strangers knock: a TCP address at which a connection is let in once it has said all that it
// must begin with. Until then it takes a place in a bounded row, and no thread; who has been silent
// longest leaves it when it is full, so that those who never speak keep out nobody who does.
//
//   HF_ASSIGN_OR_RETURN(auto door, TcpDoor::Open(reactor, {.address = "0.0.0.0:9466",
//                                                          .heard = …, .enter = …}));
//
// Of the reactor's thread, which opens it, and closes it before the reactor goes.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "server/runtime/reactor.h"

namespace holdfast {

class TcpDoor {
 public:
  enum class Heard : uint8_t { kMore, kAll, kNonsense };
  struct Options {
    std::string address;  // HOST:PORT; port 0 picks one
    size_t silent_max = 256;
    Duration silence_max = std::chrono::seconds(5);
    size_t looked_at_max = 64;  // bytes of what it has said, which stay unread
    std::function<Heard(std::string_view said)> heard;
    std::function<void(UniqueFd connection)> enter;  // does not block
  };
  static absl::StatusOr<std::unique_ptr<TcpDoor>> Open(Reactor& reactor, Options options);
  ~TcpDoor();
  TcpDoor(const TcpDoor&) = delete;
  TcpDoor& operator=(const TcpDoor&) = delete;

  int port() const;

 private:
  struct Visitor {
    UniqueFd fd;
    MonotonicTime until;
  };
  using Visit = uint64_t;  // increasing: the first has waited longest

  TcpDoor(Reactor& reactor, Options options, UniqueFd listening);
  void Accept();
  void Listen(Visit visit, uint32_t events);
  UniqueFd Leave(std::map<Visit, Visitor>::iterator visitor);
  void CloseTheSilent();

  Reactor& reactor_;
  const Options options_;
  const UniqueFd listening_;
  const Reactor::TimerId accept_timer_;  // there were no descriptors
  const Reactor::TimerId silence_timer_;
  std::map<Visit, Visitor> visitors_;
  Visit next_ = 1;
};

}  // namespace holdfast
