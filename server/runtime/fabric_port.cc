#include "server/runtime/fabric_port.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"

namespace holdfast {

namespace {

constexpr size_t kProblemsShownMax = 8;
// Well below what a reader waits for a word.
constexpr auto kRegistrationWait = std::chrono::seconds(2);

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
  fabric.reader_id = options.incarnation;
  fabric.on_problem = [](const std::string& problem) {
    LogWarning(absl::StrCat("fabric: ", problem));
  };
  HF_ASSIGN_OR_RETURN(std::unique_ptr<Fabric> opened, Fabric::Open(fabric));
  LogInfo(absl::StrCat("fabric ", ToString(opened->info())));
  for (const std::string& problem : opened->info().problems) {
    LogWarning(absl::StrCat("fabric: left out: ", problem));
  }
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

void FabricPort::ChangePeers(const holdfast::ChangePeers& change) {
  std::set<uint64_t> gone;
  {
    MutexLock lock(mutex_);
    for (const std::string& node : change.down) {
      if (const auto known = peers_.extract(node)) {
        gone.insert(known.mapped());
      }
    }
    for (const auto& [node, at] : change.up) {
      const uint64_t before = std::exchange(peers_[node], at.incarnation);
      if (before != at.incarnation) {
        gone.insert(before);
      }
    }
  }
  gone.erase(0);  // not known
  for (const uint64_t incarnation : gone) {
    fabric_->LetGoOf(incarnation);
  }
}

void FabricPort::Offer(const std::string& provider, const ReadableShard& shard,
                       v1::PullSource& source) {
  if (provider != fabric_->info().provider) {
    return;
  }
  if (const std::shared_ptr<Slot> slot = Registered(shard)) {
    Describe(provider, *slot->registration, source);
  }
}

// (Whoever asks waits for an answer: what takes longer goes the other way this time.)
std::shared_ptr<FabricPort::Slot> FabricPort::Registered(const ReadableShard& shard) {
  if (Expect(shard.slot, shard.copy.id.job)) {
    options_.begin != nullptr ? options_.begin(shard.slot) : RegisterExpected(shard.slot);
  }
  MutexLock lock(mutex_);
  const auto until = std::chrono::steady_clock::now() + kRegistrationWait;
  while (expected_.count(shard.slot) > 0 && registered_.WaitUntil(mutex_, until)) {
  }
  const auto known = slots_.find(shard.slot);
  return known != slots_.end() && known->second->Serves(shard) ? known->second : nullptr;
}

bool FabricPort::Expect(SlotId slot, const JobUuid& job) {
  MutexLock lock(mutex_);
  const auto known = slots_.find(slot);
  const bool there =
      known != slots_.end() && known->second->job == job && !known->second->registration->faulted();
  if (there || expected_.count(slot) > 0) {
    return false;
  }
  expected_[slot] = {job, ++last_expected_};
  return true;
}

void FabricPort::RegisterExpected(SlotId slot) {
  Expected expected;
  {
    MutexLock lock(mutex_);
    const auto found = expected_.find(slot);
    if (found == expected_.end()) {
      return;
    }
    expected = found->second;
  }
  absl::StatusOr<std::shared_ptr<Slot>> made = Make(slot, expected.job);
  MutexLock lock(mutex_);  // (gone before `made` is: what is not wanted deregisters without it)
  const auto found = expected_.find(slot);
  if (found == expected_.end() || found->second.number != expected.number) {
    return;  // it was deleted, or is another job's now
  }
  expected_.erase(found);
  Note(slot, made.status(), made.ok() ? (*made)->registration->left_out() : absl::OkStatus());
  if (made.ok()) {
    made->swap(slots_[slot]);
  }
  registered_.NotifyAll();
}

// `left_out`: why it was made with some devices only.
void FabricPort::Note(SlotId slot, const absl::Status& made, const absl::Status& left_out) {
  if (made.ok() && left_out.ok()) {
    problems_.erase(slot);
    return;
  }
  const std::string problem = Message(made.ok() ? left_out : made);
  const bool said = std::any_of(problems_.begin(), problems_.end(),
                                [&](const auto& each) { return each.second == problem; });
  if (!said) {
    LogWarning(
        absl::StrCat("fabric: ", problem,
                     made.ok() ? "; shards go without that device"
                               : "; shards go over the daemons' own connections, which is slower"));
  }
  problems_[slot] = problem;
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

absl::StatusOr<std::shared_ptr<FabricPort::Slot>> FabricPort::Make(SlotId id,
                                                                   const JobUuid& job) const {
  auto slot = std::make_shared<Slot>();
  slot->job = job;
  HF_ASSIGN_OR_RETURN(slot->file, options_.slots->OpenImageFile(id, true));
  HF_ASSIGN_OR_RETURN(const FileInfo info, slot->file->Info());
  HF_ASSIGN_OR_RETURN(slot->mapping, options_.env->Map(*slot->file, 0, info.bytes, true));
  HF_ASSIGN_OR_RETURN(slot->registration,
                      fabric_->Register({slot->mapping->data(), slot->mapping->bytes()},
                                        MemoryAccess::kReadByPeers));
  return slot;
}

std::shared_ptr<FabricPort::Slot> FabricPort::Forget(SlotId slot) {
  expected_.erase(slot);
  problems_.erase(slot);
  registered_.NotifyAll();
  auto known = slots_.extract(slot);
  return known.empty() ? nullptr : std::move(known.mapped());
}

void FabricPort::Drop(SlotId slot) {
  std::shared_ptr<Slot> dropped;
  MutexLock lock(mutex_);
  dropped = Forget(slot);
}

void FabricPort::BecomesOf(SlotId slot, const JobUuid& job) {
  std::shared_ptr<Slot> dropped;
  MutexLock lock(mutex_);
  const auto expected = expected_.find(slot);
  const auto known = slots_.find(slot);
  if ((expected != expected_.end() && expected->second.job != job) ||
      (known != slots_.end() && known->second->job != job)) {
    dropped = Forget(slot);
  }
}

std::string FabricPort::problem() const {
  MutexLock lock(mutex_);
  std::vector<std::string> all = fabric_->Problems();
  // (Many slots have the same one.)
  for (const auto& [slot, problem] : problems_) {
    if (std::find(all.begin(), all.end(), problem) == all.end()) {
      all.push_back(problem);
    }
  }
  if (all.size() > kProblemsShownMax) {
    const size_t more = all.size() - kProblemsShownMax;
    all.resize(kProblemsShownMax);
    all.push_back(absl::StrCat("and ", more, " more"));
  }
  return absl::StrJoin(all, "; ");
}

}  // namespace holdfast
