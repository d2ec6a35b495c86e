#include "client-lib/src/save.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/fault_guard.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "client-lib/src/errors.h"
#include "tiers/image/record.h"

namespace holdfast::client {
namespace {

constexpr size_t kReasonBytesMax = 2048;
constexpr Milliseconds kGiveUpTime{
    1000};  // for telling the daemon about a save that failed already
constexpr size_t kSlotsPerRelease = 1024;
// Between tries to reach a daemon that is away.
constexpr Milliseconds kFirstPause{20};
constexpr Milliseconds kLongestPause{500};

}  // namespace

void ReleaseDropped(Connection& connection, SlotMappings& mappings, Deadline deadline) {
  const std::vector<uint32_t> dropped = mappings.TakeDropped();
  for (size_t i = 0; i < dropped.size(); i += kSlotsPerRelease) {
    wire::ReleaseSlots release;
    release.slots.assign(
        dropped.begin() + static_cast<ptrdiff_t>(i),
        dropped.begin() + static_cast<ptrdiff_t>(std::min(i + kSlotsPerRelease, dropped.size())));
    if (!connection.Call<wire::Done>(release, deadline).ok()) {
      mappings.PutBackDropped(release.slots);
    }
  }
}

const void* SaveRun::Source(size_t input) const {
  const size_t tensors = request_.tensors.size();
  return input < tensors ? request_.tensors[input]
                         : (*request_.objects)[input - tensors].bytes.data();
}

int32_t SaveRun::DeviceOf(size_t input) const {
  return input < request_.devices.size() ? request_.devices[input] : kHostMemory;
}

Status SaveRun::Copy() {
  // 1. What can be refused without anyone else is.
  HF_TRY(Plan());
  // 2. A slot.
  HF_TRY(Begin());
  // 3. The image into it.
  const Status filled = Fill();
  if (!filled.ok()) {
    GiveUp(filled);
    return filled;
  }
  observer_.copied(plan_->image.layout.image_bytes);
  return Status();
}

Status SaveRun::Seal() {
  Status sealed = WriteRecordAndSeal();
  if (sealed.code() == Code::kUnavailable && request_.until) {
    sealed = SealWithNextDaemon(sealed);
  }
  if (!sealed.ok() && slot_ != nullptr) {
    GiveUp(sealed);
  }
  return sealed;
}

std::vector<std::span<const std::byte>> SaveRun::Copies() const {
  std::vector<std::span<const std::byte>> copies(request_.tensors.size());
  const ImagePlan& image = plan_->image;
  for (size_t i = 0; i < image.layout.slices.size(); ++i) {
    if (image.from_input[i] < copies.size()) {
      const Slice& slice = image.layout.slices[i];
      copies[image.from_input[i]] = {slot_->data() + slice.image_offset, slice.bytes};
    }
  }
  return copies;
}

Status SaveRun::Plan() {
  plan_ = request_.plan;
  if (!FitsObjects(*plan_, *request_.objects)) {
    HF_TRY_ASSIGN(plan_, PlanWithObjects(*plan_, *request_.objects, context_.link.identity().rank));
    observer_.planned(plan_);
  }
  if (request_.fence != nullptr) {
    return Status();  // devices' memory is not read here: CompareInSlot
  }
  std::vector<const void*> sources;
  if (!plan_->overlaps.empty()) {
    for (size_t i = 0; i < plan_->input_bytes.size(); ++i) {
      sources.push_back(Source(i));
    }
  }
  return CompareOverlaps(*plan_, sources);
}

// The same for a state that is on devices, in part at least, by what has been copied of it.
Status SaveRun::CompareInSlot() const {
  std::vector<const void*> copies(plan_->input_bytes.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[plan_->image.from_input[i]] = slot_->data() + plan_->ranges[i + 1].image_offset;
  }
  return CompareOverlaps(*plan_, copies);
}

// Of one exchange with the daemon, which may take so much longer than others.
Deadline SaveRun::CallDeadline(Milliseconds longer) const {
  const Milliseconds most = context_.call_deadline + std::max(longer, LeftToWait());
  return MindsSilence(Deadline::In(most).Or(context_.ended));
}

// How long the caller still waits for the save itself.
Milliseconds SaveRun::LeftToWait() const {
  return request_.until || request_.options.hold ? Milliseconds(0) : request_.waited_for.left();
}

// A daemon that hangs costs a save that the loop does not wait for, and little time. A last step
// and a held save give it the time of an exchange, once.
Deadline SaveRun::MindsSilence(Deadline deadline) const {
  const Milliseconds exchange = std::max(context_.call_deadline, context_.silence_deadline);
  if (request_.until) {
    return deadline.OrSilence(exchange, *request_.until);
  }
  return deadline.OrSilence(request_.options.hold ? exchange : context_.silence_deadline,
                            request_.waited_for);
}

// Does it, again and again while a caller, or the last step's grace, waits for a daemon.
Status SaveRun::WithADaemon(const std::function<Status()>& doing) const {
  const Deadline patience = request_.until ? CallDeadline().Earlier(*request_.until)
                                           : request_.waited_for.Or(context_.ended);
  for (Milliseconds pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    const Status status = doing();
    patience.Look();
    if (status.code() != Code::kUnavailable) {
      return status;
    }
    if (patience.passed()) {
      return !request_.until || !request_.until->passed()
                 ? status
                 : Status(status.code(),
                          absl::StrCat(status.message(),
                                       " (the grace leaves no time to wait for a daemon)"));
    }
    const Deadline again = patience.Earlier(Deadline::In(pause));
    while (!again.passed()) {
      std::this_thread::sleep_for(std::min(Deadline::kBetweenLooks, again.left()));
      again.Look();
    }
  }
}

Status SaveRun::Begin() {
  std::vector<ForkClosedFd> descriptors;
  HF_TRY(WithADaemon([&] { return AskForSlot(descriptors); }));
  HF_SYNC_POINT("client.save.granted");
  observer_.granted(grant_->attempt);
  if (grant_->slot_bytes < plan_->slot_bytes || grant_->generation == 0) {
    const Status status(Code::kInternal,
                        absl::StrCat("ckptd granted slot ", grant_->slot, " of ",
                                     grant_->slot_bytes, " bytes (generation ", grant_->generation,
                                     ") for a save of ", plan_->slot_bytes));
    if (!descriptors.empty()) {
      context_.mappings.Drop(grant_->slot);
    }
    GiveUp(status);
    return status;
  }
  Result<SlotMapping*> mapped =
      context_.mappings.Writable(grant_->slot, grant_->slot_bytes, descriptors);
  if (!mapped.ok()) {
    GiveUp(mapped.status());
    return mapped.status();
  }
  slot_ = *mapped;
  return Status();
}

Status SaveRun::AskForSlot(std::vector<ForkClosedFd>& descriptors) {
  // There is no other save to put the last step's trust in: it has all that is left of the grace.
  const Milliseconds room = request_.waited_for.left();
  const Milliseconds patience = request_.until ? std::max(room, request_.until->left()) : room;
  const Deadline deadline = CallDeadline(patience);
  grant_.reset();
  HF_TRY_ASSIGN(connection_, context_.link.Get(CallDeadline(), Patience::kOnce));
  context_.mappings.DropUnfit(plan_->slot_bytes);
  ReleaseDropped(*connection_, context_.mappings, deadline);
  wire::BeginSave begin;
  begin.step = request_.step;
  begin.slot_bytes = plan_->slot_bytes;
  begin.deadline_ms = static_cast<uint64_t>(std::max<int64_t>(0, patience.count()));
  HF_TRY_ASSIGN(Answer<wire::Grant> answer, connection_->Call<wire::Grant>(begin, deadline));
  grant_ = answer.message;
  descriptors = std::move(answer.descriptors);
  return Status();
}

Status SaveRun::Fill() {
  const ImagePlan& image = plan_->image;
  const FaultGuard guard(slot_->data(), slot_->bytes());
  if (!guard.ok()) {
    return Status(Code::kInternal, "too many mappings are being copied at once in this process");
  }
  // 1. Header: the same in every save of this plan, and so are its digests.
  StreamCopy(slot_->data(), image.header.data(), image.header.size());
  HF_SYNC_POINT("client.save.header_written");

  // 2. Slices: those that may change soon, then the others.
  digests_.assign(plan_->digest_count, 0);
  std::copy(plan_->header_digests.begin(), plan_->header_digests.end(), digests_.begin());
  std::vector<CopyInRange> first;
  std::vector<CopyInRange> others;
  others.reserve(image.layout.slices.size());
  for (size_t i = 0; i < image.layout.slices.size(); ++i) {
    const DigestedRange& range = plan_->ranges[i + 1];
    const size_t input = image.from_input[i];
    (input < request_.first.size() && request_.first[input] ? first : others)
        .push_back({slot_->data() + range.image_offset, Source(input), range.bytes,
                    digests_.data() + range.first_digest, DeviceOf(input)});
  }
  CopyOptions options;
  options.fence = request_.fence.get();
  options.pinned = request_.fence != nullptr && slot_->Pin(request_.fence->devices());
  options.populate = !slot_->populated(image.layout.image_bytes);
  const auto whole = [&]() -> Status {
    return guard.faulted()
               ? Status(Code::kCorrupt,
                        absl::StrCat("slot ", grant_->slot, " was cut short while step ",
                                     request_.step, " was copied into it"))
               : Status();
  };
  options.first = first.size();
  options.first_read = observer_.first_read;
  options.half_point = "client.save.half_copied";
  first.insert(first.end(), others.begin(), others.end());
  HF_TRY(context_.engine.CopyIn(first, options));
  HF_TRY(whole());
  if (request_.fence != nullptr) {
    request_.fence->Over();
    const Status agree = CompareInSlot();
    HF_TRY(whole());
    HF_TRY(agree);
  }
  if (options.populate) {
    slot_->set_populated(image.layout.image_bytes);
  }
  HF_SYNC_POINT("client.save.copied");
  return Status();
}

Status SaveRun::WriteRecordAndSeal() {
  // 1. The record, after the image.
  const absl::StatusOr<JobUuid> uuid = JobUuid::FromBytes(grant_->job_uuid);
  if (!uuid.ok() || *uuid != context_.link.job_uuid()) {
    return Status(Code::kInternal, "ckptd granted a slot of another job");
  }
  ShardRecord record;
  record.id = {*uuid, grant_->attempt, request_.step, context_.link.identity().rank};
  record.job_name = context_.link.identity().job;
  record.world_size = context_.link.identity().world_size;
  record.generation = grant_->generation;
  record.image_bytes = plan_->image.layout.image_bytes;
  record.header_bytes = plan_->image.layout.header_bytes;
  record.layout_hash = plan_->image.layout_hash;
  record.layout_bytes = plan_->image.layout_bytes;
  record.digests = digests_;
  record.descent = grant_->descent;
  record.sealed_unix_ms = Clock::System()->UnixMillis();
  const std::string encoded = EncodeRecord(record);
  const uint64_t offset = RecordOffset(record.image_bytes);
  if (encoded.size() > slot_->bytes() - offset) {
    return Status(Code::kInternal,
                  absl::StrCat("the record of ", encoded.size(),
                               " bytes does not fit behind the image in slot ", grant_->slot));
  }
  {
    const FaultGuard guard(slot_->data() + offset, encoded.size());
    if (!guard.ok()) {
      return Status(Code::kInternal, absl::StrCat("save step ", request_.step, ": more than ",
                                                  kFaultGuardsMax, " guarded ranges at a time"));
    }
    std::memcpy(slot_->data() + offset, encoded.data(), encoded.size());
    if (guard.faulted()) {
      return Status(Code::kCorrupt,
                    absl::StrCat("slot ", grant_->slot, " was cut short while the record of step ",
                                 request_.step, " was written"));
    }
  }
  HF_SYNC_POINT("client.save.record_written");

  // 2. From here on the daemon may publish it at any moment.
  const Deadline deadline = CallDeadline();
  HF_TRY_ASSIGN(const uint64_t id,
                connection_->Send(wire::Seal{request_.step, grant_->slot, grant_->generation,
                                             offset, encoded.size()},
                                  deadline));
  HF_SYNC_POINT("client.save.seal_sent");
  HF_TRY(connection_->Receive<wire::Sealed>(id, deadline).status());
  HF_SYNC_POINT("client.save.sealed");
  return Status();
}

// The daemon that had granted the slot of a last step has gone (docs/protocol.md §22).
Status SaveRun::SealWithNextDaemon(const Status& why) {
  // 1. The next one may have found the copy by its record.
  std::shared_ptr<Connection> next;
  const Status found = WithADaemon([&]() -> Status {
    HF_TRY_ASSIGN(next, context_.link.Get(CallDeadline(), Patience::kOnce));
    return Status();
  });
  if (!found.ok()) {
    return Status(why.code(), absl::StrCat(why.message(), "; then: ", found.message()));
  }
  if (context_.link.attempt() != grant_->attempt) {
    return why;
  }
  const Deadline deadline = CallDeadline();
  const wire::AwaitSave await{request_.step, wire::Stage::kSealed, deadline.DaemonMillis()};
  const Status known = next->Call<wire::SaveProgress>(await, deadline).status();
  if (known.code() != Code::kInvalidArgument) {
    return known.ok() ? known
                      : Status(why.code(), absl::StrCat(why.message(),
                                                        "; the next one says: ", known.message()));
  }
  // 2. It does not know that the step was begun: so that is begun once more, and what is there of
  // it goes on from where it is, for the tensors may have changed. Where it lies nobody else writes
  // as long as this process lives, be it granted that again.
  const std::unique_ptr<SlotMapping> image = context_.mappings.Take(grant_->slot);
  slot_ = nullptr;
  HF_TRY(Begin());
  if (!slot_->SameFile(*image)) {
    const uint64_t bytes = plan_->image.layout.image_bytes;
    const FaultGuard from(image->data(), bytes);
    const FaultGuard to(slot_->data(), bytes);
    if (!from.ok() || !to.ok()) {
      return Status(Code::kInternal, "too many mappings are being copied at once in this process");
    }
    StreamCopy(slot_->data(), image->data(), bytes);
    if (from.faulted() || to.faulted()) {
      return Status(Code::kCorrupt, absl::StrCat("step ", request_.step,
                                                 " was cut short while it was copied from one slot "
                                                 "into another, behind a restart of ckptd"));
    }
  }
  return WriteRecordAndSeal();
}

void SaveRun::GiveUp(const Status& why) {
  // After an answer that refuses this filling the slot is as good as before. In any other case
  // nobody knows what the daemon makes of it: this process gives it up, so that it cannot write
  // into it behind the daemon's back.
  const bool refused = why.code() == Code::kShed || why.code() == Code::kAbandoned ||
                       why.code() == Code::kSuperseded;
  if (slot_ != nullptr && !refused) {
    context_.mappings.Drop(grant_->slot);
  }
  slot_ = nullptr;
  if (connection_->alive()) {
    const Deadline deadline = MindsSilence(Deadline::In(kGiveUpTime));
    const wire::AbortSave abort{request_.step, grant_->slot, grant_->generation,
                                ForWire(why.message(), kReasonBytesMax)};
    static_cast<void>(connection_->Call<wire::Done>(abort, deadline).ok());
    ReleaseDropped(*connection_, context_.mappings, deadline);
  }
}

}  // namespace holdfast::client
