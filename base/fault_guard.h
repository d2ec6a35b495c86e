// Survives a SIGBUS while touching a mapped slot: when the file underneath is cut short, the rest
// of the range is replaced by private zero pages, the range is marked, and the program goes on.
// Whoever read or wrote it asks afterwards and discards the result.
//
//   FaultGuard guard(mapping.data(), mapping.bytes());
//   CopyAndDigest(…);
//   if (guard.faulted()) return absl::DataLossError("slot … was truncated while it was being
//   written");
//
// The first guard installs a SIGBUS handler that passes every other fault on to the handler that
// was there. Handler and table are async-signal-safe. A forked child inherits no guarded range. At
// most kFaultGuardsMax ranges at a time: ok() says whether it got one.
#pragma once

#include <cstddef>

namespace holdfast {

inline constexpr int kFaultGuardsMax = 65'536;

class FaultGuard {
 public:
  FaultGuard(void* begin, size_t bytes);
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
  bool ok() const { return index_ >= 0; }
  bool faulted() const;

 private:
  int index_ = -1;
};

}  // namespace holdfast
