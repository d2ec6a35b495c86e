// Membership through etcd: an EtcdSession on a thread of its own, the wire to etcd, and a second
// thread for its files (a disk that hangs holds up no renewal).
//
//   std::unique_ptr<Membership> membership = MakeEtcdMembership(options);   // see membership.h
#pragma once

#include <memory>

#include "server/membership/membership.h"

namespace holdfast {

// `options.config` has etcd, and is sound.
std::unique_ptr<Membership> MakeEtcdMembership(const MembershipOptions& options);

}  // namespace holdfast
