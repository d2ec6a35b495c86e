// A device of libfabric's, opened: its domain, and what is opened on it. Internal to tiers/peer/.
//
//   HF_ASSIGN_OR_RETURN(auto devices, OpenFabricDevices(*library, options, "tcp", problems));
//   HF_ASSIGN_OR_RETURN(FabricQueues queues, device->OpenQueues(16));
//   HF_ASSIGN_OR_RETURN(FabricObject<fid_ep> endpoint, device->OpenEndpoint(info, queues));
//
// Endpoints are connected ones (FI_EP_MSG), not libfabric's reliable datagrams over connections of
// its own (ofi_rxm): those retry for ever where nobody listens, tell of a peer that died only to
// those who have something under way, and the one of libfabric 1.17 crashes when it closes a
// connection of tcp in the middle of an answer.
//
// Thread-safe; queues and endpoints are not. Held by all that was opened on it.
#pragma once

#include <poll.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiers/peer/fabric.h"
#include "tiers/peer/fabric_library.h"

namespace holdfast {

class FabricDevice;

// What happened to a connection.
struct FabricEvent {
  enum class Kind { kRequest, kConnected, kEnded, kOther };
  Kind kind = Kind::kOther;
  const fid* connection = nullptr;
  FabricInfoList request;  // of kRequest
  std::string said;        // by who connects; devices pad it
  int error = 0;           // of kEnded: 0 when the other side closed it
};

// Where completions and the events of connections arrive. Closed after the endpoints.
struct FabricQueues {
  std::shared_ptr<FabricDevice> device;
  FabricObject<fid_eq> events;
  FabricObject<fid_cq> completions;
  // Readable when there may be something to do; -1: the provider has none.
  int event_fd = -1;
  int completion_fd = -1;

  bool can_sleep() const { return event_fd >= 0 && completion_fd >= 0; }
  // Whether it is safe to sleep on the descriptors now.
  bool MaySleep() const;
  std::array<pollfd, 2> Waits() const;
  std::optional<FabricEvent> NextEvent() const;
};

class FabricDevice : public std::enable_shared_from_this<FabricDevice> {
 public:
  static absl::StatusOr<std::shared_ptr<FabricDevice>> Open(const FabricLibrary& library,
                                                            FabricInfoList info);

  // `completions` at a time.
  absl::StatusOr<FabricQueues> OpenQueues(size_t completions);
  // Enabled, not connected. `info`: info(), or that of a connection request.
  absl::StatusOr<FabricObject<fid_ep>> OpenEndpoint(fi_info* info, const FabricQueues& queues);

  const FabricLibrary& library() const { return library_; }
  // The provider takes it by a pointer that is not const.
  fi_info& info() const { return *info_; }
  fid_domain* domain() const { return domain_.get(); }
  fid_fabric* fabric() const { return fabric_.get(); }
  std::string name() const { return info_->domain_attr->name; }
  std::string provider() const { return info_->fabric_attr->prov_name; }
  uint64_t mr_mode() const { return static_cast<uint64_t>(info_->domain_attr->mr_mode); }
  int numa_node() const { return numa_node_; }
  uint8_t traffic_class() const;
  // Reads outstanding on one connection. One where the provider's answers are sent by the kernel
  // out of memory whose file may be cut short: the rest of that answer never comes, and what is
  // sent next would be taken for it.
  size_t reads_per_connection() const;
  absl::Status Error(int64_t result, std::string_view operation) const;

 private:
  FabricDevice(const FabricLibrary& library, FabricInfoList info);

  const FabricLibrary& library_;
  const FabricInfoList info_;
  FabricObject<fid_fabric> fabric_;
  FabricObject<fid_domain> domain_;
  int numa_node_ = -1;
};

// Those of the provider that the options name, in their order. One that is not there or cannot be
// opened is left out, if there is another: `problems` says why.
absl::StatusOr<std::vector<std::shared_ptr<FabricDevice>>> OpenFabricDevices(
    const FabricLibrary& library, const FabricOptions& options, const std::string& provider,
    std::vector<std::string>& problems);

}  // namespace holdfast
