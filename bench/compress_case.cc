// Compressed images of the remote tier: written and read back through the pool, verified, against
// Zstandard's own multi-threaded compression of the same bytes, and threads that decompress the
// same frames and do nothing else. And what compression saves of numbers as models have them.
#include <fcntl.h>
#include <unistd.h>
#include <zstd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "bench/cases.h"
#include "bench/durable.h"
#include "bench/harness.h"
#include "tiers/compressed/compressed_file.h"
#include "tiers/compressed/compressing_file.h"
#include "tiers/compressed/frame_codec.h"
#include "tiers/transfer/buffered_copy.h"

namespace holdfast::bench {
namespace {

constexpr double kBar = 0.85;
constexpr double kGoal = 0.95;
constexpr int kLevel = 3;  // as policy.remote.compression_level is without a setting
constexpr uint64_t kAheadMax = uint64_t{32} << 20;
constexpr uint64_t kRatioBytes = uint64_t{64} << 20;

// ---- Numbers as models and optimizers have them ----

uint16_t ToBf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Layers of a few megabytes, each with a spread of its own.
class Values {
 public:
  float Weight() { return Normal(0.02f); }
  float Moment() { return Normal(1e-4f); }  // Adam's first
  float Square() {                          // and second: squares of gradients, averaged
    const float one = Normal(1e-4f);
    const float other = Normal(1e-4f);
    return 0.9f * one * one + 0.1f * other * other;
  }

 private:
  float Normal(float spread) {
    if (drawn_++ % kLayer == 0) {
      scale_ = std::exp2(static_cast<float>(random_() % 5) - 2);
    }
    return normal_(random_) * spread * scale_;
  }
  static constexpr uint64_t kLayer = 2 << 20;
  std::mt19937_64 random_{7};
  std::normal_distribution<float> normal_;
  uint64_t drawn_ = 0;
  float scale_ = 1;
};

template <typename Number, typename Draw>
void Fill(std::span<std::byte> bytes, Draw draw) {
  for (size_t at = 0; at + sizeof(Number) <= bytes.size(); at += sizeof(Number)) {
    const Number number = draw();
    std::memcpy(bytes.data() + at, &number, sizeof number);
  }
}

void FillWithWeights(std::span<std::byte> bytes) {
  // (Drawing gigabytes of numbers takes minutes: some are drawn, and repeated beyond what zstd
  // looks back.)
  const std::span<std::byte> some = bytes.first(std::min<size_t>(bytes.size(), 64 * kMiB));
  Values values;
  Fill<uint16_t>(some, [&] { return ToBf16(values.Weight()); });
  for (size_t at = some.size(); at < bytes.size(); at += some.size()) {
    std::memcpy(bytes.data() + at, some.data(), std::min(some.size(), bytes.size() - at));
  }
}

// ---- What it saves ----

double StoredShare(std::span<const std::byte> bytes, size_t planes) {
  std::vector<std::byte> stored(kStoredFrameBytesMax);
  std::vector<std::byte> split(kFrameBytes);
  uint64_t sum = 0;
  for (size_t at = 0; at < bytes.size(); at += kFrameBytes) {
    std::span<const std::byte> frame = bytes.subspan(at, kFrameBytes);
    if (planes > 1) {
      for (size_t i = 0; i < frame.size(); ++i) {
        split[i % planes * (frame.size() / planes) + i / planes] = frame[i];
      }
      frame = split;
    }
    sum += MustBeOk(CompressFrame(kLevel, frame, stored), "compress");
  }
  return static_cast<double>(sum) / static_cast<double>(bytes.size());
}

void AddShares(Report& report) {
  std::vector<std::byte> bytes(kRatioBytes);
  const auto row = [&](const char* what, size_t planes, const std::function<void(Values&)>& fill) {
    Values values;
    fill(values);
    Row plain{std::string("stored of ") + what, "of 1"};
    plain.value = plain.ratio = StoredShare(bytes, 1);
    plain.better = Better::kLower;
    char note[80];
    std::snprintf(note, sizeof note, "%.3f if the bytes' planes were split",
                  StoredShare(bytes, planes));
    plain.note = note;
    report.rows.push_back(plain);
  };
  row("bf16 weights", 2,
      [&](Values& v) { Fill<uint16_t>(bytes, [&] { return ToBf16(v.Weight()); }); });
  row("fp32 weights", 4, [&](Values& v) { Fill<float>(bytes, [&] { return v.Weight(); }); });
  row("fp32 first moments", 4, [&](Values& v) { Fill<float>(bytes, [&] { return v.Moment(); }); });
  row("fp32 second moments", 4, [&](Values& v) { Fill<float>(bytes, [&] { return v.Square(); }); });
}

// ---- How fast ----

void WriteAll(int fd, const void* data, size_t bytes, off_t at) {
  if (::pwrite(fd, data, bytes, at) != static_cast<ssize_t>(bytes)) {
    MustBeOk(absl::DataLossError("pwrite failed"), "plain zstd");
  }
}

class Compressed {
 public:
  explicit Compressed(const CaseOptions& options)
      : options_(options),
        shard_(options.bytes, FillWithWeights),
        dir_(options.dir, 3 * shard_.bytes()),
        pool_(MustBeOk(CopyPool::Start({.threads = static_cast<size_t>(options.threads),
                                        .piece_bytes = options.piece_bytes,
                                        .priority = {.io = 4, .nice = 0}}),
                       "start the pool")) {}

  double Write() {
    const std::string path = dir_.Path("ours");
    static_cast<void>(Env::System()->Unlink(path));
    const auto file = std::make_shared<CompressingFile>(
        MustBeOk(Env::System()->Open(path, OpenMode::kCreateExclusive), "create"), shard_.bytes(),
        kLevel);
    const Stopwatch watch;
    BufferedCopySpec spec = Spec();
    spec.from_memory = Memory();
    spec.to_file = file;
    spec.ahead_max = kAheadMax;
    MustBeOk(pool_->Copy(std::move(spec)).status, "compressed write");
    MustBeOk(file->Finish(), "finish");
    return watch.Seconds();
  }

  // Zstandard's own threads, what comes out of them written as it comes.
  double PlainWrite() {
    const std::string path = dir_.Path("plain");
    static_cast<void>(Env::System()->Unlink(path));
    const auto file = MustBeOk(Env::System()->Open(path, OpenMode::kCreateExclusive), "create");
    ZSTD_CCtx* const context = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, kLevel);
    ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
    if (ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_nbWorkers, options_.threads)) != 0) {
      MustBeOk(absl::UnimplementedError("this libzstd has no threads"), "plain zstd");
    }
    std::vector<std::byte> out(ZSTD_CStreamOutSize() * 8);
    const Stopwatch watch;
    ZSTD_inBuffer in{shard_.memory().data(), shard_.bytes(), 0};
    off_t at = 0;
    for (size_t left = 1; left != 0;) {
      ZSTD_outBuffer some{out.data(), out.size(), 0};
      left = ZSTD_compressStream2(context, &some, &in, ZSTD_e_end);
      if (ZSTD_isError(left) != 0) {
        MustBeOk(absl::InternalError(ZSTD_getErrorName(left)), "plain zstd");
      }
      WriteAll(file->fd(), out.data(), some.pos, at);
      at += static_cast<off_t>(some.pos);
    }
    const double seconds = watch.Seconds();
    ZSTD_freeCCtx(context);
    return seconds;
  }

  double Read() {
    const std::shared_ptr<File> file =
        MustBeOk(CompressedFile::Open(
                     MustBeOk(Env::System()->Open(dir_.Path("ours"), OpenMode::kRead), "open"),
                     shard_.bytes()),
                 "open compressed");
    const Stopwatch watch;
    BufferedCopySpec spec = Spec();
    spec.from_file = file;
    spec.to_memory = Memory();
    MustBeOk(pool_->Copy(std::move(spec)).status, "compressed read");
    return watch.Seconds();
  }

  // The same file by threads that take frame after frame, and look at no digest.
  double PlainRead() {
    const auto file = MustBeOk(Env::System()->Open(dir_.Path("ours"), OpenMode::kRead), "open");
    const uint64_t stored_bytes = MustBeOk(file->Info(), "look").bytes;
    const SeekTable table =
        MustBeOk(ReadSeekTable(*file, stored_bytes, shard_.bytes()), "seek table");
    std::atomic<uint64_t> next{0};
    const auto run = [&] {
      ZSTD_DCtx* const context = ZSTD_createDCtx();
      std::vector<std::byte> stored(kStoredFrameBytesMax);
      for (uint64_t i = next++; i < table.frames(); i = next++) {
        const StoredFrame frame = table.frame(i);
        if (::pread(file->fd(), stored.data(), frame.stored_bytes,
                    static_cast<off_t>(frame.offset)) != static_cast<ssize_t>(frame.stored_bytes) ||
            ZSTD_decompressDCtx(context, shard_.memory().data() + i * kFrameBytes, frame.bytes,
                                stored.data(), frame.stored_bytes) != frame.bytes) {
          MustBeOk(absl::DataLossError("a frame is damaged"), "plain zstd");
        }
      }
      ZSTD_freeDCtx(context);
    };
    const Stopwatch watch;
    std::vector<std::thread> threads;
    for (int i = 0; i < options_.threads; ++i) {
      threads.emplace_back(run);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return watch.Seconds();
  }

  uint64_t bytes() const { return shard_.bytes(); }

 private:
  BufferedCopySpec Spec() const {
    BufferedCopySpec spec;
    spec.image = shard_.image();
    spec.piece_unit = kFrameBytes;
    return spec;
  }
  std::shared_ptr<RevocableMemory> Memory() const {
    return std::make_shared<RevocableMemory>(shard_.memory().data(), shard_.memory().size());
  }

  const CaseOptions options_;
  const ShardInMemory shard_;
  const ScratchDirectory dir_;
  const std::unique_ptr<CopyPool> pool_;
};

}  // namespace

Report RunCompress(const CaseOptions& options) {
  Report report{"compress", Better::kHigher, {}};
  Compressed compressed(options);
  std::vector<double> written[2];
  std::vector<double> read[2];  // ours, plain
  Progress progress("compress", options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool plain : {round % 2 == 0, round % 2 != 0}) {
      written[plain ? 1 : 0].push_back(plain ? compressed.PlainWrite() : compressed.Write());
    }
    for (const bool plain : {round % 2 == 0, round % 2 != 0}) {
      read[plain ? 1 : 0].push_back(plain ? compressed.PlainRead() : compressed.Read());
    }
    progress.Advance("round " + std::to_string(round + 1));
  }
  const auto row = [&](const char* name, const std::vector<double>(&seconds)[2],
                       const char* ceiling) {
    Row rate = RateRow(name, compressed.bytes(), seconds[0], seconds[1], kBar, kGoal);
    rate.note = "ceiling: " + std::string(ceiling) + ", " + std::to_string(options.threads) +
                " threads, level " + std::to_string(kLevel);
    report.rows.push_back(rate);
  };
  row("compressed write of bf16 weights", written, "zstd's own threads");
  row("compressed read", read, "the same frames, without digests");
  AddShares(report);
  return report;
}

}  // namespace holdfast::bench
