// What became of each step of a job that is copied to or from a directory of backups: told as it
// happens, and in the answer.
//
//   BackupReport report(context, line);
//   report.Add({.id = id, .state = StepCopied::kWritten, .ranks = 8, .bytes = bytes});
//   return report.Show({.job = job, .directory = directory, …});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "ckptctl/commands.h"
#include "ckptctl/progress.h"
#include "tiers/tier.h"

namespace holdfast {

enum class StepCopied {
  kWritten,
  kWasThere,    // whole, and of the same content
  kGone,        // retention removed it where it was read, before it was read
  kIncomplete,  // it was never written to its end where it was read
  kFailed,
};

struct CopiedStep {
  CheckpointId id;
  StepCopied state = StepCopied::kWritten;
  uint32_t ranks = 0;
  uint64_t bytes = 0;              // of the images that were written
  absl::Status why;                // of one that is not there now
  std::vector<std::string> notes;  // copies that were passed over
};

// What is wrong with one step alone: the others go on.
struct StepFault {
  absl::Status why;        // OK: nothing
  bool of_target = false;  // it is where the step is to be, not where it is read
};

// What the target's BackupDirectory fails with: an error that ends the run, or the fault of the
// step that is copied just then.
absl::Status SortTarget(const absl::Status& status, StepFault& fault);

// "step 900 (attempt 1)".
std::string StepText(const CheckpointId& id);

class BackupReport {
 public:
  BackupReport(const Context& context, ProgressLine& line) : context_(context), line_(line) {}
  // On an answer for people the step is told at once.
  void Add(CopiedStep step);

  struct Ending {
    JobIdentity job;
    std::string directory;
    int64_t elapsed_ms = 0;
    std::string hint;  // what comes next, for people
  };
  // DataLoss of any step: kDamaged; else of a failure kRefused.
  ExitCode Show(const Ending& ending) const;
  size_t complete() const { return complete_; }
  uint64_t bytes() const { return bytes_; }

 private:
  ExitCode Code() const;
  void ShowJson(const Ending& ending) const;

  const Context& context_;
  ProgressLine& line_;
  std::vector<CopiedStep> steps_;
  size_t complete_ = 0;  // that are whole there now
  uint64_t bytes_ = 0;
};

}  // namespace holdfast
