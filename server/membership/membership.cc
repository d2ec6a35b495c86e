#include "server/membership/membership.h"

#include <algorithm>
#include <random>
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
  if (options.self.incarnation == 0) {
    std::random_device device;
    options.self.incarnation = (uint64_t{device()} << 32) | device();
  }
  return options.config.has_etcd() ? MakeEtcdMembership(options) : MakeStaticMembership(options);
}

}  // namespace holdfast
