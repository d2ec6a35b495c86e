// What a PeerNetwork tells, and what it is told.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <variant>

namespace holdfast {

struct PeerAddress {
  std::string address;       // host:port
  uint64_t incarnation = 0;  // 0: not known
  bool operator==(const PeerAddress&) const = default;
};

// Whom channels may lead to; nobody, at first.
struct ChangePeers {
  std::map<std::string, PeerAddress> up;  // new ones, and those that are somewhere else or anew
  std::set<std::string> down = {};
};

// Of one PeerNetwork, never 0, never given twice: what is said to an older one is not said to the
// next one.
using PeerChannel = uint64_t;

struct PeerReached {  // a fresh channel to it: nothing that was said before will come any more
  std::string node;
  PeerChannel channel = 0;
};
struct PeerLost {  // told once for each PeerReached; another channel is tried for by itself
  std::string node;
  PeerChannel channel = 0;
  std::string why;
};
// Why there is no channel, or nothing gets through the one that there is: told when the reason
// changes. Empty: there is none any more.
struct PeerProblem {
  std::string node;
  std::string why;
};
struct PeerBegan {  // it opened a fresh channel to this node: everything it said before is void
  std::string node;
};
// Nothing has come in its channel for a while, not even that it has nothing to say: the channel is
// over. It may hear all the same. Told once for each PeerBegan; the next one ends it.
struct PeerSilent {
  std::string node;
};
struct PeerSpoke {
  std::string node;
  std::string message;
};

using PeerEvent =
    std::variant<PeerReached, PeerLost, PeerProblem, PeerBegan, PeerSilent, PeerSpoke>;
using PeerObserver = std::function<void(PeerEvent event)>;

}  // namespace holdfast
