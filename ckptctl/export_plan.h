// What an export writes (docs/formats.md, "An exported set"): which tensors and objects go into
// which file, under which names, and each file's header. Pure; the same step and options give the
// same plan, byte for byte, so that a second run can go on behind the first.
//
//   HF_ASSIGN_OR_RETURN(const ExportPlan plan, PlanExport(source, options));
//   for (const ExportFile& file : plan.files) …     // file.header, then file.entries' bytes
//
// Names of tensors are never names of files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "ckptctl/tied_names.h"
#include "holdfast/checkpoint_reader.h"

namespace holdfast {

struct ExportSource {
  std::string job;
  uint64_t step = 0;
  uint64_t attempt = 0;
  uint64_t content = 0;  // CheckpointReader::content
  const std::vector<SavedItem>* items = nullptr;
  std::vector<TiedName> tied;
};

struct ExportOptions {
  std::vector<std::string> only;  // keys of the state; empty: everything
  std::optional<Rank> rank;       // whose own things are taken; none: everybody's
  uint64_t file_bytes_max = 0;    // of tensors; a larger one has a file of its own
};

struct ExportEntry {
  size_t item = 0;
  std::string name;                    // in the set
  bool ours = false;                   // and no name of the state
  std::vector<std::string> tied = {};  // names of the same tensor that are left out
};

struct ExportFile {
  std::string name;
  std::vector<ExportEntry> entries;  // as they lie in the file
  std::string header;                // its first bytes
  uint64_t data_bytes = 0;
  uint64_t bytes() const { return header.size() + data_bytes; }
};

struct ExportPlan {
  std::vector<ExportFile> files;
  std::string index;  // content of kIndexName; empty: there is one file and no index
  uint64_t tensors = 0;
  uint64_t objects = 0;
  uint64_t data_bytes = 0;
  uint64_t bytes = 0;              // of all files
  std::vector<TiedName> left_out;  // names in the set
  uint64_t digest = 0;             // of all of it, and of the step's content
};

inline constexpr char kExportIndexName[] = "model.safetensors.index.json";

// NotFound: nothing was saved under a key. FailedPrecondition: what is wanted cannot be had whole,
// is single ranks' own, or would have a name that cannot be.
absl::StatusOr<ExportPlan> PlanExport(const ExportSource& source, const ExportOptions& options);

// Whether a name of the state is the key's, or below it: "model.w" is below "model".
bool IsUnder(std::string_view name, std::string_view key);
// NotFound if nothing of the items (or of the tied names) is under one of the keys.
absl::Status CheckKeys(const std::vector<SavedItem>& items, const std::vector<TiedName>& tied,
                       const std::vector<std::string>& keys);

}  // namespace holdfast
