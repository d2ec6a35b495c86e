// The directory that an export writes into: what is complete there and what is not, so that a run
// that was ended at any point is gone on with by the next one (docs/formats.md, "An exported set").
//
//   HF_ASSIGN_OR_RETURN(auto directory, ExportDirectory::Open(env, path, plan, of));
//   for (size_t i = 0; i < plan.files.size(); ++i) {
//     HF_ASSIGN_OR_RETURN(const bool complete, directory->IsComplete(i, progress));
//     if (complete) continue;
//     HF_RETURN_IF_ERROR(directory->Begin(i));
//     … HF_RETURN_IF_ERROR(directory->Append(bytes)); …
//     HF_RETURN_IF_ERROR(directory->Publish());
//   }
//   HF_RETURN_IF_ERROR(directory->Finish());
//
// Every file is written under a temporary name, synced and then renamed; the index comes last. One
// export at a time has a directory. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "ckptctl/export_plan.h"

namespace holdfast {

inline constexpr char kExportStateName[] = ".holdfast-export.json";
inline constexpr char kExportLockName[] = ".holdfast-export.lock";

// What a directory's state file is of.
struct ExportIdentity {
  std::string job;
  uint64_t step = 0;
  uint64_t attempt = 0;
};

class ExportDirectory {
 public:
  // Makes it, and its parents, if there is none. FailedPrecondition: something is in it that is not
  // of this export.
  static absl::StatusOr<std::unique_ptr<ExportDirectory>> Open(Env& env, const std::string& path,
                                                               const ExportPlan& plan,
                                                               const ExportIdentity& of);
  ~ExportDirectory();

  // Whether file i of the plan is there, and every byte of it is what was written then; what is
  // not right is written again. `progress` hears of bytes that were read; false ends it with
  // Cancelled.
  using Progress = std::function<bool(uint64_t bytes)>;
  absl::StatusOr<bool> IsComplete(size_t file, const Progress& progress);

  absl::Status Begin(size_t file);  // writes its header
  absl::Status Append(std::span<const std::byte> bytes);
  absl::Status Publish();
  // The file that was begun is given up, and the room that it took.
  void GiveUp();
  // Whether the index was there, and right.
  absl::StatusOr<bool> Finish();

 private:
  struct Done {
    uint64_t bytes = 0;
    uint64_t digest = 0;  // CRC-64/XZ of all of them
  };

  ExportDirectory(Env& env, std::string path, const ExportPlan& plan, const ExportIdentity& of)
      : env_(env), path_(std::move(path)), plan_(plan), of_(of) {}
  absl::Status CheckNames();
  absl::Status ReadState();
  absl::Status ParseState(const std::string& text);
  absl::Status WriteState();
  absl::Status WriteSmallFile(const std::string& name, const std::string& text);
  std::string Path(const std::string& name) const { return JoinPath(path_, name); }

  Env& env_;
  const std::string path_;
  const ExportPlan& plan_;
  const ExportIdentity of_;
  std::unique_ptr<FileLock> lock_;
  bool has_state_ = false;
  std::map<std::string, Done> done_;
  // The file that is being written.
  const ExportFile* writing_ = nullptr;
  std::unique_ptr<File> file_;
  Done written_;
};

}  // namespace holdfast
