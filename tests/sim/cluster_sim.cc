// Simulates clusters, seed after seed, and says what it has seen. A seed that fails is printed as
// the command that repeats it.
//
//   cluster_sim --seeds 1000                        small clusters, absurd rates of failures
//   cluster_sim --seeds 1000 --rates realistic --minutes 600
//   cluster_sim --seed 123 --trace                  one of them, told in full
//   cluster_sim --nodes 1536 --ranks 12288 --jobs 1 --steps 1000
//   cluster_sim --hours 10000                       until so many hours were simulated
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <string>

#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {
namespace {

constexpr const char* kUsage =
    "usage: cluster_sim [--seed N | --seeds N [--first N]] [--hours N] [--nodes N] [--spares N]\n"
    "                   [--ranks N] [--jobs N] [--pace-ms N] [--steps N] [--minutes N]\n"
    "                   [--rates none|realistic|absurd] [--check-every N] [--trace]\n";

struct Arguments {
  Options options;
  uint64_t first = 1;
  uint64_t seeds = 20;
  uint64_t hours = 0;
};

bool Parse(int argc, char** argv, Arguments& a) {
  std::map<std::string, uint64_t> numbers;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--trace") {
      a.options.trace = true;
      continue;
    }
    if (i + 1 == argc) {
      return false;
    }
    const std::string value = argv[++i];
    if (name == "--rates") {
      if (value != "none" && value != "realistic" && value != "absurd") {
        return false;
      }
      a.options.rates = value == "none"        ? Rates::kNone
                        : value == "realistic" ? Rates::kRealistic
                                               : Rates::kAbsurd;
      continue;
    }
    char* end = nullptr;
    numbers[name] = std::strtoull(value.c_str(), &end, 10);
    if (end == nullptr || *end != 0) {
      return false;
    }
  }
  Options& o = a.options;
  for (const auto& [name, value] : numbers) {
    if (name == "--seed") {
      a.first = value;
      a.seeds = 1;
    } else if (name == "--seeds") {
      a.seeds = value;
    } else if (name == "--first") {
      a.first = value;
    } else if (name == "--hours") {
      a.hours = value;
      a.seeds = UINT64_MAX;
    } else if (name == "--nodes") {
      o.nodes = static_cast<uint32_t>(value);
    } else if (name == "--spares") {
      o.spares = static_cast<uint32_t>(value);
    } else if (name == "--ranks") {
      o.ranks = static_cast<uint32_t>(value);
    } else if (name == "--jobs") {
      o.jobs = static_cast<uint32_t>(value);
    } else if (name == "--pace-ms") {
      o.pace_ms = value;
    } else if (name == "--steps") {
      o.steps = value;
    } else if (name == "--minutes") {
      o.stormy = std::chrono::minutes(value);
    } else if (name == "--check-every") {
      o.check_every = value;
    } else {
      return false;
    }
  }
  return true;
}

int Run(const Arguments& a) {
  Counts all;
  for (uint64_t i = 0; i < a.seeds; ++i) {
    Options options = a.options;
    options.seed = a.first + i;
    World world(options);
    std::string violation;
    try {
      world.Run();
      violation = world.violation();
    } catch (const std::exception& e) {  // it would have taken a daemon down
      violation = std::string("thrown: ") + e.what();
    }
    all.Add(world.counts);
    if (!violation.empty()) {
      std::printf("%s\n  (%s)\n  repeat it with: %s --trace\n", violation.c_str(),
                  world.Summary().c_str(), world.Command().c_str());
      return 1;
    }
    if (a.hours != 0 && all.nanoseconds / 3'600'000'000'000 >= a.hours) {
      break;
    }
    if (a.seeds == 1) {
      std::printf("%s\n", world.Summary().c_str());
    }
  }
  std::printf("%s", all.Report().c_str());
  return 0;
}

}  // namespace
}  // namespace holdfast::sim::cluster

int main(int argc, char** argv) {
  holdfast::sim::cluster::Arguments arguments;
  if (!holdfast::sim::cluster::Parse(argc, argv, arguments)) {
    std::fputs(holdfast::sim::cluster::kUsage, stderr);
    return 2;
  }
  return holdfast::sim::cluster::Run(arguments);
}
