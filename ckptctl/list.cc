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

std::string StateText(v1::Checkpoint::State state) {
  switch (state) {
    case v1::Checkpoint::STATE_INCOMPLETE:
      return "incomplete";
    case v1::Checkpoint::STATE_COMMITTED:
      return "committed";
    case v1::Checkpoint::STATE_BAD:
      return "BAD";
    default:
      return absl::StrCat("state ", static_cast<int>(state));
  }
}

Table CheckpointTable() {
  return Table({{"STEP", Align::kRight},
                {"ATTEMPT", Align::kRight},
                {"STATE", Align::kLeft},
                {"SHARDS", Align::kRight},
                {"SIZE", Align::kRight},
                {"AGE", Align::kRight},
                {"IN", Align::kLeft}});
}

void AddCheckpoint(const v1::Checkpoint& c, int64_t now, Table& table) {
  const std::string tiers = absl::StrJoin(
      c.tiers(), ", ",
      [](std::string* out, const std::string& tier) { absl::StrAppend(out, EscapeText(tier)); });
  table.AddRow({absl::StrCat(c.step()), absl::StrCat(c.attempt()),
                absl::StrCat(StateText(c.state()), c.pinned() ? ", pinned" : ""),
                absl::StrCat(c.shards(), " of ", c.world_size()), FormatBytes(c.bytes()),
                c.unix_ms() > 0 ? FormatAge(now - c.unix_ms()) : "?", tiers});
}

}  // namespace

std::string RenderList(std::string_view job, const v1::ListCheckpointsReply& reply,
                       int64_t now_unix_ms) {
  Table line = CheckpointTable();
  Table branches = CheckpointTable();
  for (const v1::Checkpoint& c : reply.checkpoints()) {
    AddCheckpoint(c, now_unix_ms, c.on_line() ? line : branches);
  }
  if (line.empty() && branches.empty()) {
    return absl::StrCat("job ", EscapeText(job), " has no checkpoints\n");
  }
  std::string out = absl::StrCat(
      "job ", EscapeText(job), ", line of descent (the next restore takes the newest committed)\n",
      line.empty() ? "  nothing\n" : line.Render("  "));
  if (!branches.empty()) {
    absl::StrAppend(&out, "\nother branches (never restored unless you name step and --attempt)\n",
                    branches.Render("  "));
  }
  return out;
}

ExitCode RunList(const Context& context, const ListArguments& arguments) {
  v1::ListCheckpointsRequest request;
  request.set_job(arguments.job);
  return Ask(context, arguments.job, &AdminClient::ListCheckpoints, request,
             [&](const v1::ListCheckpointsReply& reply) {
               return RenderList(arguments.job, reply, context.clock->UnixMillis());
             });
}

}  // namespace holdfast
