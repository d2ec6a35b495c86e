// Keys in etcd and their values (docs/formats.md, "Keys in etcd"). Values come from anyone who may
// write to etcd: what cannot be one is InvalidArgument, with the reason.
//
//   const EtcdKeys keys("/holdfast/default/");
//   request.set_key(keys.Host("llama"));
//
// Pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/membership/membership.h"

namespace holdfast {

inline constexpr size_t kNodeRecordBytesMax = size_t{64} << 10;

class EtcdKeys {
 public:
  explicit EtcdKeys(std::string prefix) : prefix_(std::move(prefix)) {}
  std::string Id() const { return prefix_ + "id"; }
  std::string Cluster() const { return prefix_ + "cluster"; }
  std::string Remote() const { return prefix_ + "remote"; }
  std::string Nodes() const { return prefix_ + "nodes/"; }
  std::string Node(std::string_view name) const { return Nodes().append(name); }
  std::string Host(std::string_view job) const { return OfJob(job, "/host"); }
  std::string EpochOf(std::string_view job) const { return OfJob(job, "/epoch"); }
  std::string State(std::string_view job) const { return OfJob(job, "/state"); }

 private:
  std::string OfJob(std::string_view job, std::string_view what) const {
    return (prefix_ + "jobs/").append(job).append(what);
  }
  const std::string prefix_;
};

// The end of the range of all keys with this prefix.
std::string EndOfPrefix(std::string prefix);

struct StoredState {
  Epoch epoch = 0;
  uint64_t version = 0;
  std::string state;
};

std::string EncodeNode(const NodeInfo& node);
absl::StatusOr<NodeInfo> DecodeNode(std::string_view name, std::string_view value);
std::string EncodeHost(const JobHost& host);
absl::StatusOr<JobHost> DecodeHost(std::string_view value);
std::string EncodeEpoch(Epoch epoch);
absl::StatusOr<Epoch> DecodeEpoch(std::string_view value);
std::string EncodeState(const StoredState& state);
absl::StatusOr<StoredState> DecodeState(std::string_view value);

// Of a node as this daemon publishes it: names, sizes, labels once each and in order.
absl::Status CheckNode(const NodeInfo& node);
// HOST:PORT with a port of 1 to 65535: a name, an IPv4 address, or an IPv6 address in brackets.
absl::Status CheckAddress(std::string_view address);

// <state_dir>/membership
struct MembershipNoteData {
  std::string node;
  std::vector<int64_t> leases;
  Epoch epoch = 0;
};
inline constexpr uint64_t kMembershipNoteBytesMax = 4096;
inline constexpr size_t kNotedLeasesMax = 64;
std::string EncodeMembershipNote(const MembershipNoteData& note);
absl::StatusOr<MembershipNoteData> DecodeMembershipNote(std::string_view bytes);

}  // namespace holdfast
