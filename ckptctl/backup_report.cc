#include "ckptctl/backup_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/json.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

const char* StateWord(StepCopied state) {
  switch (state) {
    case StepCopied::kWritten:
      return "written";
    case StepCopied::kWasThere:
      return "was_there";
    case StepCopied::kGone:
      return "gone";
    case StepCopied::kIncomplete:
      return "incomplete";
    case StepCopied::kFailed:
      break;
  }
  return "failed";
}

std::string DescribeCopied(const CopiedStep& step) {
  switch (step.state) {
    case StepCopied::kWritten:
      return absl::StrCat(Count(step.ranks, "rank", "ranks"), ", ", FormatBytes(step.bytes));
    case StepCopied::kWasThere:
      return "was there already";
    case StepCopied::kGone:
      return absl::StrCat("left out, it was removed meanwhile: ", EscapeText(Message(step.why)));
    case StepCopied::kIncomplete:
      return absl::StrCat("left out: ", EscapeText(Message(step.why)));
    case StepCopied::kFailed:
      break;
  }
  return absl::StrCat(absl::IsDataLoss(step.why) ? "BAD: " : "FAILED: ",
                      EscapeText(Message(step.why)));
}

}  // namespace

absl::Status SortTarget(const absl::Status& status, StepFault& fault) {
  if (!absl::IsDataLoss(status) && !absl::IsAlreadyExists(status)) {
    return status;
  }
  fault = {status, /*of_target=*/true};
  return absl::OkStatus();
}

std::string StepText(const CheckpointId& id) {
  return absl::StrCat("step ", id.step, " (attempt ", id.attempt, ")");
}

void BackupReport::Add(CopiedStep step) {
  complete_ += step.state == StepCopied::kWritten || step.state == StepCopied::kWasThere ? 1 : 0;
  bytes_ += step.bytes;
  if (!context_.json) {
    line_.Clear();
    *context_.out << StepText(step.id) << ": " << DescribeCopied(step) << "\n";
    for (const std::string& note : step.notes) {
      *context_.out << "  passed over: " << EscapeText(note) << "\n";
    }
    context_.out->flush();
  }
  steps_.push_back(std::move(step));
}

ExitCode BackupReport::Code() const {
  const auto any = [&](bool damaged) {
    return std::any_of(steps_.begin(), steps_.end(), [&](const CopiedStep& step) {
      return step.state == StepCopied::kFailed && absl::IsDataLoss(step.why) == damaged;
    });
  };
  return any(true) ? ExitCode::kDamaged : any(false) ? ExitCode::kRefused : ExitCode::kOk;
}

void BackupReport::ShowJson(const Ending& ending) const {
  nlohmann::ordered_json json;
  json["ok"] = Code() == ExitCode::kOk;
  json["job"] = ending.job.name;
  json["job_uuid"] = ending.job.job.ToString();
  json["directory"] = ending.directory;
  json["steps"] = nlohmann::ordered_json::array();
  for (const CopiedStep& step : steps_) {
    json["steps"].push_back(
        {{"step", step.id.step},
         {"attempt", step.id.attempt},
         {"state", StateWord(step.state)},
         {"ranks", step.ranks},
         {"bytes", step.bytes},
         {"damaged", step.state == StepCopied::kFailed && absl::IsDataLoss(step.why)},
         {"why", step.why.ok() ? "" : Message(step.why)},
         {"notes", step.notes}});
  }
  json["bytes"] = bytes_;
  json["elapsed_ms"] = ending.elapsed_ms;
  *context_.out << DumpJson(json) << "\n";
}

ExitCode BackupReport::Show(const Ending& ending) const {
  if (context_.json) {
    ShowJson(ending);
    return Code();
  }
  const size_t missing = steps_.size() - complete_;
  *context_.out << Count(complete_, "step", "steps") << " of job " << EscapeText(ending.job.name)
                << (complete_ == 1 ? " is in " : " are in ") << EscapeText(ending.directory)
                << (missing == 0 ? "" : absl::StrCat(", ", missing, " not"));
  if (bytes_ > 0) {
    *context_.out << "; " << FormatBytes(bytes_) << " written in " << FormatAge(ending.elapsed_ms);
  }
  *context_.out << "\n";
  if (!ending.hint.empty() && complete_ > 0) {
    *context_.out << ending.hint << "\n";
  }
  return Code();
}

}  // namespace holdfast
