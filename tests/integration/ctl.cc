#include "tests/integration/ctl.h"

namespace holdfast {

std::unique_ptr<Child> StartCtl(const Node& node, std::vector<std::string> arguments,
                                const std::string& error_file, uid_t uid) {
  arguments.insert(arguments.begin(), HOLDFAST_BIN_DIR "/ckptctl");
  arguments.insert(arguments.end(), {"--socket", node.admin_socket()});
  return std::make_unique<Child>(
      Child::Options{.arguments = arguments, .error_file = error_file, .pipes = true, .uid = uid});
}

CtlAnswer Ctl(const Node& node, std::vector<std::string> arguments, uid_t uid) {
  const TemporaryDirectory directory;
  const auto child = StartCtl(node, std::move(arguments), directory.Path("errors"), uid);
  CtlAnswer answer;
  while (const auto line = child->ReadLine()) {
    answer.text += *line + "\n";
  }
  answer.exit_code = child->Wait().value_or(-1000);
  answer.errors = ReadText(directory.Path("errors"));
  answer.parsed = nlohmann::json::parse(answer.text, nullptr, false);
  return answer;
}

}  // namespace holdfast
