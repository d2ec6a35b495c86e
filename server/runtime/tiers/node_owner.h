// Who this daemon is, for the part of a remote directory that has its node's name.
#pragma once

#include <string>

#include "base/env.h"
#include "tiers/durable/copy_store.h"

namespace holdfast {

// The id of state_dir is made with the first call. Blocks on I/O there; what cannot be had is left
// out, and the id is then one of this process alone.
NodeOwner AskNodeOwner(Env& env, const std::string& state_dir);

}  // namespace holdfast
