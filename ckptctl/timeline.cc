// timeline: how long each stage of each save took.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr int kFailuresShown = 10;
constexpr char kDone[] = "done";

// One stage of one step, all its ranks together.
struct Span {
  int64_t begin_us = 0;
  int64_t end_us = 0;  // of those that have ended
  bool open = false;
  bool failed = false;
};

using Spans = std::map<std::string, Span>;

// The daemon may learn of stages that this program does not know: in the order of their first
// appearance.
std::vector<std::string> StagesOf(const v1::TimelineReply& reply) {
  std::vector<std::string> stages;
  for (const v1::StepTimeline& step : reply.steps()) {
    for (const v1::StageTime& time : step.stages()) {
      if (std::find(stages.begin(), stages.end(), time.stage()) == stages.end()) {
        stages.push_back(time.stage());
      }
    }
  }
  return stages;
}

Spans SpansOf(const v1::StepTimeline& step) {
  Spans spans;
  for (const v1::StageTime& time : step.stages()) {
    auto [it, fresh] = spans.try_emplace(time.stage());
    Span& span = it->second;
    span.begin_us = fresh ? time.begin_unix_us() : std::min(span.begin_us, time.begin_unix_us());
    span.end_us = std::max(span.end_us, time.end_unix_us());
    span.open = span.open || time.end_unix_us() == 0;
    span.failed = span.failed || (time.end_unix_us() != 0 && time.outcome() != kDone);
  }
  return spans;
}

std::string SpanText(const Span& span, int64_t begin_us) {
  const std::string flags = span.failed ? "!" : "";
  if (span.open) {
    return absl::StrCat("open", flags);
  }
  // An instant says when; anything else how long.
  const bool instant = span.end_us == span.begin_us;
  const auto us = std::chrono::microseconds(span.end_us - (instant ? begin_us : span.begin_us));
  return absl::StrCat(instant ? "+" : "", FormatDuration(us), flags);
}

std::string FailureLines(const v1::TimelineReply& reply) {
  std::string out;
  int failures = 0;
  for (const v1::StepTimeline& step : reply.steps()) {
    for (const v1::StageTime& time : step.stages()) {
      if (time.end_unix_us() == 0 || time.outcome() == kDone || ++failures > kFailuresShown) {
        continue;
      }
      absl::StrAppend(&out, "  ! step ", step.step(), " (attempt ", step.attempt(), ") ",
                      EscapeText(time.stage()),
                      time.rank() < 0 ? "" : absl::StrCat(", rank ", time.rank()), ": ",
                      EscapeText(time.outcome()), "\n");
    }
  }
  if (failures > kFailuresShown) {
    absl::StrAppend(&out, "  and ", failures - kFailuresShown, " more: --json has them all\n");
  }
  return out.empty() ? out : "\n" + out;
}

// Tracks of one stage. What one rank does twice at a time needs two of them: a track shows one
// thing after the other.
class Tracks {
 public:
  // The track's number for something of this rank; `end_us` 0: it has not ended.
  uint64_t Take(int64_t rank, int64_t begin_us, int64_t end_us) {
    std::vector<Lane>& lanes = lanes_[rank];
    const int64_t until = end_us == 0 ? INT64_MAX : end_us;
    for (Lane& lane : lanes) {
      if (lane.until <= begin_us) {
        lane.until = until;
        return lane.id;
      }
    }
    lanes.push_back({next_++, until});
    return lanes.back().id;
  }

  template <typename Tell>
  void ForEach(const Tell& tell) const {
    for (const auto& [rank, lanes] : lanes_) {
      for (size_t i = 0; i < lanes.size(); ++i) {
        tell(lanes[i].id, absl::StrCat(rank < 0 ? "all ranks" : absl::StrCat("rank ", rank),
                                       i == 0 ? "" : absl::StrCat(" (", i + 1, ")")));
      }
    }
  }

 private:
  struct Lane {
    uint64_t id = 0;
    int64_t until = 0;
  };
  std::map<int64_t, std::vector<Lane>> lanes_;
  uint64_t next_ = 1;
};

nlohmann::ordered_json NameEvent(const char* what, uint64_t pid, uint64_t tid,
                                 const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

nlohmann::ordered_json TraceEvent(const v1::StepTimeline& step, const v1::StageTime& time,
                                  uint64_t pid, uint64_t tid) {
  nlohmann::ordered_json event = {{"name", absl::StrCat("step ", step.step())},
                                  {"cat", time.stage()},
                                  {"pid", pid},
                                  {"tid", tid},
                                  {"ts", time.begin_unix_us()}};
  if (time.end_unix_us() == 0) {
    event["ph"] = "B";
  } else if (time.end_unix_us() == time.begin_unix_us()) {
    event["ph"] = "i";
    event["s"] = "t";
  } else {
    event["ph"] = "X";
    event["dur"] = std::max<int64_t>(0, time.end_unix_us() - time.begin_unix_us());
  }
  event["args"] = {{"attempt", step.attempt()},
                   {"step", step.step()},
                   {"bytes", time.bytes()},
                   {"outcome", time.outcome()},
                   {"fate", step.fate()}};
  return event;
}

absl::Status WriteTrace(const std::string& path, const std::string& text) {
  std::string absolute = path;
  if (path.front() != '/') {
    std::array<char, PATH_MAX> here;
    if (::getcwd(here.data(), here.size()) == nullptr) {
      return absl::FailedPreconditionError(
          "the current directory has no path: name the trace file by an absolute one");
    }
    absolute = JoinPath(here.data(), path);
  }
  std::error_code unknown;
  const std::filesystem::file_status there = std::filesystem::symlink_status(absolute, unknown);
  if (!std::filesystem::exists(there) || std::filesystem::is_regular_file(there)) {
    return WriteFileAtomically(*Env::System(), absolute, text);
  }
  // A device, a pipe, a link: it is written into, not replaced.
  const auto failed = [&absolute](const char* call, int error) {
    // (Whatever the errno: nothing that is out of reach for a while.)
    return absl::FailedPreconditionError(
        absl::StrCat(Message(ErrnoStatus(error, call, absolute)),
                     "; name a file in a directory that you may write into"));
  };
  std::FILE* const out = std::fopen(absolute.c_str(), "wbe");
  if (out == nullptr) {
    return failed("open", errno);
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), out) == text.size();
  const int error = errno;
  if (std::fclose(out) != 0) {
    return failed("write", errno);
  }
  return written ? absl::OkStatus() : failed("write", error);
}

}  // namespace

std::string RenderTimeline(std::string_view job, const v1::TimelineReply& reply) {
  if (reply.steps().empty()) {
    return absl::StrCat("job ", EscapeText(job), ": no save is remembered\n");
  }
  const std::vector<std::string> stages = StagesOf(reply);
  std::vector<TableColumn> columns = {{"STEP", Align::kRight},
                                      {"ATTEMPT", Align::kRight},
                                      {"SIZE", Align::kRight},
                                      {"BEGAN", Align::kLeft}};
  for (const std::string& stage : stages) {
    columns.push_back({EscapeText(stage), Align::kRight});
  }
  columns.push_back({"FATE", Align::kLeft});
  Table table(columns);
  for (const v1::StepTimeline& step : reply.steps()) {
    const Spans spans = SpansOf(step);
    int64_t begin_us = 0;
    for (const auto& [stage, span] : spans) {
      begin_us = begin_us == 0 ? span.begin_us : std::min(begin_us, span.begin_us);
    }
    std::vector<std::string> row = {absl::StrCat(step.step()), absl::StrCat(step.attempt()),
                                    FormatBytes(step.bytes()), FormatTime(begin_us / 1000)};
    for (const std::string& stage : stages) {
      const auto found = spans.find(stage);
      row.push_back(found == spans.end() ? "-" : SpanText(found->second, begin_us));
    }
    row.push_back(EscapeText(step.fate()));
    table.AddRow(std::move(row));
  }
  return absl::StrCat("job ", EscapeText(job),
                      ", oldest first; a stage's time is from its first rank's begin to its last "
                      "rank's end, +: after the step began\n",
                      table.Render("  "), FailureLines(reply));
}

std::string TimelineTrace(std::string_view job, const v1::TimelineReply& reply) {
  const std::vector<std::string> stages = StagesOf(reply);
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  for (size_t i = 0; i < stages.size(); ++i) {
    const uint64_t pid = i + 1;
    struct Item {
      const v1::StepTimeline* step;
      const v1::StageTime* time;
    };
    std::vector<Item> items;
    for (const v1::StepTimeline& step : reply.steps()) {
      for (const v1::StageTime& time : step.stages()) {
        if (time.stage() == stages[i]) {
          items.push_back({&step, &time});
        }
      }
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return a.time->begin_unix_us() < b.time->begin_unix_us();
    });
    Tracks tracks;
    nlohmann::ordered_json of_stage = nlohmann::ordered_json::array();
    for (const Item& item : items) {
      const uint64_t tid =
          tracks.Take(item.time->rank(), item.time->begin_unix_us(), item.time->end_unix_us());
      of_stage.push_back(TraceEvent(*item.step, *item.time, pid, tid));
    }
    events.push_back(NameEvent("process_name", pid, 0, stages[i]));
    tracks.ForEach([&](uint64_t tid, const std::string& name) {
      events.push_back(NameEvent("thread_name", pid, tid, name));
    });
    events.insert(events.end(), of_stage.begin(), of_stage.end());
  }
  nlohmann::ordered_json trace;
  trace["displayTimeUnit"] = "ms";
  trace["otherData"] = {{"job", std::string(job)}};
  trace["traceEvents"] = std::move(events);
  return DumpJson(trace) + "\n";
}

ExitCode RunTimeline(const Context& context, const TimelineArguments& arguments) {
  v1::TimelineRequest request;
  request.set_job(arguments.job);
  request.set_steps_max(arguments.steps_max);
  const auto reply = AskFor(context, &AdminClient::Timeline, request);
  if (!reply.ok()) {
    return ReportError(context, reply.status());
  }
  if (!arguments.trace.empty()) {
    const absl::Status written = WriteTrace(arguments.trace, TimelineTrace(arguments.job, *reply));
    if (!written.ok()) {
      return ReportError(context, written);
    }
  }
  if (context.json) {
    ShowJson(context, arguments.job, *reply);
  } else {
    *context.out << RenderTimeline(arguments.job, *reply);
    if (!arguments.trace.empty()) {
      *context.out << "\nwritten to " << EscapeText(arguments.trace)
                   << "; open it with https://ui.perfetto.dev or chrome://tracing\n";
    }
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
