#include "client-lib/src/job_core.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_guard.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/slot_copies.h"
#include "client-lib/src/worker_pool.h"

namespace holdfast::client {
namespace {

constexpr Milliseconds kLeaveTime{2000};
// Of Preempted: for a connection that was lost, and in all. The daemon answers within 2 s; a moment
// more for the answer's way, since whoever was told and does not get it ends without the others.
constexpr Milliseconds kJoinAgain{1000};
constexpr Milliseconds kStandMax{2250};
// However little time is left: a daemon that does its work answers in less.
constexpr Milliseconds kAskMin{100};
constexpr Milliseconds kBetweenTries{20};
// What took so long was waiting for nothing.
constexpr Milliseconds kHeldUp{100};
// It is not asked again so soon after it has kept a rank waiting for nothing; unless it says
// something before, and has not done the same just before.
constexpr Milliseconds kAskAgain{10'000};
// A copy ends by itself: its exchanges have deadlines.
constexpr Milliseconds kCopyAlwaysEnds = std::chrono::hours(24 * 365);
constexpr uint32_t kReservedSlotsMax = 1024;
// What SaveOptions::copy_first may come to without a slot at hand.
constexpr uint64_t kSetAsideBytesMax = 16 << 20;
// For lines about calls that wait: who has the turn, and what is said when it has just become free.
constexpr char kNoOther[] = "an earlier call in this process has just ended";
constexpr char kReserving[] = "a reservation of slots";
constexpr char kRestoring[] = "a restore";
constexpr char kLeaving[] = "leaving the job";

std::string OfStep(uint64_t step) {
  return absl::StrCat("the save of step ", step);
}

// Why a restore does not go on, if its daemon does its work.
std::string WhyItWaits(const std::string& job, const RestoreProgress& now) {
  const std::string see = absl::StrCat(": see `ckptctl status ", job, "`");
  if (now.loading) {
    return absl::StrCat("nothing more of step ", now.step, " has been read", see);
  }
  if (now.attempt != 0) {
    return absl::StrCat("the other ranks have not all loaded step ", now.step, see);
  }
  return absl::StrCat(
      "the other ranks have not all begun to restore, or what may be newer cannot be read yet", see,
      "; to restore an older step: ckptctl restore ", job, " --step N");
}

}  // namespace

struct JobCore::RunningSave {
  // `kept`: called now and then by a caller that runs it itself.
  RunningSave(JobCore& core, SaveRequest wanted, std::shared_ptr<SaveProgress> how_far,
              std::function<void()> kept = {})
      : request(std::move(wanted)),
        progress(std::move(how_far)),
        ended([this, &core, kept = std::move(kept)] {
          if (kept) {
            kept();
          }
          return progress->cancelled() || core.closing_;
        }),
        context{*core.link_,         core.mappings_,         *core.engine_,
                core.call_deadline_, core.silence_deadline_, ended} {
    if (request.objects == nullptr) {
      request.objects = &request.own_objects;
    }
    observer.planned = [&core](std::shared_ptr<const StatePlan> plan) {
      core.plans_.Keep(std::move(plan));
    };
    observer.granted = [&core, this](uint64_t attempt) {
      core.took_part_ = true;
      progress->Granted(attempt);
    };
    observer.first_read = [this] { progress->FirstRead(); };
    observer.copied = [this](uint64_t image_bytes) { progress->Copied(image_bytes); };
  }

  // What became of it, if that is because nobody wanted it any more.
  Status Ended(const Status& status) {
    ended.Look();
    return status.ok() || !ended.hit()
               ? status
               : Status(Code::kAbandoned,
                        absl::StrCat("it was given up before it was sealed; ", status.message()));
  }

  SaveRequest request;
  const std::shared_ptr<SaveProgress> progress;
  Interrupt ended;
  const SaveContext context;
  SaveObserver observer;
  SaveRun run{context, request, observer};
};

JobCore::JobCore(RankIdentity identity, const JobOptions& options)
    : call_deadline_(options.call_deadline),
      silence_deadline_(options.silence_deadline),
      device_deadline_(options.device_deadline),
      interrupted_(options.interrupted),
      warn_(options.warn),
      plans_(identity.rank),
      engine_(MakeCopyEngine(CopyThreads(options.copy_threads))),
      link_(std::make_shared<DaemonLink>(std::move(identity))) {}

std::function<bool()> JobCore::Asks(std::function<Waiting()> waiting) {
  return [this, waiting = std::move(waiting), notice = WaitNotice(),
          began = Deadline::Clock::now()]() mutable {
    const auto kept = Deadline::Clock::now() - began;
    if (const WaitNotice::Next next = notice.Look(kept); next != WaitNotice::Next::kNothing) {
      Tell(next, kept, *link_, warn_, waiting());
    }
    return interrupted_ && interrupted_();
  };
}

// What waits for the turn waits for another call; `why` is what it waits for when it has the turn.
Waiting JobCore::ForTurn(const std::string& what, const std::string& why) {
  const std::string holder = background_.holder();
  return {what, holder == what || holder.empty()
                    ? why
                    : absl::StrCat(holder, " is still under way in this process: see `ckptctl ",
                                   "status ", link_->identity().job, "`")};
}

Status JobCore::Open(Milliseconds wait) {
  Interrupt interrupt(Asks([this]() -> Waiting {
    return {absl::StrCat("joining as rank ", link_->identity().rank),
            "another process may have this rank still, ckptd may not have read nvme or remote yet, "
            "or the job's host is not known yet: see `ckptctl status` and `ckptctl nodes`"};
  }));
  return link_->Open(Deadline::In(wait).Or(interrupt));
}

bool JobCore::Preempted(uint64_t step) {
  last_step_ = AskWhetherLast(step);
  return last_step_;
}

// A daemon that is away or hangs holds no rank up for longer than the others may stand: it is one
// that was told itself that ends then.
bool JobCore::AskWhetherLast(uint64_t step) {
  const bool told = stop_notice_.told();
  const std::optional<Milliseconds> spare = stop_notice_.spare();
  Interrupt interrupt(Asks([this, step]() -> Waiting {
    return {absl::StrCat("preempted(", step, ")"),
            absl::StrCat("the nodes of the job agree on its last step, which takes 2 s at most: "
                         "see `ckptctl status ",
                         link_->identity().job, "`")};
  }));
  Deadline until =
      Deadline::In(spare ? std::clamp(*spare, kAskMin, kStandMax) : kStandMax).Or(interrupt);
  if (!told) {
    until = until.OrSilence(silence_deadline_);
  }
  const Deadline::Clock::time_point began = Deadline::Clock::now();
  const Result<wire::StepReached> reached = AskDaemon(step, told, until);
  if (!reached.ok()) {
    const Deadline::Clock::time_point now = Deadline::Clock::now();
    if (now - began > kHeldUp) {
      or_heard_ = began.time_since_epoch().count() >= ask_again_ && link_->Current() != nullptr;
      ask_again_ = (now + (told ? kJoinAgain : kAskAgain)).time_since_epoch().count();
    }
    link_->SetPassed(step);
    return told || stopped_attempt_ == link_->attempt();
  }
  if (reached->stopping) {
    stop_notice_.LiveUntil(Milliseconds(std::min<uint64_t>(reached->left_ms, INT32_MAX)));
  }
  if (reached->stop) {
    stopped_attempt_ = link_->attempt();
  } else {
    link_->SetPassed(step);
  }
  return reached->stop;
}

Result<wire::StepReached> JobCore::AskDaemon(uint64_t step, bool told, Deadline until) {
  // However slow it was a moment ago: that this process was told is said once.
  const bool news = told && !told_daemon_;
  const std::shared_ptr<Connection> connection = link_->Current();
  const bool hangs = !told && connection != nullptr && connection->Hangs();
  if (hangs || (!news && !MayAsk())) {
    // The others end with a step that nobody is beyond: the daemon hears it when it goes on.
    if (connection && !told) {
      connection->Mention(wire::ReachStep{step, false, 0, step});
    }
    return Status(Code::kUnavailable, "the daemon did not answer a moment ago");
  }
  while (true) {
    Result<wire::StepReached> reached = AskDaemonOnce(step, told, until);
    // Through it the others hear that the job is to end: it may be just being restarted.
    if (!told || reached.status().code() != Code::kUnavailable || until.passed()) {
      return reached;
    }
    std::this_thread::sleep_for(std::min(kBetweenTries, until.left()));
    until.Look();
  }
}

bool JobCore::MayAsk() {
  if (Deadline::Clock::now().time_since_epoch().count() >= ask_again_) {
    return true;
  }
  if (!or_heard_) {
    return false;
  }
  const std::shared_ptr<Connection> connection = link_->Current();
  return connection == nullptr || connection->Answers();
}

Result<wire::StepReached> JobCore::AskDaemonOnce(uint64_t step, bool told, Deadline until) {
  wire::ReachStep reach{step, told, 0, link_->passed()};
  if (told) {
    reach.grace_ms = static_cast<uint64_t>(stop_notice_.left()->count());
  }
  HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                link_->Get(until.Earlier(Deadline::In(kJoinAgain)), Patience::kOnce));
  HF_TRY_ASSIGN(const uint64_t id, connection->Send(reach, until));
  told_daemon_ = told_daemon_ || told;
  Result<Answer<wire::StepReached>> answer = connection->Receive<wire::StepReached>(id, until);
  // One that has the rank stand for longer than there is time does not hang: the save that comes
  // next is not refused for that.
  if (stop_notice_.left()) {
    connection->Forget(id);
  }
  HF_TRY(answer.status());
  return answer->message;
}

Status JobCore::last_failure() const {
  const MutexLock lock(failure_mutex_);
  return last_failure_;
}

// The status as the caller gets it; remembered if it is a failure.
Status JobCore::Noted(uint64_t step, const Status& status) {
  if (status.ok()) {
    return status;
  }
  Status noted = WithContext(status, absl::StrCat("save step ", step));
  if (noted.code() == Code::kDeadlineExceeded) {
    // An exchange with the daemon took too long; to whoever waits for the save that code says: not
    // yet.
    noted = Status(Code::kUnavailable, noted.message());
  }
  failed_saves_.fetch_add(1, std::memory_order_relaxed);
  const MutexLock lock(failure_mutex_);
  last_failure_ = noted;
  return noted;
}

// ---- Saving ----

Result<std::shared_ptr<DeviceFence>> JobCore::FenceFor(const std::vector<Tensor>& tensors,
                                                       const std::vector<DeviceStream>& streams,
                                                       std::optional<Deadline> until) {
  std::set<int32_t> used;
  int32_t last = kHostMemory;
  for (const Tensor& tensor : tensors) {
    if (tensor.device != last && tensor.device >= 0) {
      used.insert(tensor.device);
      last = tensor.device;
    }
  }
  if (used.empty()) {
    return std::shared_ptr<DeviceFence>();
  }
  std::shared_ptr<Devices> devices;
  {
    const MutexLock lock(devices_mutex_);
    if (devices_ == nullptr) {
      HF_TRY_ASSIGN(std::shared_ptr<DeviceDriver> driver, LoadDeviceDriver());
      devices_ = std::make_shared<Devices>(std::move(driver), device_deadline_);
    }
    devices = devices_;
  }
  return DeviceFence::After(std::move(devices), std::move(used), streams, until);
}

// Everything of a save that happens before anybody is asked, but for reading the tensors.
Result<SaveRequest> JobCore::Prepare(uint64_t step, const State& state, const SaveOptions& options,
                                     Deadline waited_for, std::shared_ptr<DeviceFence> fence) {
  SaveRequest request;
  request.step = step;
  request.options = options;
  request.waited_for = waited_for;
  if (const std::optional<Milliseconds> spare = stop_notice_.spare(); last_step_ && spare) {
    request.until = Deadline::In(*spare);
  }
  HF_TRY_ASSIGN(request.plan, plans_.Get(state));
  request.tensors.reserve(state.tensors.size());
  for (const Tensor& tensor : state.tensors) {
    request.tensors.push_back(tensor.data);
  }
  if (fence != nullptr) {
    request.devices.reserve(state.tensors.size());
    for (const Tensor& tensor : state.tensors) {
      request.devices.push_back(tensor.device);
    }
  }
  request.fence = std::move(fence);
  return request;
}

// What may change as soon as SaveAsync returns. A little of what lies in this process's memory is
// copied here and now, so that nobody has to be asked for a slot first; more, and what lies on
// devices, goes into the slot, before anything else does.
Status JobCore::SetAside(const State& state, const std::vector<size_t>& tensors,
                         SaveRequest& request) {
  std::vector<size_t> aside;
  uint64_t bytes = 0;
  for (const size_t i : tensors) {
    if (i >= state.tensors.size()) {
      return Status(Code::kInvalidArgument, absl::StrCat("SaveOptions::copy_first names tensor ", i,
                                                         " of ", state.tensors.size()));
    }
    if (state.tensors[i].device < 0) {
      aside.push_back(i);
      bytes += request.plan->input_bytes[i];
    }
  }
  const bool fits = bytes <= kSetAsideBytesMax;
  if (!fits || aside.size() < tensors.size()) {
    request.first.assign(state.tensors.size(), false);
    for (const size_t i : tensors) {
      request.first[i] = !fits || state.tensors[i].device >= 0;
    }
  }
  if (!fits) {
    return Status();
  }
  if (set_aside_.size() < bytes) {
    set_aside_.resize(bytes);
  }
  std::byte* at = set_aside_.data();
  for (const size_t i : aside) {
    const uint64_t size = request.plan->input_bytes[i];
    if (size != 0) {
      std::memcpy(at, request.tensors[i], size);
    }
    request.tensors[i] = at;
    at += size;
  }
  return Status();
}

Status JobCore::RunSave(RunningSave& save) {
  HF_TRY(save.Ended(save.run.Copy()));
  return save.Ended(save.run.Seal());
}

Status JobCore::Save(uint64_t step, const State& state, const SaveOptions& options) {
  const Deadline waited_for = Deadline::In(options.wait_for_room);
  const auto save = [&]() -> Status {
    HF_TRY_ASSIGN(std::shared_ptr<DeviceFence> fence,
                  FenceFor(state.tensors, options.streams, std::nullopt));
    Interrupt interrupt(Asks([this, step] { return ForTurn(OfStep(step), kNoOther); }));
    HF_TRY_ASSIGN(const Background::Turn turn,
                  background_.Take(OfStep(step), Deadline::Never().Or(interrupt)));
    GiveUpHeld(Status(Code::kAbandoned, absl::StrCat("step ", step, " began in between")));
    HF_TRY_ASSIGN(SaveRequest request, Prepare(step, state, options, waited_for, std::move(fence)));
    request.objects = &state.objects;
    const auto progress = std::make_shared<SaveProgress>(link_, step, interrupted_, warn_);
    RunningSave running(*this, std::move(request), progress,
                        [progress] { progress->Kept(Stage::kSealed); });
    return RunSave(running);
  };
  return Noted(step, save());
}

std::unique_ptr<SaveHandle> JobCore::SaveAsync(uint64_t step, const State& state,
                                               const SaveOptions& options) {
  const Deadline waited_for = Deadline::In(options.wait_for_room);
  auto progress = std::make_shared<SaveProgress>(link_, step, interrupted_, warn_);
  Interrupt interrupt(Asks([this, step] { return ForTurn(OfStep(step), kNoOther); }));
  const auto begin = [&]() -> Status {
    HF_TRY_ASSIGN(const std::shared_ptr<DeviceFence> fence,
                  FenceFor(state.tensors, options.streams, std::nullopt));
    progress->set_fence(fence);
    HF_TRY_ASSIGN(Background::Turn turn,
                  background_.Take(OfStep(step), Deadline::Never().Or(interrupt)));
    GiveUpHeld(Status(Code::kAbandoned, absl::StrCat("step ", step, " began in between")));
    HF_TRY_ASSIGN(SaveRequest request, Prepare(step, state, options, waited_for, fence));
    HF_TRY(SetAside(state, options.copy_first, request));
    if (request.first.empty()) {
      progress->FirstRead();
    }
    request.own_objects = state.objects;
    auto save = std::make_shared<RunningSave>(*this, std::move(request), progress);
    turn.HandTo([this, save, hold = options.hold] {
      if (hold) {
        KeepHeld(save, NoThrow([&]() -> Status { return save->Ended(save->run.Copy()); }));
        return;
      }
      const Status saved = NoThrow([&]() -> Status { return RunSave(*save); });
      save->progress->Finished(Noted(save->request.step, saved));
    });
    return Status();
  };
  if (const Status begun = NoThrow(begin); !begun.ok()) {
    progress->Finished(Noted(step, begun));
  }
  if (!options.copy_first.empty() && !options.return_at_once) {
    static_cast<void>(progress->WaitFirst(kCopyAlwaysEnds).ok());
  }
  return MakeSaveHandle(std::move(progress),
                        options.hold ? weak_from_this() : std::weak_ptr<JobCore>());
}

void JobCore::KeepHeld(std::shared_ptr<RunningSave> save, const Status& copied) {
  if (copied.ok()) {
    held_ = std::move(save);
  } else {
    save->progress->Finished(Noted(save->request.step, copied));
  }
}

void JobCore::GiveUpHeld(const Status& why) {
  if (held_ == nullptr) {
    return;
  }
  const std::shared_ptr<RunningSave> save = std::exchange(held_, nullptr);
  save->run.GiveUp(why);
  save->progress->Finished(Noted(save->request.step, why));
}

Status JobCore::SealHeld(SaveProgress& progress, Deadline deadline) {
  HF_TRY_ASSIGN(Background::Turn turn, background_.Take(OfStep(progress.step()), deadline));
  if (held_ == nullptr || held_->progress.get() != &progress) {
    return Status(Code::kRefused, absl::StrCat("step ", progress.step(),
                                               " is not held any more: it was sealed or given up"));
  }
  turn.HandTo([this, save = std::exchange(held_, nullptr)] {
    const Status sealed = NoThrow([&]() -> Status { return save->Ended(save->run.Seal()); });
    save->progress->Finished(Noted(save->request.step, sealed));
  });
  return Status();
}

// Whatever else has the turn ends soon, or begins with giving up what is held.
Result<Background::Turn> JobCore::TakeHeld(SaveProgress& progress) {
  while (true) {
    Result<Background::Turn> turn =
        background_.Take(OfStep(progress.step()), Deadline::In(Deadline::kBetweenLooks));
    if (turn.status().code() != Code::kDeadlineExceeded || progress.finished()) {
      return turn;
    }
  }
}

void JobCore::DiscardHeld(SaveProgress& progress) {
  if (progress.finished()) {
    return;  // by whoever has the turn now, perhaps
  }
  const Result<Background::Turn> turn = TakeHeld(progress);
  if (turn.ok() && held_ != nullptr && held_->progress.get() == &progress) {
    GiveUpHeld(Status(Code::kAbandoned, "it was held, and given up before it was sealed"));
  }
}

Result<std::shared_ptr<const StagedTensors>> JobCore::StagedOf(SaveProgress& progress) {
  const Result<Background::Turn> turn = TakeHeld(progress);
  if (turn.status().code() == Code::kRefused) {
    return turn.status();
  }
  if (!turn.ok() || held_ == nullptr || held_->progress.get() != &progress) {
    return Status(Code::kRefused, absl::StrCat("step ", progress.step(),
                                               " is not held any more: it was sealed or given up"));
  }
  return MapCopies(held_->run.slot(), held_->run.Copies());
}

// ---- Room ----

Result<ReserveReport> JobCore::Reserve(const State& state, Milliseconds wait) {
  Interrupt interrupt(Asks([this] {
    return ForTurn(kReserving, "ckptd has not made the slots yet: see `ckptctl status`");
  }));
  const Deadline deadline = Deadline::In(wait).Or(interrupt);
  HF_TRY_ASSIGN(const std::shared_ptr<DeviceFence> fence,
                FenceFor(state.tensors, {}, std::nullopt));
  HF_TRY_ASSIGN(const Background::Turn turn, background_.Take(kReserving, deadline));
  GiveUpHeld(Status(Code::kAbandoned, "slots were reserved in between"));
  return ReserveSlots(state, fence.get(), deadline);
}

Result<ReserveReport> JobCore::ReserveSlots(const State& state, DeviceFence* fence,
                                            Deadline deadline) {
  HF_TRY_ASSIGN(std::shared_ptr<const StatePlan> plan, plans_.Get(state));
  if (!FitsObjects(*plan, state.objects)) {
    HF_TRY_ASSIGN(plan, PlanWithObjects(*plan, state.objects, link_->identity().rank));
    plans_.Keep(plan);
  }
  HF_TRY_ASSIGN(const std::shared_ptr<Connection> connection,
                link_->Get(deadline, Patience::kUntilDeadline));
  mappings_.DropUnfit(plan->slot_bytes);
  ReleaseDropped(*connection, mappings_, deadline);
  // 1. Each answer brings at most one slot that is not mapped here yet; the last one brings none.
  std::vector<SlotMapping*> fresh;
  wire::Reserve reserve;
  reserve.slot_bytes = plan->slot_bytes;
  for (uint32_t i = 0; i < kReservedSlotsMax; ++i) {
    reserve.deadline_ms = deadline.DaemonMillis();
    HF_TRY_ASSIGN(const Answer<wire::ReserveReply> answer,
                  connection->Call<wire::ReserveReply>(reserve, deadline));
    const wire::ReserveReply& reply = answer.message;
    if (!reply.descriptor) {
      // 2. With all of them mapped, what takes longer.
      for (size_t slot = 0; slot < fresh.size() && fence != nullptr && !deadline.passed(); ++slot) {
        static_cast<void>(fresh[slot]->Pin(fence->devices()));
      }
      return ReserveReport{reply.ready, reply.wanted, reply.slot_bytes};
    }
    // Mapped in any case: the daemon will not send this slot's descriptor again.
    HF_TRY_ASSIGN(SlotMapping* const mapping,
                  mappings_.Writable(reply.slot, reply.slot_bytes, answer.descriptors));
    if (deadline.passed()) {
      return ReserveReport{reply.ready, reply.wanted, reply.slot_bytes};
    }
    mapping->Populate();
    fresh.push_back(mapping);
  }
  return Status(Code::kInternal,
                absl::StrCat("ckptd went on to send slots after ", kReservedSlotsMax));
}

// ---- Restoring ----

Status JobCore::CheckWanted(const State& state) {
  return state.tensors.empty() ? Status() : plans_.GetForTensors(state.tensors).status();
}

Result<Restored> JobCore::Restore(const RestoreOptions& options, const RestoreRun::Wants& wants,
                                  const State* known, std::vector<Object>& objects) {
  RestoreMeter meter;
  // Whether to go on is asked by saying how far it is, and by asking the program. It waits for as
  // long as nothing is read.
  const auto asks = [this, &meter] {
    return Asks([this, &meter] {
      return ForTurn(kRestoring, WhyItWaits(link_->identity().job, meter.Now()));
    });
  };
  Interrupt interrupt([&, waits = asks(), read = uint64_t{0}]() mutable {
    const RestoreProgress now = meter.Now();
    if (now.bytes != read) {
      read = now.bytes;
      waits = asks();
    }
    return (options.progress && !options.progress(now)) || waits();
  });
  const Deadline deadline = Deadline::In(options.deadline).Or(interrupt);
  std::shared_ptr<DeviceFence> fence;
  if (known != nullptr) {
    HF_TRY_ASSIGN(fence, FenceFor(known->tensors, options.streams, deadline));
  }
  const RestoreRun::Fences fences = [&](const State& wanted) {
    return known != nullptr ? Result<std::shared_ptr<DeviceFence>>(fence)
                            : FenceFor(wanted.tensors, options.streams, deadline);
  };
  HF_TRY_ASSIGN(const Background::Turn turn, background_.Take(kRestoring, deadline));
  if (known != nullptr && !options.adopt_only) {
    HF_TRY(CheckWanted(*known));
  }
  GiveUpHeld(Status(Code::kAbandoned, "a restore began in between"));
  if (took_part_) {
    HF_TRY(link_->NextAttempt(deadline));
    took_part_ = false;
  }
  RestoreRun run(*link_, mappings_, *engine_, options, wants, fences, meter);
  Result<Restored> restored = run.Run(deadline);
  if (restored.ok()) {
    objects = run.TakeObjects();
  } else if (interrupt.hit()) {
    // Nobody waits for the session's answer any more.
    link_->Disconnect(Status(Code::kUnavailable, "the restore was interrupted"));
  }
  if (!restored.ok() && meter.touched()) {
    restored = Status(restored.status().code(),
                      absl::StrCat(restored.status().message(),
                                   "; the tensors may have been written in part: restore again, "
                                   "or do not use them"));
  }
  // "From scratch" is a decision of the attempt, too.
  took_part_ = restored.ok() || restored.status().code() == Code::kNothingToRestore;
  return restored;
}

// When the program is interrupted: what is under way is not waited for any longer than it copies.
Result<Background::Turn> JobCore::TakeLast(Interrupt& interrupt) {
  Result<Background::Turn> turn = background_.Take(kLeaving, Deadline::Never().Or(interrupt));
  if (turn.status().code() != Code::kDeadlineExceeded) {
    return turn;
  }
  closing_ = true;
  link_->Close();
  return background_.Take(kLeaving, Deadline::Never());
}

Status JobCore::Leave() {
  Interrupt interrupt(
      Asks([this] { return ForTurn(kLeaving, "ckptd has not heard of it yet; 2 s at most"); }));
  HF_TRY_ASSIGN(const Background::Turn turn, TakeLast(interrupt));
  GiveUpHeld(Status(Code::kAbandoned, "the job was closed before it was sealed"));
  if (link_->attempt() == 0) {
    return Status();  // never had a place to leave
  }
  if (!mappings_.DropAll()) {
    link_->Close();  // without leaving: the slots are this process's until it ends
    return Status();
  }
  const Deadline deadline = Deadline::In(kLeaveTime).Or(interrupt).OrSilence(silence_deadline_);
  Result<std::shared_ptr<Connection>> connection = link_->Get(deadline, Patience::kOnce);
  if (connection.ok()) {
    ReleaseDropped(**connection, mappings_, deadline);
    static_cast<void>((*connection)->Call<wire::Done>(wire::Leave{}, deadline).ok());
  }
  link_->Close();
  return Status();
}

}  // namespace holdfast::client
