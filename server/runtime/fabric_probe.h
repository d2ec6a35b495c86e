// How fast shards come from another node's memory: `ckptctl fabric NODE`.
//
//   HF_ASSIGN_OR_RETURN(const auto probe, FabricProbe::Make(port, 64 MiB));    // at the one end
//   HF_RETURN_IF_ERROR(MeasureFabric({&pulls, port, "n1"}, "n2", control, until, reply));  // there
//
// What is measured is a pull as any other, verified, of memory that is made for it and is nobody's
// shard. For threads that may block.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "holdfast/v1/fabric.pb.h"
#include "holdfast/v1/peer.pb.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

class FabricPort;
class PullClient;
class Registration;

inline constexpr uint64_t kProbeBytesMax = uint64_t{64} << 20;

// Memory to measure with, and its record.
class FabricProbe {
 public:
  // InvalidArgument when that is too much. `port` null: no fabric.
  static absl::StatusOr<std::unique_ptr<FabricProbe>> Make(FabricPort* port, uint64_t bytes);
  ~FabricProbe();
  FabricProbe(const FabricProbe&) = delete;
  FabricProbe& operator=(const FabricProbe&) = delete;

  const std::vector<std::byte>& image() const { return image_; }
  const std::string& record() const { return record_; }
  // Where one-sided reads find it, if the reader has the same provider.
  void Offer(FabricPort* port, const std::string& provider, v1::PullSource& source) const;

 private:
  FabricProbe() = default;

  std::vector<std::byte> image_;
  std::string record_;
  std::shared_ptr<Registration> registration_;  // goes before the memory does
};

struct Measurer {
  PullClient* pulls = nullptr;  // null: this node is alone
  FabricPort* fabric = nullptr;
  std::string node_name;
};
// Takes a second or two; gives up by `until`, and when `control` is cancelled.
absl::Status MeasureFabric(const Measurer& measurer, const std::string& node,
                           const std::shared_ptr<TransferControl>& control, MonotonicTime until,
                           v1::MeasureFabricReply& reply);

}  // namespace holdfast
