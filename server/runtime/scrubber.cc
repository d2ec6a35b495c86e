#include "server/runtime/scrubber.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "holdfast/v1/state.pb.h"
#include "server/runtime/copy_reading.h"
#include "server/runtime/found_state.h"
#include "server/runtime/verify.h"
#include "server/scrub_part.h"
#include "server/tier_lists.h"

namespace holdfast {
namespace {

constexpr Duration kListEveryMax = std::chrono::minutes(10);  // (of a large job that is work)
constexpr Duration kListEveryMin = std::chrono::milliseconds(200);
constexpr Duration kListAgainAfter = std::chrono::seconds(10);
constexpr int64_t kPostponedMs = 10 * 60 * 1000;
constexpr Duration kStateEvery = std::chrono::minutes(5);
constexpr size_t kUnreadMax = 64;
constexpr Duration kStopLook = std::chrono::milliseconds(200);
constexpr size_t kPartMax = 1'000'000;
constexpr uint64_t kScrubStateBytesMax = uint64_t{256} << 20;

ScrubSchedule::Settings ScrubSettingsOf(const v1::ScrubConfig& config) {
  return {static_cast<int64_t>(config.period_ms()), config.bandwidth_bytes_per_s_max()};
}

ScrubKey ScrubKeyOf(const ReadableShard& shard) {
  return {shard.tier, shard.copy.id};
}

Caller Scrubs() {
  Caller caller;
  caller.uid = ::geteuid();
  return caller;
}

}  // namespace

Scrubber::Scrubber(AdminContext& context, Options options)
    : context_(context),
      options_(std::move(options)),
      pacer_(std::make_shared<Pacer>(options_.config.bandwidth_bytes_per_s_max(), options_.gate)),
      schedule_(ScrubSettingsOf(options_.config)) {}

Scrubber::~Scrubber() {
  Stop();
}

void Scrubber::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Scrubber::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Scrubber::Change(const v1::ScrubConfig& config) {
  pacer_->SetRate(config.bandwidth_bytes_per_s_max());
  MutexLock lock(mutex_);
  schedule_.Change(ScrubSettingsOf(config));
  changed_settings_ = true;
  changed_.NotifyAll();
}

void Scrubber::NoteVerified(const ReadableShard& shard) {
  MutexLock lock(mutex_);
  schedule_.Verified(ScrubKeyOf(shard), options_.clock->UnixMillis());
  unread_.erase(ScrubKeyOf(shard));
}

void Scrubber::NoteUnread(const ScrubKey& key, const std::string& why) {
  if (unread_.size() < kUnreadMax || unread_.count(key) > 0) {
    unread_[key] = why;
  }
}

std::string Scrubber::Problem(int64_t now_unix_ms) {
  std::vector<std::string> problems{schedule_.Problem(now_unix_ms), unlisted_};
  if (!unread_.empty()) {
    problems.push_back(unread_.begin()->second);
  }
  if (unread_.size() > 1) {
    problems.push_back(absl::StrCat(unread_.size() == kUnreadMax ? "at least " : "",
                                    unread_.size() - 1, " more could not be read"));
  }
  std::erase(problems, "");
  return absl::StrJoin(problems, "; ");
}

void Scrubber::Fill(v1::ScrubStatus& status) {
  const int64_t now = options_.clock->UnixMillis();
  MutexLock lock(mutex_);
  const ScrubSchedule::Settings& settings = schedule_.settings();
  status.set_period_ms(static_cast<uint64_t>(settings.period_ms));
  status.set_bandwidth_bytes_per_s_max(settings.bytes_per_s_max);
  status.set_copies(schedule_.copies());
  status.set_bytes(schedule_.bytes());
  status.set_oldest_unix_ms(schedule_.oldest().value_or(0));
  const std::optional<ScrubSchedule::Choice> next = schedule_.Next(now);
  status.set_due_unix_ms(next ? next->start_unix_ms : 0);
  status.set_reading(reading_);
  status.set_overdue(schedule_.Overdue(now));
  status.set_problem(Problem(now));
  status.set_bytes_read(bytes_read_);
  status.set_copies_read(copies_read_);
  status.set_copies_bad(copies_bad_);
}

// A period of seconds (tests have such) is not kept by looking once a minute.
Duration Scrubber::ListEvery() {
  const Duration part = std::chrono::milliseconds(schedule_.settings().period_ms / 100);
  return std::clamp(part, kListEveryMin, kListEveryMax);
}

bool Scrubber::Wait(Duration at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  MutexLock lock(mutex_);
  while (!stopping_ && !changed_settings_) {
    if (!changed_.WaitUntil(mutex_, until)) {
      break;
    }
  }
  changed_settings_ = false;
  return !stopping_;
}

void Scrubber::Run() {
  LoadState();
  for (bool goes_on = true; goes_on;) {
    Duration wait{};
    bool off = false;
    Duration list_every{};
    {
      MutexLock lock(mutex_);
      off = schedule_.settings().period_ms == 0;
      list_every = ListEvery();
    }
    const MonotonicTime now = options_.clock->Now();
    if (!off && (listed_ == MonotonicTime{} || listed_ + list_every <= now)) {
      if (!List()) {
        goes_on = Wait(std::min(kListAgainAfter, list_every));
        continue;
      }
      listed_ = now;
    }
    TellProblem();
    {
      MutexLock lock(mutex_);
      const int64_t unix_ms = options_.clock->UnixMillis();
      const std::optional<ScrubSchedule::Choice> next = schedule_.Next(unix_ms);
      wait = off ? std::chrono::hours(1) : list_every;
      if (next) {
        wait = std::min<Duration>(
            wait, std::chrono::milliseconds(std::max<int64_t>(next->start_unix_ms - unix_ms, 0)));
      }
      goes_on = !stopping_;
    }
    if (goes_on && wait == Duration{}) {
      ReadNext();
    } else if (goes_on) {
      goes_on = Wait(wait);
    }
    SaveState(false);
  }
  SaveState(true);
}

bool Scrubber::List() {
  absl::StatusOr<AdminAnswer> answer =
      context_.gateway->Ask(ListCopies{}, Scrubs(), context_.request_timeout);
  auto* listed = answer.ok() ? std::get_if<ListedShards>(&answer->reply) : nullptr;
  if (listed != nullptr && options_.remote) {
    for (const std::string& job : listed->hosted_elsewhere) {
      for (ReadableShard& shard : PartOf(job)) {
        listed->shards.push_back(std::move(shard));
      }
    }
  }
  MutexLock lock(mutex_);
  unlisted_.clear();
  if (listed == nullptr) {
    unlisted_ = absl::StrCat("what there is to read is not known: ", Message(answer.status()));
    return false;
  }
  std::vector<ScrubCopy> copies;
  there_.clear();
  for (const ReadableShard& shard : listed->shards) {
    copies.push_back({ScrubKeyOf(shard), shard.copy.image_bytes, shard.copy.sealed_unix_ms,
                      shard.known_unix_ms, shard.read_unix_ms});
    there_[ScrubKeyOf(shard)] = shard;
  }
  schedule_.SetCopies(copies, options_.clock->UnixMillis());
  for (auto unread = unread_.begin(); unread != unread_.end();) {
    unread = there_.count(unread->first) > 0 ? std::next(unread) : unread_.erase(unread);
  }
  return true;
}

std::vector<ReadableShard> Scrubber::PartOf(const std::string& job) {
  std::vector<ReadableShard> part;
  v1::PlanScrubRequest request;
  request.set_job(job);
  request.set_reader(context_.node_name);
  for (bool more = true; more;) {
    absl::StatusOr<v1::PlanScrubReply> reply = PlanScrub(context_, Scrubs(), request);
    if (absl::IsNotFound(reply.status())) {
      return {};
    }
    if (!reply.ok()) {  // the host is away, or moves: what there was counts as still there
      return KnownOf(job);
    }
    const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(reply->job_uuid());
    more = uuid.ok() && reply->more() && reply->copies_size() > 0 && part.size() < kPartMax;
    for (const v1::ScrubCopy& copy : reply->copies()) {
      if (uuid.ok()) {
        part.push_back(InRemote(job, *uuid, copy));
      }
    }
    if (more) {
      *request.mutable_after() = *reply->copies().rbegin();
    }
  }
  return part;
}

std::vector<ReadableShard> Scrubber::KnownOf(const std::string& job) {
  std::vector<ReadableShard> known;
  MutexLock lock(mutex_);
  for (const auto& [key, shard] : there_) {
    if (key.tier == TierKind::kRemote && shard.copy.job_name == job) {
      known.push_back(shard);
    }
  }
  return known;
}

void Scrubber::ReadNext() {
  ReadableShard shard;
  {
    MutexLock lock(mutex_);
    const std::optional<ScrubSchedule::Choice> next = schedule_.Next(options_.clock->UnixMillis());
    const auto found = next ? there_.find(next->copy.key) : there_.end();
    if (found == there_.end()) {
      if (next) {
        schedule_.Gone(next->copy.key);
      }
      return;
    }
    shard = found->second;
    reading_ = absl::StrCat(shard.copy.job_name, " step ", shard.copy.id.step, " rank ",
                            shard.copy.id.rank, " in ", ToAbsl(TierName(shard.tier)));
  }
  ReadCopy(shard);
  MutexLock lock(mutex_);
  reading_.clear();
}

void Scrubber::ReadCopy(const ReadableShard& shard) {
  const std::unique_ptr<VerifyRun> run =
      BeginVerify(context_, Scrubs(), VerifyHow{shard.copy.job_name, false, pacer_}, {shard});
  v1::VerifyProgress progress;
  uint64_t bad = 0;
  uint64_t bytes = 0;
  MonotonicTime got_on = options_.clock->Now();
  bool stalled = false;
  for (bool done = false; !done;) {
    done = run->WaitFor(kStopLook, &progress);
    bad += static_cast<uint64_t>(progress.bad_size());
    const MonotonicTime now = options_.clock->Now();
    // (What waits for the pacer waits for its turn, and hangs nowhere. Nobody else takes from it.)
    if (progress.bytes_done() != bytes || pacer_->waiting() > 0) {
      bytes = progress.bytes_done();
      got_on = now;
    }
    stalled = stalled || (!done && now - got_on >= options_.stall_after);
    MutexLock lock(mutex_);
    if (stopping_ || stalled) {
      run->Cancel();
    }
  }
  const absl::Status result = run->result();
  const int64_t now = options_.clock->UnixMillis();
  MutexLock lock(mutex_);
  bytes_read_ += progress.bytes_done();
  copies_bad_ += bad;
  if (stalled && !stopping_) {
    NoteUnread(ScrubKeyOf(shard),
               absl::StrCat("reading ", reading_, " gets nowhere; what lies there is read later"));
    PostponeTier(shard.tier);
  } else if (!result.ok()) {
    NoteUnread(ScrubKeyOf(shard), Message(result));
    schedule_.Postpone(ScrubKeyOf(shard), now + kPostponedMs);
  } else if (progress.shards_checked() > 0) {
    ++copies_read_;
    schedule_.Verified(ScrubKeyOf(shard), now);
    unread_.erase(ScrubKeyOf(shard));
  } else if (!stopping_) {  // it left before its turn came, or is listed and could not be held
    schedule_.Postpone(ScrubKeyOf(shard), now + kPostponedMs);
  }
}

void Scrubber::PostponeTier(TierKind tier) {
  const int64_t until = options_.clock->UnixMillis() + kPostponedMs;
  for (const auto& [key, shard] : there_) {
    if (key.tier == tier) {
      schedule_.Postpone(key, until);
    }
  }
}

void Scrubber::TellProblem() {
  std::string problem;
  {
    MutexLock lock(mutex_);
    problem = schedule_.Problem(options_.clock->UnixMillis());
  }
  // (How many copies it are, and for how long, changes all the time.)
  if (problem.empty() != told_.empty()) {
    options_.tell(problem);
  }
  told_ = problem;
}

// ---- What outlives the daemon ----

// Losing it costs reading copies earlier, or later, than need be, once.
void Scrubber::LoadState() {
  const absl::StatusOr<std::string> bytes =
      ReadFile(*options_.env, options_.state_path, kScrubStateBytesMax);
  if (absl::IsNotFound(bytes.status())) {
    return;
  }
  v1::ScrubState state;
  if (!bytes.ok() || !state.ParseFromString(*bytes)) {
    return LogWarning(absl::StrCat("'", options_.state_path,
                                   "': when copies were read last is not "
                                   "known any more, and counts from now on",
                                   bytes.ok() ? "" : ": " + Message(bytes.status())));
  }
  std::map<ScrubKey, int64_t> known;
  for (const v1::ScrubState::Copy& copy : state.copies()) {
    const absl::StatusOr<JobUuid> job = JobUuid::FromBytes(copy.job_uuid());
    const auto* const tier =
        std::find_if(std::begin(kAllTiers), std::end(kAllTiers),
                     [&](TierKind each) { return TierName(each) == copy.tier(); });
    const int64_t now = options_.clock->UnixMillis();
    const bool sound = copy.read_unix_ms() > 0 && copy.read_unix_ms() <= now;
    if (job.ok() && tier != std::end(kAllTiers) && sound) {
      known[{*tier, {*job, copy.attempt(), copy.step(), copy.rank()}}] = copy.read_unix_ms();
    }
  }
  MutexLock lock(mutex_);
  schedule_.Remember(std::move(known));
}

void Scrubber::SaveState(bool now) {
  const MonotonicTime time = options_.clock->Now();
  if (!now && saved_ + kStateEvery > time) {
    return;
  }
  saved_ = time;
  v1::ScrubState state;
  {
    MutexLock lock(mutex_);
    for (const auto& [key, at] : schedule_.Known()) {
      v1::ScrubState::Copy& copy = *state.add_copies();
      copy.set_tier(std::string(TierName(key.tier)));
      copy.set_job_uuid(key.shard.job.ToBytes());
      copy.set_attempt(key.shard.attempt);
      copy.set_step(key.shard.step);
      copy.set_rank(key.shard.rank);
      copy.set_read_unix_ms(at);
    }
  }
  const absl::Status written =
      WriteFileAtomically(*options_.env, options_.state_path, state.SerializeAsString());
  if (!written.ok()) {
    LogWarning(
        absl::StrCat("when copies were read last could not be written down: ", Message(written)));
  }
}

}  // namespace holdfast
