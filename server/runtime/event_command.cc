#include "server/runtime/event_command.h"

#include <pthread.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/units.h"
#include "server/runtime/child_process.h"

namespace holdfast {
namespace {

constexpr Duration kLook = std::chrono::milliseconds(100);
constexpr Duration kAwaitEach = std::chrono::seconds(60);
constexpr size_t kLeftBehindMax = 4;
constexpr MonotonicTime kNoDeadline{INT64_MAX};
constexpr char kPath[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

// "2026-03-01T12:00:00.250Z"
std::string UtcTime(int64_t unix_ms) {
  const std::time_t seconds = unix_ms / 1000;
  std::tm parts = {};
  std::array<char, 32> text = {};
  if (unix_ms < 0 || ::gmtime_r(&seconds, &parts) == nullptr ||
      std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts) == 0) {
    return "";
  }
  const std::string ms = absl::StrCat(1000 + unix_ms % 1000).substr(1);
  return absl::StrCat(text.data(), ".", ms, "Z");
}

std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true,
                   nlohmann::ordered_json::error_handler_t::replace);
}

// As an event of its own, so that whoever parses the lines needs no second form.
v1::DaemonEvent LostEvent(uint64_t lost, int64_t unix_ms) {
  v1::DaemonEvent event;
  event.set_unix_ms(unix_ms);
  event.set_severity(v1::SEVERITY_WARNING);
  event.set_kind("events_lost");
  event.set_text(absl::StrCat(lost,
                              " events happened before, and are not told: there were too many, "
                              "or they could not be told in time"));
  return event;
}

}  // namespace

std::string EventToJson(const v1::DaemonEvent& event, const std::string& node) {
  nlohmann::ordered_json json;
  json["node"] = node;
  json["number"] = event.number();
  json["unix_ms"] = event.unix_ms();
  json["time"] = UtcTime(event.unix_ms());
  json["severity"] = SeverityName(event.severity());
  json["kind"] = event.kind();
  json["job"] = event.job();
  json["text"] = event.text();
  return Dump(json);
}

EventCommand::EventCommand(Options options, EventJournal& journal)
    : journal_(journal), options_(std::move(options)), thread_([this] { Run(); }) {}

void EventCommand::Run() {
  ::pthread_setname_np(::pthread_self(), "event-command");
  v1::WatchEventsRequest wish;
  while (!Overdue(kNoDeadline)) {
    const bool all_happened = journal_.stopped();  // (asked before it is read)
    const Options options = Current();
    wish.set_least(options.least);
    const v1::EventBatch batch = journal_.Read(wish, options.reader);
    wish.set_journal(batch.journal());
    wish.set_after(batch.next_after());
    if (batch.events_size() > 0 || batch.lost() > 0) {
      if (!options.command.empty()) {
        Tell(batch, options);
      }
      continue;
    }
    if (all_happened) {
      return;
    }
    journal_.AwaitAfter(wish.after(), kAwaitEach);
  }
}

EventCommand::Options EventCommand::Current() const {
  const MutexLock lock(mutex_);
  return options_;
}

void EventCommand::Change(std::vector<std::string> command, v1::Severity least, Duration timeout) {
  const MutexLock lock(mutex_);
  if (command != options_.command) {
    problem_.clear();  // it was the other one's
    given_up_ = 0;
  }
  options_.command = std::move(command);
  options_.least = least;
  options_.timeout = timeout;
  ++changes_;
  changed_.NotifyAll();
}

bool EventCommand::Replaced(const Options& options) const {
  const MutexLock lock(mutex_);
  return options_.command != options.command;
}

void EventCommand::Tell(const v1::EventBatch& batch, Options options) {
  uint64_t lost = batch.lost();
  {
    const MutexLock lock(mutex_);
    lost += given_up_;
  }
  std::string lines;
  if (lost > 0) {
    const int64_t when =
        batch.events_size() > 0 ? batch.events(0).unix_ms() : Clock::System()->UnixMillis();
    absl::StrAppend(&lines, EventToJson(LostEvent(lost, when), options.node), "\n");
  }
  for (const v1::DaemonEvent& event : batch.events()) {
    absl::StrAppend(&lines, EventToJson(event, options.node), "\n");
  }
  absl::Status told;
  Duration pause = options.pause;
  for (size_t tries = 1; tries <= kTriesMax; ++tries, pause *= 4) {
    told = RunOnce(lines, options);
    if (told.ok() || (tries < kTriesMax && !Replaced(options) && !Pause(pause))) {
      break;
    }
    if (Replaced(options)) {  // the next one is told, as often as any
      options = Current();
      tries = 0;
      pause = options.pause / 4;
      if (options.command.empty()) {
        return;
      }
    }
  }
  const MutexLock lock(mutex_);
  given_up_ = told.ok() ? 0 : given_up_ + static_cast<uint64_t>(batch.events_size());
  const std::string before = std::exchange(
      problem_, told.ok() ? ""
                          : absl::StrCat("events.command: ", options.command.front(), ": ",
                                         Message(told), "; ", given_up_,
                                         " events have not been told since it last went well"));
  if (!told.ok() && before.empty()) {
    LogWarning(problem_);
  } else if (told.ok() && !before.empty()) {
    LogInfo("events.command goes well again");
  }
}

absl::Status EventCommand::RunOnce(const std::string& lines, const Options& options) {
  ReapLeftBehind();
  if (left_behind_.size() >= kLeftBehindMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(left_behind_.size(), " runs of it hang, though they were killed"));
  }
  const MonotonicTime deadline = Clock::System()->Now() + options.timeout;
  HF_ASSIGN_OR_RETURN(
      ChildProcess child,
      ChildProcess::Start(options.command, {kPath, "HOLDFAST_NODE=" + options.node}, lines));
  while (!child.Step(kLook)) {
    const bool replaced = Replaced(options);
    if (!replaced && !Overdue(deadline)) {
      continue;
    }
    child.Kill();
    if (child.left_behind()) {
      left_behind_.push_back(*child.left_behind());
    }
    if (replaced) {
      return absl::CancelledError("another one has taken its place");
    }
    return absl::DeadlineExceededError(absl::StrCat("it was killed: it had not ended after ",
                                                    FormatDuration(options.timeout),
                                                    " (events.timeout_ms), or ckptd was to stop"));
  }
  return child.Result();
}

void EventCommand::ReapLeftBehind() {
  std::erase_if(left_behind_, [](pid_t pid) { return ::waitpid(pid, nullptr, WNOHANG) != 0; });
}

bool EventCommand::Overdue(MonotonicTime deadline) const {
  const MutexLock lock(mutex_);
  return Clock::System()->Now() >= (stopping_ ? std::min(deadline, stop_by_) : deadline);
}

bool EventCommand::Pause(Duration pause) {
  const auto until = std::chrono::steady_clock::now() + pause;
  const MutexLock lock(mutex_);
  const uint64_t changes = changes_;
  while (!stopping_ && changes_ == changes && changed_.WaitUntil(mutex_, until)) {
  }
  return !stopping_;
}

std::string EventCommand::problem() const {
  const MutexLock lock(mutex_);
  return problem_;
}

void EventCommand::Stop() {
  {
    const MutexLock lock(mutex_);
    if (!stopping_) {
      stopping_ = true;
      stop_by_ = Clock::System()->Now() + options_.stop_patience;
    }
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace holdfast
