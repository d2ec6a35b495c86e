// plan: what another mesh of ranks would read of whom, and how long that may take, before anything
// is moved (docs/elastic.md).
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/env.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/layout_file.h"
#include "ckptctl/plan_time.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "holdfast/v1/admin.pb.h"
#include "recovery/reshard.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

constexpr uint64_t kLayoutFileBytesMax = 1 << 20;
constexpr uint32_t kRanksPlanned = 64;  // of a larger mesh: these, from all over it
constexpr size_t kNamed = 10;           // problems, and tensors that nobody wants

// Which copy of a shard is read: the nearest kind that there is anywhere.
struct Nearest {
  std::string tier;
  uint64_t cost = 0;
  std::string node;  // empty: every node reaches it
};
std::optional<uint64_t> CostOf(std::string_view tier) {
  constexpr std::string_view kTiers[] = {"memory", "nvme", "peer", "remote"};
  const auto found = std::find(std::begin(kTiers), std::end(kTiers), tier);
  return found == std::end(kTiers)
             ? std::nullopt
             : std::optional(static_cast<uint64_t>(found - std::begin(kTiers)));
}

// What is known of the step that is planned for.
struct SavedStep {
  CheckpointId id;
  uint32_t saved_by = 0;
  std::map<std::string, std::vector<Rank>> layouts;           // encoded: who has it
  std::vector<std::vector<uint64_t>> digests;                 // of each rank, its slices' alone
  std::map<std::string, std::vector<uint64_t>> first_digest;  // of each slice of a layout, likewise
  std::vector<const std::vector<uint64_t>*> first_of;         // those of each rank's layout
  std::map<std::string, Slice> tensors;                       // whole
  std::map<Rank, Nearest> nearest;
};

absl::Status Take(const std::string& bytes, SavedStep& step) {
  HF_ASSIGN_OR_RETURN(const RecordAndLayout read, DecodeRecordAndLayout(bytes));
  const ShardRecord& record = read.record;
  if (step.saved_by == 0) {
    step.id = record.id.checkpoint();
    step.saved_by = record.world_size;
  } else if (record.id.checkpoint() != step.id || record.world_size != step.saved_by ||
             record.id.rank != step.digests.size()) {
    return absl::DataLossError(absl::StrCat("the daemon gave the record of ", record.id.ToString(),
                                            " for rank ", step.digests.size(), " of step ",
                                            step.id.step));
  }
  const std::vector<DigestedRange> ranges = DigestedRanges(read.layout);
  const size_t of_header = ranges.size() > 1 ? ranges[1].first_digest : record.digests.size();
  std::vector<uint64_t>& first = step.first_digest[record.layout_bytes];
  if (first.empty()) {
    for (size_t i = 1; i < ranges.size(); ++i) {
      first.push_back(ranges[i].first_digest - of_header);
    }
    first.push_back(record.digests.size() - of_header);
  }
  step.layouts[record.layout_bytes].push_back(record.id.rank);
  step.first_of.push_back(&first);
  step.digests.emplace_back(record.digests.begin() + static_cast<ptrdiff_t>(of_header),
                            record.digests.end());
  for (const Slice& slice : read.layout.slices) {
    if (slice.kind == SliceKind::kTensor && step.tensors.count(slice.name) == 0) {
      Slice whole;
      whole.name = slice.name;
      whole.dtype = slice.dtype;
      whole.global_shape = slice.global_shape;
      step.tensors.emplace(slice.name, std::move(whole));
    }
  }
  return absl::OkStatus();
}

// Of the newest step that is whole in some tiers together, or the one that is asked for: its
// copies.
absl::StatusOr<std::vector<v1::ShardCopy>> FindCopies(AdminClient& client,
                                                      const PlanArguments& arguments) {
  v1::WhereRequest where;
  where.set_job(arguments.job);
  where.set_step(arguments.step.value_or(0));
  where.set_attempt(arguments.attempt);
  where.set_all_steps(!arguments.step.has_value());
  v1::WhereReply reply;
  HF_RETURN_IF_ERROR(client.Where(where, reply));
  std::map<CheckpointId, std::vector<v1::ShardCopy>> good;
  for (const v1::ShardCopy& copy : reply.copies()) {
    if (copy.state() == "good" && CostOf(copy.tier())) {
      good[{copy.attempt(), copy.step()}].push_back(copy);
    }
  }
  for (auto step = good.rbegin(); step != good.rend(); ++step) {
    std::set<uint32_t> ranks;
    for (const v1::ShardCopy& copy : step->second) {
      ranks.insert(copy.rank());
    }
    if (ranks.size() == step->second.front().world_size()) {
      return std::move(step->second);
    }
  }
  return absl::NotFoundError(absl::StrCat(
      "job '", arguments.job, "' has no ",
      arguments.step.has_value() ? absl::StrCat("step ", *arguments.step) : std::string("step"),
      " of which every shard has a good copy: ckptctl explain ", arguments.job));
}

constexpr std::string_view kImage = ".safetensors";
constexpr std::string_view kCompressed = ".zst";

// The record beside a file in nvme or remote; of a slot the daemon tells it.
absl::StatusOr<std::string> ReadRecord(AdminClient& client, const std::string& job,
                                       const v1::ShardCopy& copy) {
  std::string_view stem = copy.location();
  if (stem.ends_with(kCompressed)) {
    stem.remove_suffix(kCompressed.size());
  }
  if (stem.starts_with('/') && stem.ends_with(kImage)) {
    stem.remove_suffix(kImage.size());
    return ReadFile(*Env::System(), absl::StrCat(ToAbsl(stem), ".record"), kRecordBytesMax);
  }
  v1::InspectShardRequest inspect;
  inspect.set_job(job);
  inspect.set_step(copy.step());
  inspect.set_attempt(copy.attempt());
  inspect.set_rank(copy.rank());
  v1::InspectShardReply reply;
  HF_RETURN_IF_ERROR(client.InspectShard(inspect, reply));
  return std::move(*reply.mutable_record());
}

absl::StatusOr<SavedStep> ReadStep(const Context& context, AdminClient& client,
                                   const PlanArguments& arguments) {
  HF_ASSIGN_OR_RETURN(std::vector<v1::ShardCopy> copies, [&] {
    const WaitingLine waiting(context, "waiting for ckptd");
    return FindCopies(client, arguments);
  }());
  ProgressLine line(context);
  std::stable_sort(copies.begin(), copies.end(), [](const auto& a, const auto& b) {
    return std::pair(a.rank(), *CostOf(a.tier())) < std::pair(b.rank(), *CostOf(b.tier()));
  });
  SavedStep step;
  absl::Status failed;  // of the last copy of the rank that is looked for
  for (const v1::ShardCopy& copy : copies) {
    step.nearest.try_emplace(copy.rank(), Nearest{copy.tier(), *CostOf(copy.tier()), copy.node()});
    if (copy.rank() < step.digests.size()) {
      continue;  // its record is known
    }
    if (copy.rank() > step.digests.size()) {
      return failed;
    }
    line.Draw([&] {
      return absl::StrCat("plan: reading records: ", step.digests.size(), " of ",
                          copy.world_size());
    });
    const absl::StatusOr<std::string> record = ReadRecord(client, arguments.job, copy);
    failed = record.ok() ? Take(*record, step) : record.status();
  }
  if (step.saved_by == 0 || step.digests.size() < step.saved_by) {
    return failed;
  }
  return step;
}

// All ranks' plans together.
struct Outcome {
  uint32_t planned = 0;
  uint64_t wanted = 0;
  uint64_t read = 0;
  uint64_t largest = 0;
  Rank largest_rank = 0;
  size_t shards_least = SIZE_MAX;
  size_t shards_most = 0;
  std::map<std::string, uint64_t> by_tier;  // bytes read
  std::set<std::string> wanted_tensors;
  std::map<std::string, std::string> problems;  // by tensor
  std::vector<PlanReads::Read> reads;
  // What of each slice in the remote tier is read by anybody.
  std::map<std::pair<Rank, uint32_t>, std::vector<ByteRun>> of_remote;
};

absl::Status PlanRank(const SavedStep& step, const MeshLayout& layout,
                      std::span<const Slice> tensors, Rank rank, Outcome& outcome) {
  HF_ASSIGN_OR_RETURN(std::vector<Want> wants, layout.WantsOf(rank, tensors));
  for (const Want& want : wants) {
    outcome.wanted_tensors.insert(want.slice.name);
  }
  HF_ASSIGN_OR_RETURN(ReshardPlanner planner, ReshardPlanner::For(std::move(wants)));
  for (const auto& [bytes, ranks] : step.layouts) {
    HF_RETURN_IF_ERROR(planner.Add(bytes, ranks));
  }
  ReshardSources sources;
  sources.reader = rank;
  sources.cost = [&](Rank of) -> std::optional<uint64_t> {
    const auto found = step.nearest.find(of);
    return found == step.nearest.end() ? std::nullopt : std::optional(found->second.cost);
  };
  sources.digests = [&](Rank of, uint32_t slice) -> std::optional<std::span<const uint64_t>> {
    const std::vector<uint64_t>& first = *step.first_of[of];
    return std::span(step.digests[of]).subspan(first[slice], first[slice + 1] - first[slice]);
  };
  const ReshardPlan plan = planner.Plan(sources);
  for (const ReshardProblem& problem : plan.problems) {
    outcome.problems.try_emplace(problem.tensor, problem.text);
  }
  const std::vector<std::vector<ByteRun>> reads = ReadsOf(plan, 0);
  std::map<Rank, uint64_t> shards;  // bytes
  for (size_t i = 0; i < reads.size(); ++i) {
    uint64_t bytes = 0;
    for (const ByteRun& run : reads[i]) {
      bytes += run.bytes;
    }
    const Rank of = plan.sources[i].rank;
    shards[of] += bytes;
    outcome.by_tier[step.nearest.at(of).tier] += bytes;
    if (step.nearest.at(of).tier == "remote") {
      JoinRuns(reads[i], outcome.of_remote[{of, plan.sources[i].slice}]);
    }
    outcome.read += bytes;
  }
  for (const auto& [of, bytes] : shards) {
    outcome.reads.push_back({rank, of, bytes});
  }
  ++outcome.planned;
  outcome.wanted += plan.bytes;
  outcome.shards_least = std::min(outcome.shards_least, shards.size());
  outcome.shards_most = std::max(outcome.shards_most, shards.size());
  if (plan.bytes > outcome.largest) {
    outcome.largest = plan.bytes;
    outcome.largest_rank = rank;
  }
  return absl::OkStatus();
}

// Which ranks are planned for: all, or some from all over the mesh.
std::vector<Rank> Planned(uint32_t ranks, bool all) {
  const uint32_t count = all ? ranks : std::min(ranks, kRanksPlanned);
  std::vector<Rank> planned;
  for (uint32_t i = 0; i < count; ++i) {
    planned.push_back(static_cast<Rank>(count == 1 ? 0 : uint64_t{ranks - 1} * i / (count - 1)));
  }
  return planned;
}

// How long it would take; or why nothing is said of that.
struct Estimate {
  std::string none;
  uint32_t nodes = 0;
  PlanNodeTime near;
  PlanNodeTime far;
};

// What may well be most of the time, and no plan knows of.
constexpr char kNotCounted[] =
    "starting the ranks, finding and planning the step, other jobs' traffic, the way into devices, "
    "copies that turn out bad";

Estimate EstimateOf(const PlanArguments& arguments, const SavedStep& step, const MeshLayout& layout,
                    const Outcome& outcome) {
  Estimate estimate;
  if (!outcome.problems.empty()) {
    estimate.none = "it cannot be restored so";
    return estimate;
  }
  // Some ranks of each node say little of what its drives and its network have to carry.
  if (outcome.planned < layout.ranks()) {
    estimate.none = absl::StrCat("only ", outcome.planned, " of ", layout.ranks(),
                                 " ranks were planned for; --all-ranks has one");
    return estimate;
  }
  PlanReads reads;
  reads.ranks = layout.ranks();
  reads.ranks_per_node = arguments.ranks_per_node.value_or(kRanksPerNodeAssumed);
  reads.reads = outcome.reads;
  reads.sources.resize(step.saved_by);
  for (const auto& [rank, nearest] : step.nearest) {
    reads.sources[rank].tier = nearest.tier == "remote" ? PlanSource::Tier::kRemote
                               : nearest.tier == "nvme" ? PlanSource::Tier::kNvme
                                                        : PlanSource::Tier::kMemory;
    reads.sources[rank].node = nearest.node;
  }
  for (const auto& [slice, runs] : outcome.of_remote) {
    for (const ByteRun& run : runs) {
      reads.sources[slice.first].once_bytes += run.bytes;
    }
  }
  estimate.nodes = NodesOf(reads);
  estimate.near = EstimateSlowest(reads, arguments.rates, PlanPlacement::kNear);
  estimate.far = EstimateSlowest(reads, arguments.rates, PlanPlacement::kFar);
  return estimate;
}

int64_t Milliseconds(double seconds) {
  constexpr double kMost = 1e15;  // a rate of 1 B/s may be told
  return static_cast<int64_t>(std::llround(std::min(seconds * 1e3, kMost)));
}

// "12 s", of which the tenths would promise too much.
std::string About(double seconds) {
  return FormatAge(seconds > 0 ? std::max<int64_t>(Milliseconds(seconds), 1) : 0);
}

constexpr std::array<PlanPart, kPlanParts> kParts = {PlanPart::kMemory, PlanPart::kNvme,
                                                     PlanPart::kNetwork, PlanPart::kRemote};

// "ranks 0 to 7 are the last: network 33 s, nvme 8 s".
std::string LastOnes(const PlanNodeTime& time) {
  std::array<PlanPart, kPlanParts> parts = kParts;
  std::stable_sort(parts.begin(), parts.end(),
                   [&](PlanPart a, PlanPart b) { return time.of(a) > time.of(b); });
  std::vector<std::string> waits;
  for (const PlanPart part : parts) {
    if (time.of(part) > 0) {
      waits.push_back(absl::StrCat(ToAbsl(PlanPartName(part)), " ", About(time.of(part))));
    }
  }
  const std::string ranks =
      time.first_rank == time.last_rank
          ? absl::StrCat("rank ", time.first_rank, " is the last")
          : absl::StrCat("ranks ", time.first_rank, " to ", time.last_rank, " are the last");
  return absl::StrCat(ranks, waits.empty() ? "" : ": ", absl::StrJoin(waits, ", "));
}

void AddEstimate(const PlanArguments& arguments, const Estimate& estimate, Table& facts) {
  if (!estimate.none.empty()) {
    facts.AddRow({"no estimate", estimate.none});
    return;
  }
  const std::string near = About(estimate.near.total_s());
  const std::string far = About(estimate.far.total_s());
  if (near == far) {
    facts.AddRow({"may take",
                  absl::StrCat(far, ", if the rates below are right; ", LastOnes(estimate.far))});
  } else {
    // Near is slower where memory is said to be slower than the network.
    const bool near_first = estimate.near.total_s() < estimate.far.total_s();
    facts.AddRow({"may take", absl::StrCat(near_first ? near : far, " to ", near_first ? far : near,
                                           ", if the rates below are right")});
    facts.AddRow({"  near", absl::StrCat(near, ": ranks run where most of what they read lies; ",
                                         LastOnes(estimate.near))});
    facts.AddRow(
        {"  far", absl::StrCat(far, ": they run on other nodes; ", LastOnes(estimate.far))});
  }
  std::vector<std::string> assumed;
  std::vector<std::string> told;
  (arguments.ranks_per_node ? told : assumed)
      .push_back(absl::StrCat(
          Count(arguments.ranks_per_node.value_or(kRanksPerNodeAssumed), "rank", "ranks"),
          " a node (", Count(estimate.nodes, "node", "nodes"), ")"));
  for (const PlanRateName& rate : PlanRateNames()) {
    const std::vector<std::string>& names = arguments.rates.told;
    const bool is_told = std::find(names.begin(), names.end(), rate.name) != names.end();
    (is_told ? told : assumed)
        .push_back(absl::StrCat(ToAbsl(rate.name), " ",
                                FormatRate(arguments.rates.*rate.rate, std::chrono::seconds(1)),
                                " ", ToAbsl(rate.unit_of)));
  }
  if (!assumed.empty()) {
    facts.AddRow({"  assumed", absl::StrJoin(assumed, ", ")});
  }
  if (!told.empty()) {
    facts.AddRow({"  told", absl::StrJoin(told, ", ")});
  }
  facts.AddRow({"  not counted", kNotCounted});
}

nlohmann::ordered_json ToJson(const PlanNodeTime& time) {
  nlohmann::ordered_json json;
  json["total_ms"] = Milliseconds(time.total_s());
  json["first_rank"] = time.first_rank;
  json["last_rank"] = time.last_rank;
  json["waits_for"] = PlanPartName(time.longest());
  for (const PlanPart part : kParts) {
    json[absl::StrCat(ToAbsl(PlanPartName(part)), "_ms")] = Milliseconds(time.of(part));
  }
  return json;
}

nlohmann::ordered_json ToJson(const PlanArguments& arguments, const Estimate& estimate) {
  if (!estimate.none.empty()) {
    return nullptr;
  }
  nlohmann::ordered_json json;
  json["near"] = ToJson(estimate.near);
  json["far"] = ToJson(estimate.far);
  json["ranks_per_node"] = arguments.ranks_per_node.value_or(kRanksPerNodeAssumed);
  json["nodes"] = estimate.nodes;
  for (const PlanRateName& rate : PlanRateNames()) {
    json["rates_bytes_per_s"][std::string(rate.name)] = arguments.rates.*rate.rate;
  }
  json["rates_told"] = arguments.rates.told;
  json["not_counted"] = kNotCounted;
  return json;
}

template <typename Names>
std::string Some(const Names& names) {
  std::vector<std::string> shown;
  for (const auto& name : names) {
    if (shown.size() == kNamed) {
      shown.push_back(absl::StrCat("and ", names.size() - kNamed, " more"));
      break;
    }
    shown.push_back(EscapeText(name));
  }
  return absl::StrJoin(shown, ", ");
}

std::string Render(const PlanArguments& arguments, const SavedStep& step, const MeshLayout& layout,
                   const Outcome& outcome, const Estimate& estimate,
                   const std::vector<std::string>& left_out,
                   const std::vector<std::string>& unused) {
  Table facts({{"", Align::kLeft}, {"", Align::kLeft}});
  if (outcome.planned < layout.ranks()) {
    facts.AddRow({"planned for", absl::StrCat(outcome.planned, " of ", layout.ranks(),
                                              " ranks, from all over the mesh (--all-ranks)")});
  }
  facts.AddRow({"wanted", absl::StrCat(FormatBytes(outcome.wanted), " by these ranks, ",
                                       FormatBytes(outcome.largest), " by the largest (rank ",
                                       outcome.largest_rank, ")")});
  facts.AddRow(
      {"read from", absl::StrJoin(outcome.by_tier, ", ", [](std::string* out, const auto& tier) {
         absl::StrAppend(out, tier.first, " ", FormatBytes(tier.second));
       })});
  facts.AddRow({"read besides",
                absl::StrCat(FormatBytes(outcome.read - std::min(outcome.read, outcome.wanted)),
                             ", since blocks are verified whole")});
  facts.AddRow(
      {"each rank", outcome.shards_least == outcome.shards_most
                        ? absl::StrCat("reads of ", Count(outcome.shards_most, "shard", "shards"))
                        : absl::StrCat("reads of ", outcome.shards_least, " to ",
                                       outcome.shards_most, " shards")});
  if (!left_out.empty()) {
    facts.AddRow({"not wanted", Some(left_out)});
  }
  if (!unused.empty()) {
    facts.AddRow({"rules for nothing", Some(unused)});
  }
  AddEstimate(arguments, estimate, facts);
  std::string out =
      absl::StrCat("job ", EscapeText(arguments.job), ", step ", step.id.step, " (attempt ",
                   step.id.attempt, "), saved by ", Count(step.saved_by, "rank", "ranks"), ", for ",
                   Count(layout.ranks(), "rank", "ranks"), " as ",
                   EscapeText(arguments.layout_file), " has it\n", facts.RenderWithoutTitles("  "));
  if (!outcome.problems.empty()) {
    absl::StrAppend(&out, "it cannot be restored so:\n");
    size_t named = 0;
    for (const auto& [tensor, text] : outcome.problems) {
      if (named++ == kNamed) {
        absl::StrAppend(&out, "  and ", outcome.problems.size() - kNamed, " more\n");
        break;
      }
      absl::StrAppend(&out, "  ", EscapeText(text), "\n");
    }
  }
  return out;
}

std::string ToJsonText(const PlanArguments& arguments, const SavedStep& step,
                       const MeshLayout& layout, const Outcome& outcome, const Estimate& estimate,
                       const std::vector<std::string>& left_out,
                       const std::vector<std::string>& unused) {
  nlohmann::ordered_json json;
  json["job"] = arguments.job;
  json["attempt"] = step.id.attempt;
  json["step"] = step.id.step;
  json["saved_by"] = step.saved_by;
  json["ranks"] = layout.ranks();
  json["ranks_planned"] = outcome.planned;
  json["wanted_bytes"] = outcome.wanted;
  json["read_bytes"] = outcome.read;
  json["largest_bytes"] = outcome.largest;
  json["read_bytes_by_tier"] = outcome.by_tier;
  json["not_wanted"] = left_out;
  json["unused_rules"] = unused;
  json["problems"] = nlohmann::ordered_json::array();
  for (const auto& [tensor, text] : outcome.problems) {
    json["problems"].push_back({{"tensor", tensor}, {"what", text}});
  }
  json["estimate"] = ToJson(arguments, estimate);
  json["no_estimate"] = estimate.none;
  return DumpJson(json);
}

}  // namespace

ExitCode RunPlan(const Context& context, const PlanArguments& arguments) {
  std::error_code failed;
  const std::string path = std::filesystem::absolute(arguments.layout_file, failed);
  const auto text = ReadFile(*Env::System(), path, kLayoutFileBytesMax);
  if (!text.ok()) {
    return ReportError(context, text.status());
  }
  const absl::StatusOr<MeshLayout> layout = MeshLayout::Parse(*text, arguments.layout_file);
  if (!layout.ok()) {
    return ReportError(context, layout.status());
  }
  const auto client = ConnectAdmin(context);
  if (!client.ok()) {
    return ReportError(context, client.status());
  }
  const absl::StatusOr<SavedStep> step = ReadStep(context, **client, arguments);
  if (!step.ok()) {
    return ReportError(context, step.status());
  }
  std::vector<Slice> tensors;
  for (const auto& [name, tensor] : step->tensors) {
    tensors.push_back(tensor);
  }
  Outcome outcome;
  ProgressLine line(context);
  const std::vector<Rank> planned_ranks = Planned(layout->ranks(), arguments.all_ranks);
  for (const Rank rank : planned_ranks) {
    if (context.interrupted != nullptr && context.interrupted->load()) {
      line.Clear();
      return ReportError(context, absl::CancelledError("plan: stopped"));
    }
    line.Draw([&] {
      return absl::StrCat("plan: planning: ", outcome.planned, " of ", planned_ranks.size(),
                          " ranks");
    });
    if (const absl::Status planned = PlanRank(*step, *layout, tensors, rank, outcome);
        !planned.ok()) {
      line.Clear();
      return ReportError(context, planned);
    }
  }
  line.Clear();
  std::vector<std::string> left_out;
  for (const Slice& tensor : tensors) {
    if (outcome.wanted_tensors.count(tensor.name) == 0 && outcome.planned == layout->ranks()) {
      left_out.push_back(tensor.name);
    }
  }
  const std::vector<std::string> unused = layout->Unused(tensors);
  const Estimate estimate = EstimateOf(arguments, *step, *layout, outcome);
  *context.out << (context.json
                       ? ToJsonText(arguments, *step, *layout, outcome, estimate, left_out,
                                    unused) +
                             "\n"
                       : Render(arguments, *step, *layout, outcome, estimate, left_out, unused));
  return outcome.problems.empty() ? ExitCode::kOk : ExitCode::kDamaged;
}

}  // namespace holdfast
