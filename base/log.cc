#include "base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/log_limit.h"
#include "base/log_queue.h"
#include "base/mutex.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr char kPattern[] = "%Y-%m-%dT%H:%M:%S.%e%z %l %v";

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// One place that lines go to.
struct Place {
  // A log whose last lines died with the process is of no use in the one case that it is for: each
  // line is flushed.
  bool Write(const LogLine& line) {
    try {
      sink->log(
          spdlog::details::log_msg(line.at, spdlog::source_loc(), "holdfast", ToSpdlog(line.level),
                                   spdlog::string_view_t(line.text.data(), line.text.size())));
      sink->flush();
      return true;
    } catch (const std::exception&) {  // a full disk: there is nobody left to tell
      return false;
    }
  }

  const spdlog::sink_ptr sink;
  std::unique_ptr<LogQueue> queue;  // none: whoever logs writes
};

struct Logger {
  std::atomic<LogLevel> level = LogLevel::kInfo;
  std::vector<std::shared_ptr<Place>> places;
  Mutex limiter_mutex;
  LogLimiter limiter GUARDED_BY(limiter_mutex) = LogLimiter(Clock::System(), {});
};

std::unique_ptr<Logger> MakeLogger(LogLevel level, const std::string& path) {
  auto logger = std::make_unique<Logger>();
  logger->level = level;
  std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>()};
  if (!path.empty()) {
    sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(path));
  }
  for (const spdlog::sink_ptr& sink : sinks) {
    sink->set_pattern(kPattern);
    logger->places.push_back(std::make_shared<Place>(Place{sink, nullptr}));
  }
  return logger;
}

// Until StartLog, lines go to stderr. Never destroyed: threads may log while the process exits.
std::unique_ptr<Logger>& TheLogger() {
  static auto* const logger = new std::unique_ptr<Logger>(MakeLogger(LogLevel::kInfo, ""));
  return *logger;
}

// Names come from users: a line break in one must not forge a line of the log, and a long one not
// fill it.
std::string OneLine(std::string_view message, size_t bytes_max) {
  size_t taken = std::min(message.size(), bytes_max);
  while (taken < message.size() && taken > 0 && (message[taken] & 0xc0) == 0x80) {
    --taken;  // not in the middle of a UTF-8 character
  }
  std::string line;
  line.reserve(taken);
  for (const char c : message.substr(0, taken)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      line += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&line, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else {
      line.push_back(c);
    }
  }
  if (taken < message.size()) {
    absl::StrAppend(&line, "... (", message.size() - taken, " bytes more)");
  }
  return line;
}

void Put(Logger& logger, LogLevel level, std::string_view message, size_t bytes_max) {
  const LogLine line{std::chrono::system_clock::now(), level, OneLine(message, bytes_max)};
  for (const std::shared_ptr<Place>& place : logger.places) {
    if (place->queue == nullptr || !place->queue->Push(line)) {
      place->Write(line);
    }
  }
}

void TellLeftOut(Logger& logger, bool now) {
  std::string line;
  {
    MutexLock lock(logger.limiter_mutex);
    line = logger.limiter.TakeLeftOut(now);
  }
  if (!line.empty()) {
    Put(logger, LogLevel::kWarning, line, kLogLineBytesMax);
  }
}

void PutLimited(Logger& logger, LogLevel level, std::string_view source, std::string_view message) {
  bool admitted = false;
  {
    MutexLock lock(logger.limiter_mutex);
    admitted = logger.limiter.Admit(source, level);
  }
  if (admitted) {
    Put(logger, level, message, kLogLineFromBytesMax);
  }
  TellLeftOut(logger, false);
}

std::chrono::steady_clock::time_point DeadlineAfter(Duration at_most) {
  return std::chrono::steady_clock::now() + at_most;
}

// `wait` for every place, all within `at_most`.
bool ForEachQueue(Duration at_most, bool (LogQueue::*wait)(Duration)) {
  const auto until = DeadlineAfter(at_most);
  bool all = true;
  for (const std::shared_ptr<Place>& place : TheLogger()->places) {
    if (place->queue != nullptr) {
      const Duration left = until - std::chrono::steady_clock::now();
      all = (place->queue.get()->*wait)(std::max(left, Duration(0))) && all;
    }
  }
  return all;
}

}  // namespace

absl::Status StartLog(LogLevel level, const std::string& path) {
  try {
    TheLogger() = MakeLogger(level, path);
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return absl::FailedPreconditionError(absl::StrCat("open log '", path, "': ", e.what()));
  }
}

void SetLogLevel(LogLevel level) {
  TheLogger()->level = level;
}

absl::Status StartLogThreads() {
  for (const std::shared_ptr<Place>& place : TheLogger()->places) {
    // A thread that is left behind keeps the sink; the queue in the place is not its business.
    auto target = std::make_shared<Place>(Place{place->sink, nullptr});
    HF_ASSIGN_OR_RETURN(place->queue, LogQueue::Start({}, [target](const LogLine& line) {
                          return target->Write(line);
                        }));
  }
  return absl::OkStatus();
}

bool FlushLog(Duration at_most) {
  return ForEachQueue(at_most, &LogQueue::Flush);
}

bool StopLog(Duration at_most) {
  TellLeftOut(*TheLogger(), true);
  return ForEachQueue(at_most, &LogQueue::Stop);
}

void Log(LogLevel level, std::string_view message) {
  Logger& logger = *TheLogger();
  if (level >= logger.level) {
    Put(logger, level, message, kLogLineBytesMax);
  }
}

void LogFrom(LogLevel level, std::string_view source, std::string_view message) {
  Logger& logger = *TheLogger();
  if (level >= logger.level) {
    PutLimited(logger, level, source, message);
  }
}

void LogAlways(std::string_view source, std::string_view message) {
  PutLimited(*TheLogger(), LogLevel::kInfo, source, message);
}

void LogLeftOut() {
  TellLeftOut(*TheLogger(), false);
}

absl::StatusOr<LogLevel> ParseLogLevel(std::string_view text) {
  const std::string level = absl::AsciiStrToLower(ToAbsl(text));
  if (level == "debug")
    return LogLevel::kDebug;
  if (level == "info")
    return LogLevel::kInfo;
  if (level == "warning")
    return LogLevel::kWarning;
  if (level == "error")
    return LogLevel::kError;
  return absl::InvalidArgumentError(absl::StrCat("log level '", ToAbsl(text.substr(0, 64)),
                                                 "': expected debug, info, warning or error"));
}

}  // namespace holdfast
