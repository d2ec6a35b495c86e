// Remote write and read: a shard through a pool of threads and buffers, verified, against a plain
// parallel copy of the same bytes to and from the same directory.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "base/units.h"
#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/harness.h"
#include "tiers/transfer/buffered_copy.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.90;
constexpr double kGoal = 0.97;

// The ceiling: threads that take pieces in turn and write or read them straight from memory.
void PlainCopyPieces(int fd, std::span<std::byte> memory, bool write, size_t piece, int threads) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto run = [&] {
    for (size_t at = 0; (at = next.fetch_add(piece)) < memory.size();) {
      const size_t end = std::min(at + piece, memory.size());
      while (at < end && !failed) {
        const auto offset = static_cast<off_t>(at);
        const ssize_t moved = write ? ::pwrite(fd, memory.data() + at, end - at, offset)
                                    : ::pread(fd, memory.data() + at, end - at, offset);
        failed = moved <= 0;
        at += static_cast<size_t>(std::max<ssize_t>(moved, 0));
      }
    }
  };
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back(run);
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  if (failed) {
    MustBeOk(absl::DataLossError("pwrite or pread failed"), "plain copy");
  }
}

class Mount {
 public:
  explicit Mount(const CaseOptions& options)
      : options_(options),
        shard_(options.bytes),
        dir_(options.dir, 3 * shard_.bytes()),
        pool_(MustBeOk(CopyPool::Start({.threads = static_cast<size_t>(options.threads),
                                        .piece_bytes = options.piece_bytes,
                                        .priority = {.io = 4, .nice = 0}}),
                       "start the pool")) {}

  struct Took {
    double copied;   // until the last byte was handed over
    double durable;  // and the file was synced
  };

  Took Write(bool plain) {
    const std::string path = dir_.Path(plain ? "plain" : "ours");
    static_cast<void>(Env::System()->Unlink(path));
    ::sync();  // what others left to be written is not ours to wait for
    const std::shared_ptr<File> file =
        MustBeOk(Env::System()->Open(path, OpenMode::kCreateExclusive), "create");
    const Stopwatch watch;
    if (plain) {
      PlainCopyPieces(file->fd(), shard_.memory().first(shard_.bytes()), true, options_.piece_bytes,
                      options_.threads);
    } else {
      BufferedCopySpec spec;
      spec.image = shard_.image();
      spec.from_memory = Memory();
      spec.to_file = file;
      MustBeOk(pool_->Copy(std::move(spec)).status, "remote write");
    }
    const double copied = watch.Seconds();
    MustBeOk(file->SyncData(), "fdatasync");
    return {copied, watch.Seconds()};
  }

  double Read(bool plain, bool cold) {
    const std::shared_ptr<File> file =
        MustBeOk(Env::System()->Open(dir_.Path(plain ? "plain" : "ours"), OpenMode::kRead), "open");
    if (cold) {
      ::posix_fadvise(file->fd(), 0, 0, POSIX_FADV_DONTNEED);
    }
    const Stopwatch watch;
    if (plain) {
      PlainCopyPieces(file->fd(), shard_.memory().first(shard_.bytes()), false,
                      options_.piece_bytes, options_.threads);
    } else {
      BufferedCopySpec spec;
      spec.image = shard_.image();
      spec.from_file = file;
      spec.to_memory = Memory();
      MustBeOk(pool_->Copy(std::move(spec)).status, "remote read");
    }
    return watch.Seconds();
  }

  uint64_t bytes() const { return shard_.bytes(); }

 private:
  std::shared_ptr<RevocableMemory> Memory() const {
    return std::make_shared<RevocableMemory>(shard_.memory().data(), shard_.memory().size());
  }

  const CaseOptions options_;
  const ShardInMemory shard_;
  const ScratchDirectory dir_;
  const std::unique_ptr<CopyPool> pool_;
};

}  // namespace

Report RunRemote(const CaseOptions& options) {
  Report report{"remote", Better::kHigher, {}};
  Mount mount(options);
  struct Side {
    std::vector<double> durable, copied, cold, warm;
  };
  Side sides[2];  // ours, plain
  Progress progress("remote", options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool plain : {round % 2 == 0, round % 2 != 0}) {
      Side& side = sides[plain ? 1 : 0];
      const Mount::Took took = mount.Write(plain);
      side.durable.push_back(took.durable);
      side.copied.push_back(took.copied);
    }
    for (const bool plain : {round % 2 == 0, round % 2 != 0}) {
      Side& side = sides[plain ? 1 : 0];
      side.cold.push_back(mount.Read(plain, true));
      side.warm.push_back(mount.Read(plain, false));
    }
    progress.Advance("round " + std::to_string(round + 1));
  }
  const auto row = [&](const std::string& name, std::vector<double> Side::*part, bool judged) {
    Row r = RateRow(name, mount.bytes(), sides[0].*part, sides[1].*part, judged ? kBar : 0,
                    judged ? kGoal : 0);
    r.note = "ceiling: " + std::to_string(options.threads) + " threads, pieces of " +
             std::to_string(options.piece_bytes / kKiB) + " KiB";
    report.rows.push_back(r);
  };
  row("remote write, synced", &Side::durable, true);
  row("remote read, from the drive", &Side::cold, true);
  row("remote write, into the page cache", &Side::copied, false);
  row("remote read, from the page cache", &Side::warm, false);
  return report;
}

}  // namespace holdfast::bench
