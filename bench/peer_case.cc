// A shard out of another process' memory, verified, against one-sided reads of the same bytes by
// the same provider without digests. Both processes are on this machine: they share its cores.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <sstream>

#include "base/units.h"
#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/harness.h"
#include "bench/raw_read.h"
#include "tiers/peer/pull.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.85;
constexpr double kGoal = 0.95;
constexpr size_t kRawPieceBytes = size_t{1} << 20;
constexpr size_t kRawWindow = 8;

std::unique_ptr<Fabric> OpenFabric() {
  FabricOptions options;
  options.provider = "tcp";
  options.bind_address = "127.0.0.1";
  return MustBeOk(Fabric::Open(options), "open the fabric");
}

// The other process: it has the shard, and is gone with the object.
class Source {
 public:
  explicit Source(uint64_t bytes) {
    int ends[2];
    if (::pipe(ends) != 0 || (pid_ = ::fork()) < 0) {
      MustBeOk(absl::InternalError("pipe or fork failed"), "start the source");
    }
    if (pid_ == 0) {
      Serve(bytes, ends[1]);
    }
    ::close(ends[1]);
    source_ = Told(ends[0]);
    ::close(ends[0]);
  }
  ~Source() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const PullSource& source() const { return source_; }
  double CpuSeconds() const {
    clockid_t clock = 0;
    timespec now{};
    if (::clock_getcpuclockid(pid_, &clock) != 0 || ::clock_gettime(clock, &now) != 0) {
      return 0;
    }
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  }

 private:
  struct Message {
    size_t address_bytes;
    char address[kFabricAddressBytesMax];
    RemoteRegion region;
  };

  [[noreturn]] static void Serve(uint64_t bytes, int tell) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const ShardInMemory shard(bytes);
    const auto fabric = OpenFabric();
    const auto slot = MustBeOk(fabric->Register(shard.memory(), MemoryAccess::kReadByPeers),
                               "register the shard");
    Message message{};
    message.address_bytes = fabric->address().size();
    std::memcpy(message.address, fabric->address().data(), message.address_bytes);
    message.region = slot->regions().front();
    if (::write(tell, &message, sizeof message) != sizeof message) {
      ::_exit(1);
    }
    while (true) {
      ::pause();
    }
  }

  static PullSource Told(int fd) {
    Message message{};
    size_t have = 0;
    while (have < sizeof message) {
      const ssize_t bytes =
          ::read(fd, reinterpret_cast<char*>(&message) + have, sizeof message - have);
      if (bytes <= 0) {
        MustBeOk(absl::InternalError("it ended"), "start the source");
      }
      have += static_cast<size_t>(bytes);
    }
    return {.name = "source",
            .address = std::string(message.address, message.address_bytes),
            .regions = {message.region}};
  }

  pid_t pid_ = -1;
  PullSource source_;
};

struct Side {
  std::vector<double> seconds;
  std::vector<double> cpu_per_gb;  // of both processes
};

Row CpuRow(const std::string& name, const Side& ours, const Side& raw) {
  Row row{name, "s per GB"};
  row.better = Better::kLower;
  row.value = Median(ours.cpu_per_gb);
  row.ceiling = Median(raw.cpu_per_gb);
  row.ratio = row.value / row.ceiling;
  row.ratio_low = row.ratio_high = row.ratio;
  row.note = "both processes, the kernel's work included";
  return row;
}

void Measure(const Size& size, const CaseOptions& options, Report& report) {
  // Before there is any thread here.
  const Source source(size.bytes);
  const ShardInMemory shard(size.bytes);  // for its record, and then for what arrives
  const std::span<std::byte> image = shard.memory().first(shard.bytes());
  std::memset(image.data(), 0, image.size());
  const auto fabric = OpenFabric();
  RawReader raw_reader(*fabric, source.source());
  const auto pull = [&] {
    MustBeOk(
        PullImage(*fabric, source.source(), image, shard.image()->record, shard.image()->layout, {})
            .status,
        "pull");
  };
  const auto read = [&] { raw_reader.Read(image, kRawPieceBytes, kRawWindow); };
  pull();
  read();
  Side sides[2];  // ours, raw
  Progress progress("peer " + size.name, options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool raw : {round % 2 == 0, round % 2 != 0}) {
      const double cpu = ProcessCpuSeconds() + source.CpuSeconds();
      const Stopwatch watch;
      raw ? read() : pull();
      Side& side = sides[raw ? 1 : 0];
      side.seconds.push_back(watch.Seconds());
      side.cpu_per_gb.push_back((ProcessCpuSeconds() + source.CpuSeconds() - cpu) /
                                (static_cast<double>(image.size()) / 1e9));
    }
    progress.Advance("round " + std::to_string(round + 1));
  }
  Row row = RateRow("verified pull, " + size.name, image.size(), sides[0].seconds, sides[1].seconds,
                    kBar, kGoal);
  row.note = "ceiling: raw reads by " + fabric->provider() + ", " + std::to_string(kRawWindow) +
             " pieces of " + std::to_string(kRawPieceBytes / kKiB) + " KiB under way";
  report.rows.push_back(row);
  report.rows.push_back(CpuRow("CPU, " + size.name, sides[0], sides[1]));
}

}  // namespace

Report RunPeer(const CaseOptions& options) {
  Report report{"peer", Better::kHigher, {}};
  for (const auto& [name, bytes] : std::vector<std::pair<std::string, size_t>>{
           {"64 MiB", 64 * kMiB}, {"256 MiB", 256 * kMiB}, {"1 GiB", kGiB}}) {
    if (bytes <= options.bytes_max) {
      Measure({name, bytes, 0}, options, report);
    }
  }
  return report;
}

}  // namespace holdfast::bench
