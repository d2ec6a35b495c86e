// `drain`: takes a node out: it lets no rank in, and what lies there alone goes elsewhere. Waits
// until nothing would be lost with it.
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
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

// What a look at all jobs has found of the node.
struct Left {
  std::vector<std::pair<std::string, v1::Leaving>> jobs;  // that have something there, or ranks
  std::vector<std::string> problems;                      // why not all were seen
  uint32_t shards = 0;
  uint32_t ranks = 0;
  bool safe() const { return shards == 0 && problems.empty(); }
};

Left LookAt(const v1::GetStatusReply& reply, const std::string& node) {
  Left left;
  for (const v1::JobStatus& job : reply.jobs()) {
    for (const v1::Leaving& leaving : job.leaving()) {
      if (leaving.node() == node && (leaving.shards_left() > 0 || leaving.ranks() > 0)) {
        left.jobs.emplace_back(job.name(), leaving);
        left.shards += leaving.shards_left();
        left.ranks += leaving.ranks();
      }
    }
  }
  for (const std::string& problem : reply.daemon().problems()) {
    if (problem.rfind("the jobs of ", 0) == 0) {
      left.problems.push_back(problem);
    }
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
    if (!leaving.problem().empty()) {
      absl::StrAppend(&text, ": ", EscapeText(leaving.problem()));
    }
  }
  if (leaving.ranks() > 0) {
    absl::StrAppend(&text, leaving.shards_left() > 0 ? "; " : "", leaving.ranks(),
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
  {
    ProgressLine line(context);
    for (;;) {
      const auto status = AskFor(context, &AdminClient::GetStatus, v1::GetStatusRequest());
      if (!status.ok()) {
        return ReportError(context, status.status());
      }
      left = LookAt(*status, node);
      if (left.safe() || context.clock->Now() >= until || Interrupted(context)) {
        break;
      }
      line.Draw([&] {
        return absl::StrCat("drain: ", left.shards,
                            left.shards == 1 ? " shard lies" : " shards lie", " on ",
                            EscapeText(node), " alone");
      });
      for (auto pause = kLookEvery / kLook; pause > 0 && !Interrupted(context); --pause) {
        std::this_thread::sleep_for(kLook);
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
                         ? ": nothing would be lost with it; until `ckptctl drain --undo`, or a "
                           "restart of its ckptd, it lets no rank in\n"
                         : ": not everything is safe without it yet; it goes on, ask again\n");
  }
  return left.safe()            ? ExitCode::kOk
         : Interrupted(context) ? ExitCode::kInterrupted
                                : ExitCode::kDamaged;
}

}  // namespace holdfast
