#include "tiers/peer/fabric_server.h"

#include <poll.h>
#include <pthread.h>
#include <rdma/fi_errno.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/status.h"
#include "tiers/peer/fabric_address.h"

namespace holdfast {
namespace {

constexpr size_t kCompletions = 256;
constexpr size_t kAddressBytesMax = 256;
// Asleep at the longest: an event that the provider tells nobody of is found then.
constexpr int kSleepMs = 500;
// Between two looks, where nothing would wake us.
constexpr int kLookMs = 2;
// The provider has something to do, it says: whether to stop is asked so seldom.
constexpr int kBusyLooks = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<FabricServer>> FabricServer::Start(
    std::shared_ptr<FabricDevice> device, std::string token, Duration connection_age_max) {
  HF_ASSIGN_OR_RETURN(FabricQueues queues, device->OpenQueues(kCompletions));
  std::unique_ptr<FabricServer> server(
      new FabricServer(std::move(queues), std::move(token), connection_age_max));
  HF_RETURN_IF_ERROR(server->Listen());
  server->wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!server->wake_.valid()) {
    return ErrnoStatus(errno, "eventfd", "fabric");
  }
  server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  return server;
}

absl::Status FabricServer::Listen() {
  FabricDevice& device = *queues_.device;
  fid_pep* door = nullptr;
  int result = ::fi_passive_ep(device.fabric(), &device.info(), &door, nullptr);
  if (result != 0) {
    return device.Error(result, "fi_passive_ep");
  }
  door_.reset(door);
  result = ::fi_pep_bind(door, &queues_.events->fid, 0);
  if (result == 0) {
    result = ::fi_listen(door);
  }
  if (result != 0) {
    return device.Error(result, "fi_listen");
  }
  std::array<char, kAddressBytesMax> address;
  size_t bytes = address.size();
  result = ::fi_getname(&door->fid, address.data(), &bytes);
  if (result != 0 || bytes > address.size()) {
    return device.Error(result != 0 ? result : FI_ETOOSMALL, "fi_getname");
  }
  address_.assign(address.data(), bytes);
  return absl::OkStatus();
}

FabricServer::~FabricServer() {
  if (thread_.joinable()) {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    ::eventfd_write(wake_.get(), 1);
    thread_.join();
  }
}

void FabricServer::LetGoOf(uint64_t reader_id) {
  {
    MutexLock lock(mutex_);
    gone_.insert(reader_id);
  }
  ::eventfd_write(wake_.get(), 1);
}

bool FabricServer::Wait(int timeout_ms) {
  const std::array<pollfd, 2> queues = queues_.Waits();
  std::array<pollfd, 3> waits = {pollfd{wake_.get(), POLLIN, 0}, queues[0], queues[1]};
  static_cast<void>(::poll(waits.data(), sleeps() ? waits.size() : 1, timeout_ms));
  return waits[0].revents == 0 || TakeOrders();
}

bool FabricServer::TakeOrders() {
  eventfd_t count = 0;
  ::eventfd_read(wake_.get(), &count);
  std::set<uint64_t> gone;
  {
    MutexLock lock(mutex_);
    if (stopping_) {
      return false;
    }
    gone = std::exchange(gone_, {});
  }
  std::erase_if(connections_,
                [&gone](const Connection& each) { return gone.count(each.reader_id) > 0; });
  return true;
}

void FabricServer::Run() {
  ::pthread_setname_np(::pthread_self(), "fabric");
  for (int busy = 0; true;) {
    TakeCompletions();
    while (TakeEvent()) {
    }
    CloseOld();
    if (sleeps() && !queues_.MaySleep()) {
      if (++busy % kBusyLooks == 0 && !Wait(0)) {
        return;
      }
      continue;
    }
    if (!Wait(sleeps() ? kSleepMs : kLookMs)) {
      return;
    }
  }
}

// Reads by peers complete nothing here, but this is where they are answered.
void FabricServer::TakeCompletions() {
  std::array<fi_cq_entry, 16> entries;
  if (::fi_cq_read(queues_.completions.get(), entries.data(), entries.size()) == -FI_EAVAIL) {
    fi_cq_err_entry error{};
    ::fi_cq_readerr(queues_.completions.get(), &error, 0);
  }
}

bool FabricServer::TakeEvent() {
  const std::optional<FabricEvent> event = queues_.NextEvent();
  if (!event.has_value()) {
    return false;
  }
  if (event->kind == FabricEvent::Kind::kRequest) {
    Accept(event->request.get(), event->said);
  } else if (event->kind == FabricEvent::Kind::kEnded) {
    Close(event->connection);
  }
  return true;
}

void FabricServer::Accept(fi_info* info, std::string_view said) {
  if (said.substr(0, token_.size()) != token_) {
    ::fi_reject(door_.get(), info->handle, nullptr, 0);
    return;
  }
  absl::StatusOr<FabricObject<fid_ep>> endpoint = queues_.device->OpenEndpoint(info, queues_);
  if (!endpoint.ok()) {
    ::fi_reject(door_.get(), info->handle, nullptr, 0);
    return;
  }
  if (::fi_accept(endpoint->get(), nullptr, 0) != 0) {
    return;
  }
  if (connections_.size() >= kFabricConnectionsMax) {
    connections_.pop_front();
  }
  connections_.push_back({*std::move(endpoint), Clock::System()->Now() + connection_age_max_,
                          FabricReaderIdFrom(said.substr(token_.size()))});
}

void FabricServer::Close(const fid* connection) {
  const auto found =
      std::find_if(connections_.begin(), connections_.end(),
                   [connection](const auto& held) { return &held.endpoint->fid == connection; });
  if (found != connections_.end()) {
    connections_.erase(found);
  }
}

// That a reader is gone without a word nobody else may tell.
void FabricServer::CloseOld() {
  while (!connections_.empty() && connections_.front().until < Clock::System()->Now()) {
    connections_.pop_front();
  }
}

}  // namespace holdfast
