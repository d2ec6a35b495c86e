// top: what the daemon says now, again and again.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <thread>

#include "base/status.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/top_terminal.h"
#include "ckptctl/top_view.h"

namespace holdfast {
namespace {

// Between two looks at Ctrl-C and at the size of the terminal.
constexpr Duration kScreenLook = std::chrono::milliseconds(100);

class Viewing {
 public:
  Viewing(const Context& context, const TopArguments& arguments)
      : context_(context), arguments_(arguments) {
    if (context.screen && !context.json && arguments.frames_max != 1 &&
        CanDraw(std::getenv("TERM"))) {
      terminal_ = true;
    }
  }

  // A daemon that was never there is an error; one that goes away later is shown so.
  absl::Status Run() {
    MonotonicTime next = context_.clock->Now();
    for (uint64_t frames = 1; !Interrupted(); ++frames) {
      if (const absl::Status looked = Look(); !looked.ok()) {
        return Interrupted() && last_ ? absl::OkStatus() : looked;
      }
      Show();
      if (frames == arguments_.frames_max) {
        break;
      }
      // (A frame that took longer than `every` is followed by the next, not by all that are due.)
      next = std::max(next + arguments_.every, context_.clock->Now());
      PauseUntil(next);
    }
    return absl::OkStatus();
  }

 private:
  bool Interrupted() const { return context_.interrupted != nullptr && *context_.interrupted; }

  absl::Status Look() {
    absl::StatusOr<TopSample> sample = Ask();
    const MonotonicTime now = context_.clock->Now();
    if (sample.ok()) {
      model_ = MakeTop(*sample, last_ ? &*last_ : nullptr);
      last_ = *std::move(sample);
      away_since_.reset();
      if (terminal_ && !screen_) {
        screen_.emplace();  // not before there is something to show: an error is told as it was
      }
      return absl::OkStatus();
    }
    const absl::Status& status = sample.status();
    const bool gone = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
    if (!last_ || !gone) {
      screen_.reset();
      return status;
    }
    if (!away_since_) {
      away_since_ = now;
    }
    model_.away = Message(status);
    model_.away_ms = (now - *away_since_) / std::chrono::milliseconds(1);
    return absl::OkStatus();
  }

  // On a connection of its own: the daemon may be another one by now, and closes those that are
  // idle for long.
  absl::StatusOr<TopSample> Ask() const {
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<AdminClient> client, ConnectAdmin(context_));
    TopSample sample;
    v1::GetStatusRequest request;
    request.set_job(arguments_.job);
    HF_RETURN_IF_ERROR(client->GetStatus(request, sample.status));
    HF_RETURN_IF_ERROR(client->GetNodes(v1::GetNodesRequest(), sample.nodes));
    return sample;
  }

  void Show() {
    if (context_.json) {
      *context_.out << DumpJson(TopToJson(model_)) << "\n" << std::flush;
    } else if (screen_) {
      shown_ = screen_->screen();
      screen_->Draw(RenderTop(model_, shown_));
    } else {
      *context_.out << (any_shown_ ? "\n" : "") << RenderTop(model_, {.utf8 = LocaleIsUtf8()})
                    << std::flush;
    }
    any_shown_ = true;
  }

  void PauseUntil(MonotonicTime until) {
    while (!Interrupted()) {
      const Duration left = until - context_.clock->Now();
      if (left <= Duration(0)) {
        return;
      }
      std::this_thread::sleep_for(std::min(left, kScreenLook));
      if (screen_) {
        const TopScreen now = screen_->screen();
        if (now.columns != shown_.columns || now.rows != shown_.rows) {
          Show();
        }
      }
    }
  }

  const Context& context_;
  const TopArguments& arguments_;
  bool terminal_ = false;
  std::optional<TopTerminal> screen_;
  TopScreen shown_;
  std::optional<TopSample> last_;
  TopModel model_;
  std::optional<MonotonicTime> away_since_;
  bool any_shown_ = false;
};

}  // namespace

ExitCode RunTop(const Context& context, const TopArguments& arguments) {
  Viewing viewing(context, arguments);
  const absl::Status status = viewing.Run();
  return status.ok() ? ExitCode::kOk : ReportError(context, status);
}

}  // namespace holdfast
