// What ckptctl says of itself: completion scripts, manual pages, and the names that completion asks
// for.
#include <istream>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/completion.h"
#include "ckptctl/json.h"
#include "ckptctl/manual.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr size_t kHelpBytesMax = 1 << 20;
// Whoever presses Tab does not wait for a daemon that is busy.
constexpr std::chrono::milliseconds kNamesTimeout(500);

ExitCode ShowText(const Context& context, const std::string& name, const std::string& text) {
  if (context.json) {
    *context.out << DumpJson({{"name", name}, {"text", text}}) << "\n";
  } else {
    *context.out << text;
  }
  return ExitCode::kOk;
}

std::string ReadAll(std::istream& in, size_t bytes_max) {
  std::string text(bytes_max + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

// A word for a shell: nothing in it that one could take for more than a word.
bool IsPlainWord(const std::string& name) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name[0] != '-' &&
         name.find_first_not_of(kPlain.data(), 0, kPlain.size()) == std::string::npos;
}

}  // namespace

ExitCode RunCompletion(const Context& context, const CompletionArguments& arguments,
                       const CliModel& model) {
  return ShowText(context, arguments.shell, CompletionScript(model, arguments.shell));
}

ExitCode RunManual(const Context& context, const ManualArguments& arguments, const CliModel& model,
                   std::istream& in) {
  if (arguments.page != "ckptd") {
    return ShowText(context, "ckptctl.1", CkptctlManual(model));
  }
  const std::string help = ReadAll(in, kHelpBytesMax);
  const CliModel ckptd = ReadHelp("ckptd", model.version, help);
  if (help.size() > kHelpBytesMax || ckptd.options.empty()) {
    return ReportUsage(context,
                       absl::InvalidArgumentError(
                           "standard input is not what ckptd --help prints; its page is made so: "
                           "ckptd --help | ckptctl man ckptd"),
                       "man");
  }
  return ShowText(context, "ckptd.8", CkptdManual(ckptd));
}

ExitCode RunCompleteNames(const Context& context, const CompleteNamesArguments& arguments) {
  Context quick = context;
  quick.timeout = std::min<Duration>(context.timeout, kNamesTimeout);
  quick.progress = false;
  std::vector<std::string> names;
  if (arguments.what == "nodes") {
    const auto reply = AskFor(quick, &AdminClient::GetNodes, v1::GetNodesRequest());
    for (int i = 0; reply.ok() && i < reply->nodes_size(); ++i) {
      names.push_back(reply->nodes(i).name());
    }
  } else {
    const auto reply = AskFor(quick, &AdminClient::GetStatus, v1::GetStatusRequest());
    for (int i = 0; reply.ok() && i < reply->jobs_size(); ++i) {
      names.push_back(reply->jobs(i).name());
    }
  }
  for (const std::string& name : names) {
    if (IsPlainWord(name)) {
      *context.out << name << "\n";
    }
  }
  return ExitCode::kOk;
}

}  // namespace holdfast
