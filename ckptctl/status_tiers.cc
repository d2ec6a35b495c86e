#include "ckptctl/status_tiers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/text.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {

std::string StepText(uint64_t attempt, uint64_t step) {
  return absl::StrCat("step ", step, " (attempt ", attempt, ")");
}

namespace {

constexpr int kFlushesShown = 4;

std::string RenderTier(const v1::TierStatus& tier) {
  const std::string name = EscapeText(tier.tier());
  const std::string pad(name.size() < 6 ? 6 - name.size() : 0, ' ');  // below "memory"
  const std::string dirs = absl::StrJoin(
      tier.dirs(), ", ",
      [](std::string* out, const std::string& dir) { absl::StrAppend(out, EscapeText(dir)); });
  std::string out = absl::StrCat(name, pad, " ");
  const bool lent = tier.tier() == "peer";  // of this node's memory
  if (lent && tier.bytes_max() == 0 && tier.bytes_used() == 0) {
    return absl::StrCat(name, pad, " lends nothing to other nodes (memory.peer_bytes_max: 0)");
  }
  if (tier.bytes_max() > 0) {
    absl::StrAppend(&out, Bar(tier.bytes_used(), tier.bytes_max(), kBudgetCells), " ",
                    FormatBytes(tier.bytes_used()), " of ", FormatBytes(tier.bytes_max()));
  } else {
    absl::StrAppend(&out, FormatBytes(tier.bytes_used()), ", no budget");
  }
  if (tier.bytes_recyclable() > 0) {
    absl::StrAppend(&out, " (", FormatBytes(tier.bytes_recyclable()), " to be recycled)");
  }
  if (tier.bytes_shared() > 0) {
    absl::StrAppend(&out, " (", FormatBytes(tier.bytes_shared()),
                    " not written, as replicas have them)");
  }
  if (tier.bytes_compressed_away() > 0) {
    absl::StrAppend(&out, " (", FormatBytes(tier.bytes_compressed_away()),
                    " saved by compression)");
  }
  if (lent) {
    absl::StrAppend(&out, " lent to other nodes' replicas");
  } else {
    absl::StrAppend(&out, "; ", dirs, tier.dirs_size() == 1 ? " has " : " have ",
                    FormatBytes(tier.bytes_free()), " left");
  }
  if (!lent && !tier.engine().empty()) {
    absl::StrAppend(&out, "; ", EscapeText(tier.engine()));
  }
  if (tier.flushes() > 0) {
    absl::StrAppend(&out, "; ", Count(tier.flushes(), "write", "writes"), " under way");
  }
  if (tier.bandwidth_bytes_per_s_max() > 0) {
    absl::StrAppend(&out, "; at most ", FormatBytes(tier.bandwidth_bytes_per_s_max()), "/s");
  }
  absl::StrAppend(&out, "\n");
  const bool told = !tier.state().empty() && tier.state() != "ok";
  if (tier.stalled() > 0) {
    absl::StrAppend(&out, "problem: ", name, ": ", tier.stalled(), " of its writes ",
                    tier.stalled() == 1 ? "gets" : "get", " nowhere",
                    told ? absl::StrCat(" (", EscapeText(tier.state()), ")") : "",
                    "; saves and other tiers go on\n");
  } else if (!tier.healthy()) {
    absl::StrAppend(&out, "problem: ", name, ": ", told ? EscapeText(tier.state()) : "not well",
                    "\n");
  } else if (told) {
    absl::StrAppend(&out, name, pad, " ", EscapeText(tier.state()), "\n");
  }
  for (const std::string& note : tier.notes()) {
    absl::StrAppend(&out, name, pad, " note: ", EscapeText(note), "\n");
  }
  return out;
}

// The newest step that is committed anywhere: what the tiers lag behind.
const v1::Protection* Newest(const v1::JobStatus& job) {
  for (const v1::Protection& p : job.protection()) {
    if (p.kind() == v1::Protection::FAILURE_KIND_PROCESS && p.any()) {
      return &p;
    }
  }
  return nullptr;
}

std::string LagText(const v1::TierProgress& tier, const v1::Protection* newest) {
  if (newest == nullptr || newest->attempt() != tier.attempt() || newest->step() <= tier.step()) {
    return "";
  }
  return absl::StrCat(", ", Count(newest->step() - tier.step(), "step", "steps"),
                      " behind the newest");
}

void AddTier(const v1::TierProgress& tier, const v1::Protection* newest, int64_t now,
             Table& lines) {
  std::string text = "no step of the line yet";
  if (tier.any()) {
    text = absl::StrCat(StepText(tier.attempt(), tier.step()), ", ", FormatAge(tier.age_ms()),
                        " old", LagText(tier, newest));
  }
  if (tier.checkpoints() > 0) {
    absl::StrAppend(&text, "; holds ", Count(tier.checkpoints(), "checkpoint", "checkpoints"), ", ",
                    FormatBytes(tier.bytes()));
  }
  lines.AddRow({absl::StrCat("in ", EscapeText(tier.tier())), text});
  const int shown = std::min(tier.flushing_size(), kFlushesShown);
  for (int i = 0; i < shown; ++i) {
    const v1::FlushInFlight& flush = tier.flushing(i);
    const int64_t ms = flush.since_unix_ms() > 0 ? now - flush.since_unix_ms() : 0;
    lines.AddRow(
        {"", absl::StrCat(flush.stalled() ? "STALLED: " : "being written: ",
                          StepText(flush.attempt(), flush.step()), ", ", flush.ranks_done(), " of ",
                          Count(flush.world_size(), "rank", "ranks"), " done",
                          ms > 0 ? absl::StrCat(", for ", FormatAge(ms)) : "")});
  }
  if (shown < tier.flushing_size()) {
    lines.AddRow({"", absl::StrCat("and ", tier.flushing_size() - shown,
                                   " more being written: --json has them all")});
  }
  if (tier.waiting()) {
    lines.AddRow({"", absl::StrCat("next: ", StepText(tier.waiting_attempt(), tier.waiting_step()),
                                   " waits for its turn")});
  }
  if (!tier.problem().empty()) {
    lines.AddRow({"", absl::StrCat("PROBLEM: ", EscapeText(tier.problem()))});
  }
}

std::string PolicyText(std::string_view name, const v1::TierPolicy& policy) {
  std::string when;
  if (policy.every_steps() > 0) {
    when = policy.every_steps() == 1 ? "every step"
                                     : absl::StrCat("every ", policy.every_steps(), " steps");
  }
  if (policy.every_ms() > 0) {
    absl::StrAppend(&when, when.empty() ? "" : " or ", "every ",
                    FormatAge(static_cast<int64_t>(
                        std::min<uint64_t>(policy.every_ms(), uint64_t{INT64_MAX}))));
  }
  if (when.empty()) {
    return absl::StrCat(std::string(name), " never");
  }
  std::string text =
      absl::StrCat(std::string(name), " ", when, ", keeps the last ", policy.keep_last());
  if (policy.keep_every_steps() > 0) {
    absl::StrAppend(&text, " and for ever those that ", policy.keep_every_steps(), " divides");
  }
  if (policy.bytes_max() > 0) {
    absl::StrAppend(&text, ", at most ", FormatBytes(policy.bytes_max()));
  }
  if (policy.has_share_replicas() && !policy.share_replicas()) {
    absl::StrAppend(&text, ", each rank's file whole");
  }
  if (policy.compression() == v1::TierPolicy::COMPRESSION_ZSTD) {
    absl::StrAppend(&text, ", compressed (zstd, level ", policy.compression_level(), ")");
  }
  return text;
}

}  // namespace

std::string RenderTiers(const v1::DaemonStatus& daemon) {
  std::string out;
  for (const v1::TierStatus& tier : daemon.tiers()) {
    absl::StrAppend(&out, RenderTier(tier));
  }
  return out;
}

void AddTierLines(const v1::JobStatus& job, int64_t now_unix_ms, Table& lines) {
  const v1::Protection* newest = Newest(job);
  for (const v1::TierProgress& tier : job.tiers()) {
    AddTier(tier, newest, now_unix_ms, lines);
  }
  std::string policy;
  for (const v1::TierProgress& tier : job.tiers()) {
    const bool nvme = tier.tier() == "nvme";
    if (job.has_policy() && tier.tier() == "peer") {
      absl::StrAppend(&policy, policy.empty() ? "" : "; ", "peer ",
                      Count(job.policy().replicas(), "replica", "replicas"), " of the newest step");
    }
    if (!job.has_policy() || (!nvme && tier.tier() != "remote")) {
      continue;
    }
    absl::StrAppend(&policy, policy.empty() ? "" : "; ",
                    PolicyText(tier.tier(), nvme ? job.policy().nvme() : job.policy().remote()));
  }
  if (!policy.empty()) {
    lines.AddRow({"policy", policy});
  }
}

}  // namespace holdfast
