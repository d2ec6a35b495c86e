#include "tiers/peer/fabric_device.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/env.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kEvents = 64;
// What a connecting peer may say: as much as providers let it.
constexpr size_t kSaidBytesMax = 512;

// From sysfs, by PCI address where the provider tells it, else by the interface's or the RDMA
// device's name.
int NumaNodeOf(const fi_info& info) {
  std::vector<std::string> paths;
  if (info.nic != nullptr && info.nic->bus_attr != nullptr &&
      info.nic->bus_attr->bus_type == FI_BUS_PCI) {
    const fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
    paths.push_back(absl::StrFormat("/sys/bus/pci/devices/%04x:%02x:%02x.%x/numa_node",
                                    pci.domain_id, pci.bus_id, pci.device_id, pci.function_id));
  }
  const std::string name = info.domain_attr->name;
  if (name.find('/') == std::string::npos && name != "..") {
    paths.push_back("/sys/class/infiniband/" + name + "/device/numa_node");
    paths.push_back("/sys/class/net/" + name + "/device/numa_node");
  }
  for (const std::string& path : paths) {
    int node = -1;
    if (const auto text = ReadKernelFile(path); text.ok() && absl::SimpleAtoi(*text, &node)) {
      return node;
    }
  }
  return -1;
}

}  // namespace

bool FabricQueues::MaySleep() const {
  std::array<fid*, 2> waits_for = {&completions->fid, &events->fid};
  return can_sleep() && ::fi_trywait(device->fabric(), waits_for.data(), waits_for.size()) == 0;
}

std::array<pollfd, 2> FabricQueues::Waits() const {
  return {pollfd{completion_fd, POLLIN, 0}, pollfd{event_fd, POLLIN, 0}};
}

std::optional<FabricEvent> FabricQueues::NextEvent() const {
  alignas(fi_eq_cm_entry) std::array<char, sizeof(fi_eq_cm_entry) + kSaidBytesMax> bytes{};
  auto* const entry = reinterpret_cast<fi_eq_cm_entry*>(bytes.data());
  uint32_t kind = 0;
  const ssize_t read = ::fi_eq_read(events.get(), &kind, entry, bytes.size(), 0);
  FabricEvent event;
  if (read == -FI_EAVAIL) {
    fi_eq_err_entry error{};
    ::fi_eq_readerr(events.get(), &error, 0);
    event.kind = FabricEvent::Kind::kEnded;
    event.connection = error.fid;
    event.error = error.err == 0 ? FI_EOTHER : error.err;
    return event;
  }
  if (read < static_cast<ssize_t>(sizeof(fi_eq_cm_entry))) {
    return std::nullopt;
  }
  event.connection = entry->fid;
  if (kind == FI_CONNREQ) {
    event.kind = FabricEvent::Kind::kRequest;
    event.request = FabricInfoList(entry->info, {&device->library()});
    event.said.assign(bytes.data() + sizeof(fi_eq_cm_entry),
                      static_cast<size_t>(read) - sizeof(fi_eq_cm_entry));
  } else if (kind == FI_CONNECTED) {
    event.kind = FabricEvent::Kind::kConnected;
  } else if (kind == FI_SHUTDOWN) {
    event.kind = FabricEvent::Kind::kEnded;
  }
  return event;
}

FabricDevice::FabricDevice(const FabricLibrary& library, FabricInfoList info)
    : library_(library), info_(std::move(info)), numa_node_(NumaNodeOf(*info_)) {}

absl::Status FabricDevice::Error(int64_t result, std::string_view operation) const {
  return FabricError(library_, result, operation, name());
}

uint8_t FabricDevice::traffic_class() const {
  const uint32_t tclass = info_->tx_attr->tclass;
  return (tclass & FI_TC_DSCP) != 0 ? ::fi_tc_dscp_get(tclass) : 0;
}

absl::StatusOr<std::shared_ptr<FabricDevice>> FabricDevice::Open(const FabricLibrary& library,
                                                                 FabricInfoList info) {
  std::shared_ptr<FabricDevice> device(new FabricDevice(library, std::move(info)));
  fid_fabric* fabric = nullptr;
  if (const int result = library.fabric(device->info_->fabric_attr, &fabric, nullptr);
      result != 0) {
    return device->Error(result, "fi_fabric");
  }
  device->fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int result = ::fi_domain(fabric, device->info_.get(), &domain, nullptr); result != 0) {
    return device->Error(result, "fi_domain");
  }
  device->domain_.reset(domain);
  return device;
}

size_t FabricDevice::reads_per_connection() const {
  const bool device_reads = provider() == "verbs";
  return device_reads ? std::max<size_t>(info_->tx_attr->size, 1) : 1;
}

absl::StatusOr<FabricQueues> FabricDevice::OpenQueues(size_t completions) {
  FabricQueues queues;
  queues.device = shared_from_this();
  fi_eq_attr event_attributes{};
  event_attributes.size = kEvents;
  event_attributes.wait_obj = FI_WAIT_FD;
  fid_eq* events = nullptr;
  int result = ::fi_eq_open(fabric(), &event_attributes, &events, nullptr);
  if (result != 0) {
    return Error(result, "fi_eq_open");
  }
  queues.events.reset(events);
  fi_cq_attr attributes{};
  attributes.format = FI_CQ_FORMAT_CONTEXT;
  attributes.size = completions;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  result = ::fi_cq_open(domain(), &attributes, &queue, nullptr);
  if (result != 0) {
    attributes.wait_obj = FI_WAIT_NONE;
    result = ::fi_cq_open(domain(), &attributes, &queue, nullptr);
  }
  if (result != 0) {
    return Error(result, "fi_cq_open");
  }
  queues.completions.reset(queue);
  if (attributes.wait_obj == FI_WAIT_FD &&
      (::fi_control(&queue->fid, FI_GETWAIT, &queues.completion_fd) != 0 ||
       ::fi_control(&events->fid, FI_GETWAIT, &queues.event_fd) != 0)) {
    queues.completion_fd = -1;
  }
  return queues;
}

absl::StatusOr<FabricObject<fid_ep>> FabricDevice::OpenEndpoint(fi_info* info,
                                                                const FabricQueues& queues) {
  fid_ep* raw = nullptr;
  int result = ::fi_endpoint(domain(), info, &raw, nullptr);
  if (result != 0) {
    return Error(result, "fi_endpoint");
  }
  FabricObject<fid_ep> endpoint(raw);
  result = ::fi_ep_bind(raw, &queues.events->fid, 0);
  if (result == 0) {
    result = ::fi_ep_bind(raw, &queues.completions->fid, FI_TRANSMIT | FI_RECV);
  }
  if (result == 0) {
    result = ::fi_enable(raw);
  }
  if (result != 0) {
    return Error(result, "fi_enable");
  }
  return endpoint;
}

}  // namespace holdfast
