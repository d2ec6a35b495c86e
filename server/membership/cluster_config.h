// The settings of ClusterConfig: defaults, and what they may be.
//
//   v1::ClusterConfig cluster = …;                     // as the file says
//   CompleteClusterConfig("node-1", &cluster);
//   HF_RETURN_IF_ERROR(CheckClusterConfig("node-1", cluster));
//
// Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/setting_range.h"
#include "holdfast/v1/config.pb.h"
#include "server/membership/etcd_endpoint.h"
#include "server/membership/membership.h"

namespace holdfast {

// Of the files that a ClusterConfig names.
inline constexpr uint64_t kPemBytesMax = uint64_t{1} << 20;
inline constexpr uint64_t kPasswordBytesMax = 4096;

// Fills in what was left out. Addresses: the node's name is taken for the host's.
void CompleteClusterConfig(const std::string& node_name, v1::ClusterConfig* config);
// Of a complete one. Every error names the setting and the way out.
absl::Status CheckClusterConfig(const std::string& node_name, const v1::ClusterConfig& config);
// HOST:PORT of this machine's loopback, spelled out: what a name means others may change.
bool IsLoopbackAddress(std::string_view address);
// Of TLS settings by that name: all three files, by absolute paths.
absl::Status CheckTlsConfig(const std::string& setting, const v1::ClusterTlsConfig& tls);

// Of a complete one; those of etcd where it has etcd.
std::vector<SettingRange> ClusterRanges(const v1::ClusterConfig& config);

// Where others reach this node: advertise_address, with the port of `listening` if it leaves that
// open (only where listen_address does: port 0).
std::string PublishedAddress(const v1::ClusterConfig& config, const std::string& listening);

// For a node whose port is taken: it listens at any free port, and publishes that one.
void UseAnyPort(v1::ClusterConfig& config);

// With the cluster's name: "/holdfast/default/".
std::string EtcdPrefix(const v1::ClusterConfig& config);
absl::StatusOr<EtcdEndpoint> ParseEtcdEndpoint(const v1::EtcdConfig& config,
                                               const std::string& endpoint);
std::vector<NodeLabel> LabelsOf(const google::protobuf::RepeatedPtrField<v1::Label>& labels);

}  // namespace holdfast
