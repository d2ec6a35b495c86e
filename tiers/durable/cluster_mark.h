// Which cluster a remote directory belongs to: the file `.holdfast/cluster` (docs/formats.md), and
// whether a daemon may use the directory. `cluster` in state_dir has the same form.
//
//   HF_ASSIGN_OR_RETURN(const ClusterMark mark, DecodeClusterMark(text));
//   if (JudgeCluster(mark, us) == ClusterVerdict::kRefuse) …
//
// Pure functions. A mark comes from anyone who may write to the directory.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace holdfast {

inline constexpr uint64_t kClusterMarkBytesMax = uint64_t{256} << 10;
inline constexpr size_t kClusterMarkPeersMax = 256;

// kAlone: of all daemons that are in no cluster together, which may share a directory.
enum class ClusterKind { kAlone, kList, kEtcd };

struct ClusterMark {
  std::string id;    // 32 hex digits
  std::string name;  // of the cluster; empty: kAlone
  ClusterKind kind = ClusterKind::kAlone;
  std::string node;                // that wrote this
  std::string time;                // when, for people
  std::vector<std::string> peers;  // of a list its members, NAME@HOST:PORT; of etcd its endpoints
};

// What a daemon is: the mark that it would write, and what it knows beside.
struct ClusterIdentity {
  ClusterMark mark;
  // The id of the remote directory that the cluster has noted in etcd; empty: none.
  std::string remote_id;
};

std::string EncodeClusterMark(const ClusterMark& mark);
// DataLoss: it is none.
absl::StatusOr<ClusterMark> DecodeClusterMark(std::string_view text);

// More than half of `noted` are among `ours`: a list that some changes were made to. No two
// clusters have that.
bool SamePeers(const std::vector<std::string>& noted, const std::vector<std::string>& ours);

enum class ClusterVerdict {
  kTake,    // nobody has it
  kOurs,    // and the mark says what we are
  kRenew,   // ours, but the cluster has changed since: another list, or etcd instead of one
  kAdopt,   // by a node of this cluster that does not know the cluster's id: it takes the mark's
  kRefuse,  // another cluster's
};
ClusterVerdict JudgeCluster(const std::optional<ClusterMark>& noted, const ClusterIdentity& us);

// "'prod' (id 01…, written by node 'a', 2026-11-30 01:02 UTC)": what is in it is shown as text.
std::string DescribeCluster(const ClusterMark& mark);
// Why the directory is not used, and what to do.
std::string ClusterRefusal(const std::string& dir, const ClusterMark& noted,
                           const ClusterIdentity& us);
std::string RemoteIdRefusal(const std::string& dir, const std::string& found,
                            const ClusterIdentity& us);

}  // namespace holdfast
