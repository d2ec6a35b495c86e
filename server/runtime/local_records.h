// The records of a step's shards that this node has, for whoever gathers all of them, here or on
// another node.
//
//   local.Read(wanted, [&](FoundRecord found) { …; return true; }, gone);
//
// Thread-safe, but for the reactor's thread: it asks the core.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/ids.h"
#include "server/events.h"

namespace holdfast {

struct AdminContext;
class RemoteParts;

struct RecordsWanted {
  JobUuid job;
  std::string job_name;
  CheckpointId checkpoint;
  uint32_t world_size = 0;
  bool remote = false;  // in the remote tier; else in this node's memory and on its drives
  std::vector<std::pair<Rank, uint32_t>> ranks;  // first, how many
};
struct FoundRecord {
  Rank rank = 0;
  TierKind tier = TierKind::kMemory;
  std::string record;  // as its file has it; whether that is good is for the reader to find
};

class LocalRecords {
 public:
  using Gone = std::function<bool()>;
  struct Options {
    AdminContext* context = nullptr;
    std::shared_ptr<RemoteParts> remote_parts;  // null: no remote tier
    // Of a copy on a drive.
    std::function<absl::StatusOr<std::string>(const ReadableShard&, const Gone&)> read_from_drive;
  };
  explicit LocalRecords(Options options) : options_(std::move(options)) {}

  // What cannot be read is left out. Ends when `tell` says that it is enough, by false.
  absl::Status Read(const RecordsWanted& wanted, const std::function<bool(FoundRecord)>& tell,
                    const Gone& gone) const;

 private:
  absl::Status ReadOwn(const RecordsWanted& wanted, const std::function<bool(FoundRecord)>& tell,
                       const Gone& gone) const;
  absl::Status ReadRemote(const RecordsWanted& wanted, const std::function<bool(FoundRecord)>& tell,
                          const Gone& gone) const;

  const Options options_;
};

}  // namespace holdfast
