#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

std::string StateOf(const v1::NodeStatus& node) {
  if (node.here()) {
    return "this one";
  }
  return node.reachable() ? "up" : absl::StrCat("OUT OF REACH: ", EscapeText(node.unreachable()));
}

}  // namespace

std::string RenderNodes(const v1::GetNodesReply& reply) {
  Table table({{"NODE", Align::kLeft},
               {"ADDRESS", Align::kLeft},
               {"MEMORY", Align::kRight},
               {"VERSION", Align::kLeft},
               {"LABELS", Align::kLeft},
               {"HOSTS", Align::kLeft},
               {"STATE", Align::kLeft}});
  for (const v1::NodeStatus& node : reply.nodes()) {
    const std::string labels = absl::StrJoin(
        node.labels(), ", ", [](std::string* out, const v1::NodeStatus::Label& label) {
          absl::StrAppend(out, EscapeText(label.name()), "=", EscapeText(label.value()));
        });
    const std::string jobs = absl::StrJoin(
        node.jobs(), ", ",
        [](std::string* out, const std::string& job) { absl::StrAppend(out, EscapeText(job)); });
    table.AddRow({EscapeText(node.name()), EscapeText(node.address()),
                  node.capacity_bytes() > 0 ? FormatBytes(node.capacity_bytes()) : "?",
                  EscapeText(node.version()), labels, jobs, StateOf(node)});
  }
  std::string out = table.Render("");
  if (!reply.problem().empty()) {
    absl::StrAppend(&out, "\nPROBLEM: ", EscapeText(reply.problem()), "\n");
  }
  return out;
}

ExitCode RunNodes(const Context& context) {
  return Ask(context, "", &AdminClient::GetNodes, v1::GetNodesRequest(), RenderNodes);
}

}  // namespace holdfast
