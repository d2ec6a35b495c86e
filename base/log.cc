#include "base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <exception>
#include <memory>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
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

std::shared_ptr<spdlog::logger> MakeLogger(LogLevel level, std::vector<spdlog::sink_ptr> sinks) {
  auto logger = std::make_shared<spdlog::logger>("holdfast", sinks.begin(), sinks.end());
  logger->set_pattern(kPattern);
  logger->set_level(ToSpdlog(level));
  // A log whose last lines died with the process is of no use in the one case that it is for.
  logger->flush_on(spdlog::level::debug);
  return logger;
}

// Until StartLog, lines go to stderr. Never destroyed: threads may log while the process exits.
std::shared_ptr<spdlog::logger>& Logger() {
  static auto* const logger = new std::shared_ptr<spdlog::logger>(
      MakeLogger(LogLevel::kInfo, {std::make_shared<spdlog::sinks::stderr_sink_mt>()}));
  return *logger;
}

// Names come from users: a line break in one must not forge a line of the log.
std::string OneLine(std::string_view message) {
  std::string line;
  line.reserve(message.size());
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      line += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&line, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else {
      line.push_back(c);
    }
  }
  return line;
}

}  // namespace

absl::Status StartLog(LogLevel level, const std::string& path) {
  try {
    std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>()};
    if (!path.empty()) {
      sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(path));
    }
    Logger() = MakeLogger(level, std::move(sinks));
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return absl::FailedPreconditionError(absl::StrCat("open log '", path, "': ", e.what()));
  }
}

void Log(LogLevel level, std::string_view message) {
  spdlog::logger& logger = *Logger();
  const spdlog::level::level_enum spdlog_level = ToSpdlog(level);
  if (!logger.should_log(spdlog_level)) {
    return;
  }
  const std::string line = OneLine(message);
  logger.log(spdlog_level, spdlog::string_view_t(line.data(), line.size()));
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
