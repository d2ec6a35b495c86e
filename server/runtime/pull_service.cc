#include "server/runtime/pull_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <span>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/fabric_probe.h"
#include "server/runtime/local_records.h"
#include "server/runtime/passed_on.h"
#include "server/runtime/remote_parts.h"
#include "server/runtime/verify.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

using Stream = grpc::ServerReaderWriter<v1::PullTold, v1::PullAsked>;

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), Message(status)};
}

absl::StatusOr<HoldShard> ShardOf(const v1::PullOpen& open) {
  HoldShard hold;
  HF_RETURN_IF_ERROR(CheckJobName(open.job_name()));
  hold.job = open.job_name();
  HF_ASSIGN_OR_RETURN(hold.id.job, JobUuid::FromBytes(open.job_uuid()));
  hold.id.attempt = open.attempt();
  hold.id.step = open.step();
  hold.id.rank = open.rank();
  hold.load = open.load();
  return hold;
}

constexpr uint64_t kPartBytesMax = uint64_t{16} << 20;  // as a reader asks for at a time

absl::Status Gone() {
  return absl::CancelledError("the reader has gone");
}

// Ends calls whose reader has said nothing for too long, or is gone: whoever waits for a word in
// one has no deadline of its own.
class SilenceWatch {
 public:
  SilenceWatch() : thread_([this] { Run(); }) {}
  ~SilenceWatch() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  SilenceWatch(const SilenceWatch&) = delete;
  SilenceWatch& operator=(const SilenceWatch&) = delete;

  struct Call {
    grpc::ServerContext* context;
    const std::function<bool()>* gone;
  };
  using Calls = std::multimap<std::chrono::steady_clock::time_point, Call>;

  // For as long as it lives.
  class Guard {
   public:
    // `gone` is asked each second.
    Guard(SilenceWatch& watch, grpc::ServerContext& call, Duration at_most,
          const std::function<bool()>& gone)
        : watch_(watch) {
      MutexLock lock(watch_.mutex_);
      entry_ =
          watch_.calls_.emplace(std::chrono::steady_clock::now() + at_most, Call{&call, &gone});
      if (entry_ == watch_.calls_.begin()) {
        watch_.changed_.NotifyAll();
      }
    }
    ~Guard() {
      MutexLock lock(watch_.mutex_);
      watch_.calls_.erase(entry_);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    SilenceWatch& watch_;
    Calls::iterator entry_;
  };

 private:
  void Run() {
    MutexLock lock(mutex_);
    while (!stopping_) {
      if (calls_.empty()) {
        changed_.Wait(mutex_);
        continue;
      }
      const auto now = std::chrono::steady_clock::now();
      auto next = now + std::chrono::seconds(1);
      for (const auto& [due, call] : calls_) {
        if (due <= now || (*call.gone)()) {
          call.context->TryCancel();  // (again each second, until it has ended)
        } else {
          next = std::min(next, due);
        }
      }
      changed_.WaitUntil(mutex_, next);
    }
  }

  Mutex mutex_;
  CondVar changed_;
  Calls calls_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

class PullServer::Service final : public v1::Pulls::Service {
 public:
  explicit Service(Options options) : options_(std::move(options)) {}

  grpc::Status Pull(grpc::ServerContext* context, Stream* stream) override {
    // (A stream that nobody ends would hold its slot for ever.)
    if (context->deadline() > std::chrono::system_clock::now() + kPullLongest) {
      return ToGrpc(absl::InvalidArgumentError("pull: it has no deadline, or a late one"));
    }
    Reader reader{*context, *stream, [] { return false; }};
    const absl::Status served = Serve(reader);
    return ToGrpc(Annotate(served, absl::StrCat("pull from ", options_.context->node_name)));
  }

 private:
  struct Reader {
    grpc::ServerContext& call;
    Stream& stream;
    std::function<bool()> gone;
  };

  // (One that is not known yet has just joined.)
  std::function<bool()> GoneWhenNoMember(const std::string& node) const {
    if (options_.is_member == nullptr) {
      return [] { return false; };
    }
    return [this, node, known = options_.is_member(node)]() mutable {
      const bool is_member = options_.is_member(node);
      known = known || is_member;
      return known && !is_member;
    };
  }

  // False: the reader has ended, or has taken nothing for too long.
  bool Say(Reader& reader, const v1::PullTold& told) {
    const SilenceWatch::Guard guard(silence_, reader.call, options_.silence_max, reader.gone);
    return reader.stream.Write(told);
  }

  // What the reader says next; false: it has ended, or says nothing.
  bool Hear(Reader& reader, v1::PullAsked& asked, Duration at_most) {
    const SilenceWatch::Guard guard(silence_, reader.call, at_most, reader.gone);
    return reader.stream.Read(&asked);
  }

  absl::Status Serve(Reader& reader) {
    // 1. Who asks, and for what.
    v1::PullAsked asked;
    if (!Hear(reader, asked, options_.open_wait) || !asked.has_open()) {
      return absl::InvalidArgumentError("the stream begins without saying what is wanted");
    }
    const v1::PullOpen& open = asked.open();
    HF_RETURN_IF_ERROR(options_.check(open.who()));
    reader.gone = GoneWhenNoMember(open.who().from());
    const bool no_slot = open.records() || open.remote_parts();
    std::atomic<size_t>& serving = no_slot ? serving_parts_ : serving_;
    const size_t most = no_slot ? kPartsServedMax : kPullsServedMax;
    const absl::Cleanup leave = [&serving] { --serving; };
    if (++serving > most) {
      return absl::ResourceExhaustedError(
          absl::StrCat(most, " shards are being read from it already; try again"));
    }
    const bool in_parts = open.parts() && !no_slot;
    const absl::Cleanup leave_parts = [this, in_parts] { serving_in_parts_ -= in_parts ? 1 : 0; };
    serving_in_parts_ += in_parts ? 1 : 0;
    if (in_parts && serving_in_parts_ > kPullsInPartsMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("parts of ", kPullsInPartsMax, " shards are being read from it already"));
    }
    if (open.probe_bytes() > 0) {
      return ServeProbe(reader, open);
    }
    HF_ASSIGN_OR_RETURN(const HoldShard wanted, ShardOf(open));
    if (open.remote_file()) {
      return ServeRemoteFile(reader, wanted.id);
    }
    if (open.records() && options_.records != nullptr) {
      return ServeRecords(reader, open, wanted);
    }
    if (open.remote_parts()) {
      return ServeRemoteParts(reader, {wanted.id, wanted.job, open.world_size()});
    }

    // 2. The slot, held until the stream has ended.
    HF_ASSIGN_OR_RETURN(const AdminAnswer held, Hold(reader, wanted));
    const auto* shards = std::get_if<ReadableShards>(&held.reply);
    if (shards == nullptr || shards->shards.size() != 1 || held.lease == nullptr) {
      return absl::InternalError("the daemon answered another question");
    }
    const ReadableShard& shard = shards->shards[0];
    SlotStore& slots = *options_.context->store;
    absl::StatusOr<std::string> record = slots.ReadRecord(shard.slot);
    absl::StatusOr<std::unique_ptr<File>> image = slots.OpenImageFile(shard.slot, false);
    if (const absl::Status both = record.ok() ? image.status() : record.status(); !both.ok()) {
      if (IsBadCopy(both)) {
        options_.context->gateway->ReportBadCopy(shard, Message(both));
      }
      return absl::NotFoundError(both.message());
    }
    HF_SYNC_POINT("daemon.pull.held");

    // 3. What there is, and then what the reader asks for.
    v1::PullTold told;
    v1::PullSource& source = *told.mutable_source();
    source.set_generation(shard.copy.generation);
    source.set_image_bytes(shard.copy.image_bytes);
    if (options_.fabric != nullptr) {
      options_.fabric->Offer(open.provider(), shard, source);
    }
    // (Who reads by itself says nothing until it has all.)
    const Duration silence = source.regions_size() > 0 ? kPullLongest : options_.silence_max;
    HF_RETURN_IF_ERROR(Tell(reader, std::move(told), *record));
    const auto read = [&image](uint64_t offset, std::span<std::byte> into) {
      return (*image)->ReadAt(offset, into);
    };
    while (Hear(reader, asked, silence)) {
      if (asked.has_confirm()) {
        HF_RETURN_IF_ERROR(slots.Confirm(shard.slot, shard.copy.generation, **image));
        v1::PullTold confirmed;
        confirmed.mutable_confirmed();
        if (!Say(reader, confirmed)) {
          return Gone();
        }
        if (!asked.confirm().goes_on()) {
          return absl::OkStatus();
        }
        continue;
      }
      if (!asked.has_read()) {
        return absl::InvalidArgumentError("a question that this version does not know");
      }
      HF_RETURN_IF_ERROR(Send(reader, asked.read(), shard.copy.image_bytes, read));
    }
    return Gone();
  }

  // What has to be brought into memory first may take minutes: the reader hears that it comes.
  absl::StatusOr<AdminAnswer> Hold(Reader& reader, const HoldShard& wanted) {
    for (;;) {
      absl::StatusOr<AdminAnswer> held =
          options_.context->gateway->Ask(wanted, Caller{}, options_.hold_wait);
      const bool comes =
          wanted.load && IsUnanswered(held.status()) && absl::IsDeadlineExceeded(held.status());
      if (!comes) {
        return held;
      }
      v1::PullTold told;
      told.mutable_loading();
      if (!Say(reader, told)) {
        return Gone();
      }
    }
  }

  // What this node reads from the remote tier at this time, as it comes.
  absl::Status ServeRemoteFile(Reader& reader, const ShardId& shard) {
    const auto gone = [&reader] { return reader.call.IsCancelled(); };
    const auto until = [] { return Clock::System()->Now() + kPassedOnWait; };
    HF_ASSIGN_OR_RETURN(const std::shared_ptr<PassedOnFile> file,
                        options_.passed_on->Await(shard, until(), gone));
    v1::PullTold told;
    told.mutable_source()->set_image_bytes(file->bytes());
    HF_RETURN_IF_ERROR(Tell(reader, std::move(told), ""));
    const auto read = [&](uint64_t offset, std::span<std::byte> into) {
      return file->Read(offset, into, until(), gone);
    };
    for (v1::PullAsked asked; Hear(reader, asked, options_.silence_max);) {
      if (!asked.has_read()) {
        return absl::InvalidArgumentError("a question that this version does not know");
      }
      HF_SYNC_POINT("daemon.pull.passed_on");
      HF_RETURN_IF_ERROR(Send(reader, asked.read(), file->bytes(), read));
    }
    return Gone();
  }

  // Of the ranks that are named; what cannot be read is left out.
  absl::Status ServeRecords(Reader& reader, const v1::PullOpen& open, const HoldShard& of) {
    if (open.first_size() != open.count_size()) {
      return absl::InvalidArgumentError("runs of ranks in columns of different lengths");
    }
    RecordsWanted wanted{of.id.job,           of.job, of.id.checkpoint(), open.world_size(),
                         open.remote_parts(), {}};
    uint64_t ranks = 0;
    for (int i = 0; i < open.first_size(); ++i) {
      wanted.ranks.emplace_back(open.first(i), open.count(i));
      ranks += open.count(i);
    }
    if (ranks > kWorldSizeMax || ranks > open.world_size()) {
      return absl::InvalidArgumentError("more ranks than the step has");
    }
    bool heard = true;
    HF_RETURN_IF_ERROR(options_.records->Read(
        wanted,
        [&](const FoundRecord& found) {
          v1::PullTold told;
          v1::PullRecord& next = *told.mutable_record_of();
          next.set_rank(found.rank);
          next.set_tier(found.tier == TierKind::kNvme ? v1::TIER_NVME : v1::TIER_MEMORY);
          next.set_bytes(found.record.size());
          heard = Say(reader, told);
          for (size_t at = 0; heard && at < found.record.size(); at += kPullChunkBytes) {
            told.set_record(found.record.substr(at, kPullChunkBytes));
            heard = Say(reader, told);
          }
          return heard;
        },
        [&reader] { return reader.call.IsCancelled(); }));
    v1::PullTold told;
    told.mutable_confirmed();
    return heard && Say(reader, told) ? absl::OkStatus() : Gone();
  }

  // Parts of a file in the remote tier, which this node reads for all that want some of it.
  absl::Status ServeRemoteParts(Reader& reader, const CopyKey& key) {
    if (options_.remote_parts == nullptr) {
      return absl::FailedPreconditionError("it has no remote tier (remote.dir)");
    }
    RemoteParts& parts = *options_.remote_parts;
    const auto gone = [&reader] { return reader.call.IsCancelled(); };
    absl::StatusOr<std::shared_ptr<RemotePartFile>> file;
    do {
      file = parts.Open(key, /*whole=*/false, Clock::System()->Now() + options_.hold_wait, gone);
      v1::PullTold told;
      told.mutable_loading();
      if (absl::IsDeadlineExceeded(file.status()) && !Say(reader, told)) {
        return Gone();
      }
    } while (absl::IsDeadlineExceeded(file.status()));
    HF_RETURN_IF_ERROR(file.status());
    v1::PullTold told;
    told.mutable_source()->set_image_bytes((*file)->image().record.image_bytes);
    HF_RETURN_IF_ERROR(Tell(reader, std::move(told), (*file)->record()));
    const auto read = [&](uint64_t offset, std::span<std::byte> into) {
      return parts.Read(*file, offset, into, Clock::System()->Now() + kPassedOnWait, gone);
    };
    for (v1::PullAsked asked; Hear(reader, asked, options_.silence_max);) {
      if (!asked.has_read()) {
        return absl::InvalidArgumentError("a question that this version does not know");
      }
      const v1::PullRead& part = asked.read();
      if (part.bytes() > kPartBytesMax || part.offset() > (*file)->bytes() ||
          part.bytes() > (*file)->bytes() - part.offset()) {
        return absl::InvalidArgumentError("more is wanted than the file has, or at a time");
      }
      HF_SYNC_POINT("daemon.pull.remote_parts");
      parts.Want(*file, asked.read().offset(), asked.read().bytes());  // all of it at once
      HF_RETURN_IF_ERROR(Send(reader, asked.read(), (*file)->bytes(), read));
    }
    return Gone();
  }

  // Memory to measure with, for as long as the stream is open.
  absl::Status ServeProbe(Reader& reader, const v1::PullOpen& open) {
    if (++probes_ > kProbesServedMax) {
      --probes_;
      return absl::ResourceExhaustedError(
          absl::StrCat(kProbesServedMax, " are measuring already; try again"));
    }
    const absl::Cleanup leave = [this] { --probes_; };
    HF_ASSIGN_OR_RETURN(const std::unique_ptr<FabricProbe> probe,
                        FabricProbe::Make(options_.fabric, open.probe_bytes()));
    v1::PullTold told;
    told.mutable_source()->set_image_bytes(probe->image().size());
    probe->Offer(options_.fabric, open.provider(), *told.mutable_source());
    HF_RETURN_IF_ERROR(Tell(reader, std::move(told), probe->record()));
    const auto read = [&probe](uint64_t offset, std::span<std::byte> into) {
      std::copy_n(probe->image().begin() + static_cast<ptrdiff_t>(offset), into.size(),
                  into.begin());
      return absl::OkStatus();
    };
    for (v1::PullAsked asked; Hear(reader, asked, options_.silence_max);) {
      if (!asked.has_read()) {
        return absl::InvalidArgumentError("a question that this version does not know");
      }
      HF_RETURN_IF_ERROR(Send(reader, asked.read(), probe->image().size(), read));
    }
    return Gone();
  }

  absl::Status Tell(Reader& reader, v1::PullTold told, const std::string& record) {
    told.mutable_source()->set_record_bytes(record.size());
    if (!Say(reader, told)) {
      return Gone();
    }
    for (size_t at = 0; at < record.size(); at += kPullChunkBytes) {
      told.set_record(record.substr(at, kPullChunkBytes));
      if (!Say(reader, told)) {
        return Gone();
      }
    }
    return absl::OkStatus();
  }

  // (By pread: a file that is cut short is an error, and no SIGBUS.)
  template <typename ReadAt>
  absl::Status Send(Reader& reader, const v1::PullRead& read, uint64_t image_bytes,
                    const ReadAt& read_at) {
    if (read.offset() > image_bytes || read.bytes() > image_bytes - read.offset()) {
      return absl::InvalidArgumentError("more is wanted than the image has");
    }
    v1::PullTold told;
    for (uint64_t done = 0; done < read.bytes();) {
      const uint64_t bytes = std::min<uint64_t>(kPullChunkBytes, read.bytes() - done);
      std::string& data = *told.mutable_data();
      data.resize(bytes);
      HF_RETURN_IF_ERROR(read_at(read.offset() + done, std::as_writable_bytes(std::span(data))));
      if (!Say(reader, told)) {
        return Gone();
      }
      done += bytes;
    }
    return absl::OkStatus();
  }

  const Options options_;
  SilenceWatch silence_;
  std::atomic<size_t> serving_{0};
  std::atomic<size_t> serving_parts_{0};
  std::atomic<size_t> serving_in_parts_{0};
  std::atomic<size_t> probes_{0};
};

PullServer::PullServer(Options options) : service_(std::make_unique<Service>(std::move(options))) {}

PullServer::~PullServer() = default;

grpc::Service* PullServer::service() {
  return service_.get();
}

}  // namespace holdfast
