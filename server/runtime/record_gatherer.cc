#include "server/runtime/record_gatherer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/status.h"
#include "server/peers/pull_client.h"
#include "server/runtime/passed_files.h"
#include "server/runtime/sealed_memory.h"

namespace holdfast {
namespace {

constexpr size_t kHeadBytes = 16;

// As holdfast.v1.StepRecords has it.
std::string HeadOf(Rank rank, TierKind tier, uint64_t bytes) {
  const auto number = [](TierKind of) -> uint32_t {
    switch (of) {
      case TierKind::kMemory:
        return v1::TIER_MEMORY;
      case TierKind::kNvme:
        return v1::TIER_NVME;
      case TierKind::kPeer:
        return v1::TIER_PEER;
      case TierKind::kRemote:
        return v1::TIER_REMOTE;
    }
    return v1::TIER_UNSPECIFIED;
  };
  std::string head;
  const auto put = [&head](uint64_t value, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      head.push_back(static_cast<char>(value >> (8 * i)));
    }
  };
  put(rank, 4);
  put(number(tier), 4);
  put(bytes, 8);
  return head;
}

}  // namespace

struct RecordGatherer::Found {
  // False: there is no room for more.
  bool Add(FoundRecord record) EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    if (record.record.size() > kBytesMax - bytes) {
      full = true;
      return false;
    }
    bytes += record.record.size();
    records.emplace(record.rank, std::move(record));  // whoever has it first
    return true;
  }

  const MonotonicTime until = Clock::System()->Now() + kGatherLongest;
  Mutex mutex;
  std::map<Rank, FoundRecord> records GUARDED_BY(mutex);
  uint64_t bytes GUARDED_BY(mutex) = 0;
  bool full GUARDED_BY(mutex) = false;
};

RecordGatherer::RecordGatherer(Options options) : options_(std::move(options)) {
  for (size_t i = 0; i < kAtOnce; ++i) {
    threads_.emplace_back([this] { Work(); });
  }
}

RecordGatherer::~RecordGatherer() {
  control_->Cancel();
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void RecordGatherer::Gather(GatherRecords action) {
  const uint64_t gather = action.gather;
  {
    const MutexLock lock(mutex_);
    if (!stopping_ && waiting_.size() < kWaitingMax) {
      waiting_.push_back(std::move(action));
      changed_.NotifyAll();
      return;
    }
  }
  options_.post(RecordsGathered{
      gather, absl::ResourceExhaustedError("records of too many steps are asked for at once")});
}

void RecordGatherer::Work() {
  for (;;) {
    GatherRecords next;
    {
      const MutexLock lock(mutex_);
      while (waiting_.empty() && !stopping_) {
        changed_.Wait(mutex_);
      }
      if (stopping_) {
        return;
      }
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    options_.post(Do(next));
  }
}

RecordsGathered RecordGatherer::Do(const GatherRecords& action) {
  Found found;
  AskAll(action, found);
  const MutexLock lock(found.mutex);
  RecordsGathered gathered{action.gather, absl::OkStatus()};
  if (found.full) {
    gathered.status = absl::ResourceExhaustedError(
        absl::StrCat("the records of this step have more than ", kBytesMax, " bytes"));
    return gathered;
  }
  std::vector<std::string> heads;
  heads.reserve(found.records.size());
  std::vector<std::string_view> content;
  for (const auto& [rank, record] : found.records) {
    content.emplace_back(heads.emplace_back(HeadOf(rank, record.tier, record.record.size())));
    content.emplace_back(record.record);
  }
  gathered.bytes = found.bytes + kHeadBytes * found.records.size();
  absl::StatusOr<UniqueFd> file = content.empty()
                                      ? absl::NotFoundError("none of them could be read anywhere")
                                      : SealedMemory("holdfast-records", gathered.bytes, content);
  if (!file.ok()) {
    gathered.status = file.status();
    return gathered;
  }
  gathered.files = std::make_shared<PassedFiles>();
  gathered.files->descriptors.push_back(*std::move(file));
  return gathered;
}

void RecordGatherer::AskAll(const GatherRecords& action, Found& found) {
  std::atomic<size_t> next{0};
  // All nodes gather at the same time: each begins with another one.
  const size_t holders = action.holders.size();
  const size_t first = Crc64(options_.node_name.data(), options_.node_name.size());
  const auto work = [&] {
    for (size_t k = next++; k < holders && !control_->cancelled(); k = next++) {
      const size_t i = (first % holders + k) % holders;
      const absl::Status asked = AskOne(action, action.holders[i], found);
      if (!asked.ok() && !control_->cancelled()) {
        LogDebug(absl::StrCat("records of step ", action.checkpoint.step, " of job '",
                              action.job_name, "' from ", action.holders[i].node, ": ",
                              Message(asked)));
      }
    }
  };
  std::vector<std::thread> threads;
  const size_t wanted = std::min(kNodesAtOnce, action.holders.size());
  try {
    while (threads.size() + 1 < wanted) {
      threads.emplace_back(work);
    }
  } catch (const std::system_error&) {  // those that there are do it
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
}

absl::Status RecordGatherer::AskOne(const GatherRecords& action,
                                    const GatherRecords::Holder& holder, Found& found) {
  const RecordsWanted wanted{action.job,        action.job_name, action.checkpoint,
                             action.world_size, holder.remote,   holder.ranks};
  if (holder.node != options_.node_name) {
    return AskUntilServed(wanted, holder.node, found);
  }
  return options_.local->Read(
      wanted, [&](FoundRecord record) { return found.Add(std::move(record)); },
      [&] { return control_->cancelled() || Clock::System()->Now() > found.until; });
}

absl::Status RecordGatherer::AskUntilServed(const RecordsWanted& wanted, const std::string& node,
                                            Found& found) {
  std::chrono::milliseconds pause{20};
  while (true) {
    const absl::Status asked = AskNode(wanted, node, found);
    if (!absl::IsResourceExhausted(asked) || Clock::System()->Now() > found.until ||
        !Pause(pause)) {
      return asked;
    }
    pause = std::min(2 * pause, std::chrono::milliseconds(640));
  }
}

// False: the daemon stops.
bool RecordGatherer::Pause(std::chrono::milliseconds pause) {
  const auto until = std::chrono::steady_clock::now() + pause;
  const MutexLock lock(mutex_);
  while (!stopping_ && changed_.WaitUntil(mutex_, until)) {
  }
  return !stopping_;
}

absl::Status RecordGatherer::AskNode(const RecordsWanted& wanted, const std::string& node,
                                     Found& found) {
  if (options_.pulls == nullptr) {
    return absl::UnavailableError("this node is alone");
  }
  v1::PullOpen open;
  open.set_job_name(wanted.job_name);
  open.set_job_uuid(wanted.job.ToBytes());
  open.set_attempt(wanted.checkpoint.attempt);
  open.set_step(wanted.checkpoint.step);
  open.set_world_size(wanted.world_size);
  open.set_records(true);
  open.set_remote_parts(wanted.remote);
  for (const auto& [first, count] : wanted.ranks) {
    open.add_first(first);
    open.add_count(count);
  }
  const Duration left = found.until - Clock::System()->Now();
  if (left <= Duration(0)) {
    return absl::DeadlineExceededError("the time to gather them in is up");
  }
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<PullStream> stream,
                      options_.pulls->Open(node, std::move(open), left, control_));
  while (true) {
    HF_ASSIGN_OR_RETURN(v1::PullTold told, stream->Next());
    if (told.has_confirmed()) {
      return absl::OkStatus();
    }
    const v1::PullRecord of = told.record_of();
    if (!told.has_record_of() || of.rank() >= wanted.world_size || of.bytes() > kRecordBytesMax) {
      return absl::DataLossError("it tells something else than whose record comes next");
    }
    FoundRecord record{of.rank(), wanted.remote ? TierKind::kRemote : TierKind::kPeer, {}};
    while (record.record.size() < of.bytes()) {
      HF_ASSIGN_OR_RETURN(told, stream->Next());
      if (told.record().empty() || told.record().size() > of.bytes() - record.record.size()) {
        return absl::DataLossError("a record comes in other pieces than it said");
      }
      record.record.append(told.record());
    }
    if (!found.Add(std::move(record))) {
      return absl::OkStatus();
    }
  }
}

}  // namespace holdfast
