// The machine and its daemon: events in, actions out; slots, notes, records, states.
#include "tests/sim/cluster_node.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "holdfast/v1/peer.pb.h"
#include "tests/sim/cluster_world.h"
#include "tiers/image/kept.h"

namespace holdfast::sim::cluster {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

Node::Node(World& world, uint32_t i, std::string its_name, v1::DaemonConfig config)
    : index(i), name(std::move(its_name)), w_(world), config_(std::move(config)) {
  config_.set_node_name(name);
}

Node::~Node() = default;

MonotonicTime Node::Local() const {
  return clock_.Local(w_.t.now());
}
int64_t Node::UnixMs() const {
  return clock_.UnixMs(w_.t.now());
}

NodeInfo Node::Info() const {
  NodeInfo info;
  info.name = name;
  info.address = name + ":1";
  info.incarnation = incarnation_;
  return info;
}

// ---- The machine ----

// Its monotonic clock begins anew, a little fast or slow: two nodes differ by less than a tenth.
void Node::Boot() {
  powered_ = true;
  ++boots_;
  const double rate = 0.97 + 0.06 * static_cast<double>(w_.t.Below(1001)) / 1000;
  clock_.Boot(w_.t.now(), static_cast<int64_t>(1 + w_.t.Below(1000)) * 1'000'000'000, rate);
  clock_.SetWall(static_cast<int64_t>(w_.t.Below(600'000)) - 300'000);
}

void Node::PowerOn() {
  Boot();
  w_.t.After(w_.t.Millis(500, 5000), [this, boot = boots_] {
    if (powered_ && boot == boots_) {
      StartDaemon();
    }
  });
}

void Node::PowerOff(bool for_good) {
  KillDaemon();
  powered_ = false;
  lost_ = lost_ || for_good;
  living_.clear();
  next_pid_ = 100;  // pids come again
  WipeMemory();
  if (for_good) {
    WipeDrive();
    states_.clear();
  }
}

void Node::RecordGone(File& file, Truth::Why why) {
  if (file.record) {
    const ShardId id = file.record->copy.id;
    file.record.reset();
    w_.truth.Removed(id, {TierKind::kMemory, index}, why);
  }
}

void Node::WipeMemory() {
  for (const auto& [slot, file] : files_) {
    RecordGone(*file, Truth::Why::kFault);
  }
  files_.clear();
}

void Node::WipeDrive() {
  for (const auto& [id, copy] : nvme_.copies) {
    w_.truth.Removed(id, {TierKind::kNvme, index}, Truth::Why::kFault);
  }
  nvme_.copies.clear();
  nvme_.jobs.clear();
  nvme_.going.clear();
}

void Node::RememberDrive() {
  old_drive_ = OldDrive{nvme_, states_};
}

bool Node::RestoreOldDrive() {
  if (!old_drive_ || up()) {
    return false;
  }
  WipeDrive();
  nvme_.copies = old_drive_->nvme.copies;
  nvme_.jobs = old_drive_->nvme.jobs;
  states_ = old_drive_->states;
  for (const auto& [id, copy] : nvme_.copies) {
    if (copy.token == copy.bytes) {
      w_.truth.Added(id, {TierKind::kNvme, index});
    }
  }
  old_drive_.reset();
  return true;
}

bool Node::FlipInMemory() {
  std::vector<File*> sealed;
  for (const auto& [slot, file] : files_) {
    if (file->record) {
      sealed.push_back(file.get());
    }
  }
  if (sealed.empty()) {
    return false;
  }
  File& file = *sealed[w_.t.Below(sealed.size())];
  w_.Trace(absl::StrCat(name, ": a bit flips in slot ", file.slot, ", ",
                        file.record->copy.id.ToString()));
  file.token = w_.NewToken();
  w_.truth.Removed(file.record->copy.id, {TierKind::kMemory, index}, Truth::Why::kFault);
  return true;
}

bool Node::FlipInNvme() {
  if (nvme_.copies.empty()) {
    return false;
  }
  auto it = nvme_.copies.begin();
  std::advance(it, static_cast<ptrdiff_t>(w_.t.Below(nvme_.copies.size())));
  w_.Trace(absl::StrCat(name, ": a bit flips in nvme, ", it->first.ToString()));
  it->second.bytes = w_.NewToken();
  w_.truth.Removed(it->first, {TierKind::kNvme, index}, Truth::Why::kFault);
  return true;
}

bool Node::LoseNvmeCopy() {
  if (nvme_.copies.empty()) {
    return false;
  }
  auto it = nvme_.copies.begin();
  std::advance(it, static_cast<ptrdiff_t>(w_.t.Below(nvme_.copies.size())));
  w_.truth.Removed(it->first, {TierKind::kNvme, index}, Truth::Why::kFault);
  nvme_.copies.erase(it);
  return true;
}

// ---- Its daemon ----

void Node::NewIncarnation() {
  incarnation_ = w_.t.Random() | 1;
}

void Node::StartDaemon() {
  if (core_ || !powered_ || lost_) {
    return;
  }
  ++life_;
  if (starts_++ > 0) {
    NewIncarnation();
  }
  w_.Trace(name + ": daemon starts");
  core_ = std::make_unique<NodeCore>(config_, name, w_.t.Random(), 0);
  Started started;
  started.memory_bytes_max = 4096 * kSlotBytes;
  started.boot_id = absl::StrCat("boot-", index, "-", boots_);
  for (const auto& [slot, file] : files_) {
    FoundSlot found{slot, file->bytes, file->note, std::nullopt};
    const auto lives = [&](const auto& p) { return living_.count({p.pid(), p.start_ticks()}) > 0; };
    if (found.note.has_writer() && !lives(found.note.writer())) {
      found.note.clear_writer();
    }
    found.note.clear_readers();
    for (const v1::Reader& reader : file->note.readers()) {
      if (lives(reader)) {
        *found.note.add_readers() = reader;
      }
    }
    if (file->record && file->record->copy.generation == file->note.generation()) {
      found.sealed = file->record->copy;
    }
    started.slots.push_back(found);
  }
  for (const auto& [uuid, state] : states_) {
    started.jobs.push_back(state);
  }
  w_.etcd.Start(*this);
  Feed(started);
  Do(ScanNvme{});
}

// SIGKILL. What it was doing and had not done yet does not happen; some of what was under way was
// done, and nobody hears of it.
void Node::KillDaemon() {
  if (!core_) {
    return;
  }
  w_.Trace(name + ": daemon dies");
  for (const auto& [id, drain] : std::exchange(drains_, {})) {
    if (drain.reads && w_.t.Chance(0.3)) {
      drain.end(false);
    }
  }
  core_.reset();
  ++life_;
  w_.etcd.Stop(*this);
  w_.network.Forget(*this);
  inbox_.clear();
  pumping_ = false;
  timer_at_.reset();
  nvme_.going.clear();
  watched_.clear();
  slot_busy_until_.clear();
  state_busy_until_.clear();
  socket_busy_until_.clear();
  granted_.clear();
  obeyed_.clear();
  asked_.clear();
  requests_.clear();
  due_.clear();
  const std::map<ConnectionId, RankProcess*> open = std::exchange(connections_, {});
  for (const auto& [id, process] : open) {
    process->OnClosed();
  }
}

void Node::After(Duration delay, std::function<void()> what) {
  w_.t.After(delay, [this, life = life_, what = std::move(what)] {
    if (core_ && life == life_) {
      what();
    }
  });
}

void Node::Complete(Event event, std::optional<Duration> after) {
  After(after.value_or(Latency()), [this, event = std::move(event)] { Feed(event); });
}

void Node::Post(Event event) {
  if (!core_) {
    return;
  }
  inbox_.push_back(std::move(event));
  if (!std::exchange(pumping_, true)) {
    After(microseconds(w_.t.Below(200)), [this] { Pump(); });
  }
}

void Node::Pump() {
  const uint64_t life = life_;
  while (!inbox_.empty() && core_ && life == life_) {
    const Event event = std::move(inbox_.front());
    inbox_.pop_front();
    Feed(event);
  }
  pumping_ = false;
}

void Node::Feed(const Event& event) {
  const MonotonicTime now = Local();
  const auto* told = std::get_if<PeerTold>(&event);
  const auto* spoke = told != nullptr ? std::get_if<PeerSpoke>(&told->event) : nullptr;
  if (spoke != nullptr && timer_at_ && *timer_at_ <= now) {
    timer_at_.reset();
    ++timer_;
    Feed(TimerFired{});  // so that what comes of the message is the message's doing
  }
  if (!due_.empty() && due_.begin()->first < now) {
    const Request& late = requests_.at(due_.begin()->second);
    w_.truth.Violated(absl::StrCat(name, ": unanswered past its deadline: ", late.what));
    return;
  }
  ++w_.counts.events;
  const Actions actions = core_->Handle(event, now, UnixMs());
  if (w_.options.check_every != 0 && ++checks_ % w_.options.check_every == 0) {
    if (const std::string broken = core_->CheckInvariants(); !broken.empty()) {
      w_.truth.Violated(absl::StrCat(name, ": invariant: ", broken));
    }
  }
  if (spoke != nullptr) {
    if (v1::PeerMessage message; message.ParseFromString(spoke->message)) {
      CheckOldCommand(spoke->node, message, actions);
    }
  }
  for (const Action& action : actions) {
    std::visit([&](const auto& a) { Do(a); }, action);
  }
}

// Commands of an epoch below one that this node has obeyed have no effect.
void Node::CheckOldCommand(const std::string& from, const v1::PeerMessage& message,
                           const Actions& actions) {
  const auto* field = v1::PeerMessage::descriptor()->FindFieldByNumber(message.body_case());
  w_.counts.states[absl::StrCat("message: ", field == nullptr ? "?" : field->name())]++;
  const std::string job =
      !message.job_name().empty() ? message.job_name() : w_.truth.NameOf(message.job_uuid());
  const int number = message.body_case();
  const bool command = number >= v1::PeerMessage::kRefused && number < v1::PeerMessage::kStateAsked;
  if (command || message.has_state_kept()) {
    if (const auto obeyed = obeyed_.find(job);
        obeyed != obeyed_.end() && message.epoch() < obeyed->second) {
      w_.counts.states["router: command of an old epoch"]++;
      for (const Action& action : actions) {
        if (std::holds_alternative<FlushShard>(action) ||
            std::holds_alternative<PublishManifest>(action) ||
            std::holds_alternative<RemoveCopies>(action) ||
            std::holds_alternative<RemoveRecord>(action) ||
            std::holds_alternative<WriteJobState>(action)) {
          w_.truth.Violated(absl::StrCat(name, ": what ", from, " commands for ", job,
                                         " under epoch ", message.epoch(), " (", field->name(),
                                         ") is done after epoch ", obeyed->second));
        }
      }
    }
  }
}

Duration Node::Latency() {
  const uint64_t kind = w_.t.Below(100);
  const uint64_t us = kind < 80                   ? 50 + w_.t.Below(1000)
                      : kind < 98 || !w_.stormy() ? w_.t.Below(20'000)
                                                  : w_.t.Below(1'000'000);
  return microseconds(us);
}

absl::Status Node::MaybeFail(double probability) {
  return probability > 0 && w_.t.Chance(probability) ? absl::UnavailableError("made to fail")
                                                     : absl::OkStatus();
}

// ---- Slots ----

// Actions of one slot happen one after the other, in the order given.
void Node::OnSlot(SlotId slot, std::function<void()> effect) {
  int64_t& busy = slot_busy_until_[slot];
  busy = std::max(busy + 1, w_.t.now() + Latency().count());
  After(Duration(busy - w_.t.now()), std::move(effect));
}

void Node::Do(const CreateSlot& a) {
  OnSlot(a.slot, [this, a] {
    if (files_.count(a.slot) > 0) {
      w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot, " is made although it is there"));
    }
    auto file = std::make_shared<File>();
    file->slot = a.slot;
    file->bytes = a.bytes;
    files_[a.slot] = file;
    Complete(SlotCreated{a.slot, absl::OkStatus()});
  });
}

void Node::Do(const PopulateSlot& a) {
  OnSlot(a.slot, [this, a] { Complete(SlotPopulated{a.slot, MaybeFail(slot_failures)}); });
}

void Node::Do(const WriteNote& a) {
  OnSlot(a.slot, [this, a] {
    const absl::Status status = MaybeFail(slot_failures);
    if (status.ok() || w_.t.Chance(0.5)) {
      files_.at(a.slot)->note = a.note;
    } else {
      w_.Count(Fault::kSlotFails);
    }
    Complete(NoteWritten{a.slot, a.note_version, status});
  });
}

namespace {

// Ranks of one parity hold the same tensors; now and then one of them has other bytes.
Likeness LikenessOf(const ShardId& id) {
  const uint64_t parity = id.rank % 2;
  const uint64_t diverged = (id.attempt * 31 + id.step * 7 + id.rank) % 53 == 0 ? id.rank + 1 : 0;
  Likeness likeness;
  likeness.tensors.fill(static_cast<uint8_t>(1 + parity));
  likeness.content = PlanHash(
      likeness.tensors, std::vector<Rank>{static_cast<Rank>(id.attempt), static_cast<Rank>(id.step),
                                          static_cast<Rank>(diverged)});
  return likeness;
}

}  // namespace

void Node::Do(const PublishRecord& a) {
  OnSlot(a.slot, [this, a] {
    const FilePtr file = files_.at(a.slot);
    RecordPublished published{a.slot, a.generation, MaybeFail(slot_failures), a.expected};
    const std::optional<FileRecord>& said = file->client_record;
    if (!said || said->copy.id != a.expected.id || said->copy.generation != a.expected.generation) {
      published.status = absl::InvalidArgumentError("the record is of another shard");
    } else {
      published.copy.image_bytes = kSlotBytes / 2;
      published.copy.sealed_unix_ms = UnixMs();
      published.copy.likeness = LikenessOf(published.copy.id);
      if (published.status.ok() || w_.t.Chance(0.5)) {
        RecordGone(*file, Truth::Why::kCommanded);
        file->replaced = false;
        file->record = FileRecord{published.copy, said->token};
        const ShardId& id = published.copy.id;
        w_.truth.Sealed(id, published.copy.job_name, published.copy.world_size, said->token);
        w_.truth.Added(id, {TierKind::kMemory, index});
      }
    }
    Complete(published);
  });
}

void Node::Do(const RemoveRecord& a) {
  OnSlot(a.slot, [this, a] {
    const absl::Status status = MaybeFail(slot_failures);
    if (status.ok()) {
      RecordGone(*files_.at(a.slot), Truth::Why::kCommanded);
    }
    Complete(RecordRemoved{a.slot, a.generation, status});
  });
}

void Node::Do(const DeleteSlot& a) {
  OnSlot(a.slot, [this, a] {
    const FilePtr file = files_.at(a.slot);
    if (!file->mapped_by.empty() || !file->read_by.empty()) {
      w_.truth.Violated(
          absl::StrCat(name, ": slot ", a.slot, " is deleted while a process has it mapped"));
    }
    RecordGone(*file, Truth::Why::kCommanded);
    files_.erase(a.slot);
    Complete(SlotDeleted{a.slot, absl::OkStatus()});
  });
}

// ---- States ----

// Of one job one after the other, as the runtime does it.
void Node::Do(const WriteJobState& a) {
  int64_t& busy = state_busy_until_[a.state.job_uuid()];
  busy = std::max(busy + 1, w_.t.now() + Latency().count());
  After(Duration(busy - w_.t.now()), [this, a] {
    const absl::Status status = MaybeFail(state_failures);
    if (status.ok() || w_.t.Chance(0.5)) {
      v1::JobState& stored = states_[a.state.job_uuid()];
      const auto order = [](const v1::JobState& state) {
        return std::tuple(state.epoch(), state.version(), state.highest_epoch());
      };
      if (order(a.state) < order(stored)) {
        w_.truth.Violated(absl::StrCat(name, ": an older state of ", a.state.name(), ", epoch ",
                                       a.state.epoch(), " version ", a.state.version(),
                                       ", is written over epoch ", stored.epoch(), " version ",
                                       stored.version()));
      }
      stored = a.state;
      stored.set_boot_id(absl::StrCat("boot-", index, "-", boots_));
    }
    if (!status.ok()) {
      w_.Count(Fault::kStateWriteFails);
    }
    Complete(
        JobStateWritten{JobUuid::FromBytes(a.state.job_uuid()).value(), a.state.version(), status});
  });
}

void Node::Do(const RemoveJobState& a) {
  After(Latency(), [this, a] {
    states_.erase(a.job.ToBytes());
    Complete(JobStateRemoved{a.job, absl::OkStatus()});
  });
}

// ---- Processes ----

void Node::Do(const WatchProcess& a) {
  watched_.insert(a.process);
  if (living_.count(a.process) == 0) {
    Complete(ProcessEnded{a.process});
  }
}

void Node::Ended(const ProcessId& process) {
  living_.erase(process);
  for (const auto& [slot, file] : files_) {
    file->mapped_by.erase(process);
    file->read_by.erase(process);
  }
  if (core_ && watched_.count(process) > 0) {
    After(Latency(), [this, process] {
      if (watched_.count(process) > 0) {
        Feed(ProcessEnded{process});
      }
    });
  }
}

ConnectionId Node::Open(RankProcess* process) {
  const ConnectionId id = next_connection_++;
  connections_[id] = process;
  After(Duration(0), [this, id, process = process->process(), uid = process->uid()] {
    if (connections_.count(id) > 0) {
      Feed(ConnectionOpened{id, {process, uid, uid}});
    }
  });
  return id;
}

void Node::CloseSocket(ConnectionId connection) {
  if (connections_.erase(connection) == 0) {
    return;
  }
  for (auto it = requests_.lower_bound({connection, 0});
       it != requests_.end() && it->first.first == connection; it = requests_.erase(it)) {
    due_.erase({it->second.due, it->first});
  }
  Complete(ConnectionClosed{connection}, milliseconds(1) + Latency());
}

void Node::Do(const CloseConnection& a) {
  const auto it = connections_.find(a.connection);
  if (it != connections_.end()) {
    RankProcess* process = it->second;
    CloseSocket(a.connection);
    process->OnClosed();
  }
}

void Node::Send(ConnectionId connection, const v1::ClientFrame& frame, Duration deadline) {
  const std::pair key{connection, frame.id()};
  const MonotonicTime due = Local() + deadline + kAnswerSlack;
  requests_[key] = {w_.tracing() || w_.options.check_every == 1 ? frame.ShortDebugString() : "",
                    due};
  due_.insert({due, key});
  After(microseconds(50), [this, connection, frame] {
    if (connections_.count(connection) > 0) {
      Feed(ClientRequest{connection, frame});
    }
  });
}

FilePtr Node::FindFile(SlotId slot) const {
  const auto it = files_.find(slot);
  return it == files_.end() ? nullptr : it->second;
}

void Node::Do(const SendReply& a) {
  int64_t at = std::max(socket_busy_until_[a.connection] + 1, w_.t.now() + Latency().count());
  const bool of_slot =
      a.descriptors != Descriptors::kNone && a.descriptors != Descriptors::kOpenedCopy;
  if (of_slot) {
    at = std::max(at, slot_busy_until_[a.slot] + 1);
    slot_busy_until_[a.slot] = at;
  }
  socket_busy_until_[a.connection] = at;
  After(Duration(at - w_.t.now()), [this, a, of_slot] {
    Deliver(a, of_slot || a.frame.has_begin_save() ? FindFile(a.slot) : nullptr);
  });
}

void Node::Deliver(const SendReply& a, const FilePtr& file) {
  if (const auto it = requests_.find({a.connection, a.frame.id()}); it != requests_.end()) {
    due_.erase({it->second.due, it->first});
    requests_.erase(it);
  }
  const auto it = connections_.find(a.connection);
  if (it == connections_.end() || !it->second->running()) {
    return;
  }
  RankProcess& process = *it->second;
  if (a.frame.has_begin_save() || a.descriptors == Descriptors::kWritableImage) {
    CheckGrant(a, process, file);
  }
  if (a.descriptors == Descriptors::kReadOnlyImageAndRecord) {
    if (file && file->replaced && !file->record) {  // a good copy took its place meanwhile
      return Feed(HandOverFailed{a, absl::NotFoundError("no record")});
    }
    const v1::Source& source = a.frame.enter_session().source();
    const ShardId id{JobUuid::FromBytes(source.job_uuid()).value(), source.attempt(), source.step(),
                     source.rank()};
    if (!file || !file->record || file->record->copy.id != id ||
        file->record->copy.generation != source.generation()) {
      return w_.truth.Violated(absl::StrCat(name, ": slot ", a.slot, " was offered as ",
                                            id.ToString(), " and holds no such sealed copy"));
    }
    ++file->read_by[process.process()];
  }
  process.OnReply(a, file);
}

// One writer, proven gone before there is another.
void Node::CheckGrant(const SendReply& a, const RankProcess& process, const FilePtr& file) {
  const std::string what = absl::StrCat(name, ": slot ", a.slot, " generation ", a.generation,
                                        " was granted to ", process.process().ToString());
  if (!file) {
    return w_.truth.Violated(what + ", and is not there");
  }
  if (file->record) {
    w_.truth.Violated(what + ", and holds a sealed copy");
  }
  if (a.frame.has_begin_save()) {
    if (a.generation <= std::max(file->granted, granted_[a.slot])) {
      w_.truth.Violated(what + ", as another filling was before");
    }
    file->granted = granted_[a.slot] = a.generation;
  }
  if (!file->note.has_writer() || file->note.writer().pid() != process.process().pid ||
      file->note.generation() != a.generation) {
    w_.truth.Violated(what + ", and its note does not say so");
  }
  for (const ProcessId& other : file->mapped_by) {
    if (other != process.process()) {
      w_.truth.Violated(absl::StrCat(what, " while ", other.ToString(), " can write into it"));
    }
  }
  for (const auto& [reader, holds] : file->read_by) {
    if (holds > 0) {
      w_.truth.Violated(absl::StrCat(what, " while ", reader.ToString(), " reads it"));
    }
  }
}

// ---- Time, people, reports ----

void Node::Do(const SetTimer& a) {
  timer_at_ = a.at;
  const uint64_t timer = ++timer_;
  const int64_t at =
      std::max(TrueOf(a.at), w_.t.now()) + static_cast<int64_t>(w_.t.Below(5'000'000));
  w_.t.At(at, [this, timer, life = life_] {
    if (core_ && timer == timer_ && life == life_) {
      timer_at_.reset();
      Feed(TimerFired{});
    }
  });
}

void Node::Ask(decltype(AdminRequest::request) request, uint32_t uid,
               std::function<void(const AdminReply&)> answer) {
  if (!core_) {
    return;
  }
  const AdminToken token = next_asked_++;
  asked_[token] = std::move(answer);
  After(Duration(0), [this, token, uid, request = std::move(request)] {
    Feed(AdminRequest{token, Caller{{1, 1}, uid, uid}, request});
  });
}

void Node::Do(const AdminReply& a) {
  const auto it = asked_.find(a.token);
  if (it == asked_.end()) {
    return w_.truth.Violated(absl::StrCat(name, ": a second or unasked answer to a person"));
  }
  const auto answer = std::move(it->second);
  asked_.erase(it);
  w_.counts.states[absl::StrCat(
      "admin: ", a.status.ok() ? "ok" : absl::StatusCodeToString(a.status.code()))]++;
  if (answer) {
    answer(a);
  }
}

void Node::Do(const Report& a) {
  if (w_.tracing()) {
    w_.Trace(absl::StrCat(name, ": ", a.job, ": ", a.text));
  }
  static constexpr std::array kKinds = {
      "shard sealed",   "step committed",    "step shed",      "step retired",
      "step abandoned", "save refused",      "attempt opened", "session decided",
      "session done",   "session fell back", "session failed", "copy bad",
      "copy good",      "slot quarantined",  "slot released",  "slot lost",
      "job removed",    "tier committed",    "tier shed",      "tier trouble",
      "tier well",      "tier removed",      "protocol error", "trouble"};
  w_.counts.states[absl::StrCat("report: ", kKinds[static_cast<size_t>(a.kind)])]++;
  CheckpointId id;
  if (std::sscanf(a.text.c_str(), "step %" SCNu64 " of attempt %" SCNu64, &id.step, &id.attempt) !=
      2) {
    return;
  }
  if (a.kind == Report::Kind::kStepCommitted) {
    w_.truth.CommitReported(a.job, id);
  } else if (a.kind == Report::Kind::kTierCommitted) {
    w_.truth.TierCommitReported(a.job, id, a.tier);
  }
}

// ---- The cluster ----

template <typename ToEtcd>
void Node::DoEtcd(const ToEtcd& a) {
  w_.etcd.Do(*this, a);
}

void Node::Do(const ForgetAgreedState& a) {
  w_.truth.Violated(absl::StrCat(name, ": what was agreed on of ", a.job, " is forgotten"));
}

void Node::Do(const holdfast::SetPeers& a) {
  w_.network.SetPeers(*this, a);
}

void Node::Do(const ConnectPeer& a) {
  w_.network.Connect(*this, a.node);
}

void Node::Do(const SayToPeer& a) {
  if (v1::PeerMessage message; message.ParseFromString(a.message)) {
    if (message.has_job_hosted()) {
      w_.truth.Acts(message.job_name(), message.epoch(), name);
    }
    // Who answers a host has met it, and obeys none below it from now on.
    if (message.has_node_arrived()) {
      const std::string job =
          !message.job_name().empty() ? message.job_name() : w_.truth.NameOf(message.job_uuid());
      obeyed_[job] = std::max(obeyed_[job], message.epoch());
    }
  }
  w_.network.Say(*this, a);
}

}  // namespace holdfast::sim::cluster
