// A View of one rank's shard: straight in its slot or in its file, or, of what lies on another
// node, in parts that are brought here for each call.
//
//   HF_TRY_ASSIGN(std::unique_ptr<View> view, OpenView(wanted, deadline));
//
// What lies elsewhere costs both daemons memory and a thread for as long as it is open: of a
// process that is the one that was read last, and whatever is being read. So of a step of any
// number of ranks all can be looked at, by many at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "client-lib/src/deadline.h"
#include "client-lib/src/wire.h"
#include "holdfast/view.h"

namespace holdfast::client {

struct WantedView {
  std::string socket;
  wire::Attach attach;
  Milliseconds patience{};  // to open it again, and for each batch of parts
  std::function<bool()> interrupted;
};
Result<std::unique_ptr<View>> OpenView(WantedView wanted, Deadline deadline);

}  // namespace holdfast::client
