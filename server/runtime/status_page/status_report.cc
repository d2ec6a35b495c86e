#include "server/runtime/status_page/status_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

using nlohmann::ordered_json;

constexpr Duration kAskMax = std::chrono::seconds(5);  // of one question
constexpr size_t kTextBytesMax = 512;

std::string Short(const std::string& text) {
  return text.size() <= kTextBytesMax ? text : absl::StrCat(text.substr(0, kTextBytesMax), "…");
}

// "ATTEMPT_PHASE_RUNNING" without the prefix, in lower case.
std::string PhaseText(v1::JobStatus::AttemptPhase phase) {
  switch (phase) {
    case v1::JobStatus::ATTEMPT_PHASE_UNSPECIFIED:
      return "not begun";
    case v1::JobStatus::ATTEMPT_PHASE_GATHERING:
      return "gathering";
    case v1::JobStatus::ATTEMPT_PHASE_RESTORING:
      return "restoring";
    case v1::JobStatus::ATTEMPT_PHASE_RUNNING:
      return "running";
    default:
      return "ended";
  }
}

std::string FailureText(v1::Protection::FailureKind kind) {
  switch (kind) {
    case v1::Protection::FAILURE_KIND_PROCESS:
      return "a process";
    case v1::Protection::FAILURE_KIND_REBOOT:
      return "the node's memory (a reboot)";
    case v1::Protection::FAILURE_KIND_NODE:
      return "the node";
    case v1::Protection::FAILURE_KIND_DOMAIN:
      return "its failure domain";
    case v1::Protection::FAILURE_KIND_ALL_NODES:
      return "all nodes";
    default:
      return absl::StrCat("failure ", static_cast<int>(kind));
  }
}

std::string StateText(v1::Checkpoint::State state) {
  switch (state) {
    case v1::Checkpoint::STATE_COMMITTED:
      return "committed";
    case v1::Checkpoint::STATE_BAD:
      return "bad";
    default:
      return "incomplete";
  }
}

// The last `max` of them.
template <typename Texts>
ordered_json LastTexts(const Texts& texts, int max) {
  ordered_json out = ordered_json::array();
  for (int i = std::max(0, texts.size() - max); i < texts.size(); ++i) {
    out.push_back(Short(texts.Get(i)));
  }
  return out;
}

class Report {
 public:
  Report(StatusSource& source, const Clock& clock, const StatusReportLimits& limits)
      : source_(source), clock_(clock), limits_(limits), until_(clock.Now() + limits.time_max) {}

  absl::StatusOr<std::string> Make() {
    HF_ASSIGN_OR_RETURN(const v1::GetStatusReply status, source_.Status(Left()));
    AddDaemon(status.daemon());
    AddJobs(status);
    const absl::StatusOr<v1::GetNodesReply> nodes = source_.Nodes(Left());
    if (nodes.ok()) {
      AddNodes(*nodes);
    } else {
      json_["membership_problem"] = Message(nodes.status());
      json_["nodes"] = ordered_json::array();
    }
    return json_.dump(-1, ' ', true, ordered_json::error_handler_t::replace);
  }

 private:
  // Shards and bytes of the steps with a map, that lie on a node in a tier.
  struct Held {
    uint64_t shards = 0;
    uint64_t bytes = 0;
  };

  Duration Left() const {
    return std::clamp(until_ - clock_.Now(), Duration(0), std::min(kAskMax, limits_.time_max));
  }

  void AddDaemon(const v1::DaemonStatus& daemon) {
    json_["unix_ms"] = daemon.unix_ms();
    json_["node"] = daemon.node_name();
    json_["version"] = daemon.version();
    json_["pid"] = daemon.pid();
    json_["uptime_ms"] = daemon.uptime_ms();
    json_["connections"] = daemon.connections();
    json_["problems"] = LastTexts(daemon.problems(), limits_.texts_max);
    json_["problems_left_out"] = std::max(0, daemon.problems_size() - limits_.texts_max);
    json_["tiers"] = ordered_json::array();
    json_["tiers"].push_back({{"tier", "memory"},
                              {"used", daemon.memory_bytes_used()},
                              {"max", daemon.memory_bytes_max()},
                              {"free", daemon.memory_bytes_free_in_tmpfs()},
                              {"healthy", true},
                              {"state", "ok"},
                              {"flushes", 0},
                              {"stalled", 0},
                              {"written", nullptr},
                              {"read", nullptr}});
    for (const v1::TierStatus& tier : daemon.tiers()) {
      json_["tiers"].push_back({{"tier", tier.tier()},
                                {"used", tier.bytes_used()},
                                {"max", tier.bytes_max()},
                                {"free", tier.bytes_free()},
                                {"healthy", tier.healthy()},
                                {"state", Short(tier.state())},
                                {"flushes", tier.flushes()},
                                {"stalled", tier.stalled()},
                                {"written", tier.bytes_written()},
                                {"read", tier.bytes_read()}});
    }
  }

  // Those that run first.
  void AddJobs(const v1::GetStatusReply& status) {
    std::vector<const v1::JobStatus*> jobs;
    for (const v1::JobStatus& job : status.jobs()) {
      jobs.push_back(&job);
    }
    std::stable_partition(jobs.begin(), jobs.end(),
                          [](const v1::JobStatus* job) { return job->ranks_alive() > 0; });
    const size_t shown = std::min(jobs.size(), static_cast<size_t>(limits_.jobs_max));
    json_["jobs"] = ordered_json::array();
    json_["jobs_left_out"] = jobs.size() - shown;
    for (size_t i = 0; i < shown; ++i) {
      json_["jobs"].push_back(JobToJson(*jobs[i]));
    }
  }

  ordered_json JobToJson(const v1::JobStatus& job) {
    ordered_json out = {{"name", job.name()},
                        {"uid", job.uid()},
                        {"attempt", job.attempt()},
                        {"phase", PhaseText(job.phase())},
                        {"world_size", job.world_size()},
                        {"ranks_alive", job.ranks_alive()},
                        {"host", job.host()},
                        {"nodes", job.nodes()},
                        {"bytes_held", job.bytes_held()},
                        {"restore_point", job.restore_point()},
                        {"restore", job.has_restore() ? job.restore().text() : ""}};
    out["protection"] = ordered_json::array();
    for (const v1::Protection& line : job.protection()) {
      out["protection"].push_back({{"kind", FailureText(line.kind())},
                                   {"any", line.any()},
                                   {"attempt", line.attempt()},
                                   {"step", line.step()},
                                   {"age_ms", line.age_ms()},
                                   {"from", line.from()}});
    }
    out["tiers"] = ordered_json::array();
    for (const v1::TierProgress& tier : job.tiers()) {
      out["tiers"].push_back(TierToJson(tier));
    }
    out["in_flight"] = ordered_json::array();
    for (int i = 0; i < std::min(job.in_flight_size(), limits_.texts_max); ++i) {
      const v1::StepInFlight& step = job.in_flight(i);
      out["in_flight"].push_back({{"attempt", step.attempt()},
                                  {"step", step.step()},
                                  {"ranks_done", step.ranks_sealed()},
                                  {"world_size", step.world_size()}});
    }
    out["problem"] = "";
    AddSteps(job, out);
    AddSaves(job, out);
    return out;
  }

  ordered_json TierToJson(const v1::TierProgress& tier) const {
    ordered_json flushing = ordered_json::array();
    for (int i = 0; i < std::min(tier.flushing_size(), limits_.texts_max); ++i) {
      const v1::FlushInFlight& flush = tier.flushing(i);
      flushing.push_back({{"attempt", flush.attempt()},
                          {"step", flush.step()},
                          {"ranks_done", flush.ranks_done()},
                          {"world_size", flush.world_size()},
                          {"stalled", flush.stalled()}});
    }
    return {{"tier", tier.tier()},       {"any", tier.any()},
            {"attempt", tier.attempt()}, {"step", tier.step()},
            {"age_ms", tier.age_ms()},   {"checkpoints", tier.checkpoints()},
            {"bytes", tier.bytes()},     {"waiting", tier.waiting()},
            {"flushing", flushing},      {"problem", Short(tier.problem())}};
  }

  static void AddProblem(const absl::Status& status, ordered_json& job) {
    if (job["problem"] == "") {
      job["problem"] = Message(status);
    }
  }

  void AddSteps(const v1::JobStatus& job, ordered_json& out) {
    out["steps"] = ordered_json::array();
    v1::ListCheckpointsRequest request;
    request.set_job(job.name());
    const absl::StatusOr<v1::ListCheckpointsReply> list = source_.List(request, Left());
    if (!list.ok()) {
      out["steps_left_out"] = 0;
      return AddProblem(list.status(), out);
    }
    const int shown = std::min(list->checkpoints_size(), limits_.steps_max);
    out["steps_left_out"] = list->checkpoints_size() - shown;
    for (int i = 0; i < shown; ++i) {
      const v1::Checkpoint& step = list->checkpoints(i);
      ordered_json tiers = ordered_json::array();
      for (const std::string& tier : step.tiers()) {
        tiers.push_back(tier);
      }
      out["steps"].push_back({{"attempt", step.attempt()},
                              {"step", step.step()},
                              {"state", StateText(step.state())},
                              {"on_line", step.on_line()},
                              {"pinned", step.pinned()},
                              {"shards", step.shards()},
                              {"world_size", step.world_size()},
                              {"bytes", step.bytes()},
                              {"unix_ms", step.unix_ms()},
                              {"tiers", tiers},
                              {"map", MapOf(job, step, out)}});
    }
  }

  // Null: it would take too much, or is not to be had; the tiers are named all the same.
  ordered_json MapOf(const v1::JobStatus& job, const v1::Checkpoint& step, ordered_json& out) {
    constexpr uint64_t kTiers =
        4;  // of each shard there may be a copy in each, or more with replicas
    const uint64_t copies = kTiers * step.world_size();
    if (copies > limits_.copies_max - std::min(limits_.copies_max, copies_)) {
      return nullptr;
    }
    v1::WhereRequest request;
    request.set_job(job.name());
    request.set_attempt(step.attempt());
    request.set_step(step.step());
    const absl::StatusOr<v1::WhereReply> where = source_.Where(request, Left());
    if (!where.ok()) {
      if (!absl::IsNotFound(where.status())) {  // (it may have gone in the meantime)
        AddProblem(where.status(), out);
      }
      return nullptr;
    }
    copies_ += std::max(copies, static_cast<uint64_t>(where->copies_size()));
    std::map<std::string, std::vector<const v1::ShardCopy*>> by_tier;
    for (const v1::ShardCopy& copy : where->copies()) {
      by_tier[copy.tier()].push_back(&copy);
      if (copy.state() != "writing") {
        Held& held = held_[copy.node()][copy.tier()];
        ++held.shards;
        held.bytes += copy.bytes();
      }
    }
    ordered_json map = ordered_json::object();
    for (const auto& [tier, of_tier] : by_tier) {
      std::set<uint32_t> good;
      for (const v1::ShardCopy* copy : of_tier) {
        if (absl::StartsWith(copy->state(), "good")) {
          good.insert(copy->rank());
        }
      }
      map[tier] = {{"good", good.size()},
                   {"cells", MapRow(of_tier, step.world_size(), limits_.cells_max)}};
    }
    return map;
  }

  void AddSaves(const v1::JobStatus& job, ordered_json& out) {
    out["saves"] = ordered_json::array();
    v1::TimelineRequest request;
    request.set_job(job.name());
    request.set_steps_max(static_cast<uint32_t>(limits_.saves_max));
    const absl::StatusOr<v1::TimelineReply> timeline = source_.Timeline(request, Left());
    if (!timeline.ok()) {
      return AddProblem(timeline.status(), out);
    }
    const int first = std::max(0, timeline->steps_size() - limits_.saves_max);
    for (int i = first; i < timeline->steps_size(); ++i) {
      out["saves"].push_back(SaveToJson(timeline->steps(i)));
    }
  }

  // Of each stage from its first rank's begin to its last rank's end.
  static ordered_json SaveToJson(const v1::StepTimeline& step) {
    struct Span {
      int64_t begin = 0;
      int64_t end = 0;
      bool open = false;
      bool failed = false;
    };
    std::vector<std::pair<std::string, Span>> spans;
    for (const v1::StageTime& time : step.stages()) {
      auto found = std::find_if(spans.begin(), spans.end(),
                                [&](const auto& one) { return one.first == time.stage(); });
      if (found == spans.end()) {
        spans.emplace_back(time.stage(), Span{time.begin_unix_us(), 0});
        found = spans.end() - 1;
      }
      Span& span = found->second;
      span.begin = std::min(span.begin, time.begin_unix_us());
      span.end = std::max(span.end, time.end_unix_us());
      span.open = span.open || time.end_unix_us() == 0;
      span.failed = span.failed || absl::StartsWith(time.outcome(), "failed");
    }
    ordered_json stages = ordered_json::array();
    for (const auto& [stage, span] : spans) {
      stages.push_back({{"stage", stage},
                        {"begin_us", span.begin},
                        {"end_us", span.open ? ordered_json(nullptr) : ordered_json(span.end)},
                        {"failed", span.failed}});
    }
    return {{"attempt", step.attempt()},  {"step", step.step()},
            {"bytes", step.bytes()},      {"world_size", step.world_size()},
            {"fate", Short(step.fate())}, {"stages", stages}};
  }

  ordered_json HeldBy(const std::string& node) const {
    ordered_json out = ordered_json::object();
    if (const auto found = held_.find(node); found != held_.end()) {
      for (const auto& [tier, held] : found->second) {
        out[tier] = {{"shards", held.shards}, {"bytes", held.bytes}};
      }
    }
    return out;
  }

  // Those that are out of reach first, then this one.
  void AddNodes(const v1::GetNodesReply& reply) {
    json_["membership_problem"] = Short(reply.problem());
    std::vector<const v1::NodeStatus*> nodes;
    for (const v1::NodeStatus& node : reply.nodes()) {
      nodes.push_back(&node);
    }
    std::stable_sort(nodes.begin(), nodes.end(), [](const auto* a, const auto* b) {
      const auto order = [](const v1::NodeStatus& node) {
        return node.here() ? 1 : node.reachable() ? 2 : 0;
      };
      return order(*a) < order(*b);
    });
    const size_t shown = std::min(nodes.size(), static_cast<size_t>(limits_.nodes_max));
    json_["nodes"] = ordered_json::array();
    json_["nodes_left_out"] = nodes.size() - shown;
    for (size_t i = 0; i < shown; ++i) {
      const v1::NodeStatus& node = *nodes[i];
      std::string labels;
      for (const v1::NodeStatus::Label& label : node.labels()) {
        absl::StrAppend(&labels, labels.empty() ? "" : ", ", label.name(), "=", label.value());
      }
      json_["nodes"].push_back({{"name", node.name()},
                                {"address", node.address()},
                                {"labels", Short(labels)},
                                {"version", node.version()},
                                {"memory", node.capacity_bytes()},
                                {"here", node.here()},
                                {"reachable", node.here() || node.reachable()},
                                {"unreachable", Short(node.unreachable())},
                                {"jobs", node.jobs_size()},
                                {"held", HeldBy(node.name())}});
    }
    json_["held_by_all"] = HeldBy("");  // what every node reaches
  }

  StatusSource& source_;
  const Clock& clock_;
  const StatusReportLimits limits_;
  const MonotonicTime until_;
  uint64_t copies_ = 0;
  std::map<std::string, std::map<std::string, Held>> held_;
  ordered_json json_;
};

}  // namespace

std::string MapRow(const std::vector<const v1::ShardCopy*>& copies, uint32_t world_size,
                   size_t cells_max) {
  const size_t cells = std::min<size_t>(world_size, cells_max);
  if (cells == 0) {
    return "";
  }
  struct Cell {
    std::set<uint32_t> good;
    uint32_t ranks = 0;
    char worst = '.';
  };
  std::vector<Cell> row(cells);
  const auto cell_of = [&](uint32_t rank) -> Cell& {
    return row[static_cast<size_t>(static_cast<uint64_t>(rank) * cells / world_size)];
  };
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    ++cell_of(rank).ranks;
  }
  // The later one hides the earlier.
  constexpr std::string_view kOrder = ".wab";
  for (const v1::ShardCopy* copy : copies) {
    if (copy->rank() >= world_size) {
      continue;
    }
    Cell& cell = cell_of(copy->rank());
    if (absl::StartsWith(copy->state(), "good")) {
      cell.good.insert(copy->rank());
      continue;
    }
    const char state = copy->state() == "writing"                        ? 'w'
                       : absl::StartsWith(copy->state(), "out of reach") ? 'a'
                                                                         : 'b';
    cell.worst = kOrder.find(state) > kOrder.find(cell.worst) ? state : cell.worst;
  }
  std::string out;
  for (const Cell& cell : row) {
    out += cell.worst != '.'                ? cell.worst
           : cell.good.size() == cell.ranks ? 'g'
           : cell.good.empty()              ? '.'
                                            : 'p';
  }
  return out;
}

absl::StatusOr<std::string> StatusReport(StatusSource& source, const Clock& clock,
                                         const StatusReportLimits& limits) {
  return Report(source, clock, limits).Make();
}

}  // namespace holdfast
