#include "tests/integration/ctl.h"

namespace holdfast {

CtlAnswer Ctl(const Node& node, std::vector<std::string> arguments) {
  const TemporaryDirectory directory;
  arguments.insert(arguments.begin(), HOLDFAST_BIN_DIR "/ckptctl");
  arguments.insert(arguments.end(), {"--socket", node.admin_socket()});
  Child child({.arguments = arguments, .error_file = directory.Path("errors"), .pipes = true});
  CtlAnswer answer;
  while (const auto line = child.ReadLine()) {
    answer.text += *line + "\n";
  }
  answer.exit_code = child.Wait().value_or(-1000);
  answer.errors = ReadText(directory.Path("errors"));
  answer.parsed = nlohmann::json::parse(answer.text, nullptr, false);
  return answer;
}

}  // namespace holdfast
