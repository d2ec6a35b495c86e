// ckptctl as an operator runs it: a real process at a node's admin socket.
//
//   const CtlAnswer status = Ctl(node, {"status", "--json"});
//   EXPECT_EQ(status.exit_code, 0) << status.errors;
//   EXPECT_EQ(status.parsed["jobs"][0]["name"], "llama");
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/integration/harness.h"

namespace holdfast {

struct CtlAnswer {
  int exit_code = -1;  // -1000: it did not end
  std::string text;    // stdout
  std::string errors;
  nlohmann::json parsed;  // of stdout; discarded when it is no JSON
};

// `uid`: not 0: as this user (root only).
CtlAnswer Ctl(const Node& node, std::vector<std::string> arguments, uid_t uid = 0);
// With its output in pipes, for what goes on.
std::unique_ptr<Child> StartCtl(const Node& node, std::vector<std::string> arguments,
                                const std::string& error_file, uid_t uid = 0);

}  // namespace holdfast
