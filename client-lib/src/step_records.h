// The records of a step's shards, as the daemon has gathered them for all processes of its node
// (holdfast.v1.StepRecords).
//
//   HF_TRY_ASSIGN(StepRecords records, StepRecords::Read(source, job, checkpoint, saved_by,
//   until)); if (std::optional<StepRecord> record = records.Of(3)) { … }    // else it is to be
//   attached
//
// A record that is torn, or of something else, counts as not there. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client-lib/src/deadline.h"
#include "client-lib/src/held_shard.h"
#include "client-lib/src/slot_mapping.h"
#include "holdfast/status.h"
#include "tiers/image/record.h"

namespace holdfast::client {

struct StepRecord {
  RecordAndLayout image;
  std::string tier;  // the nearest that has the shard
};

class StepRecords {
 public:
  // Of a daemon that has none, or does not know of them, none. An error: the connection's, or the
  // deadline's.
  static Result<StepRecords> Read(const ShardSource& source, const std::string& job,
                                  CheckpointId checkpoint, uint32_t saved_by, Deadline deadline);

  std::optional<StepRecord> Of(Rank rank) const;
  // How many there are, whole or not.
  size_t size() const;

 private:
  struct Place {
    uint32_t tier = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;  // 0: not there
  };
  void Index(uint32_t saved_by);

  std::string job_;
  std::string job_uuid_;
  CheckpointId checkpoint_;
  std::unique_ptr<SlotMapping> file_;
  std::vector<Place> places_;  // by rank
};

}  // namespace holdfast::client
