// Membership without etcd: a list of nodes of which nobody knows whether they live, and whose first
// one hosts every job; or this node alone. The epochs that the first one gives grow with each of
// its starts, through its own note.
//
//   std::unique_ptr<Membership> membership = MakeStaticMembership(options);   // see membership.h
#pragma once

#include <memory>

#include "server/membership/membership.h"

namespace holdfast {

// `options.config` is sound and has no etcd.
std::unique_ptr<Membership> MakeStaticMembership(const MembershipOptions& options);

}  // namespace holdfast
