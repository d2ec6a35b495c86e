#include "server/membership/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "server/membership/cluster_config.h"
#include "server/membership/etcd_membership.h"
#include "server/membership/membership_records.h"
#include "server/membership/static_membership.h"

namespace holdfast {

absl::StatusOr<std::unique_ptr<Membership>> CreateMembership(MembershipOptions options) {
  HF_RETURN_IF_ERROR(CheckClusterConfig(options.self.name, options.config));
  std::sort(options.self.labels.begin(), options.self.labels.end());
  HF_RETURN_IF_ERROR(CheckNode(options.self));
  return options.config.has_etcd() ? MakeEtcdMembership(options) : MakeStaticMembership(options);
}

}  // namespace holdfast
