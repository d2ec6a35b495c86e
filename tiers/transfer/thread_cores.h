// Which cores a thread runs on: so that what takes much of them stays off those that a training
// process was given, where there are others.
//
//   HF_ASSIGN_OR_RETURN(const Cores own, CoresOf(0));
//   SetThreadCores(thread, CoresBeside(own, {*CoresOf(rank), …}));
//
// Plain functions, any thread.
#pragma once

#include <sys/types.h>

#include <set>
#include <vector>

#include "absl/status/statusor.h"

namespace holdfast {

using Cores = std::set<int>;

// Where a thread, or a process' first one, may run; 0: the calling thread. NotFound: it has ended.
absl::StatusOr<Cores> CoresOf(pid_t thread);

// Of `own`, those that are nobody else's; all of them, if none would be left. Whoever may run on
// all of these has none of its own.
Cores CoresBeside(const Cores& own, const std::vector<Cores>& others);

// NotFound when the thread has ended; InvalidArgument when it may run on none of them.
absl::Status SetThreadCores(pid_t thread, const Cores& cores);

}  // namespace holdfast
