// What a tier's tests implement, so that the conformance suite (tests/tiers/tier_conformance.h) can
// run against it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "base/fault_env.h"
#include "tiers/tier.h"

namespace holdfast {

// A tier with the place that it keeps its copies in. The place outlives Stop and Start.
class TierHarness {
 public:
  virtual ~TierHarness() = default;
  virtual absl::Status Start() = 0;  // opens the tier over what the place holds
  virtual void Stop() = 0;  // destroys the tier, as an orderly exit or as the end of a dead process
  // What the last Start had to report: copies lost, files damaged. A crash alone is never a reason.
  virtual std::vector<std::string> problems() = 0;
  virtual Tier& tier() = 0;
  virtual FaultEnv* faults() = 0;  // null on a real file system
  // After Stop: the worst that the tier promises to survive (memory: the process dies; disks: power
  // is lost).
  virtual void Crash() = 0;
  // What lies in the place, without room that is ready for reuse; and what one copy takes of it.
  virtual uint64_t BytesInUse() = 0;
  virtual uint64_t BytesOfCopy(uint64_t image_bytes) = 0;
  // Harm done from outside to a published copy.
  virtual absl::Status FlipRecordBit(const ShardId& id, uint64_t byte) = 0;
  virtual absl::Status ReplaceRecord(const ShardId& id, std::string_view bytes) = 0;
  virtual absl::Status CutImage(const ShardId& id, uint64_t bytes) = 0;
  virtual absl::Status DeleteImage(const ShardId& id) = 0;
};

struct HarnessFactory {
  std::string name;
  std::function<std::unique_ptr<TierHarness>()> make;
};
inline void PrintTo(const HarnessFactory& factory, std::ostream* out) {
  *out << factory.name;
}

}  // namespace holdfast
