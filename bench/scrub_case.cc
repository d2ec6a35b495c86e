// Scrub: a copy on a local drive and one in a remote directory, read and verified as the daemon's
// scrub does it (VerifyCopy) with no limit, at this process' own priority; against the fastest of
// some plain ways to read the same file, on a drive of fio, too.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "base/units.h"
#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/fio.h"
#include "bench/harness.h"
#include "server/runtime/tiers/drain_operations.h"
#include "tiers/durable/copy_store.h"
#include "tiers/transfer/direct_copy.h"
#include "tiers/transfer/file_pieces.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.90;
constexpr double kGoal = 0.97;
// Plain reading: so many threads take pieces in turn, each into a buffer of its own.
struct PlainWay {
  int threads;
  bool direct;
};
constexpr PlainWay kPlainWays[] = {{1, false}, {2, false}, {4, false}, {1, true}, {2, true}};
constexpr size_t kPlainWaysCount = std::size(kPlainWays);

void DropFromCache(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}

// Seconds.
double ReadPlainly(const std::string& path, size_t piece_bytes, const PlainWay& way) {
  const Stopwatch watch;
  const std::unique_ptr<File> file =
      MustBeOk(Env::System()->Open(path, OpenMode::kRead, {.direct = way.direct}), "open the copy");
  const uint64_t bytes = MustBeOk(file->Info(), "ask for the copy's length").bytes;
  std::atomic<uint64_t> next{0};
  const auto run = [&] {
    const AlignedBuffer buffer(piece_bytes);
    for (uint64_t at = 0; (at = next.fetch_add(piece_bytes)) < bytes;) {
      const auto now = static_cast<size_t>(std::min<uint64_t>(piece_bytes, bytes - at));
      // (The last piece ends with the file: direct reads ask for whole pages.)
      MustBeOk(ReadAtLeast(*file, at, {buffer.data(), way.direct ? piece_bytes : now}, now),
               "read the copy");
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < way.threads; ++i) {
    others.emplace_back(run);
  }
  run();
  for (std::thread& other : others) {
    other.join();
  }
  return watch.Seconds();
}

// The same shard in both tiers.
class Copies {
 public:
  explicit Copies(const CaseOptions& options)
      : options_(options),
        shard_(options.bytes),
        dir_(options.dir, 3 * shard_.bytes()),
        context_(std::make_shared<DrainContext>(std::make_shared<EventOutlet>(nullptr))) {
    context_->env = Env::System();
    context_->drives = {MakePlace(DurableKind::kNvme, "nvme")};
    context_->remote = MakePlace(DurableKind::kRemote, "remote");
    nvme_path_ = Write(*context_->drives[0], false);
    remote_path_ = Write(*context_->remote, true);
  }

  struct Took {
    double seconds;
    double cpu_seconds;
  };
  Took Scrub(TierKind tier) {
    const ShardRecord& record = shard_.image()->record;
    ReadableShard shard;
    shard.tier = tier;
    shard.copy.id = record.id;
    shard.copy.job_name = record.job_name;
    shard.copy.world_size = record.world_size;
    shard.copy.image_bytes = record.image_bytes;
    const auto operation = std::make_shared<Operation>(
        1, [](Operation&) -> Event { return TimerFired{}; },
        []() -> Event { return TimerFired{}; });
    DropFromCache(tier == TierKind::kNvme ? nvme_path_ : remote_path_);
    const double cpu_before = ProcessCpuSeconds();
    const Stopwatch watch;
    const absl::StatusOr<std::string> wrong = VerifyCopy(context_, 0, shard, nullptr, *operation);
    const Took took{watch.Seconds(), ProcessCpuSeconds() - cpu_before};
    const std::string what = MustBeOk(wrong, "scrub");
    MustBeOk(what.empty() ? absl::OkStatus() : absl::DataLossError(what), "scrub");
    return took;
  }
  double Fio() const {
    return TimeFio({nvme_path_, false, shard_.bytes(), options_.piece_bytes, options_.depth});
  }
  double Plain(TierKind tier, const PlainWay& way) const {
    const std::string& path = tier == TierKind::kNvme ? nvme_path_ : remote_path_;
    DropFromCache(path);
    return ReadPlainly(path, options_.piece_bytes, way);
  }
  uint64_t bytes() const { return shard_.bytes(); }

 private:
  std::shared_ptr<TierPlace> MakePlace(DurableKind kind, const std::string& name) const {
    CopyStore::Options store;
    store.env = Env::System();
    store.kind = kind;
    store.dir = dir_.Path(name);
    store.node_name = "bench";
    store.direct = kind == DurableKind::kNvme;
    MustBeOk(Env::System()->CreateDirectory(store.dir, 0755), "make a tier's directory");
    return std::make_shared<TierPlace>(std::move(store));
  }

  // Its path.
  std::string Write(TierPlace& place, bool remote) {
    std::vector<std::string> told;
    const std::shared_ptr<CopyStore> store = MustBeOk(place.Store(&told), "open a tier");
    const ShardRecord& record = shard_.image()->record;
    const NewCopy copy{record.id,          record.job_name, record.world_size,
                       record.image_bytes, ::geteuid(),     ::getegid()};
    if (remote) {
      MustBeOk(store->ClaimAttempt({record.id.job, record.job_name, copy.uid, copy.gid},
                                   record.id.attempt, "bench"),
               "claim the attempt");
    }
    const std::unique_ptr<CopyStore::Writing> writing =
        MustBeOk(store->Begin(copy), "begin a copy");
    const std::unique_ptr<BlockIo> io =
        MustBeOk(CreateBlockIo({.depth = options_.depth}), "make a ring");
    DirectCopyOptions how;
    how.piece_bytes = options_.piece_bytes;
    how.alignment = writing->alignment();
    MustBeOk(WriteImage(*io, shard_.memory(), writing->image(), record, shard_.image()->layout, how)
                 .status,
             "write a copy");
    return MustBeOk(writing->Publish(EncodeRecord(record)), "publish a copy").location;
  }

  const CaseOptions options_;
  const ShardInMemory shard_;
  const ScratchDirectory dir_;
  const Context context_;
  std::string nvme_path_;
  std::string remote_path_;
};

// How one tier fared: the scrub, and each way in which the same bytes were read without it.
class TierRuns {
 public:
  TierRuns(TierKind tier, const Copies& copies) : tier_(tier), copies_(copies) {}

  // Whoever is second finds the drive busier or its cache fuller: they take turns.
  void Round(int round, Copies& copies) {
    // Not counted: what others freed a virtual machine has given back, and gets again slowly.
    copies.Plain(tier_, kPlainWays[0]);
    const bool with_fio = tier_ == TierKind::kNvme;
    const size_t ways = kPlainWaysCount + (with_fio ? 2 : 1);
    for (size_t i = 0; i < ways; ++i) {
      const size_t way = (static_cast<size_t>(round) + i) % ways;
      if (way < kPlainWaysCount) {
        others_[way].push_back(copies.Plain(tier_, kPlainWays[way]));
      } else if (way == kPlainWaysCount) {
        const Copies::Took took = copies.Scrub(tier_);
        ours_.push_back(took.seconds);
        cpu_.push_back(took.cpu_seconds);
      } else {
        others_[kPlainWaysCount].push_back(copies.Fio());
      }
    }
  }

  void AddRows(const std::string& name, const std::string& pieces, Report& report) const {
    const auto end = others_.end() - (others_.back().empty() ? 1 : 0);
    const auto fastest = std::min_element(
        others_.begin(), end, [](const auto& a, const auto& b) { return Median(a) < Median(b); });
    Row row = RateRow(name, copies_.bytes(), ours_, *fastest, kBar, kGoal);
    row.note = "ceiling: the fastest, in pieces of " + pieces + ", of";
    for (auto at = others_.begin(); at != end; ++at) {
      char way[64];
      std::snprintf(way, sizeof way, "%s %s (%.2f GB/s)", at == others_.begin() ? "" : ",",
                    NameOf(static_cast<size_t>(at - others_.begin())).c_str(),
                    Rate(copies_.bytes(), Median(*at)));
      row.note += way;
    }
    report.rows.push_back(row);
    Row cpu = CpuRow(name + ", CPU", copies_.bytes(), cpu_);
    cpu.bar = 0;  // reported
    report.rows.push_back(cpu);
  }

 private:
  static std::string NameOf(size_t way) {
    if (way == kPlainWaysCount) {
      return "fio";
    }
    return std::string(kPlainWays[way].direct ? "direct by " : "buffered by ") +
           std::to_string(kPlainWays[way].threads);
  }

  const TierKind tier_;
  const Copies& copies_;
  std::vector<double> ours_, cpu_;
  std::array<std::vector<double>, kPlainWaysCount + 1> others_;  // the last: fio, of a drive
};

}  // namespace

Report RunScrub(const CaseOptions& options) {
  Report report{"scrub", Better::kHigher, {}};
  Copies copies(options);
  TierRuns nvme(TierKind::kNvme, copies);
  TierRuns remote(TierKind::kRemote, copies);
  Progress progress("scrub", options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    nvme.Round(round, copies);
    remote.Round(round, copies);
    progress.Advance("round " + std::to_string(round + 1));
  }
  const std::string pieces = std::to_string(options.piece_bytes / kKiB) + " KiB";
  nvme.AddRows("scrub of a copy on a drive", pieces, report);
  remote.AddRows("scrub of a copy in remote", pieces, report);
  return report;
}

}  // namespace holdfast::bench
