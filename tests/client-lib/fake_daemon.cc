#include "tests/client-lib/fake_daemon.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace holdfast {
namespace {

const std::string kUuid = "0123456789abcdef";

UniqueFd MakeMemfd(uint64_t bytes) {
  UniqueFd fd(::memfd_create("slot", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  return fd;
}

UniqueFd ReadOnly(const UniqueFd& fd) {
  return UniqueFd(
      ::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDONLY | O_CLOEXEC));
}

std::string ReadAll(const UniqueFd& fd, uint64_t offset, uint64_t bytes) {
  std::string out(bytes, '\0');
  const ssize_t got = ::pread(fd.get(), out.data(), bytes, static_cast<off_t>(offset));
  out.resize(got < 0 ? 0 : static_cast<size_t>(got));
  return out;
}

// The kernel names the process that made a socket listen.
void ListenInAChild(int listener) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(::listen(listener, 16) == 0 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

UniqueFd RecordFile(const std::string& record) {
  UniqueFd fd = MakeMemfd(0);
  EXPECT_EQ(::pwrite(fd.get(), record.data(), record.size(), 0),
            static_cast<ssize_t>(record.size()));
  return fd;
}

}  // namespace

std::string RequestName(const v1::ClientFrame& frame) {
  const auto* field = frame.GetDescriptor()->FindFieldByNumber(frame.request_case());
  const bool asks = frame.has_release_read() && frame.release_read().hold() == 0;
  return field == nullptr ? "?" : asks ? "ask" : field->name();
}

void FakeDaemon::Peer::Send(const v1::DaemonFrame& frame, const std::vector<int>& descriptors) {
  const std::string message = frame.SerializeAsString();
  std::string bytes(4, '\0');
  for (size_t i = 0; i < 4; ++i) {
    bytes[i] = static_cast<char>(message.size() >> (8 * i));
  }
  SendRaw(bytes + message, descriptors);
}

void FakeDaemon::Peer::SendRaw(const std::string& bytes, const std::vector<int>& descriptors) {
  struct iovec piece = {const_cast<char*>(bytes.data()), bytes.size()};
  std::vector<char> control(CMSG_SPACE(std::max<size_t>(1, descriptors.size()) * sizeof(int)));
  struct msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    struct cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  }
  ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
  while (sent >= 0 && static_cast<size_t>(sent) < bytes.size()) {
    const ssize_t more =
        ::send(fd_, bytes.data() + sent, bytes.size() - static_cast<size_t>(sent), MSG_NOSIGNAL);
    sent = more < 0 ? -1 : sent + more;
  }
}

void FakeDaemon::Peer::Close() {
  ::shutdown(fd_, SHUT_RDWR);
}

FakeDaemon::FakeDaemon(Listens listens) : listens_(listens) {
  std::string directory = "/tmp/holdfast-fake-XXXXXX";
  EXPECT_NE(::mkdtemp(directory.data()), nullptr);
  directory_ = directory;
  socket_ = directory_ + "/ckptd.sock";
  Start();
}

FakeDaemon::~FakeDaemon() {
  Stop();
  ::rmdir(directory_.c_str());
}

JobOptions FakeDaemon::Options() const {
  JobOptions options;
  options.job = "test";
  options.socket = socket_;
  options.copy_threads = 2;
  options.open_deadline = Milliseconds(20'000);
  options.call_deadline = Milliseconds(20'000);
  return options;
}

void FakeDaemon::Start() {
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  struct sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_.c_str(), sizeof(address.sun_path) - 1);
  EXPECT_EQ(::bind(listener, reinterpret_cast<struct sockaddr*>(&address), sizeof(address)), 0);
  if (listens_ == Listens::kAnother) {
    ListenInAChild(listener);
  } else {
    EXPECT_EQ(::listen(listener, 16), 0);
  }
  EXPECT_EQ(::pipe2(stop_pipe_, O_CLOEXEC), 0);
  thread_ = std::thread([this, listener] { Serve(listener); });
}

void FakeDaemon::Stop() {
  if (!thread_.joinable()) {
    return;
  }
  EXPECT_EQ(::write(stop_pipe_[1], "x", 1), 1);
  thread_.join();
  ::close(stop_pipe_[0]);
  ::close(stop_pipe_[1]);
  ::unlink(socket_.c_str());
  const MutexLock lock(mutex_);
  for (auto& [id, slot] : slots_) {
    slot.writing = false;
    slot.mapped = false;  // a new daemon passes descriptors again
  }
}

void FakeDaemon::TakePathOf(const FakeDaemon& other) {
  EXPECT_EQ(::rename(socket_.c_str(), other.socket_.c_str()), 0);
}

int FakeDaemon::Accepted() {
  const MutexLock lock(mutex_);
  return accepted_;
}

void FakeDaemon::Serve(int listener) {
  while (true) {
    std::vector<struct pollfd> fds = {{stop_pipe_[0], POLLIN, 0}, {listener, POLLIN, 0}};
    for (const auto& [fd, inbox] : inboxes_) {
      fds.push_back({fd, POLLIN, 0});
    }
    ::poll(fds.data(), fds.size(), -1);
    if (fds[0].revents != 0) {
      break;
    }
    if (fds[1].revents != 0) {
      inboxes_[::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)];
      const MutexLock lock(mutex_);
      ++accepted_;
    }
    for (size_t i = 2; i < fds.size(); ++i) {
      if (fds[i].revents != 0 && !ServeOne(fds[i].fd)) {
        ::close(fds[i].fd);
        inboxes_.erase(fds[i].fd);
      }
    }
  }
  for (const auto& [fd, inbox] : inboxes_) {
    ::close(fd);
  }
  inboxes_.clear();
  ::close(listener);
}

bool FakeDaemon::ServeOne(int fd) {
  char buffer[65536];
  const ssize_t got = ::recv(fd, buffer, sizeof(buffer), 0);
  if (got <= 0) {
    return false;
  }
  std::string& inbox = inboxes_[fd];
  inbox.append(buffer, static_cast<size_t>(got));
  while (inbox.size() >= 4) {
    uint32_t length = 0;
    std::memcpy(&length, inbox.data(), 4);
    if (inbox.size() < 4 + length) {
      break;
    }
    v1::ClientFrame frame;
    if (!frame.ParseFromArray(inbox.data() + 4, static_cast<int>(length))) {
      ADD_FAILURE() << "the client sent a frame that protobuf can't parse";
      return false;
    }
    inbox.erase(0, 4 + length);
    std::shared_ptr<const Hook> hook;
    {
      const MutexLock lock(mutex_);
      hook = hook_;
      frames_.push_back(frame);
      changed_.NotifyAll();
    }
    Peer peer(fd);
    if (hook == nullptr || !*hook || !(*hook)(frame, peer)) {
      Answer(frame, peer);
    }
  }
  return true;
}

FakeDaemon::Slot* FakeDaemon::Newest() {
  Slot* newest = nullptr;
  for (auto& [id, slot] : slots_) {
    if (slot.sealed && (newest == nullptr || slot.step > newest->step)) {
      newest = &slot;
    }
  }
  return newest;
}

void FakeDaemon::Grant(const v1::ClientFrame& frame, v1::DaemonFrame& reply,
                       std::vector<int>& descriptors) {
  const v1::BeginSave& begin = frame.begin_save();
  if (last_step_.has_value() && begin.step() <= *last_step_) {
    reply.mutable_failure()->set_code(9);
    reply.mutable_failure()->set_message("step " + std::to_string(begin.step()) +
                                         " is not greater than " + std::to_string(*last_step_));
    return;
  }
  // Three slots; the oldest sealed one goes first when all are taken.
  uint32_t chosen = 0;
  for (uint32_t id = 1; id <= 3; ++id) {
    Slot& slot = slots_[id];
    const Slot& best = slots_[chosen == 0 ? id : chosen];
    if (chosen == 0 || (best.sealed && (!slot.sealed || slot.step < best.step))) {
      chosen = id;
    }
  }
  Slot& slot = slots_[chosen];
  if (slot.bytes < begin.slot_bytes()) {
    slot.image = MakeMemfd(begin.slot_bytes());
    slot.bytes = begin.slot_bytes();
    slot.mapped = false;
  }
  ++slot.generation;
  slot.sealed = false;
  slot.writing = true;
  slot.attempt = attempt_;
  slot.step = begin.step();
  last_step_ = begin.step();
  v1::Grant* grant = reply.mutable_begin_save();
  grant->set_slot(chosen);
  grant->set_generation(slot.generation);
  grant->set_slot_bytes(slot.bytes);
  grant->set_with_descriptor(!slot.mapped);
  grant->set_job_uuid(kUuid);
  grant->set_attempt(attempt_);
  v1::Descent* descent = grant->add_descent();
  descent->set_attempt(attempt_);
  if (!slot.mapped) {
    descriptors.push_back(slot.image.get());
    slot.mapped = true;
  }
}

void FakeDaemon::Seal(const v1::ClientFrame& frame) {
  const v1::Seal& seal = frame.seal();
  Slot& slot = slots_[seal.slot()];
  EXPECT_EQ(seal.generation(), slot.generation);
  EXPECT_EQ(seal.step(), slot.step);
  slot.record = ReadAll(slot.image, seal.record_offset(), seal.record_bytes());
  slot.sealed = true;
  slot.writing = false;
}

bool FakeDaemon::Offer(std::optional<uint64_t> step, uint64_t hold, v1::DaemonFrame& reply,
                       std::vector<UniqueFd>& descriptors) {
  Slot* best = nullptr;
  uint32_t best_id = 0;
  for (auto& [id, slot] : slots_) {
    const bool candidate = slot.sealed && (!step.has_value() || slot.step == *step) &&
                           (!passed_over_.has_value() || slot.step < *passed_over_);
    if (candidate && (best == nullptr || slot.step > best->step)) {
      best = &slot;
      best_id = id;
    }
  }
  if (best == nullptr) {
    return false;
  }
  v1::SessionOutcome* outcome = reply.mutable_enter_session();
  outcome->set_session(7);
  outcome->set_round(++round_);
  outcome->set_attempt(best->attempt);
  outcome->set_step(best->step);
  v1::Source* source = outcome->mutable_source();
  const absl::StatusOr<ShardRecord> record = DecodeRecord(best->record);
  source->set_slot(best_id);
  source->set_generation(best->generation);
  source->set_image_bytes(record.ok() ? record->image_bytes : 4096);
  source->set_attempt(best->attempt);
  source->set_step(best->step);
  source->set_job_uuid(kUuid);
  source->set_world_size(1);
  source->set_hold(hold);
  EXPECT_NE(hold, 0u);
  EXPECT_TRUE(holds_.insert(hold).second) << "a hold of that name is there already";
  descriptors.push_back(ReadOnly(best->image));
  descriptors.push_back(RecordFile(best->record));
  offered_ = *outcome;
  return true;
}

// The nearest tier's copy of the step, but for those that the reader does not want.
void FakeDaemon::AnswerAttach(const v1::Attach& attach, v1::DaemonFrame& reply,
                              std::vector<UniqueFd>& descriptors) {
  const auto wanted = [&](const std::string& tier) {
    return std::count(attach.without().begin(), attach.without().end(), tier) == 0;
  };
  const std::optional<uint64_t> step =
      attach.choice() == v1::Attach::CHOICE_STEP ? std::optional(attach.step()) : std::nullopt;
  if (wanted("memory") && Offer(step, attach.hold(), reply, descriptors)) {
    const v1::Source source = reply.enter_session().source();
    *reply.mutable_attach() = source;
    return;
  }
  for (const TierCopy& copy : tier_copies_) {
    if (!attach.any_tier() || !wanted(copy.tier) || (step && copy.step != *step)) {
      continue;
    }
    const absl::StatusOr<ShardRecord> record = DecodeRecord(copy.record);
    v1::Source* source = reply.mutable_attach();
    source->set_image_bytes(record.ok() ? record->image_bytes : 4096);
    source->set_attempt(copy.attempt);
    source->set_step(copy.step);
    source->set_job_uuid(kUuid);
    source->set_world_size(1);
    source->set_tier(copy.tier);
    source->set_why(attach.without().empty() ? "memory copy absent" : "");
    descriptors.push_back(ReadOnly(copy.image));
    descriptors.push_back(RecordFile(copy.record));
    return;
  }
  reply.mutable_failure()->set_code(5);
  reply.mutable_failure()->set_message("no such checkpoint");
}

// Two at a time.
void FakeDaemon::AnswerList(const v1::List& list, v1::Listing& listing) {
  std::map<std::pair<uint64_t, uint64_t>, std::string> known;
  for (const auto& [id, slot] : slots_) {
    if (slot.sealed) {
      known[{slot.attempt, slot.step}] = "memory";
    }
  }
  for (auto it = known.rbegin(); it != known.rend(); ++it) {
    if (list.before() && it->first >= std::pair(list.before_attempt(), list.before_step())) {
      continue;
    }
    if (listing.checkpoints_size() == 2) {
      listing.set_more(true);
      return;
    }
    v1::ListedCheckpoint* listed = listing.add_checkpoints();
    listed->set_attempt(it->first.first);
    listed->set_step(it->first.second);
    listed->set_world_size(1);
    listed->set_on_line(true);
    listed->add_tiers(it->second);
    listed->set_bytes(1000);
    listed->set_unix_ms(7);
  }
}

void FakeDaemon::CopyToTier(const std::string& tier) {
  const std::string image = LastImage();
  ShardRecord record = LastRecord();
  record.generation = 0;
  TierCopy copy;
  copy.tier = tier;
  copy.attempt = record.id.attempt;
  copy.step = record.id.step;
  copy.image = MakeMemfd(0);
  copy.record = EncodeRecord(record);
  EXPECT_EQ(::pwrite(copy.image.get(), image.data(), image.size(), 0),
            static_cast<ssize_t>(image.size()));
  tier_copies_.push_back(std::move(copy));
}

void FakeDaemon::ForgetSteps() {
  const MutexLock lock(mutex_);
  last_step_.reset();
  for (auto& [id, slot] : slots_) {
    slot.writing = false;
    slot.mapped = false;
  }
}

void FakeDaemon::LoseMemory() {
  const MutexLock lock(mutex_);
  slots_.clear();
}

void FakeDaemon::AnswerReserve(const v1::ClientFrame& frame, v1::DaemonFrame& reply,
                               std::vector<int>& descriptors) {
  v1::ReserveReply* reserved = reply.mutable_reserve();
  reserved->set_ready(3);
  reserved->set_wanted(3);
  reserved->set_slot_bytes(frame.reserve().slot_bytes());
  for (uint32_t id = 1; id <= 3; ++id) {
    Slot& slot = slots_[id];
    if (slot.bytes == 0) {
      slot.image = MakeMemfd(frame.reserve().slot_bytes());
      slot.bytes = frame.reserve().slot_bytes();
    }
    if (!slot.mapped) {
      reserved->set_with_descriptor(true);
      reserved->set_slot(id);
      descriptors.push_back(slot.image.get());
      slot.mapped = true;
      return;
    }
  }
}

void FakeDaemon::AnswerSession(const v1::ClientFrame& frame, v1::DaemonFrame& reply,
                               std::vector<UniqueFd>& descriptors) {
  if (frame.has_report_load() && frame.report_load().loaded()) {
    v1::SessionOutcome* outcome = reply.mutable_enter_session();
    outcome->set_done(true);
    outcome->set_attempt(offered_->attempt());
    outcome->set_step(offered_->step());
    return;
  }
  if (frame.has_report_load() && frame.report_load().wants_mismatch()) {
    reply.mutable_failure()->set_code(3);
    reply.mutable_failure()->set_message("rank 0 wants something else");
    return;
  }
  if (frame.has_report_load() && !frame.report_load().copy_is_bad()) {
    reply.mutable_failure()->set_code(14);  // UNAVAILABLE
    reply.mutable_failure()->set_message("rank 0 could not load it: " +
                                         frame.report_load().problem());
    return;
  }
  std::optional<uint64_t> step;
  if (frame.has_report_load()) {
    passed_over_ = offered_->step();
  } else if (frame.enter_session().choice() == v1::EnterSession::CHOICE_STEP && !newest_always_) {
    step = frame.enter_session().step();
  }
  if (frame.enter_session().reads_by_itself()) {
    const Slot* newest = Newest();
    if (newest == nullptr) {
      reply.mutable_failure()->set_code(5);
      reply.mutable_failure()->set_reason(v1::Failure::REASON_NOTHING_TO_RESTORE);
      return;
    }
    v1::SessionOutcome* outcome = reply.mutable_enter_session();
    outcome->set_session(7);
    outcome->set_done(true);
    outcome->set_attempt(newest->attempt);
    outcome->set_step(step.value_or(newest->step));
    return;
  }
  const uint64_t hold =
      frame.has_report_load() ? frame.report_load().hold() : frame.enter_session().hold();
  if (!Offer(step, hold, reply, descriptors)) {
    reply.mutable_failure()->set_code(5);
    reply.mutable_failure()->set_message("there is nothing that could be offered");
    if (!step.has_value()) {
      reply.mutable_failure()->set_reason(frame.has_report_load()
                                              ? v1::Failure::REASON_UNREADABLE
                                              : v1::Failure::REASON_NOTHING_TO_RESTORE);
    }
  }
}

void FakeDaemon::Answer(const v1::ClientFrame& frame, Peer& peer) {
  v1::DaemonFrame reply;
  reply.set_id(frame.id());
  std::vector<int> descriptors;
  std::vector<UniqueFd> owned;
  const MutexLock lock(mutex_);
  switch (frame.request_case()) {
    case v1::ClientFrame::kHello:
      reply.mutable_hello()->set_protocol(1);
      reply.mutable_hello()->set_daemon_version("fake");
      break;
    case v1::ClientFrame::kJoin: {
      const v1::Join& join = frame.join();
      if (join.leave_attempt() != 0 || attempt_ == 0 || join.attempt() == 0) {
        ++attempt_;
        last_step_.reset();
      }
      passed_over_.reset();
      reply.mutable_join()->set_job_uuid(kUuid);
      reply.mutable_join()->set_attempt(attempt_);
      break;
    }
    case v1::ClientFrame::kReserve:
      AnswerReserve(frame, reply, descriptors);
      break;
    case v1::ClientFrame::kBeginSave:
      Grant(frame, reply, descriptors);
      break;
    case v1::ClientFrame::kSeal:
      Seal(frame);
      reply.mutable_seal()->set_sealed_unix_ms(1);
      break;
    case v1::ClientFrame::kAbortSave:
      slots_[frame.abort_save().slot()].writing = false;
      reply.mutable_abort_save();
      break;
    case v1::ClientFrame::kAwaitSave:
      reply.mutable_await_save()->set_stage(frame.await_save().stage());
      break;
    case v1::ClientFrame::kReportLoad:
    case v1::ClientFrame::kEnterSession:
      AnswerSession(frame, reply, owned);
      break;
    case v1::ClientFrame::kAttach:
      AnswerAttach(frame.attach(), reply, owned);
      break;
    case v1::ClientFrame::kList:
      AnswerList(frame.list(), *reply.mutable_list());
      break;
    case v1::ClientFrame::kConfirmRead:
      reply.mutable_confirm_read();
      break;
    case v1::ClientFrame::kReleaseRead:
      holds_.erase(frame.release_read().hold());
      reply.mutable_release_read();
      break;
    case v1::ClientFrame::kReleaseSlots:
      for (const uint32_t slot : frame.release_slots().slots()) {
        slots_[slot].mapped = false;
      }
      reply.mutable_release_slots();
      break;
    case v1::ClientFrame::kLeave:
      reply.mutable_leave();
      break;
    case v1::ClientFrame::kReachStep:  // its job is alone
      reply.mutable_reach_step()->set_stop(frame.reach_step().told_to_stop());
      reply.mutable_reach_step()->set_stopping(frame.reach_step().told_to_stop());
      reply.mutable_reach_step()->set_left_ms(frame.reach_step().grace_ms());
      break;
    case v1::ClientFrame::kReadParts:
    case v1::ClientFrame::kReadRecords:       // it is alone, and has gathered nothing
      reply.mutable_failure()->set_code(14);  // UNAVAILABLE
      reply.mutable_failure()->set_message("there is no other node");
      break;
    case v1::ClientFrame::REQUEST_NOT_SET:
      peer.Close();
      return;
  }
  for (const UniqueFd& fd : owned) {
    descriptors.push_back(fd.get());
  }
  peer.Send(reply, descriptors);
}

void FakeDaemon::SetHook(Hook hook) {
  const MutexLock lock(mutex_);
  hook_ = std::make_shared<const Hook>(std::move(hook));
}

void FakeDaemon::OfferTheNewestAlways() {
  const MutexLock lock(mutex_);
  newest_always_ = true;
}

size_t FakeDaemon::Holds() {
  const MutexLock lock(mutex_);
  return holds_.size();
}

int FakeDaemon::Count(const std::string& request) {
  return static_cast<int>(Frames(request).size());
}

std::vector<v1::ClientFrame> FakeDaemon::Frames(const std::string& request) {
  const MutexLock lock(mutex_);
  std::vector<v1::ClientFrame> found;
  for (const v1::ClientFrame& frame : frames_) {
    if (RequestName(frame) == request) {
      found.push_back(frame);
    }
  }
  return found;
}

bool FakeDaemon::WaitForCount(const std::string& request, int count) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const MutexLock lock(mutex_);
  while (std::count_if(frames_.begin(), frames_.end(), [&](const v1::ClientFrame& f) {
           return RequestName(f) == request;
         }) < count) {
    if (!changed_.WaitUntil(mutex_, until)) {
      return false;
    }
  }
  return true;
}

ShardRecord FakeDaemon::LastRecord() {
  const MutexLock lock(mutex_);
  const Slot* slot = Newest();
  absl::StatusOr<ShardRecord> record = DecodeRecord(slot == nullptr ? std::string() : slot->record);
  EXPECT_TRUE(record.ok()) << record.status();
  return record.ok() ? *std::move(record) : ShardRecord();
}

std::string FakeDaemon::LastImage() {
  const uint64_t bytes = LastRecord().image_bytes;
  const MutexLock lock(mutex_);
  const Slot* slot = Newest();
  return slot == nullptr ? std::string() : ReadAll(slot->image, 0, bytes);
}

void FakeDaemon::FlipImageByte(uint64_t offset) {
  const MutexLock lock(mutex_);
  const Slot* slot = Newest();
  std::string byte = ReadAll(slot->image, offset, 1);
  byte[0] = static_cast<char>(byte[0] ^ 0x40);
  EXPECT_EQ(::pwrite(slot->image.get(), byte.data(), 1, static_cast<off_t>(offset)), 1);
}

void FakeDaemon::TruncateImage(uint64_t bytes) {
  const MutexLock lock(mutex_);
  EXPECT_EQ(::ftruncate(Newest()->image.get(), static_cast<off_t>(bytes)), 0);
}

void FakeDaemon::ReplaceRecord(const std::string& record) {
  const MutexLock lock(mutex_);
  Newest()->record = record;
}

void FakeDaemon::TruncateAll(uint64_t bytes) {
  const MutexLock lock(mutex_);
  for (auto& [id, slot] : slots_) {
    if (slot.image.valid()) {
      EXPECT_EQ(::ftruncate(slot.image.get(), static_cast<off_t>(bytes)), 0);
    }
  }
}

uint64_t FakeDaemon::attempt() {
  const MutexLock lock(mutex_);
  return attempt_;
}

}  // namespace holdfast
