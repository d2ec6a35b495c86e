// The machine and its daemon: events in, actions out; time, people, reports, the cluster.
// (Slots: cluster_slots.cc; processes and their sockets: cluster_sockets.cc; drives:
// cluster_tiers.cc.)
#include "tests/sim/cluster_node.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "holdfast/v1/peer.pb.h"
#include "server/state_order.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

Node::Node(World& world, uint32_t i, std::string its_name, v1::DaemonConfig config)
    : index(i),
      name(std::move(its_name)),
      knows_mending(world.options.seed % 4 != 2 || i != 1),
      w_(world),
      config_(std::move(config)) {
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
    if (HoldsGood(id)) {
      return;  // a replica that goes, and was asked for again meanwhile
    }
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

bool Node::Keeps(const v1::JobState& state) const {
  return std::any_of(states_.begin(), states_.end(), [&](const auto& kept) {
    return kept.second.name() == state.name() && !IsNewerState(state, kept.second);
  });
}

bool Node::HasHeard(const std::string& job, Epoch epoch) const {
  return std::any_of(states_.begin(), states_.end(), [&](const auto& kept) {
    return kept.second.name() == job && kept.second.highest_epoch() >= epoch;
  });
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
  w_.truth.DamagedUnnoticed(file.record->copy.id, {TierKind::kMemory, index});
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
  w_.truth.DamagedUnnoticed(it->first, {TierKind::kNvme, index});
  return true;
}

bool Node::LoseNvmeCopy() {
  if (nvme_.copies.empty()) {
    return false;
  }
  auto it = nvme_.copies.begin();
  std::advance(it, static_cast<ptrdiff_t>(w_.t.Below(nvme_.copies.size())));
  w_.Trace(absl::StrCat(name, ": lost in nvme, ", it->first.ToString()));
  w_.truth.DamagedUnnoticed(it->first, {TierKind::kNvme, index});
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
  started.memory_bytes_max = kMemoryBytes;
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
  Scrub();
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
  ForgetPulls();
  ForgetParts();
  core_.reset();
  suspended_until_ = 0;
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
  lost_at_.clear();
  known_bad_.clear();
  tries_.clear();
  met_here_.clear();
  asked_.clear();
  requests_.clear();
  due_.clear();
  const std::map<ConnectionId, RankProcess*> open = std::exchange(connections_, {});
  for (const auto& [id, process] : open) {
    process->OnClosed();
  }
}

void Node::Suspend(Duration time) {
  const int64_t until = w_.t.now() + time.count();
  if (!core_ || until <= suspended_until_) {
    return;
  }
  w_.Trace(name + ": daemon is suspended");
  // Its clients wait for it as long.
  const Duration more((until - std::max(suspended_until_, w_.t.now())) * 11 / 10);
  suspended_until_ = until;
  std::set<std::pair<MonotonicTime, std::pair<ConnectionId, uint64_t>>> due;
  for (const auto& [at, key] : due_) {
    requests_.at(key).due = at + more;
    due.insert({at + more, key});
  }
  due_ = std::move(due);
}

bool Node::suspended() const {
  return core_ && w_.t.now() < suspended_until_;
}

void Node::WhenAwake(std::function<void()> what) {
  suspended() ? w_.t.At(suspended_until_, std::move(what)) : what();
}

void Node::InLife(uint64_t life, std::function<void()> what) {
  if (!core_ || life != life_) {
    return;
  }
  if (suspended()) {
    return w_.t.At(suspended_until_, [this, life, what = std::move(what)] { InLife(life, what); });
  }
  what();
}

void Node::After(Duration delay, std::function<void()> what) {
  w_.t.After(delay, [this, life = life_, what = std::move(what)]() mutable {
    InLife(life, std::move(what));
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
  v1::PeerMessage message;
  const bool heard = spoke != nullptr && message.ParseFromString(spoke->message);
  if (heard) {
    CheckOldCommand(spoke->node, message, actions);
    CheckOldMeeting(spoke->node, message, actions);
  } else {
    NoteMeetings(event);
  }
  heard_of_ = heard ? absl::StrCat(spoke->node, " ", message.epoch()) : "";
  Perform(actions);
  heard_of_.clear();
  if (const auto* closed = std::get_if<ConnectionClosed>(&event)) {
    CheckPartsOf(closed->connection);
  }
  if (heard && message.has_node_arrived() && w_.options.check_every == 1) {
    CheckArrival(spoke->node, *spoke, message);
  }
}

void Node::Perform(const Actions& actions) {
  for (const Action& action : actions) {
    std::visit([&](const auto& a) { Do(a); }, action);
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

// ---- Time, people, reports ----

void Node::Do(const SetTimer& a) {
  timer_at_ = a.at;
  const uint64_t timer = ++timer_;
  const int64_t at =
      std::max(TrueOf(a.at), w_.t.now()) + static_cast<int64_t>(w_.t.Below(5'000'000));
  w_.t.At(at, [this, timer, life = life_] {
    InLife(life, [this, timer] {
      if (timer == timer_) {
        timer_at_.reset();
        Feed(TimerFired{});
      }
    });
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

// What another node asked to read here. (Of what is read the runtime's own tests know.)
void Node::Do(const PeerReads& a) {
  ReadForPeer read{a.token, MaybeFail(w_.stormy() ? 0.2 : 0), {}};
  if (std::holds_alternative<v1::ReadShardRequest>(a.request)) {
    read.reply = v1::ReadShardReply();
  } else if (std::holds_alternative<v1::VerifyPartRequest>(a.request)) {
    read.reply = v1::VerifyPartReply();
  } else {
    read.reply = v1::VerifyMoreReply();
  }
  Complete(std::move(read));
}

void Node::Do(const Report& a) {
  if (w_.tracing()) {
    w_.Trace(absl::StrCat(name, ": ", a.job, ": ", a.text));
  }
  static constexpr std::array kKinds = {
      "shard sealed",     "step committed", "step shed",       "step retired", "step abandoned",
      "save refused",     "attempt opened", "session decided", "session done", "session fell back",
      "session failed",   "copy bad",       "copy good",       "copy mended",  "copy unmended",
      "slot quarantined", "slot released",  "slot lost",       "job removed",  "tier committed",
      "tier shed",        "tier trouble",   "tier well",       "tier removed", "replicas diverged",
      "job stopping",     "protocol error", "trouble"};
  static_assert(kKinds.size() == static_cast<size_t>(Report::Kind::kTrouble) + 1);
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
  } else if (a.kind == Report::Kind::kCopyMended) {
    w_.ToldMended(a.job, a.text);
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

void Node::Do(const holdfast::ChangePeers& a) {
  w_.network.ChangePeers(*this, a);
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
