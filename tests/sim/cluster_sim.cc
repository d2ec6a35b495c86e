// Simulates clusters, seed after seed, and says what it has seen. A seed that fails is printed as
// the command that repeats it.
//
//   cluster_sim --seeds 1000                        small clusters, absurd rates of failures
//   cluster_sim --seeds 1000 --rates realistic --minutes 600
//   cluster_sim --seed 123 --trace                  one of them, told in full
//   cluster_sim --nodes 1536 --ranks 12288 --jobs 1 --steps 1000
//   cluster_sim --hours 10000 --processes 2         until so many hours were simulated
//
// Goes on behind a seed that fails, up to kFailuresMax of them in each process; exits with 1 then.
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {
namespace {

constexpr const char* kUsage =
    "usage: cluster_sim [--seed N | --seeds N [--first N]] [--hours N] [--wall-minutes N]\n"
    "                   [--processes N]\n"
    "                   [--nodes N] [--spares N]\n"
    "                   [--ranks N] [--jobs N] [--pace-ms N] [--steps N] [--minutes N]\n"
    "                   [--rates none|realistic|absurd|erasures|drives|reshards|operators|rot]\n"
    "                   [--check-every "
    "N]\n"
    "                   [--trace | --trace-messages]\n";

constexpr int kFailuresMax = 10;
constexpr uint64_t kProcessesMax = 256;

struct Arguments {
  Options options;
  uint64_t first = 1;
  uint64_t seeds = 20;
  uint64_t hours = 0;         // simulated
  uint64_t wall_minutes = 0;  // of real time: no further seed is begun after it
  uint64_t processes = 1;
};

bool Parse(int argc, char** argv, Arguments& a) {
  std::map<std::string, uint64_t> numbers;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--trace" || name == "--trace-messages") {
      a.options.trace = true;
      a.options.trace_messages = a.options.trace_messages || name == "--trace-messages";
      continue;
    }
    if (i + 1 == argc) {
      return false;
    }
    const std::string value = argv[++i];
    if (name == "--rates") {
      const auto* const named = std::find(kRatesNames.begin(), kRatesNames.end(), value);
      if (named == kRatesNames.end()) {
        return false;
      }
      a.options.rates = static_cast<Rates>(named - kRatesNames.begin());
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
    } else if (name == "--wall-minutes") {
      a.wall_minutes = value;
    } else if (name == "--processes" && value > 0 && value <= kProcessesMax) {
      a.processes = value;
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

// ---- What another process has seen comes as text ----

using Numbers = std::map<std::string, uint64_t>;

Numbers ToNumbers(const Counts& counts) {
  Numbers numbers;
  for (size_t i = 0; i < counts.faults.size(); ++i) {
    numbers[absl::StrCat("fault ", i)] = counts.faults[i];
  }
  for (const auto& [name, count] : counts.states) {
    numbers["state " + name] = count;
  }
  numbers["events"] = counts.events;
  numbers["messages"] = counts.messages;
  numbers["commits"] = counts.commits;
  numbers["restores"] = counts.restores;
  numbers["nanoseconds"] = counts.nanoseconds;
  numbers["training"] = counts.training;
  numbers["seeds"] = counts.seeds;
  return numbers;
}

Counts FromNumbers(Numbers numbers) {
  Counts counts;
  for (size_t i = 0; i < counts.faults.size(); ++i) {
    counts.faults[i] = numbers[absl::StrCat("fault ", i)];
  }
  for (const auto& [name, count] : numbers) {
    if (name.rfind("state ", 0) == 0) {
      counts.states[name.substr(6)] = count;
    }
  }
  counts.events = numbers["events"];
  counts.messages = numbers["messages"];
  counts.commits = numbers["commits"];
  counts.restores = numbers["restores"];
  counts.nanoseconds = numbers["nanoseconds"];
  counts.training = numbers["training"];
  counts.seeds = numbers["seeds"];
  return counts;
}

// ---- Runs ----

// One of so many processes: each takes the seeds that are its turn. The number of those that
// failed.
int RunSome(const Arguments& a, uint64_t which, Counts& all) {
  using RealClock = std::chrono::steady_clock;
  const RealClock::time_point until = RealClock::now() + std::chrono::minutes(a.wall_minutes);
  int failures = 0;
  for (uint64_t i = which; i < a.seeds && failures < kFailuresMax; i += a.processes) {
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
      ++failures;
      std::printf("%s\n  (%s)\n  repeat it with: %s --trace\n", violation.c_str(),
                  world.Summary().c_str(), world.Command().c_str());
      std::fflush(stdout);
    } else if (a.seeds == 1) {
      std::printf("%s\n", world.Summary().c_str());
    }
    if (a.hours != 0 && all.nanoseconds / 3'600'000'000'000 * a.processes >= a.hours) {
      break;
    }
    if (a.wall_minutes != 0 && RealClock::now() >= until) {
      break;
    }
  }
  return failures;
}

// In a child: says what it has seen into the pipe, and ends.
[[noreturn]] void RunChild(const Arguments& a, uint64_t which, int out) {
  Counts counts;
  const int failures = RunSome(a, which, counts);
  std::string text;
  for (const auto& [name, number] : ToNumbers(counts)) {
    absl::StrAppend(&text, name, "\t", number, "\n");
  }
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = write(out, text.data() + done, text.size() - done);
    if (written <= 0) {
      _exit(2);
    }
    done += static_cast<size_t>(written);
  }
  _exit(failures == 0 ? 0 : 1);
}

Counts ReadCounts(int in) {
  std::string text;
  std::array<char, 4096> bytes{};
  for (ssize_t got = 0; (got = read(in, bytes.data(), bytes.size())) > 0;) {
    text.append(bytes.data(), static_cast<size_t>(got));
  }
  Numbers numbers;
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  for (const std::string& line : lines) {
    const size_t tab = line.rfind('\t');
    uint64_t number = 0;
    if (tab != std::string::npos && absl::SimpleAtoi(line.substr(tab + 1), &number)) {
      numbers[line.substr(0, tab)] = number;
    }
  }
  return FromNumbers(std::move(numbers));
}

int Run(const Arguments& a) {
  Counts all;
  int failures = 0;
  if (a.processes == 1) {
    failures = RunSome(a, 0, all);
  }
  std::vector<std::pair<pid_t, int>> children;
  for (uint64_t i = 0; a.processes > 1 && i < a.processes; ++i) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) {
      std::perror("pipe");
      return 2;
    }
    const pid_t child = fork();
    if (child == 0) {
      close(ends[0]);
      RunChild(a, i, ends[1]);
    }
    close(ends[1]);
    if (child < 0) {
      std::perror("fork");
      return 2;
    }
    children.emplace_back(child, ends[0]);
  }
  for (const auto& [child, in] : children) {
    all.Add(ReadCounts(in));
    close(in);
    int status = 0;
    waitpid(child, &status, 0);
    failures += status == 0 ? 0 : 1;
  }
  std::printf("%s", all.Report().c_str());
  return failures == 0 ? 0 : 1;
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
