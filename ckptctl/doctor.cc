#include "ckptctl/doctor.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "ckptctl/json.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"

namespace holdfast {
namespace {

constexpr std::array<Verdict, 3> kVerdicts = {Verdict::kOk, Verdict::kSlow, Verdict::kBroken};

size_t CountOf(const std::vector<Finding>& findings, Verdict verdict) {
  return static_cast<size_t>(std::count_if(findings.begin(), findings.end(),
                                           [&](const Finding& f) { return f.verdict == verdict; }));
}

nlohmann::ordered_json FindingsToJson(const std::vector<Finding>& findings) {
  nlohmann::ordered_json json;
  for (const Verdict verdict : kVerdicts) {
    json[std::string(VerdictId(verdict))] = CountOf(findings, verdict);
  }
  json["findings"] = nlohmann::ordered_json::array();
  for (const Finding& f : findings) {
    json["findings"].push_back({{"check", f.check},
                                {"verdict", VerdictId(f.verdict)},
                                {"text", f.text},
                                {"mend", f.mend}});
  }
  return json;
}

}  // namespace

std::string RenderFindings(const std::vector<Finding>& findings) {
  Table table({{"", Align::kLeft}, {"", Align::kLeft}, {"", Align::kLeft}});
  for (const Finding& f : findings) {
    table.AddRow({std::string(VerdictText(f.verdict)), EscapeText(f.check), EscapeText(f.text)});
    if (!f.mend.empty()) {
      table.AddRow({"", "", absl::StrCat("mend: ", EscapeText(f.mend))});
    }
  }
  return absl::StrCat(table.RenderWithoutTitles(""), "\n", CountOf(findings, Verdict::kOk), " ok, ",
                      CountOf(findings, Verdict::kSlow), " slow, ",
                      CountOf(findings, Verdict::kBroken), " will not work\n");
}

ExitCode RunDoctor(const Context& context, const DoctorArguments& arguments) {
  const std::vector<Finding> findings = [&] {
    const WaitingLine waiting(context, "looking at this machine");
    return Evaluate(CollectFacts(context, arguments));
  }();
  *context.out << (context.json ? DumpJson(FindingsToJson(findings)) + "\n"
                                : RenderFindings(findings));
  return CountOf(findings, Verdict::kBroken) == 0 ? ExitCode::kOk : ExitCode::kDamaged;
}

}  // namespace holdfast
