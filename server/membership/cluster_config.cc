#include "server/membership/cluster_config.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/membership/membership_records.h"

namespace holdfast {
namespace {

constexpr char kDefaultPort[] = "9465";
constexpr char kDefaultPrefix[] = "/holdfast/";
constexpr uint32_t kLeaseTtlMsDefault = 10'000;
constexpr uint32_t kLeaseTtlMsMin = 2'000;  // etcd grants no shorter ones
constexpr uint32_t kLeaseTtlMsMax = 3'600'000;
constexpr uint32_t kRequestTimeoutMsDefault = 2'000;
constexpr uint32_t kRequestTimeoutMsMin = 100;
constexpr int kEndpointsMax = 64;
constexpr size_t kPrefixBytesMax = 512;
constexpr size_t kShownBytesMax = 64;

absl::Status Bad(std::string_view setting, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(ToAbsl(setting), ": ", problem));
}

absl::Status CheckAddressOf(const std::string& setting, const std::string& address) {
  if (const absl::Status status = CheckAddress(address); !status.ok()) {
    return Bad(setting, Message(status));
  }
  return absl::OkStatus();
}

std::string PortOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  return address.substr(colon == std::string::npos ? 0 : colon + 1);
}

// Port 0: whichever is free.
bool AnyPort(const std::string& address) {
  return absl::EndsWith(address, ":0");
}

std::string WithPort(const std::string& address, const std::string& port) {
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

// Names of hosts have no case.
std::string WithoutCase(const std::string& address) {
  return absl::AsciiStrToLower(address);
}

// 0.0.0.0, [::], and what else the resolver takes for them: where a socket can listen. Whoever
// connects there reaches its own machine.
bool IsWildcard(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (!host.starts_with('[')) {
    in_addr v4 = {};
    return ::inet_aton(host.c_str(), &v4) != 0 && v4.s_addr == INADDR_ANY;
  }
  host = host.substr(1, host.find_first_of("%]") - 1);
  in6_addr v6 = {};
  const in6_addr mapped = {{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0}}};
  return ::inet_pton(AF_INET6, host.c_str(), &v6) == 1 &&
         (IN6_IS_ADDR_UNSPECIFIED(&v6) || IN6_ARE_ADDR_EQUAL(&v6, &mapped));
}

// What is said in the clear is said by whoever reaches the port.
absl::Status CheckPlaintext(const v1::ClusterConfig& config, const std::string& listening) {
  if (config.has_tls()) {
    return config.plaintext()
               ? Bad("cluster.plaintext",
                     "it is true, and cluster.tls is set: which of both? Take one of them out")
               : absl::OkStatus();
  }
  if (config.plaintext() || IsLoopbackAddress(listening)) {
    return absl::OkStatus();
  }
  return Bad("cluster.tls",
             absl::StrCat("there is none, and in the clear whoever reaches '", listening,
                          "' (cluster.listen_address) could read shards, and speak as any node: "
                          "set cluster.tls (ca_file, cert_file, key_file), or, where the network "
                          "is trusted, cluster.plaintext: true"));
}

absl::Status CheckReachable(const std::string& setting, const std::string& address,
                            std::string_view node) {
  if (!IsWildcard(address)) {
    return absl::OkStatus();
  }
  return Bad(setting, absl::StrCat("'", address,
                                   "' stands for every address of a machine and leads to none: "
                                   "give the name or address at which other nodes reach ",
                                   ToAbsl(node), "; listen_address may be such a one"));
}

absl::Status CheckNodeOf(const std::string& setting, NodeInfo node) {
  if (const absl::Status status = CheckNode(node); !status.ok()) {
    return Bad(setting, Message(status));
  }
  return absl::OkStatus();
}

absl::Status CheckFile(std::string_view setting, const std::string& path) {
  return path.empty() || path[0] == '/'
             ? absl::OkStatus()
             : Bad(setting, absl::StrCat("'", path, "' is not an absolute path"));
}

// The others look for it where the list says, whatever it says itself.
absl::Status CheckListedAddress(const std::string& node_name, const std::string& listed,
                                const std::string& advertised) {
  if (WithoutCase(listed) == WithoutCase(advertised)) {
    return absl::OkStatus();
  }
  return Bad("cluster.advertise_address",
             absl::StrCat("'", advertised, "' is not what cluster.members says of this node, '",
                          node_name, "': ", listed,
                          ", where the others look for it; leave advertise_address out, or give "
                          "that address in the list, on every node alike"));
}

absl::Status CheckMembers(const std::string& node_name, const v1::ClusterConfig& config) {
  std::map<std::string, std::string> named;  // name → address
  std::set<std::string> addresses;
  for (const v1::ClusterMember& member : config.members()) {
    const std::string setting = absl::StrCat("cluster.members (", member.name(), ")");
    HF_RETURN_IF_ERROR(
        CheckNodeOf(setting, {member.name(), member.address(), LabelsOf(member.labels())}));
    HF_RETURN_IF_ERROR(CheckReachable(setting, member.address(), "it"));
    if (!named.emplace(member.name(), member.address()).second) {
      return Bad(setting, "listed twice; every node needs a name of its own");
    }
    if (!addresses.insert(WithoutCase(member.address())).second) {
      return Bad(setting, absl::StrCat("address ", member.address(), " is another member's, too"));
    }
  }
  for (const v1::ClusterMember& member : config.members()) {
    if (member.name() == node_name && member.labels_size() > 0 && config.labels_size() > 0 &&
        LabelsOf(member.labels()) != LabelsOf(config.labels())) {
      return Bad("cluster.labels",
                 absl::StrCat("they are not those that cluster.members gives this node, '",
                              node_name, "'; leave them out here, where the list has them"));
    }
  }
  const auto self = named.find(node_name);
  if (self == named.end()) {
    return Bad("cluster.members",
               absl::StrCat("this node, '", node_name,
                            "' (node_name), is not listed; add it, on every node alike"));
  }
  return CheckListedAddress(node_name, self->second, config.advertise_address());
}

absl::Status CheckEndpoints(const v1::EtcdConfig& etcd) {
  std::map<std::string, std::string> servers;  // address → as written
  for (const std::string& endpoint : etcd.endpoints()) {
    const absl::StatusOr<EtcdEndpoint> parsed = ParseEtcdEndpoint(etcd, endpoint);
    if (!parsed.ok()) {
      return Bad("cluster.etcd.endpoints", Message(parsed.status()));
    }
    const auto [first, is_new] = servers.emplace(WithoutCase(parsed->address), endpoint);
    if (!is_new) {
      return Bad("cluster.etcd.endpoints", absl::StrCat("'", endpoint, "' is the same server as '",
                                                        first->second, "'; name each one once"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPrefix(const std::string& prefix) {
  if (prefix.empty()) {
    return Bad("cluster.etcd.prefix",
               absl::StrCat("'' would mix our keys with everybody's; give one that ends with a "
                            "slash, or leave it out for '",
                            kDefaultPrefix, "'"));
  }
  if (prefix.back() != '/' || prefix.size() > kPrefixBytesMax ||
      !std::all_of(prefix.begin(), prefix.end(),
                   [](const char c) { return c > ' ' && c < 0x7f; })) {
    return Bad("cluster.etcd.prefix",
               absl::StrCat("'", PrintableText(prefix.substr(0, kShownBytesMax)),
                            "': printable ASCII, a slash at the end, at most ", kPrefixBytesMax,
                            " bytes"));
  }
  return absl::OkStatus();
}

absl::Status CheckEtcd(const v1::EtcdConfig& etcd) {
  HF_RETURN_IF_ERROR(CheckEndpoints(etcd));
  HF_RETURN_IF_ERROR(CheckPrefix(etcd.prefix()));
  HF_RETURN_IF_ERROR(CheckFile("cluster.etcd.ca_file", etcd.ca_file()));
  HF_RETURN_IF_ERROR(CheckFile("cluster.etcd.cert_file", etcd.cert_file()));
  HF_RETURN_IF_ERROR(CheckFile("cluster.etcd.key_file", etcd.key_file()));
  HF_RETURN_IF_ERROR(CheckFile("cluster.etcd.password_file", etcd.password_file()));
  if (etcd.cert_file().empty() != etcd.key_file().empty()) {
    return Bad("cluster.etcd.cert_file", "cert_file and key_file go together; give both or none");
  }
  if (etcd.user().empty() != etcd.password_file().empty()) {
    return Bad("cluster.etcd.user", "user and password_file go together; give both or none");
  }
  if (etcd.user().size() > kNodeTextBytesMax) {
    return Bad("cluster.etcd.user",
               absl::StrCat("at most ", kNodeTextBytesMax, " bytes are allowed"));
  }
  return absl::OkStatus();
}

}  // namespace

bool IsLoopbackAddress(std::string_view address) {
  const std::string host(address.substr(0, address.rfind(':')));
  in_addr v4 = {};
  return host == "[::1]" || (::inet_pton(AF_INET, host.c_str(), &v4) == 1 &&
                             (ntohl(v4.s_addr) >> 24) == IN_LOOPBACKNET);
}

absl::Status CheckTlsConfig(const std::string& setting, const v1::ClusterTlsConfig& tls) {
  if (tls.ca_file().empty() || tls.cert_file().empty() || tls.key_file().empty()) {
    return Bad(setting, "ca_file, cert_file and key_file go together; give all, or leave tls out");
  }
  HF_RETURN_IF_ERROR(CheckFile(setting + ".ca_file", tls.ca_file()));
  HF_RETURN_IF_ERROR(CheckFile(setting + ".cert_file", tls.cert_file()));
  return CheckFile(setting + ".key_file", tls.key_file());
}

std::vector<NodeLabel> LabelsOf(const google::protobuf::RepeatedPtrField<v1::Label>& labels) {
  std::vector<NodeLabel> sorted;
  for (const v1::Label& label : labels) {
    sorted.push_back({label.name(), label.value()});
  }
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

std::string PublishedAddress(const v1::ClusterConfig& config, const std::string& listening) {
  const std::string& address = config.advertise_address();
  return AnyPort(address) ? WithPort(address, PortOf(listening)) : address;
}

void UseAnyPort(v1::ClusterConfig& config) {
  config.set_listen_address(WithPort(config.listen_address(), "0"));
  config.set_advertise_address(WithPort(config.advertise_address(), "0"));
}

std::string EtcdPrefix(const v1::ClusterConfig& config) {
  return absl::StrCat(config.etcd().prefix(), config.name(), "/");
}

absl::StatusOr<EtcdEndpoint> ParseEtcdEndpoint(const v1::EtcdConfig& config,
                                               const std::string& endpoint) {
  absl::string_view address = endpoint;
  const bool https = absl::ConsumePrefix(&address, "https://");
  const bool http = !https && absl::ConsumePrefix(&address, "http://");
  HF_RETURN_IF_ERROR(CheckAddress(FromAbsl(address)));
  const bool tls_files = !config.ca_file().empty() || !config.cert_file().empty();
  if (http && tls_files) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", endpoint,
        "' would not be encrypted, although ca_file or cert_file is set; use https://"));
  }
  return EtcdEndpoint{std::string(address), https || tls_files};
}

void CompleteClusterConfig(const std::string& node_name, v1::ClusterConfig* config) {
  if (config->name().empty()) {
    config->set_name("default");
  }
  if (config->listen_address().empty()) {
    config->set_listen_address(absl::StrCat("0.0.0.0:", kDefaultPort));
  }
  if (config->advertise_address().empty()) {
    const auto self =
        std::find_if(config->members().begin(), config->members().end(),
                     [&](const v1::ClusterMember& member) { return member.name() == node_name; });
    config->set_advertise_address(
        self != config->members().end()
            ? self->address()
            : absl::StrCat(node_name, ":", PortOf(config->listen_address())));
  }
  if (config->has_etcd()) {
    v1::EtcdConfig* etcd = config->mutable_etcd();
    if (!etcd->has_prefix()) {
      etcd->set_prefix(kDefaultPrefix);
    }
    if (etcd->lease_ttl_ms() == 0) {
      etcd->set_lease_ttl_ms(kLeaseTtlMsDefault);
    }
    if (etcd->request_timeout_ms() == 0) {
      etcd->set_request_timeout_ms(kRequestTimeoutMsDefault);
    }
  }
}

std::vector<SettingRange> ClusterRanges(const v1::ClusterConfig& config) {
  using Unit = SettingRange::Unit;
  std::vector<SettingRange> ranges = {
      {.setting = "cluster.labels",
       .value = static_cast<uint64_t>(config.labels_size()),
       .max = kNodeLabelsMax},
      {.setting = "cluster.members",
       .value = static_cast<uint64_t>(config.members_size()),
       .max = kMembersMax},
  };
  if (config.has_etcd()) {
    const v1::EtcdConfig& etcd = config.etcd();
    ranges.push_back({.setting = "cluster.etcd.endpoints",
                      .value = static_cast<uint64_t>(etcd.endpoints_size()),
                      .min = 1,
                      .max = kEndpointsMax,
                      .note = "HOST:PORT each"});
    ranges.push_back({.setting = "cluster.etcd.lease_ttl_ms",
                      .value = etcd.lease_ttl_ms(),
                      .min = kLeaseTtlMsMin,
                      .max = kLeaseTtlMsMax,
                      .unit = Unit::kMs,
                      .multiple_of = 1000});
    ranges.push_back({.setting = "cluster.etcd.request_timeout_ms",
                      .value = etcd.request_timeout_ms(),
                      .min = kRequestTimeoutMsMin,
                      .max = etcd.lease_ttl_ms() / 2,
                      .unit = Unit::kMs,
                      .max_is = "half of cluster.etcd.lease_ttl_ms",
                      .note = "another endpoint must have time to renew the lease"});
  }
  return ranges;
}

absl::Status CheckClusterConfig(const std::string& node_name, const v1::ClusterConfig& config) {
  if (const absl::Status name = CheckJobName(config.name()); !name.ok()) {
    return Bad("cluster.name", absl::StrCat("it must be as a job's name: ", Message(name)));
  }
  if (const absl::Status name = CheckJobName(node_name); !name.ok()) {
    return Bad("node_name",
               absl::StrCat("in a cluster the node name must be as a job's name: ", Message(name)));
  }
  if (config.has_etcd() && config.members_size() > 0) {
    return Bad("cluster.members", "either a static list or etcd, not both; remove one of them");
  }
  for (const SettingRange& range : ClusterRanges(config)) {
    HF_RETURN_IF_ERROR(CheckRange(range));
  }
  const bool any_port = AnyPort(config.listen_address());
  const std::string listening =
      any_port ? WithPort(config.listen_address(), kDefaultPort) : config.listen_address();
  const std::string published =
      any_port ? PublishedAddress(config, listening) : config.advertise_address();
  // (The list first: where it names this node, its address may be taken from there.)
  if (config.members_size() > 0 && !config.has_etcd()) {
    HF_RETURN_IF_ERROR(CheckMembers(node_name, config));
  }
  HF_RETURN_IF_ERROR(CheckAddressOf("cluster.listen_address", listening));
  HF_RETURN_IF_ERROR(CheckAddressOf("cluster.advertise_address", published));
  HF_RETURN_IF_ERROR(
      CheckReachable("cluster.advertise_address", config.advertise_address(), "this one"));
  HF_RETURN_IF_ERROR(
      CheckNodeOf("cluster.labels", {node_name, published, LabelsOf(config.labels())}));
  if (config.has_tls()) {
    HF_RETURN_IF_ERROR(CheckTlsConfig("cluster.tls", config.tls()));
  }
  if (config.has_etcd()) {
    HF_RETURN_IF_ERROR(CheckEtcd(config.etcd()));
  }
  return CheckPlaintext(config, listening);
}

}  // namespace holdfast
