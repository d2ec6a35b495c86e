#include <sys/sysinfo.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "bench/cases.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kCpuBarPercent = 1;
constexpr double kCpuGoalPercent = 0.1;
constexpr double kMemoryBarMb = 100;
constexpr double kMemoryGoalMb = 50;
constexpr int kIdleSeconds = 10;

// utime + stime of the whole process, in seconds.
double CpuSeconds(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string field;
  double ticks = 0;
  for (int i = 3; i <= 15 && fields >> field; ++i) {
    if (i == 14 || i == 15) {
      ticks += std::stod(field);
    }
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Resident memory that is not a slot.
double ResidentMb(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  std::string line;
  double kib = 0;
  while (std::getline(file, line)) {
    if (line.starts_with("RssAnon:") || line.starts_with("RssFile:")) {
      kib += std::stod(line.substr(8));
    }
  }
  return kib * 1024 / 1e6;
}

}  // namespace

// The daemon at rest, with a job connected that has saved and now computes.
Report RunIdle(const CaseOptions& options) {
  Report report{"idle", Better::kLower, {}};
  const size_t bytes = std::min(kGiB, options.bytes_max);
  const Memory tensors(bytes, Memory::Kind::kPrivate);
  const State state = MakeState(tensors, bytes, 16 * kMiB);
  const Daemon daemon(3 * (bytes + 64 * kMiB), 3);
  const std::unique_ptr<Job> job = OpenJob(daemon, "idle", options.threads);
  MustSucceed(job->Reserve(state, kCallDeadline), "reserve");
  for (uint64_t step = 0; step < 5; ++step) {
    MustSucceed(job->Save(step, state), "save");
  }
  Progress progress("idle", kIdleSeconds);
  const double before = CpuSeconds(daemon.pid());
  for (int second = 0; second < kIdleSeconds; ++second) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    progress.Advance("at rest");
  }
  const double cpu = (CpuSeconds(daemon.pid()) - before) / kIdleSeconds * 100;
  Row cpu_row{"CPU at rest, share of one core", "%"};
  cpu_row.value = cpu_row.ratio = cpu;
  cpu_row.bar = kCpuBarPercent;
  cpu_row.goal = kCpuGoalPercent;
  report.rows.push_back(cpu_row);
  Row memory_row{"memory beside the slots", "MB"};
  memory_row.value = memory_row.ratio = ResidentMb(daemon.pid());
  memory_row.bar = kMemoryBarMb;
  memory_row.goal = kMemoryGoalMb;
  report.rows.push_back(memory_row);
  return report;
}

}  // namespace holdfast::bench
