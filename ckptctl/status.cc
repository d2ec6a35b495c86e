#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/status_tiers.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr int kLossesShown = 5;
constexpr int kEventsShown = 8;
constexpr int kInFlightShown = 8;

// One line of a job: what it is about, and what there is to say.
void AddLine(Table& table, std::string_view label, std::string text) {
  table.AddRow({std::string(label), std::move(text)});
}

// The parts that say something, with commas between.
std::string Sentence(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts) {
    absl::StrAppend(&text, text.empty() || part.empty() ? "" : ", ", part);
  }
  return text;
}

std::string PhaseText(v1::JobStatus::AttemptPhase phase) {
  switch (phase) {
    case v1::JobStatus::ATTEMPT_PHASE_UNSPECIFIED:
      return "not begun: no process has joined";
    case v1::JobStatus::ATTEMPT_PHASE_GATHERING:
      return "gathering: ranks are joining";
    case v1::JobStatus::ATTEMPT_PHASE_RESTORING:
      return "restoring";
    case v1::JobStatus::ATTEMPT_PHASE_RUNNING:
      return "running";
    case v1::JobStatus::ATTEMPT_PHASE_ENDED:
      return "ended: none of its processes is alive";
    default:
      return absl::StrCat("phase ", static_cast<int>(phase));
  }
}

// What each failure is called, and why nothing survives it when nothing does.
struct FailureText {
  std::string name;
  std::string nothing;
};
FailureText TextOf(v1::Protection::FailureKind kind) {
  switch (kind) {
    case v1::Protection::FAILURE_KIND_PROCESS:
      return {"if a process dies", "no step is committed"};
    case v1::Protection::FAILURE_KIND_REBOOT:
      return {"if the node reboots", "no copy is kept on its drives, nor outside this node"};
    case v1::Protection::FAILURE_KIND_NODE:
      return {"if the node dies", "no copy is kept outside this node"};
    case v1::Protection::FAILURE_KIND_DOMAIN:
      return {"if its failure domain dies", "no copy is kept outside this failure domain"};
    case v1::Protection::FAILURE_KIND_ALL_NODES:
      return {"if all nodes die", "no copy is kept on storage that outlives the nodes"};
    default:
      return {absl::StrCat("if failure ", static_cast<int>(kind), " happens"),
              "no copy is kept for it"};
  }
}

std::string ProtectionText(const v1::Protection& p) {
  if (!p.any()) {
    return absl::StrCat("nothing would survive: ", TextOf(p.kind()).nothing);
  }
  return absl::StrCat("you are back at ", StepText(p.attempt(), p.step()), ", ",
                      FormatAge(p.age_ms()), " old, from ", EscapeText(p.from()));
}

// What the host holds of it is not all that there is, or none of it.
bool HeldElsewhere(const v1::JobStatus& job) {
  return job.nodes() > 1 ||
         (job.nodes() == 1 && job.node_names_size() == 1 && job.node_names(0) != job.host());
}

std::string JobHead(const v1::JobStatus& job) {
  return absl::StrCat("job ", EscapeText(job.name()), ": attempt ", job.attempt(), ", ",
                      PhaseText(job.phase()), "; ", job.ranks_alive(), " of ",
                      Count(job.world_size(), "rank", "ranks"), " alive; holds ",
                      FormatBytes(job.bytes_held()),
                      HeldElsewhere(job) ? absl::StrCat(" on ", EscapeText(job.host())) : "", "\n");
}

void AddInFlight(const v1::JobStatus& job, Table& lines) {
  const int shown = std::min(job.in_flight_size(), kInFlightShown);
  for (int i = 0; i < shown; ++i) {
    const v1::StepInFlight& step = job.in_flight(i);
    AddLine(lines,
            i > 0                   ? ""
            : job.ranks_alive() > 0 ? "being saved"
                                    : "incomplete",
            absl::StrCat(StepText(step.attempt(), step.step()), ": ", step.ranks_sealed(), " of ",
                         Count(step.world_size(), "rank", "ranks"), " sealed"));
  }
  if (shown < job.in_flight_size()) {
    AddLine(lines, "",
            absl::StrCat("and ", job.in_flight_size() - shown, " more: --json has them all"));
  }
}

void AddLosses(const v1::JobStatus& job, int64_t now, Table& lines) {
  const int shown = std::min(job.losses_size(), kLossesShown);
  for (int i = 0; i < shown; ++i) {
    const v1::StepLoss& loss = job.losses(i);
    const std::string ago = FormatAgo(loss.unix_ms(), now);
    // The reason may begin with the step by itself: once is enough.
    const bool told = absl::StartsWith(loss.why(), absl::StrCat("step ", loss.step(), " "));
    AddLine(
        lines, i == 0 ? "given up" : "",
        Sentence({told ? "" : StepText(loss.attempt(), loss.step()), EscapeText(loss.why()), ago}));
  }
  if (shown < job.losses_size()) {
    AddLine(lines, "",
            absl::StrCat("and ", job.losses_size() - shown, " older: --json has them all"));
  }
}

void AddEvents(const v1::JobStatus& job, int64_t now, Table& lines) {
  // Oldest first, so that the eye ends at the newest.
  const int first = std::max(0, job.events_size() - kEventsShown);
  for (int i = first; i < job.events_size(); ++i) {
    const v1::Event& event = job.events(i);
    const std::string ago = FormatAgo(event.unix_ms(), now);
    AddLine(lines, i == first ? "recently" : "", Sentence({EscapeText(event.text()), ago}));
  }
}

// "rank 3 was told to end; step 900, or the first one after it, is the last; 24 s left"
std::string StoppingText(const v1::Stopping& stopping) {
  return absl::StrCat(
      "rank ", stopping.rank(), " was told to end; ",
      stopping.chosen()
          ? absl::StrCat("step ", stopping.last_step(), ", or the first one after it, is the last")
          : "on which step is being agreed on",
      stopping.left_ms() > 0
          ? absl::StrCat("; ", FormatDuration(std::chrono::milliseconds(stopping.left_ms())),
                         " left")
          : "");
}

std::string RenderJob(const v1::JobStatus& job, int64_t now) {
  Table lines({{"", Align::kLeft}, {"", Align::kLeft}});
  for (const v1::Protection& p : job.protection()) {
    AddLine(lines, TextOf(p.kind()).name, ProtectionText(p));
  }
  if (!job.restore_point().empty()) {
    AddLine(lines, "next restore",
            absl::StrCat(EscapeText(job.restore_point()),
                         " (set by hand; --clear of ckptctl restore takes it back)"));
  }
  if (job.has_prefetch()) {
    AddLine(lines, "", EscapeText(job.prefetch().text()));
  }
  if (job.has_stopping()) {
    AddLine(lines, "ends", StoppingText(job.stopping()));
  }
  if (job.has_restore()) {
    AddLine(lines, "restores", EscapeText(job.restore().text()));
  }
  AddTierLines(job, now, lines);
  AddInFlight(job, lines);
  AddLosses(job, now, lines);
  AddEvents(job, now, lines);
  return JobHead(job) + lines.RenderWithoutTitles("  ");
}

// Nothing where nobody ever said that the network is busy.
std::string RenderQuiet(const v1::NetworkQuiet& quiet) {
  if (quiet.busy_processes() == 0 && quiet.held_ms() == 0) {
    return "";
  }
  return absl::StrCat("network: ", Count(quiet.busy_processes(), "process says", "processes say"),
                      " that it is busy; background copying ",
                      quiet.holding() ? "waits" : "does not wait", ", and has waited ",
                      FormatAge(static_cast<int64_t>(quiet.held_ms())), " in all\n");
}

std::string RenderDaemon(const v1::DaemonStatus& d) {
  std::string out =
      absl::StrCat("ckptd ", EscapeText(d.version()), " on ", EscapeText(d.node_name()), ": pid ",
                   d.pid(), ", up ", FormatAge(d.uptime_ms()), ", ",
                   Count(d.connections(), "connection", "connections"), "\n");
  absl::StrAppend(&out, "memory ", Bar(d.memory_bytes_used(), d.memory_bytes_max(), kBudgetCells),
                  " ", FormatBytes(d.memory_bytes_used()), " of ",
                  FormatBytes(d.memory_bytes_max()), " in ", Count(d.slots(), "slot", "slots"),
                  " (", d.slots_free(), " free, ", d.slots_quarantined(), " quarantined); ",
                  EscapeText(d.memory_dir()), " has ", FormatBytes(d.memory_bytes_free_in_tmpfs()),
                  " left\n");
  absl::StrAppend(&out, RenderTiers(d), RenderQuiet(d.quiet()));
  if (d.draining()) {
    absl::StrAppend(&out, "being drained: no rank is let in (ckptctl drain --undo)\n");
  }
  for (const std::string& problem : d.problems()) {
    absl::StrAppend(&out, "problem: ", EscapeText(problem), "\n");
  }
  return out;
}

}  // namespace

std::string RenderStatus(const v1::GetStatusReply& reply) {
  std::string out = RenderDaemon(reply.daemon());
  for (const v1::JobStatus& job : reply.jobs()) {
    absl::StrAppend(&out, "\n", RenderJob(job, reply.daemon().unix_ms()));
  }
  if (reply.jobs().empty()) {
    absl::StrAppend(&out, "\n", NoJobs(reply.daemon()));
  }
  return out;
}

ExitCode RunStatus(const Context& context, const StatusArguments& arguments) {
  v1::GetStatusRequest request;
  request.set_job(arguments.job);
  return Ask(context, "", &AdminClient::GetStatus, request, RenderStatus);
}

}  // namespace holdfast
