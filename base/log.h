// The daemon's and ckptctl's log: one line an event, "key=value" pairs after the words. spdlog
// underneath; its headers stay in log.cc. The client library never logs: it returns.
//
//   HF_RETURN_IF_ERROR(StartLog(LogLevel::kInfo, file));
//   HF_RETURN_IF_ERROR(StartLogThreads());   // the daemon: whoever logs never waits
//   LogInfo("ready");
//   StopLog(std::chrono::seconds(1));
//
// Log, LogFrom, LogAlways and SetLogLevel: any thread; the others: one.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"

namespace holdfast {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Of one line; what a user's text may contribute is less.
inline constexpr size_t kLogLineBytesMax = 2048;
inline constexpr size_t kLogLineFromBytesMax = 512;

// To stderr, and to `path` as well when not empty (opened for append). Call once, before threads.
// Until StartLogThreads a line is out when Log returns.
absl::Status StartLog(LogLevel level, const std::string& path);

// What is logged from now on.
void SetLogLevel(LogLevel level);

// From now on stderr and the file have a thread each that writes, so that one that does not take
// lines (a full pipe, a disk that hangs) holds nobody: a bounded number of lines waits, further
// ones are dropped, and a line says how many as soon as it can be written.
absl::Status StartLogThreads();
// Waits until what was logged so far is out; false when it is not by then.
bool FlushLog(Duration at_most);
// The same, and ends the threads; one that hangs is left behind. Later lines go out at once, if
// the last ones could.
bool StopLog(Duration at_most);

void Log(LogLevel level, std::string_view message);
// A line that somebody else causes, at a pace and with words of theirs: `source` ("job=a") may fill
// a limited number of lines a second, shorter ones. How many were left out is said about once a
// second, with a later line or by LogLeftOut.
void LogFrom(LogLevel level, std::string_view source, std::string_view message);
void LogLeftOut();
// As LogFrom, whatever the level is: what must leave a trace. As information.
void LogAlways(std::string_view source, std::string_view message);

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
