// jobs: what one looks at first where there are many of them.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

using nlohmann::ordered_json;

constexpr int kNodesShown = 2;
constexpr int kProblemsShown = 8;
constexpr size_t kProblemColumns = 120;

std::string PhaseName(v1::JobStatus::AttemptPhase phase) {
  switch (phase) {
    case v1::JobStatus::ATTEMPT_PHASE_UNSPECIFIED:
      return "not begun";  // it has no attempt yet
    case v1::JobStatus::ATTEMPT_PHASE_GATHERING:
      return "gathering";
    case v1::JobStatus::ATTEMPT_PHASE_RESTORING:
      return "restoring";
    case v1::JobStatus::ATTEMPT_PHASE_RUNNING:
      return "running";
    case v1::JobStatus::ATTEMPT_PHASE_ENDED:
      return "ended";
    default:
      return absl::StrCat("phase ", static_cast<int>(phase));
  }
}

// The newest step of the line that a restore of processes finds; null: none.
const v1::Protection* NewestCommitted(const v1::JobStatus& job) {
  for (const v1::Protection& line : job.protection()) {
    if (line.kind() == v1::Protection::FAILURE_KIND_PROCESS && line.any()) {
      return &line;
    }
  }
  return nullptr;
}

// Null: no step of the line is in the remote tier.
const v1::TierProgress* InRemote(const v1::JobStatus& job) {
  for (const v1::TierProgress& tier : job.tiers()) {
    if (tier.tier() == "remote" && tier.any()) {
      return &tier;
    }
  }
  return nullptr;
}

template <typename Newest>
std::string StepAndAge(const Newest* newest) {
  return newest == nullptr ? "none"
                           : absl::StrCat(newest->step(), ", ", FormatAge(newest->age_ms()));
}

std::string LostText(const v1::JobStatus& job, int64_t now) {
  if (job.losses().empty()) {
    return "";
  }
  const v1::StepLoss& newest = job.losses(0);
  const std::string ago = FormatAgo(newest.unix_ms(), now);
  return absl::StrCat(newest.step(), ago.empty() ? "" : ", ", ago);
}

std::string NodesText(const v1::JobStatus& job) {
  if (job.nodes() > kNodesShown || static_cast<int>(job.nodes()) != job.node_names_size()) {
    return Count(job.nodes(), "node", "nodes");
  }
  return absl::StrJoin(job.node_names(), ", ", [](std::string* out, const std::string& name) {
    absl::StrAppend(out, EscapeText(name));
  });
}

// What somebody should look at, the most important first.
std::vector<std::string> ProblemsOf(const v1::JobStatus& job) {
  std::vector<std::string> problems;
  if (job.phase() == v1::JobStatus::ATTEMPT_PHASE_RUNNING && job.ranks_alive() < job.world_size()) {
    problems.push_back(
        absl::StrCat(Count(job.world_size() - job.ranks_alive(), "rank is", "ranks are"), " gone"));
  }
  for (const v1::TierProgress& tier : job.tiers()) {
    if (!tier.problem().empty()) {
      problems.push_back(absl::StrCat(tier.tier(), ": ", tier.problem()));
    }
  }
  return problems;
}

std::string ProblemText(const std::vector<std::string>& problems) {
  if (problems.empty()) {
    return "";
  }
  return absl::StrCat(
      EscapeText(problems[0], kProblemColumns),
      problems.size() > 1 ? absl::StrCat(" (and ", problems.size() - 1, " more)") : std::string());
}

std::string Totals(const v1::GetStatusReply& reply) {
  std::map<v1::JobStatus::AttemptPhase, uint32_t> phases;
  uint32_t troubled = 0;
  for (const v1::JobStatus& job : reply.jobs()) {
    ++phases[job.phase()];
    troubled += ProblemsOf(job).empty() ? 0 : 1;
  }
  return absl::StrCat(
      Count(static_cast<uint64_t>(reply.jobs_size()), "job", "jobs"), ": ",
      absl::StrJoin(phases, ", ",
                    [](std::string* out, const auto& phase) {
                      absl::StrAppend(out, phase.second, " ", PhaseName(phase.first));
                    }),
      troubled > 0 ? absl::StrCat("; ", troubled, " with a problem (ckptctl status JOB)")
                   : std::string(),
      "\n");
}

// Among them the nodes whose jobs are not shown, which are told last.
std::string DaemonProblems(const v1::DaemonStatus& daemon) {
  const int first = std::max(0, daemon.problems_size() - kProblemsShown);
  std::string out;
  for (int i = first; i < daemon.problems_size(); ++i) {
    absl::StrAppend(&out, "problem: ", EscapeText(daemon.problems(i)), "\n");
  }
  if (first > 0) {
    absl::StrAppend(&out, "and ", first, " more: ckptctl status\n");
  }
  return out;
}

template <typename Newest>
ordered_json StepToJson(const Newest* newest) {
  if (newest == nullptr) {
    return nullptr;
  }
  return {{"attempt", newest->attempt()}, {"step", newest->step()}, {"age_ms", newest->age_ms()}};
}

ordered_json JobToJson(const v1::JobStatus& job) {
  ordered_json json = MessageToJson(job);
  ordered_json out;
  for (const char* field : {"name", "uid", "host", "attempt", "phase", "ranks_alive", "world_size",
                            "nodes", "node_names"}) {
    out[field] = json[field];
  }
  out["newest"] = StepToJson(NewestCommitted(job));
  out["newest_in_remote"] = StepToJson(InRemote(job));
  out["lost"] = job.losses().empty() ? ordered_json(nullptr) : json["losses"][0];
  out["problems"] = ProblemsOf(job);
  return out;
}

}  // namespace

std::string RenderJobs(const v1::GetStatusReply& reply) {
  Table table({{"JOB", Align::kLeft},
               {"HOST", Align::kLeft},
               {"ATTEMPT", Align::kRight},
               {"PHASE", Align::kLeft},
               {"ALIVE", Align::kRight},
               {"ON", Align::kLeft},
               {"NEWEST STEP", Align::kLeft},
               {"IN REMOTE", Align::kLeft},
               {"LAST LOST", Align::kLeft},
               {"PROBLEM", Align::kLeft}});
  for (const v1::JobStatus& job : reply.jobs()) {
    table.AddRow({EscapeText(job.name()), EscapeText(job.host()), absl::StrCat(job.attempt()),
                  PhaseName(job.phase()), absl::StrCat(job.ranks_alive(), " of ", job.world_size()),
                  NodesText(job), StepAndAge(NewestCommitted(job)), StepAndAge(InRemote(job)),
                  LostText(job, reply.daemon().unix_ms()), ProblemText(ProblemsOf(job))});
  }
  const std::string problems = DaemonProblems(reply.daemon());
  const std::string jobs =
      table.empty() ? NoJobs(reply.daemon()) : absl::StrCat(table.Render(""), "\n", Totals(reply));
  return absl::StrCat(jobs, problems);
}

std::string NoJobs(const v1::DaemonStatus& daemon) {
  return daemon.problems().empty()
             ? "no jobs of yours: none has joined since their copies were last removed\n"
             : "no jobs of yours are shown, which may be for the problems that are named\n";
}

ExitCode RunJobs(const Context& context) {
  const auto reply = AskFor(context, &AdminClient::GetStatus, v1::GetStatusRequest());
  if (!reply.ok()) {
    return ReportError(context, reply.status());
  }
  if (!context.json) {
    *context.out << RenderJobs(*reply);
    return ExitCode::kOk;
  }
  ordered_json json;
  json["jobs"] = ordered_json::array();
  for (const v1::JobStatus& job : reply->jobs()) {
    json["jobs"].push_back(JobToJson(job));
  }
  json["problems"] = ordered_json::array();
  for (const std::string& problem : reply->daemon().problems()) {
    json["problems"].push_back(problem);
  }
  json["unix_ms"] = reply->daemon().unix_ms();
  *context.out << DumpJson(json) << "\n";
  return ExitCode::kOk;
}

}  // namespace holdfast
