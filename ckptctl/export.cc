#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/commands.h"
#include "ckptctl/export_directory.h"
#include "ckptctl/export_plan.h"
#include "ckptctl/json.h"
#include "ckptctl/open_step.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/way_out.h"

namespace holdfast {
namespace {

constexpr uint64_t kTreeBytesMax = uint64_t{256} << 20;
constexpr size_t kLeftOutShown = 10;

// What a directory's file system fails with says nothing of ckptd, or of what was saved.
absl::Status OfDirectory(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kNotFound:
      return absl::FailedPreconditionError(Message(status));
    default:
      return status;
  }
}

// One run: what was there already, and what it wrote.
class Export {
 public:
  Export(const Context& context, const ExportArguments& arguments)
      : context_(context), arguments_(arguments), line_(context, Duration(0)) {}

  absl::Status Run();
  void Show() const;

 private:
  absl::Status Plan(const OpenedStep& step);
  absl::StatusOr<std::vector<TiedName>> Tied(const OpenedStep& step);
  absl::Status Write(const OpenedStep& step, ExportDirectory& directory);
  absl::Status WriteFile(const OpenedStep& step, ExportDirectory& directory, size_t number);
  absl::Status Explain(const absl::Status& failed) const;
  bool Advance(uint64_t bytes);
  nlohmann::ordered_json ToJson() const;

  const Context& context_;
  const ExportArguments& arguments_;
  ProgressLine line_;
  std::string directory_;
  ExportIdentity of_;
  ExportPlan plan_;
  std::vector<std::string> notes_;  // what could not be looked at
  std::vector<bool> kept_;          // of files: it was complete before
  size_t files_complete_ = 0;
  bool had_index_ = false;
  uint64_t bytes_done_ = 0;
  MonotonicTime begin_;
  int64_t elapsed_ms_ = 0;
};

absl::Status Export::Run() {
  begin_ = context_.clock->Now();
  std::error_code error;
  directory_ = std::filesystem::absolute(arguments_.directory, error).lexically_normal().string();
  if (error) {
    return ErrnoStatus(error.value(), "look for", arguments_.directory);
  }
  while (directory_.size() > 1 && directory_.back() == '/') {
    directory_.pop_back();
  }
  HF_ASSIGN_OR_RETURN(const OpenedStep step, OpenStep(context_, arguments_.step));
  of_ = {arguments_.step.job, step.reader().step(), step.reader().attempt()};
  HF_RETURN_IF_ERROR(Plan(step));
  const absl::Status written = [&]() -> absl::Status {
    auto directory = ExportDirectory::Open(*Env::System(), directory_, plan_, of_);
    HF_RETURN_IF_ERROR(OfDirectory(directory.status()));
    return Write(step, **directory);
  }();
  line_.Clear();
  elapsed_ms_ = (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
  return Explain(written);
}

absl::Status Export::Plan(const OpenedStep& step) {
  const CheckpointReader& reader = step.reader();
  if (arguments_.rank && *arguments_.rank >= reader.world_size()) {
    return absl::NotFoundError(absl::StrCat(NameOfStep(reader, arguments_.step.job),
                                            " was saved by ", reader.world_size(),
                                            " ranks: there is no rank ", *arguments_.rank));
  }
  ExportSource source;
  source.job = of_.job;
  source.step = of_.step;
  source.attempt = of_.attempt;
  source.content = reader.content();
  source.items = &reader.items();
  HF_ASSIGN_OR_RETURN(source.tied, Tied(step));
  absl::StatusOr<ExportPlan> plan =
      PlanExport(source, {arguments_.only, arguments_.rank, arguments_.file_bytes_max});
  if (!plan.ok()) {
    return Annotate(plan.status(), NameOfStep(reader, arguments_.step.job));
  }
  plan_ = *std::move(plan);
  return absl::OkStatus();
}

// A tree that is too large, or none, ties nothing: then each name is what it is.
absl::StatusOr<std::vector<TiedName>> Export::Tied(const OpenedStep& step) {
  std::vector<TiedName> all;
  for (size_t i = 0; i < step.items().size(); ++i) {
    const SavedItem& item = step.items()[i];
    if (item.kind != SavedItem::Kind::kJson || item.name != kStateTree) {
      continue;
    }
    const absl::StatusOr<std::string> tree = step.ReadItem(i, kTreeBytesMax);
    if (absl::IsResourceExhausted(tree.status())) {
      notes_.push_back(absl::StrCat("which names are tied is not known: ", Message(tree.status())));
      continue;
    }
    HF_RETURN_IF_ERROR(tree.status());
    const std::vector<TiedName> tied = TiedNames(*tree);
    all.insert(all.end(), tied.begin(), tied.end());
  }
  return all;
}

absl::Status Export::Write(const OpenedStep& step, ExportDirectory& directory) {
  kept_.assign(plan_.files.size(), false);
  for (size_t i = 0; i < plan_.files.size(); ++i) {
    const uint64_t before = bytes_done_;
    HF_ASSIGN_OR_RETURN(const bool complete,
                        directory.IsComplete(i, [&](uint64_t bytes) { return Advance(bytes); }));
    kept_[i] = complete;
    if (!complete) {
      bytes_done_ = before;
      HF_RETURN_IF_ERROR(WriteFile(step, directory, i));
    }
    ++files_complete_;
  }
  const absl::StatusOr<bool> had_index = directory.Finish();
  had_index_ = had_index.ok() && *had_index;
  return OfDirectory(had_index.status());
}

absl::Status Export::WriteFile(const OpenedStep& step, ExportDirectory& directory, size_t number) {
  const ExportFile& file = plan_.files[number];
  std::vector<ElementRange> ranges;
  ranges.reserve(file.entries.size());
  for (const ExportEntry& entry : file.entries) {
    ranges.push_back({entry.item, 0, step.items()[entry.item].elements});
  }
  HF_ASSIGN_OR_RETURN(WindowReader windows, step.Read(std::move(ranges)));
  HF_RETURN_IF_ERROR(OfDirectory(directory.Begin(number)));
  Advance(file.header.size());
  while (true) {
    HF_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, windows.Next());
    if (bytes.empty()) {
      break;
    }
    HF_RETURN_IF_ERROR(OfDirectory(directory.Append(bytes)));
    if (!Advance(bytes.size())) {
      return absl::CancelledError("interrupted");
    }
  }
  return OfDirectory(directory.Publish());
}

// False: it is to end.
bool Export::Advance(uint64_t bytes) {
  bytes_done_ += bytes;
  line_.Draw([&] {
    const int64_t elapsed = (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
    return absl::StrCat("export ", EscapeText(of_.job), " ",
                        ByteProgress(bytes_done_, plan_.bytes, elapsed));
  });
  return context_.interrupted == nullptr || !*context_.interrupted;
}

// With what was asked for, and what to do.
absl::Status Export::Explain(const absl::Status& failed) const {
  if (failed.ok()) {
    return failed;
  }
  const std::string what = absl::StrCat("export step ", of_.step, " (attempt ", of_.attempt,
                                        ") of job ", of_.job, " into '", directory_, "'");
  const std::string again =
      files_complete_ == 0
          ? "the same command begins anew"
          : absl::StrCat("the same command goes on behind the ",
                         Count(files_complete_, "file that is", "files that are"), " complete");
  std::string way_out =
      WayOutOfDirectory(failed, plan_.bytes - std::min(plan_.bytes, bytes_done_), again);
  if (absl::IsNotFound(failed)) {
    way_out = absl::StrCat(
        "; is it gone meanwhile? Then remove the directory and export another "
        "step; ckptctl pin keeps one for as long as an export takes");
  } else if (absl::IsPermissionDenied(failed)) {
    way_out = "; name a directory that you may write to";
  } else if (absl::IsDataLoss(failed)) {
    way_out =
        "; another step may be whole: ckptctl verify says which; files that are complete stay";
  } else if (absl::IsCancelled(failed) || absl::IsUnavailable(failed)) {
    way_out = absl::StrCat("; ", again);
  }
  return absl::Status(failed.code(), absl::StrCat(what, ": ", Message(failed), way_out));
}

void Export::Show() const {
  if (context_.json) {
    *context_.out << DumpJson(ToJson()) << "\n";
    return;
  }
  const bool all_kept = std::all_of(kept_.begin(), kept_.end(), [](bool kept) { return kept; });
  const size_t kept = static_cast<size_t>(std::count(kept_.begin(), kept_.end(), true));
  std::ostream& out = *context_.out;
  out << "step " << of_.step << " (attempt " << of_.attempt << ") of job " << EscapeText(of_.job)
      << (all_kept && had_index_ ? " is already in " : " is in ") << EscapeText(directory_) << ": "
      << Count(plan_.tensors, "tensor", "tensors")
      << (plan_.objects == 0 ? "" : " and " + Count(plan_.objects, "object", "objects")) << " in "
      << Count(plan_.files.size(), "file", "files") << ", " << FormatBytes(plan_.bytes) << " in "
      << FormatAge(elapsed_ms_) << "\n";
  if (kept > 0) {
    out << Count(kept, "file was", "files were")
        << " complete already: every byte was compared with what was written then\n";
  }
  for (const std::string& note : notes_) {
    out << EscapeText(note) << "\n";
  }
  for (size_t i = 0; i < plan_.left_out.size() && i < kLeftOutShown; ++i) {
    out << "left out: " << EscapeText(plan_.left_out[i].name) << ", which is the same tensor as "
        << EscapeText(plan_.left_out[i].same_as) << "\n";
  }
  if (plan_.left_out.size() > kLeftOutShown) {
    out << "… and " << plan_.left_out.size() - kLeftOutShown << " more; --json names all\n";
  }
}

nlohmann::ordered_json Export::ToJson() const {
  nlohmann::ordered_json json;
  json["job"] = of_.job;
  json["step"] = of_.step;
  json["attempt"] = of_.attempt;
  json["directory"] = directory_;
  json["index"] = plan_.index.empty() ? "" : kExportIndexName;
  json["files"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < plan_.files.size(); ++i) {
    const ExportFile& file = plan_.files[i];
    json["files"].push_back({{"name", file.name},
                             {"bytes", file.bytes()},
                             {"entries", file.entries.size()},
                             {"was_complete", static_cast<bool>(kept_[i])}});
  }
  json["tensors"] = plan_.tensors;
  json["objects"] = plan_.objects;
  json["bytes"] = plan_.bytes;
  json["elapsed_ms"] = elapsed_ms_;
  json["left_out"] = nlohmann::ordered_json::array();
  for (const TiedName& left_out : plan_.left_out) {
    json["left_out"].push_back({{"name", left_out.name}, {"same_as", left_out.same_as}});
  }
  json["notes"] = notes_;
  return json;
}

}  // namespace

ExitCode RunExport(const Context& context, const ExportArguments& arguments) {
  Export one(context, arguments);
  if (const absl::Status done = one.Run(); !done.ok()) {
    return ReportError(context, done);
  }
  one.Show();
  return ExitCode::kOk;
}

}  // namespace holdfast
