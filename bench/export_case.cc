// ckptctl export of a step in memory, as a process of its own, against a plain copy of as many
// bytes from memory into the same directory; both synced.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/harness.h"
#include "bench/memory.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.80;
constexpr double kGoal = 0.95;
constexpr size_t kTensorBytes = 16 * kMiB;
constexpr size_t kBufferBytes = 4 * kMiB;

void MustWork(bool worked, const char* doing) {
  if (!worked) {
    std::perror(doing);
    std::exit(1);
  }
}

double Export(const Daemon& daemon, const std::string& directory) {
  const std::string program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "ckptctl";
  const Stopwatch watch;
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int null = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
    ::dup2(null, STDOUT_FILENO);
    ::execl(program.c_str(), program.c_str(), "export", "export", directory.c_str(),
            "--client-socket", daemon.socket().c_str(), nullptr);
    ::_exit(127);
  }
  int status = 0;
  MustWork(pid > 0 && ::waitpid(pid, &status, 0) == pid && status == 0, "ckptctl export");
  return watch.Seconds();
}

// As cp does it: through a buffer, and then a sync.
double Copy(const std::string& from, const std::string& to, std::vector<char>& buffer) {
  const Stopwatch watch;
  const int in = ::open(from.c_str(), O_RDONLY | O_CLOEXEC);
  const int out = ::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  MustWork(in >= 0 && out >= 0, "open");
  ssize_t got = 0;
  while ((got = ::read(in, buffer.data(), buffer.size())) > 0) {
    MustWork(::write(out, buffer.data(), static_cast<size_t>(got)) == got, "write");
  }
  MustWork(got == 0 && ::fsync(out) == 0, "copy");
  ::close(in);
  ::close(out);
  return watch.Seconds();
}

}  // namespace

Report RunExport(const CaseOptions& options) {
  Report report{"export", Better::kHigher, {}};
  const size_t bytes = options.bytes / kTensorBytes * kTensorBytes;
  const Memory tensors(bytes, Memory::Kind::kPrivate);
  const State state = MakeState(tensors, bytes, kTensorBytes);
  const Daemon daemon(2 * (bytes + 64 * kMiB), 2);
  const std::unique_ptr<Job> job = OpenJob(daemon, "export", options.threads);
  MustSucceed(job->Save(1, state), "save");
  const ScratchDirectory memory("/dev/shm", bytes);
  const ScratchDirectory scratch(options.dir, 3 * bytes);
  std::vector<char> buffer(kBufferBytes);
  {
    const int file = ::open(memory.Path("source").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    for (size_t at = 0; at < bytes; at += kTensorBytes) {
      MustWork(
          ::write(file, tensors.data() + at, kTensorBytes) == static_cast<ssize_t>(kTensorBytes),
          "fill the source");
    }
    ::close(file);
  }
  std::vector<double> exported;
  std::vector<double> copied;
  Progress progress("export", options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool plain : {round % 2 == 0, round % 2 != 0}) {
      const std::string to = scratch.Path(plain ? "plain" : "set");
      std::filesystem::remove_all(to);
      ::sync();  // what others left to be written is not ours to wait for
      (plain ? copied : exported)
          .push_back(plain ? Copy(memory.Path("source"), to, buffer) : Export(daemon, to));
    }
    progress.Advance("round " + std::to_string(round + 1));
  }
  Row row = RateRow("export, synced", bytes, exported, copied, kBar, kGoal);
  row.note = "ceiling: read and write through a buffer of 4 MiB, and fsync";
  report.rows.push_back(row);
  return report;
}

}  // namespace holdfast::bench
