#include "tiers/peer/fabric.h"

#include <arpa/inet.h>
#include <sys/random.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "tiers/peer/fabric_address.h"
#include "tiers/peer/fabric_device.h"
#include "tiers/peer/fabric_server.h"
#include "tiers/peer/reader_pool.h"

namespace holdfast {
namespace {

FabricDeviceInfo InfoOf(const FabricDevice& device, const FabricServer& server) {
  const fi_info& info = device.info();
  return {.name = device.name(),
          .address = FabricEndpointForPeople(info.addr_format, server.address()),
          .mr_mode = device.mr_mode(),
          .key_bytes = info.domain_attr->mr_key_size,
          .random_keys = (device.mr_mode() & FI_MR_PROV_KEY) == 0,
          .message_bytes_max = info.ep_attr->max_msg_size,
          .reads_max = device.reads_per_connection(),
          .traffic_class = device.traffic_class(),
          .numa_node = device.numa_node(),
          .sleeps = server.sleeps()};
}

absl::Status CheckOptions(const FabricOptions& options) {
  in6_addr number;
  const std::string& at = options.bind_address;
  const bool address = at.empty() || ::inet_pton(AF_INET, at.c_str(), &number) == 1 ||
                       ::inet_pton(AF_INET6, at.c_str(), &number) == 1;
  if (options.devices.size() > kFabricDevicesMax || options.traffic_class > 63 || !address) {
    return absl::InvalidArgumentError(absl::StrCat("fabric: at most ", kFabricDevicesMax,
                                                   " devices, a DSCP up to 63, and an IP "
                                                   "address without port to bind to, not '",
                                                   at, "'"));
  }
  return absl::OkStatus();
}

struct MrBit {
  uint64_t bit;
  const char* name;
};

}  // namespace

std::vector<std::string> NamesOfMrMode(uint64_t mr_mode) {
  std::vector<std::string> names;
  for (const MrBit& known :
       {MrBit{FI_MR_LOCAL, "LOCAL"}, MrBit{FI_MR_VIRT_ADDR, "VIRT_ADDR"},
        MrBit{FI_MR_ALLOCATED, "ALLOCATED"}, MrBit{FI_MR_PROV_KEY, "PROV_KEY"}}) {
    if ((mr_mode & known.bit) != 0) {
      names.emplace_back(known.name);
      mr_mode &= ~known.bit;
    }
  }
  if (mr_mode != 0) {
    names.push_back(absl::StrCat(mr_mode));
  }
  return names;
}

std::string ToString(const FabricInfo& info) {
  std::string text =
      absl::StrCat("provider=", info.provider, " libfabric=", FI_MAJOR(info.library_version), ".",
                   FI_MINOR(info.library_version));
  for (const FabricDeviceInfo& device : info.devices) {
    absl::StrAppend(&text, " device=", device.name, " address=", device.address,
                    " keys=", device.random_keys ? "random" : "provider");
    if (device.numa_node >= 0) {
      absl::StrAppend(&text, " numa=", device.numa_node);
    }
    if (device.traffic_class != 0) {
      absl::StrAppend(&text, " dscp=", static_cast<int>(device.traffic_class));
    }
  }
  return text;
}

Fabric::Fabric() = default;

// Readers first: their endpoints are closed before the domains that they are of.
Fabric::~Fabric() = default;

absl::StatusOr<std::unique_ptr<Fabric>> Fabric::Open(const FabricOptions& options) {
  HF_RETURN_IF_ERROR(CheckOptions(options));
  HF_ASSIGN_OR_RETURN(const FabricLibrary* library, LoadFabricLibrary(options.library));
  std::vector<std::string> providers = {options.provider.substr(0, options.provider.find(';'))};
  if (options.provider == "auto") {
    providers = {"verbs", "tcp"};
  }
  std::vector<std::string> problems;
  std::vector<std::string>
      missing;  // that there is no device of verbs is what most machines are like
  absl::Status last;
  for (const std::string& provider : providers) {
    std::unique_ptr<Fabric> fabric(new Fabric());
    fabric->options_ = options;
    last = fabric->OpenProvider(*library, provider);
    if (last.ok()) {
      std::vector<std::string>& shown = fabric->info_.problems;
      if (!shown.empty()) {  // (a device that was named may be of the other provider)
        problems.insert(problems.end(), missing.begin(), missing.end());
      }
      shown.insert(shown.begin(), problems.begin(), problems.end());
      return fabric;
    }
    (absl::IsNotFound(last) ? missing : problems)
        .push_back(absl::StrCat("not by ", provider, ": ", Message(last)));
  }
  if (!options.devices.empty()) {
    problems.insert(problems.begin(), missing.begin(), missing.end());
  }
  return providers.size() == 1 || problems.empty()
             ? last
             : absl::Status(last.code(), absl::StrJoin(problems, "; "));
}

absl::Status Fabric::OpenProvider(const FabricLibrary& library, const std::string& provider) {
  FabricAddress address;
  address.provider = provider;
  address.token.resize(kFabricTokenBytes);
  if (::getrandom(address.token.data(), address.token.size(), 0) !=
      static_cast<ssize_t>(address.token.size())) {
    return ErrnoStatus(errno, "getrandom", "fabric");
  }
  info_.provider = provider;
  info_.library_version = library.version;
  HF_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<FabricDevice>> opened,
                      OpenFabricDevices(library, options_, provider, info_.problems));
  absl::Status last;
  for (const std::shared_ptr<FabricDevice>& device : opened) {
    const uint32_t format = device->info().addr_format;
    absl::StatusOr<std::unique_ptr<FabricServer>> server =
        devices_.empty() || format == address.format
            ? FabricServer::Start(device, address.token, options_.connection_age_max)
            : absl::InvalidArgumentError(absl::StrCat("fabric: '", device->name(), "' and '",
                                                      devices_.front()->name(),
                                                      "' have addresses of different kinds"));
    if (!server.ok()) {
      last = server.status();
      info_.problems.push_back(Message(last));
      continue;
    }
    address.format = format;
    address.endpoints.push_back({(*server)->address(), device->name()});
    info_.devices.push_back(InfoOf(*device, **server));
    servers_.push_back(*std::move(server));
    devices_.push_back(device);
  }
  if (devices_.empty()) {
    return last;
  }
  address_ = EncodeFabricAddress(address);
  HF_RETURN_IF_ERROR(CheckAddress(address_));
  readers_ = std::make_unique<ReaderPool>(options_.readers_max, options_.connection_age_max / 2,
                                          options_.reader_id, options_.on_problem);
  return absl::OkStatus();
}

absl::Status Fabric::CheckAddress(std::string_view address) const {
  HF_ASSIGN_OR_RETURN(const FabricAddress own, DecodeFabricAddress(address_));
  HF_ASSIGN_OR_RETURN(const FabricAddress peer, DecodeFabricAddress(address));
  return CheckReachable(own, peer);
}

std::vector<std::string> Fabric::Problems() const {
  std::vector<std::string> problems = info_.problems;
  for (std::string& problem : readers_->Problems()) {
    problems.push_back(std::move(problem));
  }
  return problems;
}

void Fabric::LetGoOf(uint64_t reader_id) {
  for (const std::unique_ptr<FabricServer>& server : servers_) {
    server->LetGoOf(reader_id);
  }
  readers_->CloseIdle();
}

absl::StatusOr<std::shared_ptr<Registration>> Fabric::Register(std::span<std::byte> memory,
                                                               MemoryAccess access) {
  return Registration::Make(devices_, memory, access, options_.registration_bytes_max);
}

}  // namespace holdfast
