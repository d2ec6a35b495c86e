// What the tests of tiers/peer/ share: fabrics on the loopback, a node that is a process of its
// own.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/peer/fabric.h"
#include "tiers/peer/pull.h"

namespace holdfast {

// Of those that read, and of the sources. tcp on the loopback; where HOLDFAST_TEST_FABRIC is set,
// as in tests/verbs/, what that says: "verbs 10.99.0.1 10.99.0.2", addresses of theirs.
FabricOptions LoopbackOptions();
FabricOptions SourceOptions();
std::unique_ptr<Fabric> OpenLoopback();

// A source that registers `slot` here.
struct LocalSource {
  explicit LocalSource(TestSlot& slot, FabricOptions options = SourceOptions());
  std::unique_ptr<Fabric> fabric;
  std::shared_ptr<Registration> registration;
  PullSource source;
};

// As a line of text, for the other process.
std::string ToLine(const PullSource& source);
PullSource SourceFromLine(const std::string& line);

// peer_helper, a node: gone with the object.
class PeerProcess {
 public:
  // Serves the slot.
  static std::unique_ptr<PeerProcess> Serve(TestSlot& slot);
  // Reads `source` into a slot of its own, again and again. Says when it has begun.
  static std::unique_ptr<PeerProcess> PullForEver(const PullSource& source, uint64_t bytes);
  ~PeerProcess();

  const PullSource& source() const { return source_; }
  void Signal(int signal_number) const;
  void Kill();  // and waits until it is gone
  pid_t pid() const { return pid_; }

 private:
  PeerProcess(const std::vector<std::string>& arguments, int inherited_fd);
  std::string ReadLine() const;

  pid_t pid_ = -1;
  int output_ = -1;
  PullSource source_;
};

}  // namespace holdfast
