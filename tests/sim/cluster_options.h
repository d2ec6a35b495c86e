// What a simulated cluster is made of, what goes wrong in it, and what is counted.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "base/clock.h"

namespace holdfast::sim::cluster {

enum class Rates {
  kNone,
  kRealistic,
  kAbsurd,
  kErasures,   // absurd: etcd is erased again and again, and many nodes find it late
  kDrives,     // absurd: nodes reboot again and again, and others read from drives slowly
  kReshards,   // absurd: jobs come back with other numbers of ranks again and again
  kOperators,  // absurd: nodes are drained, jobs told to end, settings read again, again and again
  kRot,        // absurd: copies in the durable tiers go bad again and again
};
inline constexpr std::array<const char*, 8> kRatesNames = {
    "none", "realistic", "absurd", "erasures", "drives", "reshards", "operators", "rot"};

struct Options {
  uint64_t seed = 1;
  uint32_t nodes = 0;    // 0: as the seed has it, 3 to 8
  uint32_t spares = 1;   // of them without ranks at first
  uint32_t ranks = 0;    // of each job; 0: as the seed has it, 2 to 16
  uint32_t jobs = 0;     // 0: one or two
  uint64_t pace_ms = 0;  // between two saves of a rank; 0: as the seed has it
  uint64_t steps = 0;    // not 0: the storm ends when so many steps were committed
  Duration stormy = std::chrono::minutes(10);  // with faults
  Duration calm = std::chrono::minutes(3);     // without: all must go well
  Rates rates = Rates::kAbsurd;
  uint64_t check_every = 1;  // events of a node between two checks of its invariants
  bool trace = false;
  bool trace_messages = false;  // between nodes, too
};

// A lease of membership, and what the cluster's own deadlines make of it.
inline constexpr Duration kLeaseTtl = std::chrono::seconds(10);
// How late an answer may be: the core waits for the runtime (10 s), gives up what no host answered
// 2 s after its deadline, and the runtime may be late itself.
inline constexpr Duration kAnswerSlack = std::chrono::seconds(30);
inline constexpr uint64_t kSlotBytes = 2ull << 20;
inline constexpr uint64_t kMemoryBytes = 4096 * kSlotBytes;  // of a node

enum class Fault {
  kProcessKilled,
  kProcessHangs,
  kProcessLingers,  // killed, or told to end, and goes on for a while
  kDaemonKilled,
  kDaemonSuspended,  // and goes on later
  kNodeRebooted,
  kNodeLost,
  kCut,        // two nodes, both ways
  kCutOneWay,  // one hears the other, and not the other way round
  kCutOff,     // a node from all others
  kFlapping,
  kSlowLink,
  kCallLost,
  kAnswerLost,
  kCallLate,  // it arrives after its sender has given it up: reordered, or taken twice
  kEtcdDown,
  kEtcdCutOff,  // one node from etcd
  kEtcdWiped,
  kHostRemoved,     // somebody removes the key that says who hosts a job
  kEtcdAnswerLost,  // the outcome is not known
  kEtcdLate,        // what a watch tells comes seconds late
  kWallClockJumps,
  kBitFlippedMemory,
  kBitFlippedNvme,
  kBitFlippedRemote,
  kNvmeCopyLost,
  kNvmeCopyCut,
  kRemoteCopyCut,
  kNvmeStale,  // an older image of the drive, and of the states on it, comes back
  kNvmeFails,
  kNvmeHangs,
  kRemoteFails,
  kRemoteFull,
  kRemoteHangs,
  kRemoteUnreadable,
  kStateWriteFails,
  kSlotFails,
  kRestorePoint,  // a person sets one
  kPin,
  kRemoval,        // a person removes a step
  kForcedRemoval,  // whatever that costs
  kReader,         // attaches, and takes part in nothing
  kStranger,       // another user's process joins under the name
  kStrangersWish,  // another user would change something of it
  kDrained,        // a node is taken out, or let in again
  kToldToEnd,      // a rank hears that its job is to end
  kSettingsRead,   // a daemon reads others
  kCount
};
const char* NameOf(Fault fault);

// What a run has seen, for people.
struct Counts {
  std::array<uint64_t, static_cast<size_t>(Fault::kCount)> faults{};
  std::map<std::string, uint64_t> states;  // of the protocol: what was come through, and how often
  uint64_t events = 0;                     // taken by the control logic
  uint64_t messages = 0;                   // between nodes
  uint64_t commits = 0;
  uint64_t restores = 0;     // ranks
  uint64_t nanoseconds = 0;  // simulated
  uint64_t training = 0;     // of these in which all ranks of some job trained
  uint64_t seeds = 0;

  void Add(const Counts& other);
  uint64_t Faults() const;
  // Several lines.
  std::string Report() const;
};

}  // namespace holdfast::sim::cluster
