#include "server/runtime/part_reader.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <optional>
#include <set>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/errno_status.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/peers/pull_client.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/found_state.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/pull_transfer.h"
#include "server/runtime/remote_parts.h"
#include "server/runtime/sealed_memory.h"
#include "tiers/image/kept.h"

namespace holdfast {
namespace {

// Then the next read opens it anew: a source does not hold its slot for whoever stands still.
constexpr Duration kStreamLongest = std::chrono::minutes(10);
// Between two questions to nodes that serve as many as they may; twice as long each time.
constexpr std::chrono::milliseconds kBusyPause{20};
constexpr std::chrono::milliseconds kBusyPauseMax{640};
constexpr std::chrono::milliseconds kBusyLongest{5000};  // of who reads a file for all
// A client that wants nothing for so long gives way to others: the node holds its slot for it.
constexpr auto kIdleLongest = std::chrono::seconds(10);
// As in whole pulls: when what more nodes have contradicts its digests, and no other node has
// better, it is rather this one.
constexpr size_t kBadNodesBelieved = 1;
// While a file is opened here, between two looks at whether somebody waits still.
constexpr Duration kLookHere = std::chrono::seconds(1);
// Then whoever waits hears that it cannot be read now.
constexpr Duration kReadHereLongest = std::chrono::seconds(60);

// What parts are read into: this process's mapping of it.
class PartMemory {
 public:
  static absl::StatusOr<std::unique_ptr<PartMemory>> Make() {
    HF_ASSIGN_OR_RETURN(UniqueFd fd, SealedMemory("holdfast-parts", kPartsBytes, {}));
    void* const at = ::mmap(nullptr, kPartsBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (at == MAP_FAILED) {
      return ErrnoStatus(errno, "mmap", "memory for parts of a shard");
    }
    return std::unique_ptr<PartMemory>(new PartMemory(std::move(fd), at));
  }
  ~PartMemory() {
    registration_.reset();
    // A client that keeps its descriptor keeps no memory.
    static_cast<void>(::madvise(at_, kPartsBytes, MADV_REMOVE));
    ::munmap(at_, kPartsBytes);
  }
  PartMemory(const PartMemory&) = delete;
  PartMemory& operator=(const PartMemory&) = delete;

  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(at_), kPartsBytes}; }
  UniqueFd TakeDescriptor() { return std::move(fd_); }
  // Once, for all reads into it; null: it cannot be, and each read is for itself.
  const Registration* RegisteredWith(Fabric& fabric) {
    if (!tried_) {
      tried_ = true;
      absl::StatusOr<std::shared_ptr<Registration>> made =
          fabric.Register(bytes(), MemoryAccess::kFilledByReads);
      registration_ = made.ok() ? *std::move(made) : nullptr;
    }
    return registration_.get();
  }

 private:
  PartMemory(UniqueFd fd, void* at) : fd_(std::move(fd)), at_(at) {}
  UniqueFd fd_;
  void* const at_;
  bool tried_ = false;
  std::shared_ptr<Registration> registration_;
};

bool SameContent(const RecordAndLayout& one, const RecordAndLayout& other) {
  return one.record.layout_hash == other.record.layout_hash &&
         one.record.image_bytes == other.record.image_bytes &&
         one.record.digests == other.record.digests && one.record.kept == other.record.kept;
}

}  // namespace

class PartReader::Shard {
 public:
  Shard(const Options& options, OpenDurable open)
      : options_(options),
        open_(std::move(open)),
        remote_(open_.tier == TierKind::kRemote),
        places_(PlacesOf(options, open_)) {}
  ~Shard() {
    End();
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  // False: no thread is to be had.
  bool Begin() {
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }
  void Read(ReadParts read) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    wanted_ = std::move(read);
    changed_.NotifyAll();
  }
  void End() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    control_->Cancel();
    ended_ = true;
    changed_.NotifyAll();
  }
  bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  // Where it may be read from, in the order to try them.
  struct Place {
    std::string node;  // empty: here, in the remote tier
  };
  static std::vector<Place> PlacesOf(const Options& options, const OpenDurable& open) {
    std::vector<Place> places;
    for (const std::string& node : open.peers) {
      if (node != options.node_name) {
        places.push_back({node});
      }
    }
    if (open.tier == TierKind::kRemote && options.remote_parts != nullptr) {
      places.push_back({""});
    }
    return places;
  }
  bool here() const { return places_[place_].node.empty(); }

  void Run() EXCLUDES(mutex_) {
    ::pthread_setname_np(::pthread_self(), "parts");
    DurableOpened opened = Open();
    const bool open = opened.status.ok();
    options_.post(std::move(opened));
    while (open) {
      const std::optional<ReadParts> read = Next();
      if (!read) {
        break;
      }
      options_.post(PartsRead{open_.drain, read->token, ReadAll(*read)});
    }
    LeaveSource();
    done_.store(true, std::memory_order_release);
    options_.ended();
  }

  DurableOpened Open() {
    DurableOpened opened{open_.drain, absl::OkStatus(), false, {}, nullptr};
    opened.status = OpenForClient(opened);
    // What other nodes say is no verdict: nothing was compared with digests.
    opened.bad = failed_here_ && absl::IsDataLoss(opened.status);
    if (!opened.status.ok() && !failed_here_) {
      opened.status = absl::UnavailableError(Message(opened.status));
    }
    return opened;
  }

  absl::Status OpenForClient(DurableOpened& opened) {
    HF_ASSIGN_OR_RETURN(memory_, PartMemory::Make());
    HF_RETURN_IF_ERROR(FindSource());
    HF_ASSIGN_OR_RETURN(UniqueFd record,
                        SealedMemory("holdfast-record", offer_->record.size(),
                                     std::array<std::string_view, 1>{offer_->record}));
    image_ = std::move(offer_->image);
    offer_->record.clear();
    opened.copy = ToSealedCopy(image_->record);
    opened.files = std::make_shared<PassedFiles>();
    opened.files->descriptors.push_back(memory_->TakeDescriptor());
    opened.files->descriptors.push_back(std::move(record));
    opened.parts_bytes = kPartsBytes;
    return absl::OkStatus();
  }

  std::optional<ReadParts> Next() EXCLUDES(mutex_) {
    const auto idle_until = std::chrono::steady_clock::now() + kIdleLongest;
    if (!AwaitWish(idle_until)) {
      LeaveSource();
      stream_is_fresh_ = true;
    }
    const MutexLock lock(mutex_);
    while (!ended_ && !wanted_) {
      changed_.Wait(mutex_);
    }
    return ended_ ? std::nullopt : std::exchange(wanted_, std::nullopt);
  }
  // False: there was none by then.
  bool AwaitWish(std::chrono::steady_clock::time_point until) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    while (!ended_ && !wanted_ && changed_.WaitUntil(mutex_, until)) {
    }
    return ended_ || wanted_.has_value();
  }
  // False: it has ended.
  bool Pause(std::chrono::milliseconds pause) EXCLUDES(mutex_) {
    const auto until = std::chrono::steady_clock::now() + pause;
    const MutexLock lock(mutex_);
    while (!ended_ && changed_.WaitUntil(mutex_, until)) {
    }
    return !ended_;
  }

  // Of the places that have the shard, from `place_` on, the first that serves it. Nodes that serve
  // as many as they may are asked again, until whoever waits has had enough.
  absl::Status FindSource() {
    std::chrono::milliseconds pause = kBusyPause;
    std::chrono::milliseconds waited{0};
    while (true) {
      absl::Status last = absl::UnavailableError(NoPlaceIsLeft());
      bool busy = false;
      for (size_t tried = 0; tried < places_.size(); ++tried) {
        if (!here() && Doubted(places_[place_].node)) {
          place_ = (place_ + 1) % places_.size();
          continue;
        }
        last = here() ? OpenHere() : OpenAt(places_[place_].node);
        failed_here_ = here() && !last.ok();
        if (last.ok() || control_->cancelled()) {
          return last;
        }
        busy = busy || absl::IsResourceExhausted(last);
        if (remote_ && absl::IsResourceExhausted(last) && waited < kBusyLongest) {
          break;  // (to read it here at once would be to read it twice)
        }
        place_ = (place_ + 1) % places_.size();
      }
      if (!busy || !Pause(pause)) {
        return last;
      }
      waited += pause;
      pause = std::min(2 * pause, kBusyPauseMax);
    }
  }
  // One of several whose bytes contradict the digests: whether they are bad or this node is, shows
  // what the others have.
  bool Doubted(const std::string& node) const {
    return contradicted_.size() > kBadNodesBelieved && contradicted_.count(node) > 0;
  }
  std::string NoPlaceIsLeft() const {
    if (contradicted_.size() > kBadNodesBelieved) {
      return absl::StrCat("what came from ", absl::StrJoin(contradicted_, " and from "),
                          " contradicts its digests: they are hardly all bad, this node's memory "
                          "or network may be (ckptctl verify finds out)");
    }
    return remote_ ? "this node is to read it for all, and has no remote tier (remote.dir)"
                   : "no other node was named";
  }
  bool has_source() const { return stream_ != nullptr || file_ != nullptr; }
  void LeaveSource() {
    stream_.reset();
    file_.reset();
  }

  absl::Status OpenHere() {
    absl::StatusOr<std::shared_ptr<RemotePartFile>> file;
    do {
      file = options_.remote_parts->Open(open_.key, open_.whole, Clock::System()->Now() + kLookHere,
                                         [this] { return control_->cancelled(); });
    } while (absl::IsDeadlineExceeded(file.status()));
    HF_RETURN_IF_ERROR(file.status());
    PullOffer offer;
    offer.image = (*file)->image();
    offer.record = (*file)->record();
    HF_RETURN_IF_ERROR(TakeOffer(std::move(offer), "the remote tier"));
    file_ = *std::move(file);
    by_fabric_ = false;
    return absl::OkStatus();
  }

  // Of the shard that is wanted, and the same as before.
  absl::Status TakeOffer(PullOffer offer, const std::string& of) {
    absl::Status status = CheckIsOf(offer, open_.key, open_.tier);
    if (status.ok() && image_ && !SameContent(*image_, offer.image)) {
      status = absl::DataLossError("its record has other digests than that which came before");
    }
    if (!status.ok()) {
      return Annotate(status, absl::StrCat("parts from ", of));
    }
    offer_ = std::move(offer);
    stream_is_fresh_ = true;
    return absl::OkStatus();
  }

  absl::Status OpenAt(const std::string& node) {
    v1::PullOpen open;
    open.set_job_name(open_.key.job_name);
    open.set_job_uuid(open_.key.id.job.ToBytes());
    open.set_attempt(open_.key.id.attempt);
    open.set_step(open_.key.id.step);
    open.set_rank(open_.key.id.rank);
    if (remote_) {
      open.set_remote_parts(true);
      open.set_world_size(open_.key.world_size);
    }
    open.set_load(!remote_);
    open.set_parts(true);
    if (options_.fabric != nullptr && !remote_) {
      open.set_provider(options_.fabric->fabric().info().provider);
    }
    HF_ASSIGN_OR_RETURN(stream_,
                        options_.pulls->Open(node, std::move(open), kStreamLongest, control_));
    absl::StatusOr<PullOffer> offer = ReadPullOffer(*stream_, kImageBytesMax, control_.get());
    absl::Status status = offer.ok()
                              ? TakeOffer(*std::move(offer), absl::StrCat("'", node, "'"))
                              : Annotate(offer.status(), absl::StrCat("parts from '", node, "'"));
    if (!status.ok()) {
      stream_.reset();
      return status;
    }
    by_fabric_ = options_.fabric != nullptr && offer_->source.regions_size() > 0;
    return absl::OkStatus();
  }

  // Each place once, by each way to it; that it was opened anew in between says nothing of it.
  absl::Status ReadAll(const ReadParts& read) {
    const uint64_t file_bytes = FileBytes(image_->record);
    for (const PartRun& run : read.parts) {
      if (run.offset > file_bytes || run.bytes > file_bytes - run.offset) {
        return absl::OutOfRangeError(absl::StrCat("read parts: the image has ", file_bytes,
                                                  " bytes, wanted are ", run.bytes, " from ",
                                                  run.offset, " on"));
      }
    }
    if (read.contradicted) {
      HF_RETURN_IF_ERROR(ReadElsewhere(read));
    }
    absl::Status status;
    for (size_t failures = 0; failures <= 2 * places_.size() + 1; ++failures) {
      if (!has_source()) {
        HF_RETURN_IF_ERROR(FindSource());
      }
      status = ReadOnce(read);
      if (status.ok() || control_->cancelled()) {
        stream_is_fresh_ = false;
        break;
      }
      if (!std::exchange(stream_is_fresh_, true)) {
        LeaveSource();  // it stood still for long, or the source's patience is at its end
        continue;
      }
      if (by_fabric_ && !absl::IsFailedPrecondition(status)) {
        LogWarning(
            absl::StrCat("fabric: parts from ", places_[place_].node, ": ", Message(status)));
      }
      GoOn();
    }
    return status;
  }

  // What came is not what the record says. Of a file that is read here the next reading may be
  // better: what was kept of it may have been damaged in memory.
  absl::Status ReadElsewhere(const ReadParts& read) {
    if (file_ != nullptr) {
      for (const PartRun& run : read.parts) {
        options_.remote_parts->Forget(*file_, run.offset, run.bytes);
      }
      return absl::OkStatus();
    }
    const std::string node = places_[place_].node;
    if (!by_fabric_) {
      contradicted_.insert(node);
    }
    GoOn();
    return absl::OkStatus();
  }

  // Another way to the same node, else another place.
  void GoOn() {
    if (by_fabric_ && stream_ != nullptr && !stream_->node_gone()) {
      by_fabric_ = false;
      return;
    }
    LeaveSource();
    place_ = (place_ + 1) % places_.size();
  }

  absl::Status ReadOnce(const ReadParts& read) {
    std::vector<PulledPart> parts;
    for (const PartRun& run : read.parts) {
      parts.push_back({run.offset, memory_->bytes().subspan(run.place, run.bytes)});
    }
    if (file_ != nullptr) {
      return ReadHere(parts);
    }
    if (by_fabric_) {
      Fabric& fabric = options_.fabric->fabric();
      HF_RETURN_IF_ERROR(PullPartsByFabric(*options_.fabric, *stream_, *offer_, parts,
                                           places_[place_].node, memory_->RegisteredWith(fabric),
                                           *control_));
    } else {
      HF_RETURN_IF_ERROR(PullPartsByStream(*stream_, parts, *control_));
    }
    // (Files in the remote tier are never filled anew.)
    return remote_ ? absl::OkStatus() : ConfirmPull(*stream_, AfterConfirm::kGoesOn);
  }

  absl::Status ReadHere(const std::vector<PulledPart>& parts) {
    RemoteParts& remote = *options_.remote_parts;
    for (const PulledPart& part : parts) {
      remote.Want(file_, part.offset, part.into.size());
    }
    for (const PulledPart& part : parts) {
      HF_RETURN_IF_ERROR(remote.Read(file_, part.offset, part.into,
                                     Clock::System()->Now() + kReadHereLongest,
                                     [this] { return control_->cancelled(); }));
    }
    return absl::OkStatus();
  }

  const Options& options_;
  const OpenDurable open_;
  const bool remote_;
  const std::vector<Place> places_;
  const std::shared_ptr<TransferControl> control_ = std::make_shared<TransferControl>();
  std::thread thread_;
  std::atomic<bool> done_{false};
  Mutex mutex_;
  CondVar changed_;
  std::optional<ReadParts> wanted_ GUARDED_BY(mutex_);
  bool ended_ GUARDED_BY(mutex_) = false;
  // The thread's own.
  std::unique_ptr<PartMemory> memory_;
  std::unique_ptr<PullStream> stream_;    // to a node
  std::shared_ptr<RemotePartFile> file_;  // or here; both null: none is open
  bool failed_here_ = false;              // what failed last was to open it here
  std::set<std::string> contradicted_;    // nodes of which nothing came that fits its digests
  bool stream_is_fresh_ = true;           // nothing was read over it yet
  size_t place_ = 0;                      // where that is, or what is tried next
  bool by_fabric_ = false;
  std::optional<PullOffer> offer_;
  std::optional<RecordAndLayout> image_;  // as the client was told
};

PartReader::PartReader(Options options) : options_(std::move(options)) {}

PartReader::~PartReader() {
  for (const auto& [drain, shard] : shards_) {
    shard->End();  // all at once, not one after the other
  }
}

void PartReader::Open(OpenDurable action) {
  const DrainId drain = action.drain;
  auto shard = std::make_unique<Shard>(options_, std::move(action));
  if (!shard->Begin()) {
    return options_.post(
        DurableOpened{drain,
                      absl::UnavailableError("no thread is to be had to read from other nodes"),
                      false,
                      {},
                      nullptr});
  }
  shards_[drain] = std::move(shard);
}

void PartReader::Read(ReadParts action) {
  const auto found = shards_.find(action.opened);
  if (found != shards_.end()) {
    found->second->Read(std::move(action));
  }
}

// (Its thread may be in a call that takes a moment to come back.)
void PartReader::End(DrainId opened) {
  const auto found = shards_.find(opened);
  if (found != shards_.end()) {
    found->second->End();
    ending_[next_ending_++] = std::move(found->second);
    shards_.erase(found);
  }
}

void PartReader::Reap() {
  std::erase_if(ending_, [](const auto& shard) { return shard.second->done(); });
}

}  // namespace holdfast
