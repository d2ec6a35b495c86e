// Lines on their way to one place of the log, and the thread that brings them there. Bounded: when
// the place does not take lines, Push drops them and never waits; a line in their stead says how
// many.
//
//   HF_ASSIGN_OR_RETURN(auto queue, LogQueue::Start({}, write));
//   queue->Push({now, LogLevel::kInfo, "ready"});
//   queue->Stop(std::chrono::seconds(1));
//
// Push: any thread; the others: the owner's.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/log.h"

namespace holdfast {

struct LogLine {
  std::chrono::system_clock::time_point at;
  LogLevel level = LogLevel::kInfo;
  std::string text;
};

class LogQueue {
 public:
  struct Limits {
    size_t lines_max = 8192;
    size_t bytes_max = 4u << 20;
  };
  // On the queue's thread, one line at a time; may hang. False: the line is lost.
  using Write = std::function<bool(const LogLine&)>;

  static absl::StatusOr<std::unique_ptr<LogQueue>> Start(const Limits& limits, Write write);
  ~LogQueue();  // Stop, without waiting
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;

  // False after a Stop that wrote everything: then the caller may write by itself.
  bool Push(LogLine line);
  bool Flush(Duration at_most);
  // Whether all was written and the thread ended. One that hangs in `write` is left behind, with
  // all that it uses.
  bool Stop(Duration at_most);

 private:
  struct State;
  explicit LogQueue(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace holdfast
