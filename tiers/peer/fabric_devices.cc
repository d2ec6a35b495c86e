// Which devices a Fabric opens: what libfabric offers, and what the options ask for.
#include <arpa/inet.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 11);
// The registration modes that this code knows how to live with.
constexpr int kMrModes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
// Of one endpoint; more only costs memory.
constexpr size_t kReadsMax = 64;
constexpr size_t kReceivesMax = 8;

bool IsAddress(const std::string& text) {
  in6_addr address;
  return ::inet_pton(AF_INET, text.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

// What we want of a provider. The list is the library's own.
absl::StatusOr<FabricInfoList> MakeHints(const FabricLibrary& library, const std::string& provider,
                                         uint8_t traffic_class) {
  FabricInfoList hints(library.dupinfo(nullptr), {&library});
  if (hints == nullptr) {
    return absl::ResourceExhaustedError("fi_dupinfo: out of memory");
  }
  hints->caps = FI_RMA | FI_READ | FI_REMOTE_READ;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_MSG;
  hints->domain_attr->mr_mode = kMrModes;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->tx_attr->size = kReadsMax;
  hints->rx_attr->size = kReceivesMax;
  if (traffic_class != 0) {
    hints->tx_attr->tclass = ::fi_tc_dscp_set(traffic_class);
  }
  hints->fabric_attr->prov_name = ::strdup(provider.c_str());  // fi_freeinfo frees it
  return hints;
}

// All that the provider offers, at `address` if that is not empty. Empty when it offers nothing.
absl::StatusOr<FabricInfoList> Ask(const FabricLibrary& library, const std::string& provider,
                                   const std::string& address, uint8_t traffic_class) {
  HF_ASSIGN_OR_RETURN(const FabricInfoList hints, MakeHints(library, provider, traffic_class));
  fi_info* offered = nullptr;
  const bool at_address = !address.empty();
  int result = library.getinfo(kApiVersion, at_address ? address.c_str() : nullptr, nullptr,
                               at_address ? FI_SOURCE : 0, hints.get(), &offered);
  if (result != 0 && traffic_class != 0) {
    return Ask(library, provider, address, 0);
  }
  if (result == -FI_ENODATA || result == -FI_ENOENT) {
    offered = nullptr;
  } else if (result != 0) {
    return FabricError(library, result, "fi_getinfo", provider);
  }
  return FabricInfoList(offered, {&library});
}

// Only what is exactly the provider's, not one of libfabric's layers on top, and has all that is
// used of it.
bool Fits(const fi_info& info, const std::string& provider) {
  return info.fabric_attr != nullptr && info.fabric_attr->prov_name != nullptr &&
         info.fabric_attr->prov_name == provider && info.domain_attr != nullptr &&
         info.domain_attr->name != nullptr && info.ep_attr != nullptr && info.tx_attr != nullptr &&
         info.rx_attr != nullptr && info.ep_attr->type == FI_EP_MSG &&
         info.ep_attr->protocol != FI_PROTO_RDMA_CM_IB_XRC &&
         (info.domain_attr->mr_mode & ~kMrModes) == 0 &&
         info.domain_attr->mr_key_size <= sizeof(uint64_t) && info.ep_attr->max_msg_size > 0;
}

bool IsLoopback(const fi_info& info) {
  if (info.src_addr == nullptr) {
    return false;
  }
  if (info.addr_format == FI_SOCKADDR_IN && info.src_addrlen >= sizeof(sockaddr_in)) {
    const auto* address = static_cast<const sockaddr_in*>(info.src_addr);
    return (ntohl(address->sin_addr.s_addr) >> 24) == 127;
  }
  if (info.addr_format == FI_SOCKADDR_IN6 && info.src_addrlen >= sizeof(sockaddr_in6)) {
    return IN6_IS_ADDR_LOOPBACK(&static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr);
  }
  return false;
}

bool IsLinkLocal(const fi_info& info) {
  return info.src_addr != nullptr && info.addr_format == FI_SOCKADDR_IN6 &&
         info.src_addrlen >= sizeof(sockaddr_in6) &&
         IN6_IS_ADDR_LINKLOCAL(&static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr);
}

// The lower the better: IPv4, other addresses, IPv6 that needs a scope, the loopback.
int Rank(const fi_info& info) {
  if (IsLoopback(info)) {
    return 3;
  }
  if (IsLinkLocal(info)) {
    return 2;
  }
  return info.addr_format == FI_SOCKADDR_IN ? 0 : 1;
}

std::vector<const fi_info*> Candidates(const FabricInfoList& offered, const std::string& provider) {
  std::vector<const fi_info*> candidates;
  for (const fi_info* info = offered.get(); info != nullptr; info = info->next) {
    if (Fits(*info, provider)) {
      candidates.push_back(info);
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const fi_info* a, const fi_info* b) { return Rank(*a) < Rank(*b); });
  return candidates;
}

std::string NamesOf(const std::vector<const fi_info*>& candidates) {
  std::set<std::string> names;
  for (const fi_info* info : candidates) {
    names.insert(info->domain_attr->name);
  }
  return names.empty() ? "nothing" : absl::StrJoin(names, ", ");
}

// What the options want of one provider, one entry a device.
class Selection {
 public:
  Selection(const FabricLibrary& library, const FabricOptions& options, std::string provider)
      : library_(library), options_(options), provider_(std::move(provider)) {}

  // At least one, or why there is none; `failed`: why others are not there.
  absl::StatusOr<std::vector<FabricInfoList>> Choose(std::vector<absl::Status>& failed) {
    if (options_.devices.empty()) {
      HF_RETURN_IF_ERROR(ChooseFreely());
    }
    for (const std::string& name : options_.devices) {
      if (absl::Status status = ChooseNamed(name); !status.ok()) {
        failed.push_back(std::move(status));
      }
    }
    return chosen_.empty() ? absl::StatusOr<std::vector<FabricInfoList>>(failed.front())
                           : std::move(chosen_);
  }

 private:
  absl::StatusOr<FabricInfoList> AskAt(const std::string& address) {
    return Ask(library_, provider_, address, options_.traffic_class);
  }

  void Take(const fi_info* info) {
    chosen_.emplace_back(library_.dupinfo(info), FabricInfoFreer{&library_});
  }

  absl::Status NothingAt(const std::string& what, const std::string& offered) {
    return absl::NotFoundError(absl::StrCat("fabric '", provider_, "': no device",
                                            what.empty() ? "" : absl::StrCat(" for '", what, "'"),
                                            ": there is ", offered, " (fi_info -p '", provider_,
                                            "' lists all)"));
  }

  absl::Status ChooseNamed(const std::string& name) {
    // (Where it is named, it need not be the one that the daemons' own connections use.)
    HF_ASSIGN_OR_RETURN(const FabricInfoList offered, AskAt(IsAddress(name) ? name : ""));
    const auto candidates = Candidates(offered, provider_);
    for (const fi_info* info : candidates) {
      if (IsAddress(name) || name == info->domain_attr->name) {
        Take(info);
        return absl::OkStatus();
      }
    }
    return NothingAt(name, NamesOf(candidates));
  }

  absl::Status ChooseFreely() {
    // Several devices side by side are for those that do the work themselves.
    const bool all = provider_ == "verbs";
    const std::string address = all ? "" : options_.bind_address;
    HF_ASSIGN_OR_RETURN(const FabricInfoList offered, AskAt(address));
    const auto candidates = Candidates(offered, provider_);
    if (candidates.empty()) {
      return NothingAt(address, "nothing");
    }
    std::set<std::string> taken;
    for (const fi_info* info : candidates) {
      const bool usable = Rank(*info) == Rank(*candidates.front());
      if (usable && chosen_.size() < (all ? kFabricDevicesMax : 1) &&
          taken.insert(info->domain_attr->name).second) {
        Take(info);
      }
    }
    return absl::OkStatus();
  }

  const FabricLibrary& library_;
  const FabricOptions& options_;
  const std::string provider_;
  std::vector<FabricInfoList> chosen_;
};

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<FabricDevice>>> OpenFabricDevices(
    const FabricLibrary& library, const FabricOptions& options, const std::string& provider,
    std::vector<std::string>& problems) {
  std::vector<absl::Status> failed;
  HF_ASSIGN_OR_RETURN(std::vector<FabricInfoList> chosen,
                      Selection(library, options, provider).Choose(failed));
  std::vector<std::shared_ptr<FabricDevice>> devices;
  for (FabricInfoList& info : chosen) {
    absl::StatusOr<std::shared_ptr<FabricDevice>> device =
        FabricDevice::Open(library, std::move(info));
    if (device.ok()) {
      devices.push_back(*std::move(device));
    } else {
      failed.push_back(device.status());
    }
  }
  if (devices.empty()) {
    return failed.front();  // (Choose gives one, or says why not)
  }
  for (const absl::Status& each : failed) {
    problems.push_back(Message(each));
  }
  return devices;
}

}  // namespace holdfast
