// What keeps the tiers in order: gc, pin, rm of a step, rebuild, set.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/upkeep.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr int kFilesShown = 20;

std::string Listed(std::string_view title,
                   const google::protobuf::RepeatedPtrField<std::string>& all) {
  if (all.empty()) {
    return "";
  }
  std::string out = absl::StrCat("\n", std::string(title), "\n");
  const int shown = std::min(all.size(), kFilesShown);
  for (int i = 0; i < shown; ++i) {
    absl::StrAppend(&out, "  ", EscapeText(all.Get(i)), "\n");
  }
  if (shown < all.size()) {
    absl::StrAppend(&out, "  … and ", all.size() - shown, " more: --json has them all\n");
  }
  return out;
}

constexpr char kUnknownFiles[] = "files that are not Holdfast's, left alone:";

bool GoodName(std::string_view name) {
  return !name.empty() &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.") == std::string_view::npos;
}

absl::Status WordError(const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat(what,
                   "; write ckptctl set JOB nvme.every_steps=10, or without a job: "
                   "ckptctl set nvme.bandwidth_bytes_per_s_max=500MiB"));
}

}  // namespace

std::string RenderGarbage(const v1::CollectGarbageReply& reply, bool dry_run) {
  Table table({{"JOB", Align::kLeft},
               {"TIER", Align::kLeft},
               {"STEP", Align::kRight},
               {"ATTEMPT", Align::kRight},
               {"SIZE", Align::kRight},
               {"", Align::kLeft},
               {"WHY", Align::kLeft}});
  size_t going = 0;
  for (const v1::RetentionVerdict& v : reply.verdicts()) {
    going += v.goes() ? 1 : 0;
    table.AddRow({EscapeText(v.job()), EscapeText(v.tier()), absl::StrCat(v.step()),
                  absl::StrCat(v.attempt()), FormatBytes(v.bytes()), v.goes() ? "GOES" : "stays",
                  EscapeText(v.why())});
  }
  const std::string bytes = FormatBytes(reply.bytes_to_free());
  const std::string what = going == 0 ? "nothing goes"
                           : dry_run
                               ? absl::StrCat(Count(going, "checkpoint", "checkpoints"),
                                              " would go: ", bytes, " less in use")
                               : absl::StrCat(Count(going, "checkpoint goes", "checkpoints go"),
                                              ": ", bytes, " less in use");
  return absl::StrCat(table.empty() ? "" : table.Render(""), table.empty() ? "" : "\n", what,
                      dry_run ? " (nothing was removed: --dry-run)\n" : "\n",
                      Listed(kUnknownFiles, reply.unknown_files()));
}

std::string RenderRebuild(const v1::RebuildReply& reply) {
  std::string written;
  for (const std::string& line : reply.written()) {
    absl::StrAppend(&written, EscapeText(line), "\n");
  }
  return absl::StrCat(written, "found ", Count(reply.shards(), "copy", "copies"), " of ",
                      Count(reply.checkpoints(), "checkpoint", "checkpoints"), " of ",
                      Count(reply.jobs(), "job", "jobs"), "; the catalog is written anew\n",
                      Listed("problems:", reply.problems()),
                      Listed(kUnknownFiles, reply.unknown_files()));
}

absl::Status ParseSetWords(const SetArguments& arguments, v1::SetOptionsRequest& request) {
  for (size_t i = 0; i < arguments.words.size(); ++i) {
    const std::string& word = arguments.words[i];
    const size_t equals = word.find('=');
    if (equals == std::string::npos) {
      if (i > 0) {
        return WordError(absl::StrCat("'", word, "' is no name=value"));
      }
      if (absl::Status job = CheckJobName(word); !job.ok()) {
        return job;
      }
      request.set_job(word);
      continue;
    }
    if (!GoodName(word.substr(0, equals)) || equals + 1 == word.size()) {
      return WordError(absl::StrCat("'", word, "' is no name=value"));
    }
    const std::string name = word.substr(0, equals);
    if (std::any_of(request.options().begin(), request.options().end(),
                    [&](const v1::SetOptionsRequest::Option& o) { return o.name() == name; })) {
      return absl::InvalidArgumentError(absl::StrCat(name, " is given twice; leave one out"));
    }
    v1::SetOptionsRequest::Option& option = *request.add_options();
    option.set_name(name);
    option.set_value(word.substr(equals + 1));
  }
  request.set_clear(arguments.clear);
  if (arguments.clear && (request.job().empty() || !request.options().empty())) {
    return WordError("--clear takes a job and nothing else");
  }
  if (!arguments.clear && request.options().empty()) {
    return WordError("nothing to set");
  }
  return absl::OkStatus();
}

absl::Status CheckSetWords(const SetArguments& arguments) {
  v1::SetOptionsRequest request;
  return ParseSetWords(arguments, request);
}

ExitCode RunGarbage(const Context& context, const GarbageArguments& arguments) {
  v1::CollectGarbageRequest request;
  request.set_job(arguments.job);
  request.set_dry_run(arguments.dry_run);
  return Ask(context, "", &AdminClient::CollectGarbage, request,
             [&](const v1::CollectGarbageReply& reply) {
               return RenderGarbage(reply, arguments.dry_run);
             });
}

ExitCode RunPin(const Context& context, const PinArguments& arguments) {
  v1::PinRequest request;
  request.set_job(arguments.job);
  request.set_step(arguments.step);
  request.set_attempt(arguments.attempt);
  request.set_unpin(arguments.unpin);
  return Ask(context, arguments.job, &AdminClient::Pin, request,
             [](const v1::PinReply& reply) { return EscapeText(reply.text()) + "\n"; });
}

ExitCode RunRemoveStep(const Context& context, const RemoveArguments& arguments) {
  v1::RemoveCheckpointRequest request;
  request.set_job(arguments.job);
  request.set_step(*arguments.step);
  request.set_attempt(arguments.attempt);
  request.set_tier(arguments.tier);
  request.set_force(arguments.force);
  return Ask(
      context, arguments.job, &AdminClient::RemoveCheckpoint, request,
      [](const v1::RemoveCheckpointReply& reply) { return EscapeText(reply.text()) + "\n"; });
}

ExitCode RunRebuild(const Context& context, const RebuildArguments& arguments) {
  v1::RebuildRequest request;
  request.set_tier(arguments.tier);
  if (arguments.owner) {
    v1::RebuildRequest::Owner& owner = *request.mutable_owner();
    owner.set_job(arguments.job);
    owner.set_uid(arguments.owner->uid);
    owner.set_gid(arguments.owner->gid);
  }
  const auto reply = AskFor(context, &AdminClient::Rebuild, request);
  if (!reply.ok()) {
    return ReportError(context, reply.status());
  }
  if (context.json) {
    ShowJson(context, "", *reply);
  } else {
    *context.out << RenderRebuild(*reply);
  }
  return reply->problems().empty() ? ExitCode::kOk : ExitCode::kDamaged;
}

ExitCode RunSet(const Context& context, const SetArguments& arguments) {
  v1::SetOptionsRequest request;
  if (const absl::Status status = ParseSetWords(arguments, request); !status.ok()) {
    return ReportError(context, status);
  }
  return Ask(context, request.job(), &AdminClient::SetOptions, request,
             [](const v1::SetOptionsReply& reply) { return EscapeText(reply.text()) + "\n"; });
}

}  // namespace holdfast
