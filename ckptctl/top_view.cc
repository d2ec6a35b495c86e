#include "ckptctl/top_view.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/units.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

using nlohmann::ordered_json;

constexpr size_t kBarCells = 10;
constexpr size_t kNameColumns = 40;
constexpr size_t kTextColumns = 160;

// ---- From answers to the model ----

const v1::Protection* NewestOf(const v1::JobStatus& job) {
  for (const v1::Protection& line : job.protection()) {
    if (line.kind() == v1::Protection::FAILURE_KIND_PROCESS && line.any()) {
      return &line;
    }
  }
  return nullptr;
}

// By the daemon's own clock that nobody sets. 0: another run of the daemon, or no time in between.
int64_t Interval(const v1::DaemonStatus& now, const v1::DaemonStatus* before) {
  if (before == nullptr || before->pid() != now.pid() || before->node_name() != now.node_name()) {
    return 0;
  }
  return std::max<int64_t>(0, now.uptime_ms() - before->uptime_ms());
}

std::optional<double> Rate(uint64_t now, std::optional<uint64_t> before, int64_t interval_ms) {
  const uint64_t was = before.value_or(UINT64_MAX);
  if (interval_ms <= 0 || now < was) {
    return std::nullopt;
  }
  return static_cast<double>(now - was) * 1000 / static_cast<double>(interval_ms);
}

const v1::TierStatus* TierOf(const v1::DaemonStatus* daemon, const std::string& name) {
  if (daemon != nullptr) {
    for (const v1::TierStatus& tier : daemon->tiers()) {
      if (tier.tier() == name) {
        return &tier;
      }
    }
  }
  return nullptr;
}

TopTier MemoryOf(const v1::DaemonStatus& daemon) {
  TopTier memory;
  memory.name = "memory";
  memory.bytes_used = daemon.memory_bytes_used();
  memory.bytes_max = daemon.memory_bytes_max();
  memory.bytes_room = memory.bytes_max - std::min(memory.bytes_used, memory.bytes_max);
  return memory;
}

TopTier TierFrom(const v1::TierStatus& now, const v1::TierStatus* before, int64_t interval_ms) {
  TopTier tier;
  tier.name = now.tier();
  tier.bytes_used = now.bytes_used();
  tier.bytes_max = now.bytes_max();
  const uint64_t left = now.bytes_max() - std::min(now.bytes_used(), now.bytes_max());
  const bool own_files = now.dirs_size() > 0;  // what is lent of memory has none
  tier.bytes_room = now.bytes_max() == 0 ? now.bytes_free()
                    : own_files          ? std::min(left, now.bytes_free())
                                         : left;
  const auto last = [&](uint64_t bytes) {
    return before == nullptr ? std::nullopt : std::optional<uint64_t>(bytes);
  };
  tier.written_bytes_per_s =
      Rate(now.bytes_written(), last(before == nullptr ? 0 : before->bytes_written()), interval_ms);
  tier.read_bytes_per_s =
      Rate(now.bytes_read(), last(before == nullptr ? 0 : before->bytes_read()), interval_ms);
  if (now.stalled() > 0) {
    tier.problem = absl::StrCat(Count(now.stalled(), "write gets", "writes get"), " nowhere");
  }
  const bool told = !now.state().empty() && now.state() != "ok";
  if (!now.healthy() || told) {
    absl::StrAppend(&tier.problem, tier.problem.empty() ? "" : ": ",
                    told ? now.state() : "not well");
  }
  return tier;
}

const v1::JobStatus* JobOf(const TopSample* sample, const v1::JobStatus& job) {
  if (sample != nullptr) {
    for (const v1::JobStatus& one : sample->status.jobs()) {
      if (one.uuid() == job.uuid() && one.name() == job.name()) {
        return &one;
      }
    }
  }
  return nullptr;
}

// How many ranks of the same step were done then; none: it was not on its way yet.
template <typename Steps, typename Done>
std::optional<uint64_t> DoneBefore(const Steps* before, uint64_t attempt, uint64_t step,
                                   Done done) {
  if (before != nullptr) {
    for (const auto& one : *before) {
      if (one.attempt() == attempt && one.step() == step) {
        return done(one);
      }
    }
  }
  return std::nullopt;
}

void AddFlows(const v1::JobStatus& job, const v1::JobStatus* before, int64_t now_unix_ms,
              int64_t interval_ms, TopModel& model) {
  for (const v1::StepInFlight& step : job.in_flight()) {
    const auto was =
        DoneBefore(before == nullptr ? nullptr : &before->in_flight(), step.attempt(), step.step(),
                   [](const v1::StepInFlight& one) { return one.ranks_sealed(); });
    model.flows.push_back({.job = job.name(),
                           .attempt = step.attempt(),
                           .step = step.step(),
                           .what = "saved",
                           .ranks_done = step.ranks_sealed(),
                           .ranks = step.world_size(),
                           .ranks_per_s = Rate(step.ranks_sealed(), was, interval_ms)});
  }
  for (const v1::TierProgress& tier : job.tiers()) {
    const v1::TierProgress* tier_before = nullptr;
    if (before != nullptr) {
      for (const v1::TierProgress& one : before->tiers()) {
        tier_before = one.tier() == tier.tier() ? &one : tier_before;
      }
    }
    for (const v1::FlushInFlight& flush : tier.flushing()) {
      const auto was =
          DoneBefore(tier_before == nullptr ? nullptr : &tier_before->flushing(), flush.attempt(),
                     flush.step(), [](const v1::FlushInFlight& one) { return one.ranks_done(); });
      const bool timed = flush.since_unix_ms() > 0;
      model.flows.push_back(
          {.job = job.name(),
           .attempt = flush.attempt(),
           .step = flush.step(),
           .what = tier.tier(),
           .ranks_done = flush.ranks_done(),
           .ranks = flush.world_size(),
           .for_ms = timed ? std::max<int64_t>(0, now_unix_ms - flush.since_unix_ms()) : 0,
           .stalled = flush.stalled(),
           .ranks_per_s = Rate(flush.ranks_done(), was, interval_ms)});
    }
  }
  if (job.has_restore()) {
    std::optional<uint64_t> was;
    if (before != nullptr && before->has_restore() &&
        before->restore().attempt() == job.restore().attempt() &&
        before->restore().step() == job.restore().step()) {
      was = before->restore().ranks_done();
    }
    model.flows.push_back({.job = job.name(),
                           .attempt = job.restore().attempt(),
                           .step = job.restore().step(),
                           .what = "restored",
                           .ranks_done = job.restore().ranks_done(),
                           .ranks = job.world_size(),
                           .ranks_per_s = Rate(job.restore().ranks_done(), was, interval_ms)});
  }
  if (job.has_prefetch() && job.prefetch().in_memory() < job.prefetch().ranks()) {
    model.flows.push_back({.job = job.name(),
                           .what = "prefetched",
                           .ranks_done = job.prefetch().in_memory(),
                           .ranks = job.prefetch().ranks()});
  }
}

void AddLags(const v1::JobStatus& job, TopModel& model) {
  const v1::Protection* newest = NewestOf(job);
  for (const v1::TierProgress& tier : job.tiers()) {
    TopLag lag;
    lag.job = job.name();
    lag.tier = tier.tier();
    lag.any = tier.any();
    lag.attempt = tier.attempt();
    lag.step = tier.step();
    lag.age_ms = tier.age_ms();
    if (newest != nullptr && tier.any() && newest->attempt() == tier.attempt()) {
      lag.steps_behind = newest->step() - std::min(newest->step(), tier.step());
    }
    lag.problem = tier.problem();
    model.lags.push_back(std::move(lag));
    for (TopTier& known : model.tiers) {
      if (known.name != tier.tier()) {
        continue;
      }
      known.steps_waiting += tier.waiting() ? 1 : 0;
      for (const v1::FlushInFlight& flush : tier.flushing()) {
        known.backlog_shards +=
            flush.world_size() - std::min(flush.ranks_done(), flush.world_size());
      }
    }
  }
}

TopJob JobFrom(const v1::JobStatus& job) {
  TopJob out;
  out.name = job.name();
  out.host = job.host();
  out.phase = job.phase();
  out.ranks_alive = job.ranks_alive();
  out.ranks = job.world_size();
  if (const v1::Protection* newest = NewestOf(job)) {
    out.any = true;
    out.step = newest->step();
    out.age_ms = newest->age_ms();
  }
  for (const v1::Protection& line : job.protection()) {
    out.losses.push_back(
        {line.kind(), !line.any(), line.attempt(), line.step(), line.any() ? line.age_ms() : 0});
  }
  return out;
}

// ---- From the model to text ----

// A title, a line of column titles perhaps, and rows of which some may be left out.
struct Section {
  std::vector<std::string> head;
  std::vector<std::string> rows;
};

class Writer {
 public:
  explicit Writer(const TopScreen& screen) : screen_(screen) {}

  std::string Text(std::string_view raw, size_t columns_max) const {
    const std::string escaped = EscapeText(raw, columns_max);
    return screen_.utf8 ? escaped : AsciiText(escaped);
  }
  std::string Name(std::string_view raw) const { return Text(raw, kNameColumns); }

  void AddLine(const std::string& line) { lines_.push_back(line); }
  void AddSection(std::string title, const Table& table, const std::string& if_empty) {
    Section section;
    section.head.push_back(std::move(title));
    if (table.empty()) {
      section.rows.push_back("  " + if_empty);
    } else {
      section.rows = absl::StrSplit(table.Render("  "), '\n', absl::SkipEmpty());
      section.head.push_back(section.rows.front());
      section.rows.erase(section.rows.begin());
    }
    sections_.push_back(std::move(section));
  }

  // As many rows of each section as fit, the same bound for all.
  std::string Frame() const {
    size_t most = 0;
    for (const Section& section : sections_) {
      most = std::max(most, section.rows.size());
    }
    std::vector<std::string> lines = LinesWith(most);
    while (screen_.rows > 0 && lines.size() > screen_.rows && most > 0) {
      lines = LinesWith(--most);
    }
    if (screen_.rows > 0 && lines.size() > screen_.rows) {
      const size_t more = lines.size() - screen_.rows + 1;
      lines.resize(screen_.rows - 1);
      lines.push_back(absl::StrCat(Count(more, "more line", "more lines")));
    }
    std::string out;
    for (const std::string& line : lines) {
      absl::StrAppend(&out, Cut(line), "\n");
    }
    return out;
  }

 private:
  std::string Cut(const std::string& line) const {
    return screen_.columns == 0 ? line : CutText(line, screen_.columns, screen_.utf8 ? "…" : ">");
  }
  std::vector<std::string> LinesWith(size_t rows_max) const {
    std::vector<std::string> lines = lines_;
    for (const Section& section : sections_) {
      lines.emplace_back();
      lines.insert(lines.end(), section.head.begin(), section.head.end());
      const size_t shown = std::min(rows_max, section.rows.size());
      lines.insert(lines.end(), section.rows.begin(),
                   section.rows.begin() + static_cast<ptrdiff_t>(shown));
      if (shown < section.rows.size()) {
        lines.push_back(absl::StrCat("  ", section.rows.size() - shown, " more"));
      }
    }
    return lines;
  }

  const TopScreen screen_;
  std::vector<std::string> lines_;
  std::vector<Section> sections_;
};

std::string ByteRate(const std::optional<double>& bytes_per_s) {
  if (!bytes_per_s) {
    return "-";
  }
  return FormatRate(static_cast<uint64_t>(*bytes_per_s), std::chrono::seconds(1));
}

std::string PhaseWord(v1::JobStatus::AttemptPhase phase) {
  switch (phase) {
    case v1::JobStatus::ATTEMPT_PHASE_UNSPECIFIED:
      return "not begun";
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

std::string BacklogText(const TopTier& tier) {
  std::string text =
      tier.backlog_shards > 0 ? Count(tier.backlog_shards, "shard", "shards") : std::string();
  if (tier.steps_waiting > 0) {
    absl::StrAppend(&text, text.empty() ? "" : ", ",
                    Count(tier.steps_waiting, "step waits", "steps wait"));
  }
  return text.empty() ? "-" : text;
}

void AddNodes(const TopModel& model, Writer& writer) {
  Table table({{"NODE", Align::kLeft},
               {"MEMORY", Align::kRight},
               {"STATE", Align::kLeft},
               {"HOSTS", Align::kRight}});
  int up = 0;
  // Those that are out of reach first: they are what somebody should see.
  std::vector<const v1::NodeStatus*> nodes;
  for (const v1::NodeStatus& node : model.nodes.nodes()) {
    nodes.push_back(&node);
    up += node.here() || node.reachable() ? 1 : 0;
  }
  std::stable_partition(nodes.begin(), nodes.end(), [](const v1::NodeStatus* node) {
    return !node->here() && !node->reachable();
  });
  for (const v1::NodeStatus* node : nodes) {
    table.AddRow(
        {writer.Name(node->name()),
         node->capacity_bytes() > 0 ? FormatBytes(node->capacity_bytes()) : "?",
         node->here() ? "this one"
         : node->reachable()
             ? "up"
             : absl::StrCat("OUT OF REACH: ", writer.Text(node->unreachable(), kTextColumns)),
         Count(static_cast<uint64_t>(node->jobs_size()), "job", "jobs")});
  }
  writer.AddSection(absl::StrCat("NODES: ", up, " of ", model.nodes.nodes_size(), " within reach"),
                    table, "none are known");
}

void AddTiers(const TopModel& model, Writer& writer) {
  Table table({{"TIER", Align::kLeft},
               {"", Align::kLeft},
               {"USED", Align::kRight},
               {"OF", Align::kRight},
               {"ROOM", Align::kRight},
               {"WRITTEN", Align::kRight},
               {"READ", Align::kRight},
               {"BACKLOG", Align::kLeft},
               {"PROBLEM", Align::kLeft}});
  for (const TopTier& tier : model.tiers) {
    table.AddRow({writer.Name(tier.name),
                  tier.bytes_max > 0 ? Bar(tier.bytes_used, tier.bytes_max, kBarCells) : "",
                  FormatBytes(tier.bytes_used),
                  tier.bytes_max > 0 ? FormatBytes(tier.bytes_max) : "no limit",
                  FormatBytes(tier.bytes_room), ByteRate(tier.written_bytes_per_s),
                  ByteRate(tier.read_bytes_per_s), BacklogText(tier),
                  writer.Text(tier.problem, kTextColumns)});
  }
  writer.AddSection(absl::StrCat("TIERS of ", writer.Name(model.daemon.node_name())), table,
                    "none");
}

std::string FlowText(const TopFlow& flow) {
  if (flow.what == "saved" || flow.what == "restored" || flow.what == "prefetched") {
    return "being " + flow.what;
  }
  return absl::StrCat("to ", flow.what);
}

void AddFlowRows(const TopModel& model, Writer& writer) {
  Table table({{"JOB", Align::kLeft},
               {"STEP", Align::kRight},
               {"WHAT", Align::kLeft},
               {"RANKS DONE", Align::kRight},
               {"RANKS/S", Align::kRight},
               {"FOR", Align::kRight},
               {"", Align::kLeft}});
  // What stands still first.
  std::vector<const TopFlow*> flows;
  for (const TopFlow& flow : model.flows) {
    flows.push_back(&flow);
  }
  std::stable_partition(flows.begin(), flows.end(),
                        [](const TopFlow* flow) { return flow->stalled; });
  for (const TopFlow* flow : flows) {
    table.AddRow({writer.Name(flow->job), flow->attempt > 0 ? absl::StrCat(flow->step) : "?",
                  writer.Text(FlowText(*flow), kNameColumns),
                  absl::StrCat(flow->ranks_done, " of ", flow->ranks),
                  flow->ranks_per_s ? absl::StrFormat("%.1f", *flow->ranks_per_s) : "-",
                  flow->for_ms > 0 ? FormatAge(flow->for_ms) : "-",
                  flow->stalled ? "STALLED" : ""});
  }
  writer.AddSection("ON THE WAY", table, "nothing");
}

void AddLagRows(const TopModel& model, Writer& writer) {
  Table table({{"JOB", Align::kLeft},
               {"TIER", Align::kLeft},
               {"NEWEST STEP", Align::kRight},
               {"AGE", Align::kRight},
               {"STEPS BEHIND", Align::kRight},
               {"PROBLEM", Align::kLeft}});
  for (const TopLag& lag : model.lags) {
    table.AddRow({writer.Name(lag.job), writer.Name(lag.tier),
                  lag.any ? absl::StrCat(lag.step) : "none", lag.any ? FormatAge(lag.age_ms) : "-",
                  lag.steps_behind ? absl::StrCat(*lag.steps_behind) : "?",
                  writer.Text(lag.problem, kTextColumns)});
  }
  writer.AddSection("LAG behind the newest committed step", table, "no tier is kept");
}

std::string LossText(const TopJob& job, v1::Protection::FailureKind kind) {
  for (const TopLoss& loss : job.losses) {
    if (loss.kind == kind) {
      return loss.everything ? "EVERYTHING" : FormatAge(loss.age_ms);
    }
  }
  return "?";
}

void AddJobs(const TopModel& model, Writer& writer) {
  Table table({{"JOB", Align::kLeft},
               {"PHASE", Align::kLeft},
               {"ALIVE", Align::kRight},
               {"NEWEST STEP", Align::kRight},
               {"PROCESS", Align::kRight},
               {"REBOOT", Align::kRight},
               {"NODE", Align::kRight},
               {"DOMAIN", Align::kRight},
               {"ALL NODES", Align::kRight}});
  for (const TopJob& job : model.jobs) {
    table.AddRow({writer.Name(job.name), PhaseWord(job.phase),
                  absl::StrCat(job.ranks_alive, " of ", job.ranks),
                  job.any ? absl::StrCat(job.step) : "none",
                  LossText(job, v1::Protection::FAILURE_KIND_PROCESS),
                  LossText(job, v1::Protection::FAILURE_KIND_REBOOT),
                  LossText(job, v1::Protection::FAILURE_KIND_NODE),
                  LossText(job, v1::Protection::FAILURE_KIND_DOMAIN),
                  LossText(job, v1::Protection::FAILURE_KIND_ALL_NODES)});
  }
  writer.AddSection("JOBS, and the training that is lost if one of these dies now", table,
                    "none of yours");
}

template <typename T>
ordered_json OrNull(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

std::string KindWord(v1::Protection::FailureKind kind) {
  v1::Protection line;
  line.set_kind(kind);
  return MessageToJson(line)["kind"].get<std::string>();
}

}  // namespace

TopModel MakeTop(const TopSample& now, const TopSample* before) {
  TopModel model;
  model.daemon = now.status.daemon();
  model.nodes = now.nodes;
  const v1::DaemonStatus* last = before == nullptr ? nullptr : &before->status.daemon();
  model.interval_ms = Interval(model.daemon, last);
  model.tiers.push_back(MemoryOf(model.daemon));
  for (const v1::TierStatus& tier : model.daemon.tiers()) {
    model.tiers.push_back(TierFrom(tier, TierOf(last, tier.tier()), model.interval_ms));
  }
  for (const v1::JobStatus& job : now.status.jobs()) {
    AddFlows(job, JobOf(before, job), model.daemon.unix_ms(), model.interval_ms, model);
    AddLags(job, model);
    model.jobs.push_back(JobFrom(job));
  }
  return model;
}

std::string RenderTop(const TopModel& model, const TopScreen& screen) {
  Writer writer(screen);
  const v1::DaemonStatus& daemon = model.daemon;
  writer.AddLine(absl::StrCat(
      "ckptd ", writer.Name(daemon.version()), " on ", writer.Name(daemon.node_name()), ", up ",
      FormatAge(daemon.uptime_ms()), ", ", Count(daemon.connections(), "connection", "connections"),
      ", ", FormatTime(daemon.unix_ms())));
  if (!model.away.empty()) {
    writer.AddLine(
        absl::StrCat("AWAY for ", FormatAge(model.away_ms),
                     ", below is what it said last: ", writer.Text(model.away, kTextColumns)));
  }
  if (!model.nodes.problem().empty()) {
    writer.AddLine(
        absl::StrCat("problem: membership: ", writer.Text(model.nodes.problem(), kTextColumns)));
  }
  // (Those of the status are in it, one a line: the newest, and how many there are.)
  if (const int problems = daemon.problems_size(); problems > 0) {
    writer.AddLine(absl::StrCat(
        "problem: ", writer.Text(daemon.problems(problems - 1), kTextColumns),
        problems > 1 ? absl::StrCat(" (and ", problems - 1, " more: ckptctl status)") : ""));
  }
  AddJobs(model, writer);
  AddLagRows(model, writer);
  AddFlowRows(model, writer);
  AddTiers(model, writer);
  AddNodes(model, writer);
  return writer.Frame();
}

ordered_json TopToJson(const TopModel& model) {
  ordered_json json;
  json["unix_ms"] = model.daemon.unix_ms();
  json["node_name"] = model.daemon.node_name();
  json["away"] = model.away.empty() ? ordered_json(nullptr) : ordered_json(model.away);
  json["away_ms"] = model.away_ms;
  json["interval_ms"] = model.interval_ms;
  json["problems"] = ordered_json::array();
  for (const std::string& problem : model.daemon.problems()) {
    json["problems"].push_back(problem);
  }
  json["nodes"] = MessageToJson(model.nodes)["nodes"];
  json["membership_problem"] = model.nodes.problem();
  json["tiers"] = ordered_json::array();
  for (const TopTier& tier : model.tiers) {
    json["tiers"].push_back({{"tier", tier.name},
                             {"bytes_used", tier.bytes_used},
                             {"bytes_max", tier.bytes_max},
                             {"bytes_room", tier.bytes_room},
                             {"backlog_shards", tier.backlog_shards},
                             {"steps_waiting", tier.steps_waiting},
                             {"written_bytes_per_s", OrNull(tier.written_bytes_per_s)},
                             {"read_bytes_per_s", OrNull(tier.read_bytes_per_s)},
                             {"problem", tier.problem}});
  }
  json["flows"] = ordered_json::array();
  for (const TopFlow& flow : model.flows) {
    json["flows"].push_back({{"job", flow.job},
                             {"attempt", flow.attempt},
                             {"step", flow.step},
                             {"what", flow.what},
                             {"ranks_done", flow.ranks_done},
                             {"ranks", flow.ranks},
                             {"ranks_per_s", OrNull(flow.ranks_per_s)},
                             {"for_ms", flow.for_ms},
                             {"stalled", flow.stalled}});
  }
  json["lags"] = ordered_json::array();
  for (const TopLag& lag : model.lags) {
    json["lags"].push_back({{"job", lag.job},
                            {"tier", lag.tier},
                            {"any", lag.any},
                            {"attempt", lag.attempt},
                            {"step", lag.step},
                            {"age_ms", lag.age_ms},
                            {"steps_behind", OrNull(lag.steps_behind)},
                            {"problem", lag.problem}});
  }
  json["jobs"] = ordered_json::array();
  for (const TopJob& job : model.jobs) {
    ordered_json losses = ordered_json::array();
    for (const TopLoss& loss : job.losses) {
      losses.push_back({{"kind", KindWord(loss.kind)},
                        {"everything", loss.everything},
                        {"attempt", loss.attempt},
                        {"step", loss.step},
                        {"age_ms", loss.age_ms}});
    }
    v1::JobStatus phase;
    phase.set_phase(job.phase);
    json["jobs"].push_back({{"job", job.name},
                            {"host", job.host},
                            {"phase", MessageToJson(phase)["phase"]},
                            {"ranks_alive", job.ranks_alive},
                            {"ranks", job.ranks},
                            {"any", job.any},
                            {"step", job.step},
                            {"age_ms", job.age_ms},
                            {"losses", std::move(losses)}});
  }
  return json;
}

}  // namespace holdfast
