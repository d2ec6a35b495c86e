// where, and explain: what there is of a step, and what that means.
#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr int kStepsExplained = 20;

std::string StepHead(uint64_t attempt, uint64_t step) {
  return absl::StrCat("step ", step, " (attempt ", attempt, ")");
}

Table CopyTable() {
  return Table({{"RANK", Align::kRight},
                {"TIER", Align::kLeft},
                {"STATE", Align::kLeft},
                {"SIZE", Align::kRight},
                {"NODE", Align::kLeft},
                {"LIES IN", Align::kLeft}});
}

// What is wrong with a copy may be long: below the table it makes no column wider.
constexpr std::string_view kLong[] = {"bad", "incomplete", "out of reach"};

// "bad", of "bad: …"; empty: the state is short.
std::string_view ShortState(std::string_view state) {
  for (const std::string_view word : kLong) {
    if (state.rfind(word, 0) == 0 && state.substr(word.size(), 2) == ": ") {
      return word;
    }
  }
  return "";
}

// "1.2 MiB of 4.0 MiB", where the rest lies in other ranks' files.
std::string SizeOf(const v1::ShardCopy& copy) {
  const std::string size = FormatBytes(copy.bytes());
  return copy.shard_bytes() == 0 ? size
                                 : absl::StrCat(size, " of ", FormatBytes(copy.shard_bytes()));
}

// "memory 2 of 2, nvme 1 of 2": good copies, of how many ranks.
std::string Totals(const std::map<std::string, std::set<uint32_t>>& good, uint32_t world_size) {
  return absl::StrJoin(good, ", ", [&](std::string* out, const auto& tier) {
    absl::StrAppend(out, EscapeText(tier.first), " ", tier.second.size(), " of ", world_size);
  });
}

}  // namespace

std::string RenderWhere(std::string_view job, const v1::WhereReply& reply) {
  if (reply.copies().empty()) {
    return absl::StrCat("job ", EscapeText(job), " has no copies of it anywhere\n");
  }
  std::string out = absl::StrCat("job ", EscapeText(job), "\n");
  size_t shown = 0;
  for (int i = 0; i < reply.copies_size();) {
    const v1::ShardCopy& first = reply.copies(i);
    Table table = CopyTable();
    std::map<std::string, std::set<uint32_t>> good;
    std::string problems;
    for (; i < reply.copies_size() && reply.copies(i).attempt() == first.attempt() &&
           reply.copies(i).step() == first.step();
         ++i) {
      const v1::ShardCopy& copy = reply.copies(i);
      auto& ranks = good[copy.tier()];
      if (copy.state() == "good") {
        ranks.insert(copy.rank());
      }
      if (shown++ < kCopiesShown) {
        const std::string_view word = ShortState(copy.state());
        if (!word.empty()) {
          absl::StrAppend(&problems, "  rank ", copy.rank(), ", ", EscapeText(copy.tier()), ": ",
                          EscapeText(copy.state()), "\n");
        }
        if (copy.shard_bytes() != 0) {
          absl::StrAppend(&problems, "  rank ", copy.rank(), ", ", EscapeText(copy.tier()),
                          ": the rest is in the files of ", EscapeText(copy.rest_in()), "\n");
        }
        table.AddRow({absl::StrCat(copy.rank()), EscapeText(copy.tier()),
                      word.empty() ? EscapeText(copy.state()) : std::string(word), SizeOf(copy),
                      copy.node().empty() ? "any" : EscapeText(copy.node()),
                      EscapeText(copy.location())});
      }
    }
    absl::StrAppend(&out, "\n", StepHead(first.attempt(), first.step()), ": good copies in ",
                    Totals(good, first.world_size()), "\n", table.empty() ? "" : table.Render("  "),
                    problems);
  }
  if (shown > kCopiesShown) {
    absl::StrAppend(&out, "\n… and ", shown - kCopiesShown, " more copies: --json has them all\n");
  }
  return out;
}

std::string RenderExplain(std::string_view job, const v1::ExplainReply& reply) {
  std::string out;
  if (!reply.next_restore().empty()) {
    out = absl::StrCat("the next restore of job ", EscapeText(job), ": ",
                       EscapeText(reply.next_restore()), "\n");
  }
  if (reply.has_prefetch()) {
    absl::StrAppend(&out, "  ", EscapeText(reply.prefetch().text()), "\n");
  }
  const int shown = std::min(reply.steps_size(), kStepsExplained);
  for (int i = 0; i < shown; ++i) {
    const v1::StepExplanation& step = reply.steps(i);
    absl::StrAppend(&out, out.empty() ? "" : "\n", StepHead(step.attempt(), step.step()),
                    step.on_line() ? "" : ", on another branch",
                    step.restorable() ? ": restorable\n" : ": NOT restorable\n");
    for (const std::string& reason : step.reasons()) {
      absl::StrAppend(&out, "  ", EscapeText(reason), "\n");
    }
  }
  if (shown < reply.steps_size()) {
    absl::StrAppend(&out, "\n… and ", reply.steps_size() - shown,
                    " older: --step N explains one, --json has them all\n");
  }
  return out.empty() ? absl::StrCat("job ", EscapeText(job), " has no checkpoints\n") : out;
}

ExitCode RunWhere(const Context& context, const WhereArguments& arguments) {
  v1::WhereRequest request;
  request.set_job(arguments.job);
  request.set_step(arguments.step.value_or(0));
  request.set_attempt(arguments.attempt);
  request.set_all_steps(!arguments.step.has_value());
  return Ask(context, arguments.job, &AdminClient::Where, request,
             [&](const v1::WhereReply& reply) { return RenderWhere(arguments.job, reply); });
}

ExitCode RunExplain(const Context& context, const ExplainArguments& arguments) {
  v1::ExplainRequest request;
  request.set_job(arguments.job);
  request.set_step(arguments.step.value_or(0));
  request.set_attempt(arguments.attempt);
  request.set_all_steps(!arguments.step.has_value());
  return Ask(context, arguments.job, &AdminClient::Explain, request,
             [&](const v1::ExplainReply& reply) { return RenderExplain(arguments.job, reply); });
}

}  // namespace holdfast
