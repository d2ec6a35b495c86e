// The daemon's and ckptctl's log: one line an event, "key=value" pairs after the words. spdlog
// underneath; its headers stay in log.cc. The client library never logs: it returns.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace holdfast {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// To stderr, and to `path` as well when not empty (opened for append). Call once, before threads.
absl::Status StartLog(LogLevel level, const std::string& path);
void Log(LogLevel level, std::string_view message);
absl::StatusOr<LogLevel> ParseLogLevel(std::string_view text);  // debug, info, warning, error

// LogInfo(absl::StrCat("slot sealed job=", name, " step=", step));
inline void LogInfo(std::string_view m) {
  Log(LogLevel::kInfo, m);
}
inline void LogWarning(std::string_view m) {
  Log(LogLevel::kWarning, m);
}
inline void LogError(std::string_view m) {
  Log(LogLevel::kError, m);
}
inline void LogDebug(std::string_view m) {
  Log(LogLevel::kDebug, m);
}

}  // namespace holdfast
