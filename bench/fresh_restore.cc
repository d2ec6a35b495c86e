#include "bench/fresh_restore.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "bench/ceiling.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr int kChildArguments = 7;  // program, mode, socket, job, bytes, tensor bytes, threads

}  // namespace

FreshRestore RestoreInFreshProcess(const Daemon& daemon, const std::string& job, const Size& size,
                                   int threads) {
  int ends[2];
  if (pipe(ends) != 0) {
    MustSucceed(Status(Code::kInternal, "no pipe"), "start a fresh process");
  }
  const std::string bytes = std::to_string(size.bytes);
  const std::string tensor_bytes = std::to_string(size.tensor_bytes);
  const std::string thread_count = std::to_string(threads);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    execl("/proc/self/exe", "holdfast_bench", kFreshRestoreChild, daemon.socket().c_str(),
          job.c_str(), bytes.c_str(), tensor_bytes.c_str(), thread_count.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
  FILE* const figures = fdopen(ends[0], "r");
  FreshRestore result;
  result.ceiling.resize(PlainCopies().size());
  bool whole = std::fscanf(figures, "%lf %lf", &result.whole, &result.copied) == 2;
  for (double& seconds : result.ceiling) {
    whole = whole && std::fscanf(figures, "%lf", &seconds) == 1;
  }
  std::fclose(figures);
  int status = 0;
  waitpid(child, &status, 0);
  if (!whole || status != 0) {
    MustSucceed(Status(Code::kInternal, "it failed"), "restore in a fresh process");
  }
  return result;
}

int RunFreshRestoreChild(int argc, char** argv) {
  if (argc != kChildArguments) {
    return 2;
  }
  const size_t bytes = std::strtoull(argv[4], nullptr, 10);
  const int threads = std::atoi(argv[6]);
  // As a model that was built before its weights are loaded: the tensors' memory is there.
  const Memory tensors(bytes, Memory::Kind::kPrivate);
  const Memory source(bytes, Memory::Kind::kShared);
  State state = MakeState(tensors, bytes, std::strtoull(argv[5], nullptr, 10));
  JobOptions options;
  options.job = argv[3];
  options.socket = argv[2];
  options.copy_threads = static_cast<uint32_t>(threads);
  const std::unique_ptr<Job> job = MustSucceed(Job::Open(options), "open the job");
  std::vector<double> plain;
  for (const PlainCopy& copy : PlainCopies()) {
    plain.push_back(TimePlainCopy(copy, PiecesFrom(source, state), threads));
  }
  const Stopwatch watch;
  const Restored restored = MustSucceed(job->Restore(state), "restore");
  std::printf("%.9f %.9f", watch.Seconds(), std::chrono::duration<double>(restored.copied).count());
  for (const double seconds : plain) {
    std::printf(" %.9f", seconds);
  }
  std::printf("\n");
  return 0;
}

}  // namespace holdfast::bench
