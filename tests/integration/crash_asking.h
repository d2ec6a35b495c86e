// Asking ranks while something may die at a sync point.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/integration/harness.h"

namespace holdfast {

bool AnyDied(Node& node, std::vector<std::unique_ptr<Rank>>& ranks);
// Sends to all; "" of those that did not answer. When a process dies on the way, the others are not
// waited for: they may wait for it.
std::vector<std::string> AskUntilDeath(Node& node, std::vector<std::unique_ptr<Rank>>& ranks,
                                       const std::string& command);

// tests/sync_points.txt, in two parts: what only a daemon with durable tiers passes is crashed by
// crash_tiers_test.cc, what only nodes of a cluster pass (daemon.host.*) by
// tests/cluster/kills_test.py.
std::vector<std::string> PointsOfDurableTiers();
std::vector<std::string> PointsWithoutDurableTiers();

}  // namespace holdfast
