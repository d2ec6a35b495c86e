// holdfast_bench CASE [--json] [--rounds N] [--threads N] [--max-gib N] [--dir PATH]
// [--piece-kib N] [--depth N]: see scripts/bench.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "bench/cases.h"
#include "bench/fresh_restore.h"

namespace {

using holdfast::bench::CaseOptions;
using holdfast::bench::Report;

const std::map<std::string, Report (*)(const CaseOptions&)>& Cases() {
  static const std::map<std::string, Report (*)(const CaseOptions&)> cases = {
      {"snapshot", holdfast::bench::RunSnapshot},
      {"first-save", holdfast::bench::RunFirstSave},
      {"overlap", holdfast::bench::RunOverlap},
      {"attach", holdfast::bench::RunAttach},
      {"restore", holdfast::bench::RunRestore},
      {"idle", holdfast::bench::RunIdle},
      {"flush", holdfast::bench::RunFlush},
      {"load", holdfast::bench::RunLoad},
      {"scrub", holdfast::bench::RunScrub},
      {"remote", holdfast::bench::RunRemote},
      {"export", holdfast::bench::RunExport},
      {"compress", holdfast::bench::RunCompress},
      {"drain-cost", holdfast::bench::RunDrainCost},
      {"coordinator", holdfast::bench::RunCoordinator},
      {"peer", holdfast::bench::RunPeer},
      {"reshard", holdfast::bench::RunReshard},
      {"reshard-memory", holdfast::bench::RunReshardMemory},
  };
  return cases;
}

int Usage(const std::string& problem) {
  std::fprintf(stderr,
               "holdfast_bench: %s\nusage: holdfast_bench CASE [--json] [--rounds N] [--threads N] "
               "[--max-gib N] [--dir PATH] [--piece-kib N] [--depth N]\ncases:",
               problem.c_str());
  for (const auto& [name, run] : Cases()) {
    std::fprintf(stderr, " %s", name.c_str());
  }
  std::fprintf(stderr, "\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], holdfast::bench::kFreshRestoreChild) == 0) {
    return holdfast::bench::RunFreshRestoreChild(argc, argv);
  }
  CaseOptions options;
  std::string name;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--json") {
      json = true;
    } else if (argument == "--rounds" && has_value) {
      options.rounds = std::atoi(argv[++i]);
    } else if (argument == "--threads" && has_value) {
      options.threads = std::atoi(argv[++i]);
    } else if (argument == "--max-gib" && has_value) {
      options.bytes_max = static_cast<size_t>(std::atoi(argv[++i])) << 30;
    } else if (argument == "--dir" && has_value) {
      options.dir = argv[++i];
    } else if (argument == "--piece-kib" && has_value) {
      options.piece_bytes = static_cast<size_t>(std::atoi(argv[++i])) << 10;
    } else if (argument == "--depth" && has_value) {
      options.depth = static_cast<size_t>(std::atoi(argv[++i]));
    } else if (name.empty() && argument[0] != '-') {
      name = argument;
    } else {
      return Usage("unknown argument '" + argument + "'");
    }
  }
  const auto found = Cases().find(name);
  if (found == Cases().end() || options.rounds < 1 || options.threads < 1 ||
      options.bytes_max == 0 || options.piece_bytes == 0) {
    return Usage(name.empty() ? "no case given" : "cannot run '" + name + "' with these arguments");
  }
  options.bytes = std::min(options.bytes, options.bytes_max);
  const Report report = found->second(options);
  holdfast::bench::Print(report, json);
  return report.Passes() ? 0 : 1;
}
