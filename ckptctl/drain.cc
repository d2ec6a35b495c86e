// `drain`: takes a node out: it lets no rank in, and what lies there alone goes elsewhere. Waits
// until nothing would be lost with it.
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(500);
constexpr auto kLook = std::chrono::milliseconds(50);

// What a look at the node and at all jobs has found.
struct Left {
  std::vector<std::pair<std::string, v1::Leaving>> jobs;  // that have something there, or ranks
  std::vector<std::string> problems;  // why it is not known what else would be lost
  bool over = false;  // it is not being drained any more: there is nothing to wait for
  uint32_t shards = 0;
  uint32_t pinned = 0;  // steps
  uint32_t ranks = 0;
  bool safe() const { return shards == 0 && pinned == 0 && problems.empty(); }
};

// Safe is only what its host has counted: of each job that has something there, as the node says.
// (A host that has not heard of it, or has lost the node, says nothing of it.)
Left LookAt(const v1::GetStatusReply& reply, const v1::DrainReply& there) {
  Left left;
  std::set<std::string> counted;
  for (const v1::JobStatus& job : reply.jobs()) {
    for (const v1::Leaving& leaving : job.leaving()) {
      if (leaving.node() != there.node()) {
        continue;
      }
      counted.insert(job.uuid());
      if (!leaving.not_known().empty()) {
        left.problems.push_back(absl::StrCat("job '", job.name(), "': ", leaving.not_known()));
      }
      if (leaving.shards_left() > 0 || leaving.pinned_size() > 0 || leaving.ranks() > 0) {
        left.jobs.emplace_back(job.name(), leaving);
        left.shards += leaving.shards_left();
        left.pinned += static_cast<uint32_t>(leaving.pinned_size());
        left.ranks += leaving.ranks();
      }
    }
  }
  for (const v1::DrainReply::Job& job : there.jobs()) {
    if (counted.count(job.uuid()) == 0) {
      left.problems.push_back(
          absl::StrCat("job '", job.name(),
                       "' has something there, and its host has not said what would be lost"));
    }
  }
  left.problems.insert(left.problems.end(), reply.not_shown().begin(), reply.not_shown().end());
  return left;
}

Left Over(std::string why) {
  Left left;
  left.over = true;
  left.problems.push_back(std::move(why));
  return left;
}

Left TooOld(const std::string& node) {
  return Over(absl::StrCat("ckptd on ", node,
                           " is of an older version, which does not say what would be "
                           "lost with it: update it (`ckptctl where JOB` shows what lies there)"));
}

// An error: ckptd itself, which was asked, does not answer.
absl::StatusOr<Left> Look(const Context& context, const std::string& node) {
  v1::DrainRequest request;
  request.set_node(node);
  request.set_look(true);
  const auto there = AskFor(context, &AdminClient::Drain, request);
  if (!there.ok() && !IsDaemonsAnswer(there.status())) {
    return there.status();
  }
  if (absl::IsNotFound(there.status())) {
    return Over(
        absl::StrCat(node,
                     " is no node of the cluster any more: what lay there alone is out of reach "
                     "until it is back"));
  }
  if (there.ok() && !there->draining()) {
    return Over(
        absl::StrCat(node,
                     " is not being drained any more: its ckptd was started anew, or somebody "
                     "said --undo; it lets ranks in. Say `ckptctl drain ",
                     node, "` again"));
  }
  HF_ASSIGN_OR_RETURN(const v1::GetStatusReply status,
                      AskFor(context, &AdminClient::GetStatus, v1::GetStatusRequest()));
  Left left = LookAt(status, there.ok() ? *there : v1::DrainReply());
  if (!there.ok()) {
    left.problems.push_back(
        absl::StrCat("what is on ", node, " is not known: ", Message(there.status())));
  }
  return left;
}

nlohmann::ordered_json ToJson(const Left& left, const std::string& node) {
  nlohmann::ordered_json json;
  json["node"] = node;
  json["safe"] = left.safe();
  json["ranks"] = left.ranks;
  json["jobs"] = nlohmann::ordered_json::array();
  for (const auto& [name, leaving] : left.jobs) {
    nlohmann::ordered_json one;
    one["job"] = name;
    one.update(MessageToJson(leaving));
    one.erase("node");
    json["jobs"].push_back(std::move(one));
  }
  json["problems"] = left.problems;
  return json;
}

bool Interrupted(const Context& context) {
  return context.interrupted != nullptr && *context.interrupted;
}

}  // namespace

// "llama: 3 shards of step 900 (12 GiB) lie there alone: …"
std::string RenderLeft(const std::string& job, const v1::Leaving& leaving) {
  std::string text = absl::StrCat(EscapeText(job), ": ");
  if (leaving.shards_left() > 0) {
    absl::StrAppend(&text, leaving.shards_left(), leaving.shards_left() == 1 ? " shard" : " shards",
                    " of step ", leaving.step(), " (", FormatBytes(leaving.bytes_left()),
                    leaving.shards_left() == 1 ? ") lies" : ") lie", " there alone");
  }
  if (leaving.pinned_size() > 0) {
    absl::StrAppend(&text, leaving.shards_left() > 0 ? "; " : "", "pinned ",
                    leaving.pinned_size() == 1 ? "step " : "steps ",
                    absl::StrJoin(leaving.pinned(), ", "), " (some shards, or all)",
                    leaving.pinned_size() == 1 ? " lies" : " lie", " there alone");
  }
  const bool any = leaving.shards_left() > 0 || leaving.pinned_size() > 0;
  if (any && !leaving.problem().empty()) {
    absl::StrAppend(&text, ": ", EscapeText(leaving.problem()));
  }
  if (leaving.ranks() > 0) {
    absl::StrAppend(&text, any ? "; " : "", leaving.ranks(),
                    leaving.ranks() == 1 ? " rank runs" : " ranks run", " there");
  }
  return text;
}

ExitCode RunDrain(const Context& context, const DrainArguments& arguments) {
  v1::DrainRequest request;
  request.set_node(arguments.node);
  request.set_undo(arguments.undo);
  const auto told = AskFor(context, &AdminClient::Drain, request);
  if (!told.ok()) {
    return ReportError(context, told.status());
  }
  const std::string& node = told->node();
  if (arguments.undo) {
    if (context.json) {
      *context.out << DumpJson({{"node", node}, {"draining", false}}) << "\n";
    } else {
      *context.out << EscapeText(node) << " lets ranks in again\n";
    }
    return ExitCode::kOk;
  }
  const MonotonicTime until =
      context.clock->Now() + arguments.wait.value_or(std::chrono::hours(24 * 365));
  Left left;
  bool looked = false;
  {
    ProgressLine line(context);
    for (;;) {
      absl::StatusOr<Left> found = told->draining() ? Look(context, node) : TooOld(node);
      if (!found.ok() && looked && Interrupted(context)) {
        break;  // what was found last is told
      }
      if (!found.ok()) {
        return ReportError(context, found.status());
      }
      looked = true;
      left = *std::move(found);
      if (left.safe() || left.over || context.clock->Now() >= until || Interrupted(context)) {
        break;
      }
      line.Draw([&] {
        return left.shards == 0 && !left.problems.empty()
                   ? absl::StrCat("drain: ", EscapeText(left.problems.front()))
               : left.shards == 0
                   ? absl::StrCat("drain: of ", left.pinned, " pinned steps some lies on ",
                                  EscapeText(node), " alone")
                   : absl::StrCat("drain: ", left.shards,
                                  left.shards == 1 ? " shard lies" : " shards lie", " on ",
                                  EscapeText(node), " alone");
      });
      for (auto pause = kLookEvery / kLook; pause > 0 && !Interrupted(context); --pause) {
        std::this_thread::sleep_for(kLook);
      }
      if (Interrupted(context)) {
        break;
      }
    }
  }
  if (context.json) {
    *context.out << DumpJson(ToJson(left, node)) << "\n";
  } else {
    for (const auto& [name, leaving] : left.jobs) {
      *context.out << RenderLeft(name, leaving) << "\n";
    }
    for (const std::string& problem : left.problems) {
      *context.out << EscapeText(problem) << "\n";
    }
    *context.out << EscapeText(node)
                 << (left.safe()
                         ? ": no job's newest step, and none that is pinned, would be lost with "
                           "it; until `ckptctl drain --undo`, or a restart of its ckptd, it lets "
                           "no rank in\n"
                     : left.over
                         ? ": not everything is safe without it\n"
                         : ": not everything is safe without it yet; it goes on, ask again\n");
  }
  return left.safe()            ? ExitCode::kOk
         : Interrupted(context) ? ExitCode::kInterrupted
                                : ExitCode::kDamaged;
}

}  // namespace holdfast
