// `fabric`: what carries shards between nodes, and how fast it is.
#include <ostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/fabric.pb.h"

namespace holdfast {

std::string RenderFabric(const v1::ShowFabricReply& reply) {
  std::string out;
  if (reply.provider().empty()) {
    absl::StrAppend(&out, EscapeText(reply.node()), ": no fabric: ", EscapeText(reply.problem()),
                    "\nshards go over the daemons' own connections, which is slower "
                    "(docs/fabric.md)\n");
    return out;
  }
  absl::StrAppend(
      &out, EscapeText(reply.node()), ": ", EscapeText(reply.provider()), ", by libfabric ",
      EscapeText(reply.library_version()), "; replicas ",
      reply.bandwidth_bytes_per_s_max() == 0
          ? "as fast as it goes"
          : absl::StrCat("at most ", FormatBytes(reply.bandwidth_bytes_per_s_max()), " a second"),
      "\n\n");
  Table table({{"DEVICE", Align::kLeft},
               {"ADDRESS", Align::kLeft},
               {"NUMA", Align::kRight},
               {"DSCP", Align::kRight},
               {"MESSAGE", Align::kRight},
               {"READS", Align::kRight},
               {"REGISTRATION", Align::kLeft}});
  for (const v1::FabricDevice& device : reply.devices()) {
    table.AddRow({EscapeText(device.name()), EscapeText(device.address()),
                  device.numa_node() < 0 ? "-" : absl::StrCat(device.numa_node()),
                  device.dscp() == 0 ? "-" : absl::StrCat(device.dscp()),
                  FormatBytes(device.message_bytes_max()), absl::StrCat(device.reads_max()),
                  device.registration().empty()
                      ? "-"
                      : EscapeText(absl::StrJoin(device.registration(), ","))});
  }
  absl::StrAppend(&out, table.Render("  "));
  if (!reply.problem().empty()) {
    absl::StrAppend(&out, "\nPROBLEM: ", EscapeText(reply.problem()), "\n");
  }
  return out;
}

std::string RenderMeasured(const v1::MeasureFabricReply& reply) {
  std::string out = absl::StrCat(
      EscapeText(reply.from()), " to ", EscapeText(reply.to()), ", ",
      reply.provider().empty() ? "over the daemons' own connections" : EscapeText(reply.provider()),
      ": ", FormatBytes(reply.bytes_per_s()), " a second, verified; 4 KiB in ",
      absl::StrFormat("%.0f", reply.latency_us()), " us\n");
  if (!reply.problem().empty()) {
    absl::StrAppend(&out, "PROBLEM: ", reply.provider().empty() ? "not by the fabric: " : "",
                    EscapeText(reply.problem()), "\n");
  }
  return out;
}

ExitCode RunFabric(const Context& context, const FabricArguments& arguments) {
  if (arguments.node.empty()) {
    return Ask(context, "", &AdminClient::ShowFabric, v1::ShowFabricRequest(), RenderFabric);
  }
  v1::MeasureFabricRequest request;
  request.set_node(arguments.node);
  return Ask(context, "", &AdminClient::MeasureFabric, request, RenderMeasured);
}

}  // namespace holdfast
