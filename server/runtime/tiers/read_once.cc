#include "server/runtime/tiers/read_once.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/fault_guard.h"
#include "base/log.h"
#include "base/status.h"
#include "server/peers/pull_client.h"
#include "server/runtime/pull_service.h"
#include "tiers/transfer/digest_blocks.h"

namespace holdfast {
namespace {

constexpr uint64_t kAskBytes = uint64_t{16} << 20;  // of a node, at a time
constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
// A node that has so little of a file ready is asked no further: the remote tier has it, too.
constexpr uint64_t kBytesPerSecondMin = uint64_t{4} << 20;
constexpr Duration kStart = std::chrono::seconds(30);

// Each wait in vain takes kPassedOnWait: after so many nodes all else is read here.
constexpr size_t kVainMax = 3;

using Sink = std::function<absl::Status(uint64_t offset, std::span<const std::byte>)>;

// Another rank's file in the remote tier, as somebody reads it.
class FileReader {
 public:
  virtual ~FileReader() = default;
  virtual absl::Status Read(uint64_t offset, uint64_t bytes, const Sink& sink) = 0;
};

// This node does.
class HereReader final : public FileReader {
 public:
  HereReader(std::shared_ptr<PassedOnFile> file, MonotonicTime until, TransferControl& control)
      : file_(std::move(file)), until_(until), control_(control), piece_(kPieceBytes) {}

  absl::Status Read(uint64_t offset, uint64_t bytes, const Sink& sink) override {
    for (const uint64_t end = offset + bytes; offset < end;) {
      const std::span<std::byte> into(piece_.data(), std::min(kPieceBytes, end - offset));
      const MonotonicTime until = std::min(until_, Clock::System()->Now() + kPassedOnWait);
      HF_RETURN_IF_ERROR(file_->Read(offset, into, until, [this] { return control_.cancelled(); }));
      HF_RETURN_IF_ERROR(sink(offset, into));
      offset += into.size();
    }
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<PassedOnFile> file_;
  const MonotonicTime until_;
  TransferControl& control_;
  std::vector<std::byte> piece_;
};

// Another node does.
class ThereReader final : public FileReader {
 public:
  explicit ThereReader(std::unique_ptr<PullStream> stream) : stream_(std::move(stream)) {}

  absl::Status Start() {
    HF_ASSIGN_OR_RETURN(const v1::PullTold told, stream_->Next());
    return told.has_source()
               ? absl::OkStatus()
               : absl::DataLossError("it begins with something else than what it has");
  }

  absl::Status Read(uint64_t offset, uint64_t bytes, const Sink& sink) override {
    for (const uint64_t end = offset + bytes; offset < end;) {
      v1::PullAsked asked;
      asked.mutable_read()->set_offset(offset);
      asked.mutable_read()->set_bytes(std::min(kAskBytes, end - offset));
      HF_RETURN_IF_ERROR(stream_->Ask(asked));
      for (const uint64_t asked_end = offset + asked.read().bytes(); offset < asked_end;) {
        HF_ASSIGN_OR_RETURN(const v1::PullTold told, stream_->Next());
        if (told.data().empty() || told.data().size() > asked_end - offset) {
          return absl::DataLossError("its bytes come in other pieces than were asked for");
        }
        HF_RETURN_IF_ERROR(sink(offset, std::as_bytes(std::span(told.data()))));
        offset += told.data().size();
      }
    }
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<PullStream> stream_;
};

bool Has(const RankRun& run, Rank rank) {
  return rank >= run.first && (rank - run.first) % run.stride == 0 &&
         (rank - run.first) / run.stride < run.count;
}

// Fills one image; for one thread.
class Filler {
 public:
  Filler(const Context& context, const FetchShard& action, const WholeCopy& whole,
         RevocableMemory& memory, std::shared_ptr<TransferControl> control)
      : context_(context),
        action_(action),
        whole_(whole),
        memory_(memory),
        shared_control_(std::move(control)),
        control_(*shared_control_) {}

  // What the rank's own file leaves out.
  absl::Status Rest(uint64_t& remote_bytes) {
    HF_RETURN_IF_ERROR(Put(0, std::as_bytes(std::span(whole_.map->header))));
    std::vector<std::vector<ImageRun>> runs(whole_.files.size());
    for (const ImageRun& run : whole_.map->runs) {
      runs[run.source].push_back(run);
    }
    // Whoever needs the same files begins with another one: the next rank's.
    const auto after =
        std::upper_bound(whole_.ranks.begin(), whole_.ranks.end(), action_.key.id.rank);
    const size_t first = static_cast<size_t>(after - whole_.ranks.begin());
    for (size_t i = 0; i < whole_.ranks.size(); ++i) {
      const size_t owner = (first + i) % whole_.ranks.size();
      std::vector<ImageRun>& wanted = runs[owner + 1];
      std::sort(wanted.begin(), wanted.end(), [](const ImageRun& a, const ImageRun& b) {
        return a.source_offset < b.source_offset;
      });
      size_t done = 0;
      const std::string* const node = NodeOf(whole_.ranks[owner]);
      const absl::Status passed =
          node == nullptr ? absl::UnavailableError("its rank is not among those that were named")
          : vain_.count(*node) > 0 || vain_.size() >= kVainMax
              ? absl::UnavailableError("others were waited for in vain")
              : FromReader(owner, *node, wanted, done);
      if (control_.cancelled()) {
        return absl::CancelledError("as asked");
      }
      if (!passed.ok()) {
        if (node != nullptr) {
          vain_.insert(*node);
        }
        LogInfo(absl::StrCat("fetch of ", action_.key.id.ToString(), ": rank ", whole_.ranks[owner],
                             "'s file is read from the remote tier here, too: ", Message(passed)));
        HF_RETURN_IF_ERROR(FromRemote(*whole_.files[owner + 1],
                                      std::span<const ImageRun>(wanted).subspan(done),
                                      remote_bytes));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Verify(const RecordAndLayout& image) {
    for (DigestBlocks block(image.layout); !block.done(); block.Next()) {
      uint64_t digest = 0;
      HF_RETURN_IF_ERROR(Touch(block.offset(), block.bytes(), [&](const std::byte* memory) {
        digest = Crc64(memory, block.bytes());
      }));
      if (const auto bad = CompareBlock(image.record, block, digest)) {
        return BadBlockError(image.record, *bad, whole_.path_at(block.offset()));
      }
      control_.Touch();
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Touch(uint64_t offset, uint64_t bytes, const std::function<void(std::byte*)>& with) {
    if (offset > memory_.bytes() || bytes > memory_.bytes() - offset) {
      return absl::DataLossError("a part of the image has no place in its slot");
    }
    const RevocableMemory::Access access = memory_.Enter();
    if (!access) {
      return absl::CancelledError("the slot was taken back");
    }
    const FaultGuard guard(access.data() + offset, bytes);
    with(access.data() + offset);
    return guard.faulted() ? absl::UnavailableError("the slot was cut short") : absl::OkStatus();
  }

  absl::Status Put(uint64_t offset, std::span<const std::byte> bytes) {
    return Touch(offset, bytes.size(),
                 [&](std::byte* memory) { std::memcpy(memory, bytes.data(), bytes.size()); });
  }

  const std::string* NodeOf(Rank rank) const {
    for (const RemoteReader& reader : action_.readers) {
      if (std::any_of(reader.ranks.begin(), reader.ranks.end(),
                      [rank](const RankRun& run) { return Has(run, rank); })) {
        return &reader.node;
      }
    }
    return nullptr;
  }

  absl::StatusOr<std::unique_ptr<FileReader>> Open(Rank rank, const std::string& node,
                                                   uint64_t wanted_bytes) {
    ShardId id = action_.key.id;
    id.rank = rank;
    const Duration at_most = kStart + std::chrono::seconds(wanted_bytes / kBytesPerSecondMin);
    if (node == context_->node_name) {
      const MonotonicTime now = Clock::System()->Now();
      HF_ASSIGN_OR_RETURN(std::shared_ptr<PassedOnFile> file,
                          context_->passed_on->Await(id, now + kPassedOnWait,
                                                     [this] { return control_.cancelled(); }));
      return std::make_unique<HereReader>(std::move(file), now + at_most, control_);
    }
    v1::PullOpen open;
    open.set_job_name(action_.key.job_name);
    open.set_job_uuid(id.job.ToBytes());
    open.set_attempt(id.attempt);
    open.set_step(id.step);
    open.set_rank(rank);
    open.set_remote_file(true);
    HF_ASSIGN_OR_RETURN(std::unique_ptr<PullStream> stream,
                        context_->pulls->Open(node, std::move(open), at_most, shared_control_));
    auto reader = std::make_unique<ThereReader>(std::move(stream));
    HF_RETURN_IF_ERROR(reader->Start());
    return reader;
  }

  // `done`: of how many of the runs all bytes have come.
  absl::Status FromReader(size_t owner, const std::string& node, std::span<const ImageRun> runs,
                          size_t& done) {
    uint64_t wanted = 0;
    for (const ImageRun& run : runs) {
      wanted += run.bytes;
    }
    const TransferControl::Call call(&control_, "take from another node",
                                     whole_.files[owner + 1]->path());
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<FileReader> reader,
                        Open(whole_.ranks[owner], node, wanted));
    while (done < runs.size()) {
      // Runs that lie side by side in the file are asked for together.
      size_t end = done + 1;
      uint64_t bytes = runs[done].bytes;
      while (end < runs.size() && runs[end].source_offset == runs[done].source_offset + bytes) {
        bytes += runs[end++].bytes;
      }
      size_t at = done;
      const Sink sink = [&](uint64_t offset, std::span<const std::byte> data) {
        while (!data.empty()) {
          const ImageRun& run = runs[at];
          const uint64_t into = offset - run.source_offset;
          const uint64_t now = std::min<uint64_t>(data.size(), run.bytes - into);
          HF_RETURN_IF_ERROR(Put(run.offset + into, data.first(now)));
          control_.Advance(now);
          data = data.subspan(now);
          offset += now;
          at += into + now == run.bytes ? 1 : 0;
        }
        return absl::OkStatus();
      };
      HF_RETURN_IF_ERROR(reader->Read(runs[done].source_offset, bytes, sink));
      done = end;
    }
    return absl::OkStatus();
  }

  absl::Status FromRemote(File& file, std::span<const ImageRun> runs, uint64_t& remote_bytes) {
    std::vector<std::byte> piece(kPieceBytes);
    for (const ImageRun& run : runs) {
      for (uint64_t at = 0; at < run.bytes;) {
        if (control_.cancelled()) {
          return absl::CancelledError("as asked");
        }
        const std::span<std::byte> into(piece.data(), std::min(kPieceBytes, run.bytes - at));
        {
          const TransferControl::Call call(&control_, "read", file.path());
          HF_RETURN_IF_ERROR(file.ReadAt(run.source_offset + at, into));
        }
        HF_RETURN_IF_ERROR(Put(run.offset + at, into));
        at += into.size();
        remote_bytes += into.size();
        control_.Advance(into.size());
      }
    }
    return absl::OkStatus();
  }

  const Context& context_;
  const FetchShard& action_;
  const WholeCopy& whole_;
  RevocableMemory& memory_;
  std::set<std::string> vain_;  // nodes that were waited for in vain, and are not asked again
  const std::shared_ptr<TransferControl> shared_control_;
  TransferControl& control_;
};

}  // namespace

ReadOnceResult ReadOnce(const Context& context, const FetchShard& action, const WholeCopy& whole,
                        const RecordAndLayout& image, PassedOnFile& passed,
                        const std::shared_ptr<RevocableMemory>& memory, Operation& operation) {
  ReadOnceResult result;
  // 1. What this rank's own file has, for all: nobody waits for anybody in it.
  BufferedCopySpec spec;
  spec.from_file = whole.files[0];
  spec.piece_unit = whole.own_piece_unit;
  spec.to_memory = memory;
  spec.image = std::make_shared<const RecordAndLayout>(FileImage(image));
  spec.scatter = std::make_shared<const ImageMap>(PlacesInImage(image));
  spec.arrived = [&passed](uint64_t offset, uint64_t bytes) { passed.Arrived(offset, bytes); };
  spec.control = operation.control();
  result.own = context->pool->Copy(std::move(spec));
  if (!result.own.ok()) {
    return result;
  }
  // 2. What the others' have, from them; and then all of it against this rank's own digests.
  Filler filler(context, action, whole, *memory, operation.control());
  result.rest = filler.Rest(result.remote_bytes);
  if (result.rest.ok()) {
    result.rest = filler.Verify(image);
  }
  return result;
}

}  // namespace holdfast
