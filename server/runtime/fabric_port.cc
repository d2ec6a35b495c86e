#include "server/runtime/fabric_port.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"

namespace holdfast {

namespace {

// The address that it stands for, as numbers. Empty when it has none but the loopback's (as a
// host's own name often has in /etc/hosts), which no other node reaches.
std::string NumericAddress(std::string host) {
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  in6_addr number;
  if (::inet_pton(AF_INET, host.c_str(), &number) == 1 ||
      ::inet_pton(AF_INET6, host.c_str(), &number) == 1) {
    return host;
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) {
    return "";
  }
  std::string numeric;
  for (const addrinfo* at = found; at != nullptr && numeric.empty(); at = at->ai_next) {
    char text[NI_MAXHOST];
    const bool told = ::getnameinfo(at->ai_addr, at->ai_addrlen, text, sizeof(text), nullptr, 0,
                                    NI_NUMERICHOST) == 0;
    if (told && !absl::StartsWith(text, "127.") && std::string_view(text) != "::1") {
      numeric = text;
    }
  }
  ::freeaddrinfo(found);
  return numeric;
}

}  // namespace

absl::StatusOr<std::unique_ptr<FabricPort>> FabricPort::Open(Options options) {
  FabricOptions fabric;
  if (!options.config.provider().empty()) {
    fabric.provider = options.config.provider();
  }
  fabric.devices.assign(options.config.devices().begin(), options.config.devices().end());
  const std::string& at = options.advertise_address;
  fabric.bind_address = NumericAddress(at.substr(0, at.rfind(':')));
  fabric.traffic_class = static_cast<uint8_t>(options.config.dscp());
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Fabric> opened, Fabric::Open(fabric));
  LogInfo(absl::StrCat("fabric ", ToString(opened->info())));
  for (const FabricDeviceInfo& device : opened->info().devices) {
    // (verbs of libfabric 1.17 leaves it out without a word)
    if (device.traffic_class != fabric.traffic_class) {
      LogWarning(absl::StrCat("fabric: '", device.name, "' is not given fabric.dscp ",
                              static_cast<int>(fabric.traffic_class), ": the provider ",
                              opened->info().provider,
                              " takes none; set it on the system (docs/fabric.md, RoCE)"));
    }
  }
  return std::unique_ptr<FabricPort>(new FabricPort(std::move(options), std::move(opened)));
}

FabricPort::FabricPort(Options options, std::unique_ptr<Fabric> fabric)
    : options_(std::move(options)), fabric_(std::move(fabric)) {}

FabricPort::~FabricPort() = default;

void FabricPort::Offer(const std::string& provider, const ReadableShard& shard,
                       v1::PullSource& source) {
  if (provider != fabric_->info().provider) {
    return;
  }
  const absl::StatusOr<std::shared_ptr<Slot>> slot = Register(shard);
  {
    MutexLock lock(mutex_);
    const std::string problem = slot.ok() ? "" : Message(slot.status());
    if (problem_ != problem && !problem.empty()) {
      LogWarning(absl::StrCat("fabric: ", problem,
                              "; shards go over the daemons' own connections, which is slower"));
    }
    problem_ = problem;
  }
  if (!slot.ok()) {
    return;
  }
  Describe(provider, *(*slot)->registration, source);
}

void FabricPort::Describe(const std::string& provider, const Registration& registration,
                          v1::PullSource& source) const {
  if (provider != fabric_->info().provider) {
    return;
  }
  source.set_provider(provider);
  source.set_fabric_address(fabric_->address());
  for (const RemoteRegion& region : registration.regions()) {
    v1::RemoteRegion& out = *source.add_regions();
    out.set_device(region.device);
    out.set_base(region.base);
    out.set_key(region.key);
    out.set_bytes(region.bytes);
  }
}

absl::StatusOr<std::shared_ptr<FabricPort::Slot>> FabricPort::Register(const ReadableShard& shard) {
  {
    MutexLock lock(mutex_);
    const auto known = slots_.find(shard.slot);
    if (known != slots_.end() && known->second->Serves(shard)) {
      return known->second;
    }
  }
  auto slot = std::make_shared<Slot>();
  slot->job = shard.copy.id.job;
  HF_ASSIGN_OR_RETURN(slot->file, options_.slots->OpenImageFile(shard.slot, true));
  HF_ASSIGN_OR_RETURN(const FileInfo info, slot->file->Info());
  HF_ASSIGN_OR_RETURN(slot->mapping, options_.env->Map(*slot->file, 0, info.bytes, true));
  HF_ASSIGN_OR_RETURN(slot->registration,
                      fabric_->Register({slot->mapping->data(), slot->mapping->bytes()},
                                        MemoryAccess::kReadByPeers));
  std::shared_ptr<Slot> before;  // (deregisters when the lock is gone)
  MutexLock lock(mutex_);
  std::shared_ptr<Slot>& known = slots_[shard.slot];
  if (known != nullptr && known->Serves(shard)) {
    before = std::move(slot);  // another reader was faster, and has been told of that one
    return known;
  }
  before = std::exchange(known, slot);
  return slot;
}

void FabricPort::Drop(SlotId slot) {
  std::shared_ptr<Slot> dropped;
  MutexLock lock(mutex_);
  if (const auto known = slots_.find(slot); known != slots_.end()) {
    dropped = std::move(known->second);
    slots_.erase(known);
  }
}

void FabricPort::BecomesOf(SlotId slot, const JobUuid& job) {
  std::shared_ptr<Slot> dropped;
  MutexLock lock(mutex_);
  if (const auto known = slots_.find(slot); known != slots_.end() && known->second->job != job) {
    dropped = std::move(known->second);
    slots_.erase(known);
  }
}

std::string FabricPort::problem() const {
  MutexLock lock(mutex_);
  return problem_;
}

}  // namespace holdfast
