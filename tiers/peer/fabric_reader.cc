#include "tiers/peer/fabric_reader.h"

#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

// Between two looks, where nothing would wake us.
constexpr Duration kLook = std::chrono::microseconds(50);

// The device's, and where it goes: verbs chooses the port and the way there when the endpoint is
// opened, and opens none without (EINVAL); tcp looks at it when it connects.
absl::StatusOr<FabricInfoList> InfoTo(const FabricDevice& device, const std::string& peer) {
  FabricInfoList info(device.library().dupinfo(&device.info()), {&device.library()});
  void* const address = std::malloc(peer.size());  // fi_freeinfo frees it
  if (info == nullptr || address == nullptr) {
    std::free(address);
    return absl::ResourceExhaustedError("fi_dupinfo: out of memory");
  }
  std::memcpy(address, peer.data(), peer.size());
  std::free(info->dest_addr);
  info->dest_addr = address;
  info->dest_addrlen = peer.size();
  return info;
}

}  // namespace

FabricReader::FabricReader(FabricQueues queues, size_t window)
    : operations_(window), queues_(std::move(queues)) {
  for (size_t i = window; i > 0; --i) {
    free_.push_back(i - 1);
  }
}

absl::StatusOr<std::unique_ptr<FabricReader>> FabricReader::Connect(
    std::shared_ptr<FabricDevice> device, const std::string& peer, const std::string& greeting) {
  const size_t window = device->reads_per_connection();
  HF_ASSIGN_OR_RETURN(FabricQueues queues, device->OpenQueues(window));
  std::unique_ptr<FabricReader> reader(new FabricReader(std::move(queues), window));
  HF_ASSIGN_OR_RETURN(const FabricInfoList info, InfoTo(*device, peer));
  absl::StatusOr<FabricObject<fid_ep>> endpoint = device->OpenEndpoint(info.get(), reader->queues_);
  if (!endpoint.ok()) {
    // Of verbs that is where a peer that is out of reach is noticed.
    return absl::IsResourceExhausted(endpoint.status())
               ? endpoint.status()
               : absl::UnavailableError(Message(endpoint.status()));
  }
  reader->endpoint_ = *std::move(endpoint);
  const int result =
      ::fi_connect(reader->endpoint_.get(), peer.data(), greeting.data(), greeting.size());
  if (result != 0) {
    return reader->Broken(result, "connect");
  }
  return reader;
}

absl::Status FabricReader::Broken(int64_t error, const char* doing) const {
  return absl::UnavailableError(Message(device().Error(error, doing)));
}

absl::StatusOr<bool> FabricReader::Post(std::span<std::byte> to, void* descriptor, uint64_t from,
                                        uint64_t key, uint64_t tag) {
  if (!connected_ || free_.empty()) {
    return false;
  }
  Operation& operation = operations_[free_.back()];
  operation.tag = tag;
  const ssize_t result = ::fi_read(endpoint_.get(), to.data(), to.size(), descriptor, 0, from, key,
                                   &operation.context);
  if (result == -FI_EAGAIN) {
    return false;
  }
  if (result != 0) {
    return Broken(result, "fi_read");
  }
  free_.pop_back();
  return true;
}

absl::StatusOr<std::optional<uint64_t>> FabricReader::Poll() {
  if (connected_) {
    fi_cq_entry entry{};
    const ssize_t result = ::fi_cq_read(queues_.completions.get(), &entry, 1);
    if (result == 1) {
      // The context is the operation's first member.
      const auto* operation = static_cast<const Operation*>(entry.op_context);
      free_.push_back(static_cast<size_t>(operation - operations_.data()));
      return operation->tag;
    }
    if (result == -FI_EAVAIL) {
      fi_cq_err_entry error{};
      ::fi_cq_readerr(queues_.completions.get(), &error, 0);
      return Broken(error.err, "read over");
    }
  }
  HF_RETURN_IF_ERROR(TakeEvents());
  return std::nullopt;
}

absl::Status FabricReader::TakeEvents() {
  const std::optional<FabricEvent> event = queues_.NextEvent();
  if (event.has_value() && event->kind == FabricEvent::Kind::kConnected) {
    connected_ = true;
  } else if (event.has_value() && event->kind == FabricEvent::Kind::kEnded) {
    return Broken(event->error == 0 ? FI_ECONNRESET : event->error,
                  connected_ ? "read over" : "connect over");
  }
  return absl::OkStatus();
}

void FabricReader::Wait(std::span<FabricReader* const> readers, Duration at_most) {
  std::vector<pollfd> waits;
  for (FabricReader* reader : readers) {
    if (!reader->queues_.can_sleep()) {
      at_most = std::min(at_most, kLook);
    } else if (!reader->queues_.MaySleep()) {
      return;
    } else {
      for (const pollfd& wait : reader->queues_.Waits()) {
        waits.push_back(wait);
      }
    }
  }
  const auto ns = std::max<int64_t>(at_most.count(), 0);
  const timespec timeout = {ns / 1'000'000'000, ns % 1'000'000'000};
  static_cast<void>(::ppoll(waits.data(), waits.size(), &timeout, nullptr));
}

}  // namespace holdfast
