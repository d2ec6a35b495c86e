#include "bench/fio.h"

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace holdfast::bench {
namespace {

std::string OutputOf(const std::string& command) {
  std::string output;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) {
    return output;
  }
  char part[4096];
  for (size_t got = 0; (got = std::fread(part, 1, sizeof part, pipe)) > 0;) {
    output.append(part, got);
  }
  ::pclose(pipe);
  return output;
}

}  // namespace

double TimeFio(const FioRun& run) {
  const uint64_t bytes = run.bytes / run.block_bytes * run.block_bytes;
  const std::string output = OutputOf(
      "fio --name=ceiling --thread --ioengine=io_uring --direct=1 --allow_file_create=0 "
      "--scramble_buffers=0 --fixedbufs=1 --registerfiles=1 --output-format=json --filename='" +
      run.path + "' --rw=" + (run.write ? "write" : "read") +
      " --bs=" + std::to_string(run.block_bytes) + " --iodepth=" + std::to_string(run.depth) +
      " --size=" + std::to_string(bytes));
  const nlohmann::json report = nlohmann::json::parse(
      output.substr(std::min(output.find('{'), output.size())), nullptr, false);
  if (report.is_discarded() || !report.contains("jobs")) {
    std::fprintf(stderr,
                 "holdfast_bench: fio gave no report (scripts/setup bench installs it): %s\n",
                 output.c_str());
    std::exit(1);
  }
  const nlohmann::json& side = report["jobs"][0][run.write ? "write" : "read"];
  const auto moved = side["io_bytes"].get<double>();
  const auto per_second = side["bw_bytes"].get<double>();
  // For as many bytes as ours, whose last block is not a whole one.
  return static_cast<double>(run.bytes) / moved * (moved / per_second);
}

}  // namespace holdfast::bench
