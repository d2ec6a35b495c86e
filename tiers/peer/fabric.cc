#include "tiers/peer/fabric.h"

#include <sys/random.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
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
  HF_ASSIGN_OR_RETURN(const FabricLibrary* library, LoadFabricLibrary(options.library));
  std::unique_ptr<Fabric> fabric(new Fabric());
  fabric->options_ = options;
  HF_ASSIGN_OR_RETURN(fabric->devices_, OpenFabricDevices(*library, options));
  FabricAddress address;
  address.provider = fabric->devices_.front()->info().fabric_attr->prov_name;
  address.token.resize(kFabricTokenBytes);
  if (::getrandom(address.token.data(), address.token.size(), 0) !=
      static_cast<ssize_t>(address.token.size())) {
    return ErrnoStatus(errno, "getrandom", "fabric");
  }
  address.format = fabric->devices_.front()->info().addr_format;
  fabric->info_.provider = address.provider;
  fabric->info_.library_version = library->version;
  for (const std::shared_ptr<FabricDevice>& device : fabric->devices_) {
    if (device->info().addr_format != address.format) {
      return absl::InvalidArgumentError(absl::StrCat("fabric: '", device->name(), "' and '",
                                                     fabric->devices_.front()->name(),
                                                     "' have addresses of different kinds"));
    }
    HF_ASSIGN_OR_RETURN(std::unique_ptr<FabricServer> server,
                        FabricServer::Start(device, address.token));
    address.endpoints.push_back(server->address());
    fabric->info_.devices.push_back(InfoOf(*device, *server));
    fabric->servers_.push_back(std::move(server));
  }
  fabric->address_ = EncodeFabricAddress(address);
  HF_RETURN_IF_ERROR(fabric->CheckAddress(fabric->address_));
  fabric->readers_ = std::make_unique<ReaderPool>(options.readers_max);
  return fabric;
}

absl::Status Fabric::CheckAddress(std::string_view address) const {
  HF_ASSIGN_OR_RETURN(const FabricAddress own, DecodeFabricAddress(address_));
  HF_ASSIGN_OR_RETURN(const FabricAddress peer, DecodeFabricAddress(address));
  return CheckReachable(own, peer);
}

absl::StatusOr<std::shared_ptr<Registration>> Fabric::Register(std::span<std::byte> memory,
                                                               MemoryAccess access) {
  return Registration::Make(devices_, memory, access, options_.registration_bytes_max);
}

}  // namespace holdfast
