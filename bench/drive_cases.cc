// Flush and load: a shard from its slot to a local drive and back, verified, against fio.
#include <algorithm>
#include <atomic>
#include <thread>

#include "base/units.h"
#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast::bench {
namespace {

constexpr double kRateBar = 0.90;
constexpr double kRateGoal = 0.97;
constexpr double kMemoryBarMib = 64;
constexpr double kMemoryGoalMib = 32;

// The most private memory that this process had while it lives, beyond what it had at first.
class MemoryWatch {
 public:
  MemoryWatch() : before_(PrivateBytes()), thread_([this] { Watch(); }) {}
  ~MemoryWatch() { Stop(); }
  double MostMib() {
    Stop();
    return static_cast<double>(most_ - std::min(most_, before_)) / static_cast<double>(kMiB);
  }

 private:
  void Watch() {
    while (!stop_) {
      most_ = std::max(most_, PrivateBytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  const uint64_t before_;
  uint64_t most_ = 0;  // the thread's, until it was joined
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// One shard, the file that it is flushed to, and the one that fio overwrites.
class Drive {
 public:
  explicit Drive(const CaseOptions& options)
      : options_(options),
        shard_(options.bytes),
        dir_(options.dir, 4 * shard_.bytes()),
        io_(MustBeOk(CreateBlockIo({.depth = options.depth}), "make a ring")) {
    Write(OpenMode::kCreateExclusive, "ours");
    Write(OpenMode::kCreateExclusive, "fio");
  }

  struct Took {
    double seconds;
    double cpu_seconds;
  };

  // The bytes only; making them durable is `sync_seconds`.
  Took Write(OpenMode mode, const std::string& name) {
    const DirectFile direct = OpenDirect(dir_.Path(name), mode);
    if (mode == OpenMode::kCreateExclusive) {
      MustBeOk(direct.file->Allocate(0, shard_.bytes()), "allocate");
    }
    const double cpu_before = ProcessCpuSeconds();
    const Stopwatch watch;
    const TransferResult result =
        WriteImage(*io_, shard_.memory(), *direct.file, shard_.image()->record,
                   shard_.image()->layout, CopyOptions(direct.alignment));
    const Took took{watch.Seconds(), ProcessCpuSeconds() - cpu_before};
    MustBeOk(result.status, "flush");
    MustBeOk(direct.file->Truncate(shard_.bytes()), "truncate");
    const Stopwatch sync;
    MustBeOk(direct.file->SyncData(), "fdatasync");
    sync_seconds_.push_back(sync.Seconds());
    return took;
  }

  Took Read() {
    const DirectFile direct = OpenDirect(dir_.Path("ours"), OpenMode::kRead);
    const double cpu_before = ProcessCpuSeconds();
    const Stopwatch watch;
    const TransferResult result =
        ReadImage(*io_, *direct.file, shard_.memory(), shard_.image()->record,
                  shard_.image()->layout, CopyOptions(direct.alignment));
    const Took took{watch.Seconds(), ProcessCpuSeconds() - cpu_before};
    MustBeOk(result.status, "load");
    return took;
  }

  double Fio(bool write) const {
    return TimeFio({dir_.Path("fio"), write, shard_.bytes(), options_.piece_bytes, options_.depth});
  }

  void Remove(const std::string& name) {
    MustBeOk(Env::System()->Unlink(dir_.Path(name)), "unlink");
  }

  uint64_t bytes() const { return shard_.bytes(); }
  const std::string& engine() const { return io_->description(); }
  double SyncSeconds() const { return Median(sync_seconds_); }

 private:
  DirectCopyOptions CopyOptions(uint32_t alignment) const {
    DirectCopyOptions options;
    options.piece_bytes = options_.piece_bytes;
    options.alignment = alignment;
    return options;
  }

  const CaseOptions options_;
  const ShardInMemory shard_;
  const ScratchDirectory dir_;
  const std::unique_ptr<BlockIo> io_;
  std::vector<double> sync_seconds_;
};

Row MemoryRow(double mib) {
  Row row{"memory beyond the slot", "MiB"};
  row.better = Better::kLower;
  row.value = row.ratio = mib;
  row.bar = kMemoryBarMib;
  row.goal = kMemoryGoalMib;
  return row;
}

std::string PieceAndDepth(const CaseOptions& options) {
  return std::to_string(options.piece_bytes / kKiB) + " KiB x " + std::to_string(options.depth);
}

}  // namespace

Report RunFlush(const CaseOptions& options) {
  Report report{"flush", Better::kHigher, {}};
  Drive drive(options);
  std::vector<double> ours, cpu, fio, fresh;
  Progress progress("flush", options.rounds);
  MemoryWatch memory;
  for (int round = 0; round < options.rounds; ++round) {
    // Whoever is second finds the drive busier or its cache fuller: take turns.
    if (round % 2 == 0) {
      fio.push_back(drive.Fio(true));
    }
    const Drive::Took took = drive.Write(OpenMode::kReadWrite, "ours");
    ours.push_back(took.seconds);
    cpu.push_back(took.cpu_seconds);
    if (round % 2 != 0) {
      fio.push_back(drive.Fio(true));
    }
    fresh.push_back(drive.Write(OpenMode::kCreateExclusive, "fresh").seconds);
    drive.Remove("fresh");
    progress.Advance("round " + std::to_string(round + 1));
  }
  Row row = RateRow("flush, recycled file", drive.bytes(), ours, fio, kRateBar, kRateGoal);
  row.note = "ceiling: fio " + PieceAndDepth(options) + ", ours: " + drive.engine();
  report.rows.push_back(row);
  report.rows.push_back(CpuRow("flush, CPU", drive.bytes(), cpu));
  report.rows.push_back(MemoryRow(memory.MostMib()));
  Row cold = RateRow("flush, fresh file", drive.bytes(), fresh, fio, 0, 0);
  cold.note = "fallocate beforehand not counted";
  report.rows.push_back(cold);
  Row sync{"flush, fdatasync afterwards", "ms"};
  sync.value = sync.ratio = drive.SyncSeconds() * 1e3;
  report.rows.push_back(sync);
  return report;
}

Report RunLoad(const CaseOptions& options) {
  Report report{"load", Better::kHigher, {}};
  Drive drive(options);
  std::vector<double> ours, cpu, fio;
  Progress progress("load", options.rounds);
  MemoryWatch memory;
  for (int round = 0; round < options.rounds; ++round) {
    if (round % 2 == 0) {
      fio.push_back(drive.Fio(false));
    }
    const Drive::Took took = drive.Read();
    ours.push_back(took.seconds);
    cpu.push_back(took.cpu_seconds);
    if (round % 2 != 0) {
      fio.push_back(drive.Fio(false));
    }
    progress.Advance("round " + std::to_string(round + 1));
  }
  Row row = RateRow("load into a slot", drive.bytes(), ours, fio, kRateBar, kRateGoal);
  row.note = "ceiling: fio " + PieceAndDepth(options) + ", ours: " + drive.engine();
  report.rows.push_back(row);
  Row cpu_row = CpuRow("load, CPU", drive.bytes(), cpu);
  cpu_row.bar = 0;  // reported
  report.rows.push_back(cpu_row);
  report.rows.push_back(MemoryRow(memory.MostMib()));
  return report;
}

}  // namespace holdfast::bench
