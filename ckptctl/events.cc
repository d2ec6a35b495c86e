// What happened on the daemon's node, and what happens from now on.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

// Between two tries to reach a daemon that went while it was followed, and two looks at Ctrl-C.
constexpr auto kTryEvery = std::chrono::seconds(1);
constexpr auto kLook = std::chrono::milliseconds(100);

const char* NameOf(v1::Severity severity) {
  switch (severity) {
    case v1::SEVERITY_WARNING:
      return "warning";
    case v1::SEVERITY_ERROR:
      return "error";
    default:
      return "info";
  }
}

v1::Severity SeverityOf(const std::string& name) {
  return name == "error"     ? v1::SEVERITY_ERROR
         : name == "warning" ? v1::SEVERITY_WARNING
                             : v1::SEVERITY_INFO;
}

class Watching {
 public:
  Watching(const Context& context, const EventsArguments& arguments)
      : context_(context), arguments_(arguments) {
    request_.set_job(arguments.job);
    request_.set_follow(arguments.follow);
    request_.set_least(SeverityOf(arguments.least));
    if (arguments.since) {
      request_.set_since_unix_ms(context.clock->UnixMillis() -
                                 *arguments.since / std::chrono::milliseconds(1));
    }
  }

  absl::Status Once() {
    const auto client = ConnectAdmin(context_);
    if (!client.ok()) {
      return client.status();
    }
    return (*client)->WatchEvents(request_, Cancel(),
                                  [this](const v1::EventBatch& batch) { Take(batch); });
  }

  // A daemon that is restarted or upgraded is no end; one that was never there is, and so is one
  // that is there and does not let us in any more.
  absl::Status UntilInterrupted() {
    for (;;) {
      const absl::Status status = Once();
      if (absl::IsCancelled(status) || Cancel()) {
        return absl::OkStatus();
      }
      const bool gone = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
      if (!heard_ || !gone || IsNotLetIn(status)) {
        return status.ok() ? absl::UnavailableError("the daemon ended what was to go on") : status;
      }
      if (away_ != Message(status)) {
        away_ = Message(status);
        *context_.err << "ckptctl: ckptd is away (" << EscapeText(away_)
                      << "); its events go on when it is back\n"
                      << std::flush;
      }
      Pause();
    }
  }

  // Of all that came, as one object.
  void ShowJson() const {
    nlohmann::ordered_json json;
    json["node"] = node_;
    json["lost"] = lost_;
    json["events"] = events_;
    *context_.out << DumpJson(json) << "\n";
  }
  bool any() const { return any_; }

 private:
  const std::atomic<bool>& Cancel() const {
    static const std::atomic<bool> kNever{false};
    return context_.interrupted == nullptr ? kNever : *context_.interrupted;
  }
  void Pause() const {
    for (auto left = kTryEvery / kLook; left > 0 && !Cancel(); --left) {
      std::this_thread::sleep_for(kLook);
    }
  }

  void TellLost(const v1::EventBatch& batch) const {
    if (!context_.json) {
      *context_.err << "ckptctl: " << batch.lost() << " events went before they could be shown\n";
    } else if (arguments_.follow) {
      // As ckptd tells it to events.command.
      nlohmann::ordered_json json;
      json["node"] = batch.node();
      json["journal"] = std::to_string(batch.journal());
      json["severity"] = "warning";
      json["kind"] = "events_lost";
      json["text"] = absl::StrCat(batch.lost(), " events went before they could be told");
      *context_.out << DumpJson(json) << "\n";
    }
  }

  void Take(const v1::EventBatch& batch) {
    heard_ = true;
    away_.clear();
    node_ = batch.node();
    lost_ += batch.lost();
    request_.set_journal(batch.journal());
    request_.set_after(batch.next_after());
    if (batch.lost() > 0) {
      TellLost(batch);
    }
    for (const v1::DaemonEvent& event : batch.events()) {
      any_ = true;
      if (!context_.json) {
        *context_.out << RenderEvent(event) << "\n";
        continue;
      }
      nlohmann::ordered_json json;
      json["node"] = batch.node();
      json["journal"] = std::to_string(batch.journal());
      json.update(MessageToJson(event));
      if (arguments_.follow) {
        *context_.out << DumpJson(json) << "\n";
      } else {
        events_.push_back(std::move(json));
      }
    }
    *context_.out << std::flush;
  }

  const Context& context_;
  const EventsArguments& arguments_;
  v1::WatchEventsRequest request_;
  std::string node_;
  uint64_t lost_ = 0;
  nlohmann::ordered_json events_ = nlohmann::ordered_json::array();
  bool heard_ = false;
  std::string away_;  // as was said last; empty: it is there
  bool any_ = false;
};

}  // namespace

std::string RenderEvent(const v1::DaemonEvent& event) {
  std::string severity = NameOf(event.severity());
  severity.resize(std::max<size_t>(severity.size(), 7), ' ');
  return absl::StrCat(FormatTime(event.unix_ms()), "  ", severity, "  ",
                      event.job().empty() ? "-" : EscapeText(event.job()), "  ",
                      EscapeText(event.kind()), "  ", EscapeText(event.text()));
}

ExitCode RunEvents(const Context& context, const EventsArguments& arguments) {
  Watching watching(context, arguments);
  const absl::Status status = arguments.follow ? watching.UntilInterrupted() : watching.Once();
  if (!status.ok()) {
    return ReportError(context, status);
  }
  if (context.json && !arguments.follow) {
    watching.ShowJson();
  } else if (!context.json && !arguments.follow && !watching.any()) {
    *context.out
        << "no such events are kept; ckptd forgets them when it is restarted, its log does "
           "not\n";
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
