#include "tiers/peer/remote_range.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

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
// A device whose connections fail so often, with less than much in between, leads nowhere.
constexpr int kFailuresMax = 16;
constexpr uint64_t kMuchBytes = 8 * kMiB;

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

std::string RemoteRange::After() const {
  return absl::StrCat(", after ", arrived_, " of ", into_.size(), " bytes");
}

absl::Status RemoteRange::CutShort() const {
  return absl::DataLossError(
      absl::StrCat(Doing(), ": the slot that it went into was cut short while it was in use"));
}

uint64_t RemoteRange::PiecesLeft() const {
  return (into_.size() - arrived_ + options_.piece_bytes - 1) / options_.piece_bytes;
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
  HF_RETURN_IF_ERROR(RegisterInto());
  // 3. The way.
  PairWithPeers();
  HF_RETURN_IF_ERROR(FillRails());
  last_arrival_ = begun_ = Now();
  return absl::OkStatus();
}

absl::Status RemoteRange::RegisterInto() {
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
  return absl::OkStatus();
}

void RemoteRange::PairWithPeers() {
  std::vector<int> nodes;
  std::vector<std::string> ours;
  std::vector<std::string> theirs;
  for (const std::shared_ptr<FabricDevice>& device : fabric_.devices()) {
    nodes.push_back(device->numa_node());
    ours.push_back(device->name());
  }
  for (const FabricEndpoint& endpoint : peer_->endpoints) {
    theirs.push_back(endpoint.device);
  }
  const std::vector<int> pairs = PairDevices(ours, theirs, memory_->devices());
  devices_.resize(ours.size());
  for (size_t i = 0; i < devices_.size(); ++i) {
    devices_[i].peer_device = pairs[i];
    devices_[i].given_up = pairs[i] < 0 || (registration_ != nullptr && !registration_->Has(i));
  }
  order_ = NearestFirst(nodes, NumaNodeOf(into_.data()));
}

// ---- Rails ----

bool RemoteRange::HasRails(size_t device) const {
  return std::any_of(rails_.begin(), rails_.end(),
                     [device](const auto& rail) { return rail->device == device; });
}

// As many as there is something to do for; an error when there is none any more.
absl::Status RemoteRange::FillRails() {
  GiveUpThoseWithoutRails();
  FillRails(false);
  GiveUpThoseWithoutRails();
  if (rails_.empty() && !done() && options_.another_way && last_rail_ == 0 && last_failure_.ok()) {
    return Failed(absl::FailedPreconditionError(absl::StrCat(
                      Doing(), ": nothing could be read over any device a short while ago")),
                  FaultySide::kNone);
  }
  if (rails_.empty()) {
    FillRails(true);
  }
  readers_.clear();
  for (const auto& rail : rails_) {
    readers_.push_back(&rail->lease.reader());
  }
  if (!rails_.empty() || done()) {
    return absl::OkStatus();
  }
  if (all_bytes_ == 0) {
    NoteThoseThatLedNowhere();
  }
  if (last_failure_.ok()) {
    return FromSource(absl::UnavailableError("none of its devices is one for ours"));
  }
  return absl::IsUnavailable(last_failure_)
             ? FromSource(last_failure_)
             : Failed(Annotate(last_failure_, Doing()), FaultySide::kNone);
}

void RemoteRange::FillRails(bool those_that_led_nowhere) {
  for (const size_t device : order_) {
    if (rails_.size() >= PiecesLeft()) {
      return;  // (whoever is told that a device may be tried has to try it)
    }
    const FabricDevice& ours = *fabric_.devices()[device];
    if (devices_[device].given_up || HasRails(device)) {
      continue;
    }
    if (!those_that_led_nowhere && fabric_.readers().LedNowhere(&ours, KeyOf(device))) {
      continue;
    }
    const size_t connections =
        ours.reads_per_connection() > 1 ? 1 : std::min(options_.window, kConnectionsMax);
    const bool fresh = devices_[device].failures > 0;
    for (size_t i = 0; i < connections && rails_.size() < PiecesLeft(); ++i) {
      if (!OpenRail(device, fresh)) {
        break;
      }
    }
  }
}

bool RemoteRange::OpenRail(size_t device, bool fresh) {
  const auto peer_device = static_cast<uint32_t>(devices_[device].peer_device);
  absl::StatusOr<ReaderPool::Lease> lease = fabric_.readers().Take(
      fabric_.devices()[device], peer_->endpoints[peer_device].address, peer_->token, fresh);
  if (!lease.ok()) {
    last_failure_ = lease.status();
    NoteFailure(device);
    return false;
  }
  const size_t window =
      std::min(fabric_.devices()[device]->reads_per_connection(), options_.window);
  rails_.push_back(std::make_unique<Rail>(
      Rail{++last_rail_, device, peer_device, window, *std::move(lease), 0, Now()}));
  return true;
}

void RemoteRange::NoteFailure(size_t device) {
  Device& failed = devices_[device];
  failed.failures = failed.got_bytes >= kMuchBytes ? 1 : failed.failures + 1;
  failed.got_bytes = 0;
}

// Those that failed, and over which nothing is read any more.
void RemoteRange::GiveUpThoseWithoutRails() {
  for (size_t i = 0; i < devices_.size(); ++i) {
    if (!devices_[i].given_up && devices_[i].failures > 0 && !HasRails(i)) {
      devices_[i].given_up = true;
      devices_[i].problem = absl::IsUnavailable(last_failure_) ? Message(last_failure_) : "";
    }
  }
}

// The next ones who read go over other devices at once. Known when all has come over those, or
// nothing over any: else it may have been this read's own fault.
void RemoteRange::NoteThoseThatLedNowhere() {
  for (size_t i = 0; i < devices_.size(); ++i) {
    const FabricDevice& device = *fabric_.devices()[i];
    if (!devices_[i].problem.empty()) {
      fabric_.readers().NoteLedNowhere(
          &device, KeyOf(i),
          absl::StrCat("device '", device.name(), "' leads nowhere: read from '", source_.name,
                       "': ", std::exchange(devices_[i].problem, "")));
    }
  }
}

std::string RemoteRange::KeyOf(size_t device) const {
  return peer_->endpoints[static_cast<size_t>(devices_[device].peer_device)].address + peer_->token;
}

// What was under way over it is to be asked for again.
void RemoteRange::DropRail(size_t index) {
  const uint64_t number = rails_[index]->number;
  for (auto& [offset, piece] : pieces_) {
    if (piece.state == Piece::State::kAsked && piece.rail == number) {
      piece.state = Piece::State::kWanted;
      wanted_.insert(offset);
    }
  }
  NoteFailure(rails_[index]->device);
  rails_.erase(rails_.begin() + static_cast<ptrdiff_t>(index));
}

absl::Status RemoteRange::RailFailed(size_t index, const absl::Status& status) {
  if (IntoIsCutShort()) {
    return Failed(CutShort(), FaultySide::kDestination);
  }
  last_failure_ = absl::UnavailableError(absl::StrCat(Message(status), After()));
  // A connection from an earlier read may have died since, or have been closed for its age: that
  // says nothing of the peer now. One that brought something is worth another.
  const size_t device = rails_[index]->device;
  const bool worth_another = rails_[index]->lease.used() || rails_[index]->got_bytes > 0;
  DropRail(index);
  if (worth_another && devices_[device].failures <= kFailuresMax) {
    OpenRail(device, true);
  }
  return FillRails();
}

// ---- Pieces ----

absl::Status RemoteRange::CheckControl() {
  if (options_.control != nullptr && options_.control->cancelled()) {
    return Failed(absl::CancelledError(absl::StrCat(Doing(), ": cancelled", After())),
                  FaultySide::kNone);
  }
  if (options_.deadline.has_value() && Now() > *options_.deadline) {
    return Failed(
        absl::DeadlineExceededError(absl::StrCat(Doing(), ": the deadline passed", After())),
        FaultySide::kSource);
  }
  return absl::OkStatus();
}

absl::Status RemoteRange::Advance() {
  HF_RETURN_IF_ERROR(CheckControl());
  for (size_t i = 0; i < rails_.size() && !done();) {
    HF_ASSIGN_OR_RETURN(const bool kept, Take(i));
    i += kept ? 1 : 0;
  }
  // In turn, so that devices get equal shares for as long as they keep up.
  for (bool asked = true; asked && (asked_ < into_.size() || !wanted_.empty());) {
    asked = false;
    for (size_t i = 0; i < rails_.size(); ++i) {
      HF_ASSIGN_OR_RETURN(const bool one, Ask(i));
      asked = asked || one;
    }
  }
  if (done()) {
    NoteThoseThatLedNowhere();
    for (const auto& rail : rails_) {
      if (rail->lease.reader().connected()) {
        rail->lease.KeepOpen();
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> RemoteRange::Take(size_t index) {
  Rail& rail = *rails_[index];
  const absl::StatusOr<std::optional<uint64_t>> completed = rail.lease.reader().Poll();
  if (!completed.ok()) {
    HF_RETURN_IF_ERROR(RailFailed(index, completed.status()));
    return false;
  }
  if (completed->has_value()) {
    Arrived(rail, **completed);
  }
  return true;
}

void RemoteRange::Arrived(Rail& rail, uint64_t offset) {
  Piece& piece = pieces_.at(offset);
  piece.state = Piece::State::kArrived;
  all_bytes_ += piece.bytes;
  last_arrival_ = Now();
  rail.got_bytes += piece.bytes;
  rail.lease.NoteRead();
  rail.since = last_arrival_;
  rail.all_bytes_then = all_bytes_;
  devices_[rail.device].got_bytes += piece.bytes;
  if (options_.control != nullptr) {
    options_.control->Advance(piece.bytes);
  }
  while (!pieces_.empty() && pieces_.begin()->second.state == Piece::State::kArrived) {
    arrived_ += pieces_.begin()->second.bytes;
    pieces_.erase(pieces_.begin());
  }
}

absl::StatusOr<bool> RemoteRange::Ask(size_t index) {
  Rail& rail = *rails_[index];
  FabricReader& reader = rail.lease.reader();
  const bool again = !wanted_.empty();
  if ((!again && asked_ == into_.size()) || reader.in_flight() >= rail.window) {
    return false;
  }
  const uint64_t offset = again ? *wanted_.begin() : asked_;
  const uint64_t wanted = again ? pieces_.at(offset).bytes
                                : std::min<uint64_t>(options_.piece_bytes, into_.size() - offset);
  const RemoteMemory::Place from = memory_->At(rail.peer_device, offset);
  uint64_t bytes = std::min<uint64_t>({wanted, from.bytes, reader.max_bytes()});
  void* descriptor = nullptr;
  if (registration_ != nullptr) {
    const Registration::Local local = registration_->At(rail.device, into_.data() + offset);
    descriptor = local.descriptor;
    bytes = std::min<uint64_t>(bytes, local.bytes);
  }
  if (options_.pacer != nullptr && offset + bytes > paced_) {
    if (!options_.pacer->Acquire(offset + bytes - paced_, options_.control)) {
      HF_RETURN_IF_ERROR(CheckControl());
      return false;
    }
    paced_ = offset + bytes;
    last_arrival_ = std::max(last_arrival_, Now());
  }
  absl::StatusOr<bool> posted =
      reader.Post(into_.subspan(offset, bytes), descriptor, from.address, from.key, offset);
  if (!posted.ok()) {
    HF_RETURN_IF_ERROR(RailFailed(index, posted.status()));
    return false;
  }
  if (!*posted) {
    return false;
  }
  if (reader.in_flight() == 1) {
    rail.since = Now();
    rail.all_bytes_then = all_bytes_;
  }
  pieces_[offset] = {bytes, Piece::State::kAsked, rail.number};
  wanted_.erase(offset);
  asked_ = std::max(asked_, offset + bytes);
  if (bytes < wanted && again) {  // over this rail in smaller ones
    pieces_[offset + bytes] = {wanted - bytes};
    wanted_.insert(offset + bytes);
  }
  return true;
}

// The kernel says EFAULT where we would get SIGBUS: touching the pages tells.
bool RemoteRange::IntoIsCutShort() const {
  for (const auto& [offset, piece] : pieces_) {
    for (uint64_t at = 0;
         piece.state == Piece::State::kAsked && at < piece.bytes && !guard_->faulted();
         at += kPageBytes) {
      static_cast<void>(*static_cast<volatile std::byte*>(into_.data() + offset + at));
    }
  }
  return guard_->faulted();
}

// ---- Silence ----

absl::Status RemoteRange::CheckStall() {
  if (done()) {
    return absl::OkStatus();
  }
  if (options_.source_gone && options_.source_gone()) {
    return FromSource(
        absl::UnavailableError(absl::StrCat("it is no member of the cluster any more", After())));
  }
  any_connected_ = any_connected_ ||
                   std::any_of(rails_.begin(), rails_.end(),
                               [](const auto& rail) { return rail->lease.reader().connected(); });
  return Now() - last_arrival_ > Patience() ? GoOnWithoutSilent() : DropRailThatLags();
}

// (To be let in takes a node that is well no time.)
Duration RemoteRange::Patience() const {
  return any_connected_ ? options_.stall_timeout : options_.stall_timeout / 3;
}

// Nothing comes any more. Rails that have brought all that they were asked for get the rest to do,
// and devices that were not needed before; if there are none, the source is given up.
absl::Status RemoteRange::GoOnWithoutSilent() {
  const Duration silence = Now() - last_arrival_;
  last_failure_ =
      absl::UnavailableError(absl::StrCat("nothing came for ", FormatDuration(silence), After(),
                                          ": the node hangs, or the network between"));
  for (size_t i = rails_.size(); i > 0; --i) {
    const FabricReader& reader = rails_[i - 1]->lease.reader();
    if (reader.in_flight() > 0 || !reader.connected()) {
      DropRail(i - 1);
    }
  }
  // (Not as long once more: most often it is the source that hangs. But long enough to be let in.)
  last_arrival_ = Now();
  last_arrival_.ns -= (Patience() - options_.stall_timeout / 3).count();
  return FillRails();
}

// One rail of which nothing comes while much comes over others: it holds up what lies behind. Or
// while others have nothing left to do, and wait for it for long, as long as the whole has taken.
absl::Status RemoteRange::DropRailThatLags() {
  const MonotonicTime now = Now();
  for (size_t i = 0; i < rails_.size(); ++i) {
    const Rail& rail = *rails_[i];
    const Duration silence = now - rail.since;
    const bool much_came = all_bytes_ - rail.all_bytes_then > kMuchBytes;
    const bool waited_for = std::any_of(rails_.begin(), rails_.end(), [&](const auto& other) {
      const FabricReader& reader = other->lease.reader();
      return reader.connected() && reader.in_flight() == 0;
    });
    if (rail.lease.reader().in_flight() > 0 &&
        ((much_came && silence > options_.stall_timeout) ||
         (waited_for && silence > options_.stall_timeout / 5 && silence > (now - begun_) / 4))) {
      last_failure_ = absl::UnavailableError(
          absl::StrCat("nothing came for ", FormatDuration(now - rail.since), After()));
      DropRail(i);
      return FillRails();
    }
  }
  return absl::OkStatus();
}

absl::Status RemoteRange::Wait() {
  HF_RETURN_IF_ERROR(CheckStall());
  FabricReader::Wait(readers_, kSleepMax);
  return absl::OkStatus();
}

}  // namespace holdfast
