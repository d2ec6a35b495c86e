#include "tiers/peer/remote_range.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/peer/device_order.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast {
namespace {

constexpr size_t kPageBytes = 4096;
// Between two looks at whether it should end.
constexpr Duration kSleepMax = std::chrono::milliseconds(20);

// Side by side, where one connection takes one read at a time: what is under way on the others
// fills the time until the next answer.
constexpr size_t kConnectionsMax = 4;

MonotonicTime Now() {
  return Clock::System()->Now();
}

bool WantsLocalRegistration(const Fabric& fabric) {
  return std::any_of(fabric.devices().begin(), fabric.devices().end(),
                     [](const auto& device) { return (device->mr_mode() & FI_MR_LOCAL) != 0; });
}

bool Covers(const Registration& registration, std::span<const std::byte> memory) {
  const std::span<std::byte> registered = registration.memory();
  return memory.data() >= registered.data() &&
         memory.data() + memory.size() <= registered.data() + registered.size();
}

}  // namespace

RemoteRange::RemoteRange(Fabric& fabric, const PullSource& source, uint64_t offset,
                         std::span<std::byte> into, const PullOptions& options)
    : fabric_(fabric), source_(source), offset_(offset), into_(into), options_(options) {}

std::string RemoteRange::Doing() const {
  return absl::StrCat("read from '", source_.name, "'");
}

absl::Status RemoteRange::Failed(absl::Status status, FaultySide faulty) {
  faulty_ = faulty;
  return status;
}

absl::Status RemoteRange::FromSource(const absl::Status& status) {
  return Failed(Annotate(status, Doing()), FaultySide::kSource);
}

absl::Status RemoteRange::CutShort() const {
  return absl::DataLossError(
      absl::StrCat(Doing(), ": the slot that it went into was cut short while it was in use"));
}

absl::Status RemoteRange::Begin() {
  // 1. What the peer says of itself.
  if (absl::Status status = fabric_.CheckAddress(source_.address); !status.ok()) {
    return FromSource(status);
  }
  absl::StatusOr<FabricAddress> peer = DecodeFabricAddress(source_.address);
  if (!peer.ok()) {
    return FromSource(peer.status());
  }
  peer_ = *std::move(peer);
  absl::StatusOr<RemoteMemory> memory = RemoteMemory::Make(source_, *peer_, offset_, into_.size());
  if (!memory.ok()) {
    return FromSource(memory.status());
  }
  memory_ = *std::move(memory);
  // 2. Our memory.
  guard_.emplace(into_.data(), into_.size());
  if (!guard_->ok()) {
    return absl::ResourceExhaustedError(absl::StrCat(Doing(), ": too many guarded mappings"));
  }
  if (options_.registration != nullptr) {
    if (!Covers(*options_.registration, into_)) {
      return absl::InvalidArgumentError(
          absl::StrCat(Doing(), ": where it goes is not what was registered"));
    }
    registration_ = options_.registration;
  } else if (WantsLocalRegistration(fabric_)) {
    absl::StatusOr<std::shared_ptr<Registration>> made =
        fabric_.Register(into_, MemoryAccess::kFilledByReads);
    if (!made.ok()) {
      return Failed(made.status(), FaultySide::kDestination);
    }
    own_registration_ = *std::move(made);
    registration_ = own_registration_.get();
  }
  // 3. The way.
  last_arrival_ = Now();
  return OpenRails(false);
}

absl::Status RemoteRange::OpenRails(bool fresh) {
  readers_.clear();
  rails_.clear();
  const std::vector<uint32_t>& theirs = memory_->devices();
  std::vector<int> nodes;
  for (size_t i = 0; i < std::min(fabric_.devices().size(), theirs.size()); ++i) {
    nodes.push_back(fabric_.devices()[i]->numa_node());
  }
  const uint64_t pieces = (into_.size() + options_.piece_bytes - 1) / options_.piece_bytes;
  // (Each with the one of the same number there: so they are cabled.)
  for (const size_t device : NearestFirst(nodes, NumaNodeOf(into_.data()))) {
    const size_t window = fabric_.devices()[device]->reads_per_connection();
    const size_t connections = window > 1 ? 1 : std::min(options_.window, kConnectionsMax);
    for (size_t i = 0; i < connections && rails_.size() < pieces; ++i) {
      absl::StatusOr<ReaderPool::Lease> lease = fabric_.readers().Take(
          fabric_.devices()[device], peer_->endpoints[theirs[device]], peer_->token, fresh);
      if (!lease.ok()) {
        return Failed(Annotate(lease.status(), Doing()), absl::IsUnavailable(lease.status())
                                                             ? FaultySide::kSource
                                                             : FaultySide::kNone);
      }
      rails_.push_back(
          {device, theirs[device], std::min(window, options_.window), *std::move(lease)});
    }
  }
  for (Rail& rail : rails_) {
    readers_.push_back(&rail.lease.reader());
  }
  return absl::OkStatus();
}

absl::Status RemoteRange::CheckControl() {
  if (options_.control != nullptr && options_.control->cancelled()) {
    return Failed(absl::CancelledError(absl::StrCat(Doing(), ": cancelled after ", arrived_, " of ",
                                                    into_.size(), " bytes")),
                  FaultySide::kNone);
  }
  const MonotonicTime now = Now();
  if (options_.deadline.has_value() && now > *options_.deadline) {
    return Failed(
        absl::DeadlineExceededError(absl::StrCat(Doing(), ": the deadline passed after ", arrived_,
                                                 " of ", into_.size(), " bytes")),
        FaultySide::kSource);
  }
  return absl::OkStatus();
}

absl::Status RemoteRange::CheckStall() {
  if (!done() && options_.source_gone && options_.source_gone()) {
    return FromSource(
        absl::UnavailableError(absl::StrCat("it is no member of the cluster any more, after ",
                                            arrived_, " of ", into_.size(), " bytes")));
  }
  const MonotonicTime now = Now();
  if (!done() && now - last_arrival_ > options_.stall_timeout) {
    return FromSource(absl::UnavailableError(
        absl::StrCat("nothing came for ", FormatDuration(now - last_arrival_), ", after ", arrived_,
                     " of ", into_.size(), " bytes: the node hangs, or the network between")));
  }
  return absl::OkStatus();
}

absl::Status RemoteRange::Advance() {
  HF_RETURN_IF_ERROR(CheckControl());
  for (size_t i = 0; i < rails_.size() && !try_again_; ++i) {
    HF_RETURN_IF_ERROR(Take(rails_[i]));
  }
  if (std::exchange(try_again_, false)) {
    HF_RETURN_IF_ERROR(OpenRails(true));
  }
  // In turn, so that devices get equal shares for as long as they keep up.
  bool asked = true;
  while (asked && asked_ < into_.size()) {
    asked = false;
    for (size_t i = 0; i < rails_.size() && !try_again_; ++i) {
      HF_ASSIGN_OR_RETURN(const bool one, Ask(rails_[i]));
      asked = asked || one;
    }
  }
  if (done()) {
    for (Rail& rail : rails_) {
      rail.lease.KeepOpen();
    }
  }
  return absl::OkStatus();
}

absl::Status RemoteRange::Take(Rail& rail) {
  const absl::StatusOr<std::optional<uint64_t>> completed = rail.lease.reader().Poll();
  if (!completed.ok()) {
    return RailFailed(rail, completed.status());
  }
  if (completed->has_value()) {
    Arrived(**completed);
  }
  return absl::OkStatus();
}

void RemoteRange::Arrived(uint64_t tag) {
  Piece& piece = pieces_[static_cast<size_t>(tag - first_tag_)];
  piece.arrived = true;
  anything_arrived_ = true;
  last_arrival_ = Now();
  if (options_.control != nullptr) {
    options_.control->Advance(piece.bytes);
  }
  while (!pieces_.empty() && pieces_.front().arrived) {
    arrived_ += pieces_.front().bytes;
    pieces_.pop_front();
    ++first_tag_;
  }
}

absl::Status RemoteRange::RailFailed(const Rail& rail, const absl::Status& status) {
  if (IntoIsCutShort()) {
    return Failed(CutShort(), FaultySide::kDestination);
  }
  // A connection from an earlier read may have died since, which says nothing of the peer now.
  if (rail.lease.used() && !anything_arrived_ && !tried_again_) {
    tried_again_ = true;
    try_again_ = true;
    pieces_.clear();
    first_tag_ = 0;
    asked_ = 0;
    return absl::OkStatus();
  }
  return FromSource(absl::UnavailableError(
      absl::StrCat(Message(status), ", after ", arrived_, " of ", into_.size(), " bytes")));
}

absl::StatusOr<bool> RemoteRange::Ask(Rail& rail) {
  FabricReader& reader = rail.lease.reader();
  if (asked_ == into_.size() || reader.in_flight() >= rail.window) {
    return false;
  }
  const RemoteMemory::Place from = memory_->At(rail.peer_device, asked_);
  uint64_t bytes = std::min<uint64_t>(
      {options_.piece_bytes, into_.size() - asked_, from.bytes, reader.max_bytes()});
  void* descriptor = nullptr;
  if (registration_ != nullptr) {
    const Registration::Local local = registration_->At(rail.device, into_.data() + asked_);
    descriptor = local.descriptor;
    bytes = std::min<uint64_t>(bytes, local.bytes);
  }
  if (options_.pacer != nullptr && asked_ + bytes > paced_) {
    if (!options_.pacer->Acquire(asked_ + bytes - paced_, options_.control)) {
      HF_RETURN_IF_ERROR(CheckControl());
      return false;
    }
    paced_ = asked_ + bytes;
    last_arrival_ = std::max(last_arrival_, Now());
  }
  absl::StatusOr<bool> posted = reader.Post(into_.subspan(asked_, bytes), descriptor, from.address,
                                            from.key, first_tag_ + pieces_.size());
  if (!posted.ok()) {
    HF_RETURN_IF_ERROR(RailFailed(rail, posted.status()));
    return false;
  }
  if (*posted) {
    pieces_.push_back({asked_, bytes, false});
    asked_ += bytes;
  }
  return *posted;
}

// The kernel says EFAULT where we would get SIGBUS: touching the pages tells.
bool RemoteRange::IntoIsCutShort() const {
  for (const Piece& piece : pieces_) {
    for (uint64_t at = 0; at < piece.bytes && !guard_->faulted(); at += kPageBytes) {
      static_cast<void>(*static_cast<volatile std::byte*>(into_.data() + piece.offset + at));
    }
  }
  return guard_->faulted();
}

absl::Status RemoteRange::Wait() {
  HF_RETURN_IF_ERROR(CheckStall());
  FabricReader::Wait(readers_, kSleepMax);
  return absl::OkStatus();
}

}  // namespace holdfast
