#include "tests/integration/crash_asking.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace holdfast {
namespace {

bool OfDurableTiers(const std::string& point) {
  for (const char* begin :
       {"daemon.flush.", "daemon.fetch.", "daemon.manifest.", "daemon.removal."}) {
    if (StartsWith(point, begin)) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool AnyDied(Node& node, std::vector<std::unique_ptr<Rank>>& ranks) {
  return !node.running() || std::any_of(ranks.begin(), ranks.end(),
                                        [](auto& rank) { return !rank->child().running(); });
}

std::vector<std::string> AskUntilDeath(Node& node, std::vector<std::unique_ptr<Rank>>& ranks,
                                       const std::string& command) {
  for (auto& rank : ranks) {
    rank->Send(command);
  }
  std::vector<std::string> answers(ranks.size());
  size_t missing = ranks.size();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (missing > 0 && std::chrono::steady_clock::now() < until) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (answers[i].empty()) {
        const std::optional<std::string> line =
            ranks[i]->child().ReadLine(std::chrono::milliseconds(20));
        if (line.has_value()) {
          answers[i] = *line;
          --missing;
        }
      }
    }
    if (missing > 0 && AnyDied(node, ranks)) {
      // What was written before the death counts: it was acknowledged.
      for (size_t i = 0; i < ranks.size(); ++i) {
        if (answers[i].empty()) {
          answers[i] = ranks[i]->child().ReadLine(std::chrono::milliseconds(200)).value_or("");
        }
      }
      break;
    }
  }
  // Its socket closes a moment before the daemon counts as ended.
  if (std::any_of(answers.begin(), answers.end(), [](const std::string& answer) {
        return StartsWith(answer, "error UNAVAILABLE");
      })) {
    EXPECT_TRUE(node.WaitExit().has_value()) << ::testing::PrintToString(answers);
  }
  return answers;
}

std::vector<std::string> PointsOfDurableTiers() {
  std::vector<std::string> points = SyncPoints();
  std::erase_if(points, [](const std::string& point) { return !OfDurableTiers(point); });
  return points;
}

std::vector<std::string> PointsWithoutDurableTiers() {
  std::vector<std::string> points = SyncPoints();
  std::erase_if(points, [](const std::string& point) {
    return OfDurableTiers(point) || point.rfind("ckptctl.", 0) == 0 ||
           point.rfind("daemon.host.", 0) == 0 || point.rfind("daemon.pull.", 0) == 0 ||
           point.rfind("daemon.replace.", 0) == 0;  // (repair_test.cc)
  });
  return points;
}

}  // namespace holdfast
