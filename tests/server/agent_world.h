// The agent of one node of a cluster, and a test that is its runtime and all other nodes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "server/agent.h"

namespace holdfast {

inline constexpr uint64_t kSlot = 2ull << 20;
inline constexpr uint32_t kUser = 1000;

inline JobUuid Uuid(uint8_t n) {
  JobUuid uuid;
  uuid.bytes[0] = n;
  return uuid;
}

inline v1::JobState State(const JobUuid& uuid, const std::string& name, uint64_t version,
                          uint64_t epoch = 0) {
  v1::JobState state;
  state.set_job_uuid(uuid.ToBytes());
  state.set_name(name);
  state.set_uid(kUser);
  state.set_gid(kUser);
  state.set_version(version);
  state.set_epoch(epoch);
  state.set_highest_epoch(epoch);
  return state;
}

class AgentClusterTest : public ::testing::Test {
 protected:
  AgentClusterTest() {
    config_.mutable_cluster()->add_members()->set_name("node-a");
    config_.mutable_memory()->set_slots_per_rank(3);
    config_.mutable_memory()->set_slots_max(1000);
    config_.mutable_save()->set_commit_deadline_ms(600'000);
    config_.mutable_session()->set_deadline_max_ms(3'600'000);
    config_.mutable_admin()->set_request_timeout_ms(30'000);
    config_.mutable_nvme()->add_dirs("/nvme");
    config_.mutable_nvme()->set_high_watermark_percent(90);
    config_.mutable_nvme()->set_low_watermark_percent(80);
    config_.mutable_remote()->set_dir("/remote");
    started_.memory_bytes_max = 100 * kSlot;
    started_.boot_id = "boot";
  }

  EventTime Time() const { return {now_, now_.ns / 1'000'000}; }

  void Start() {
    agent_ = std::make_unique<Agent>(config_, "node-a", 7, 0);
    Feed(started_);
  }
  void Feed(const Event& event) {
    agent_->Handle(event, Time());
    Settle();
  }
  // What the runtime does at once; the rest is kept for the test.
  void Settle() {
    while (true) {
      agent_->Settle(Time());
      if (agent_->actions().empty()) {
        break;
      }
      const Action action = std::move(agent_->actions().front());
      agent_->actions().pop_front();
      if (const auto* note = std::get_if<WriteNote>(&action); note != nullptr && !keep_notes_) {
        agent_->Handle(NoteWritten{note->slot, note->note_version, absl::OkStatus()}, Time());
      } else if (const auto* slot = std::get_if<CreateSlot>(&action)) {
        agent_->Handle(SlotCreated{slot->slot, absl::OkStatus()}, Time());
      } else if (const auto* record = std::get_if<PublishRecord>(&action)) {
        RecordPublished published{record->slot, record->generation, absl::OkStatus(),
                                  record->expected};
        published.copy.image_bytes = 4096;
        published.copy.sealed_unix_ms = 5;
        agent_->Handle(published, Time());
      } else {
        actions_.push_back(action);
      }
    }
    EXPECT_EQ(agent_->CheckInvariants(), "");
  }
  template <typename What>
  std::vector<What> Take() {
    std::vector<What> taken;
    std::erase_if(actions_, [&](const Action& action) {
      const auto* found = std::get_if<What>(&action);
      if (found != nullptr) {
        taken.push_back(*found);
      }
      return found != nullptr;
    });
    return taken;
  }
  template <typename What>
  std::vector<What> Notices() {
    std::vector<What> taken;
    for (const AgentNotice& notice : agent_->notices()) {
      if (const auto* found = std::get_if<What>(&notice)) {
        taken.push_back(*found);
      }
    }
    agent_->notices().clear();
    return taken;
  }
  // What was said to the job's coordinator since, in order.
  std::vector<ToCoordinator> Said(const JobUuid& job) {
    std::vector<ToCoordinator> said;
    for (const auto& [to, message] : agent_->messages()) {
      if (to == job) {
        said.push_back(message);
      }
    }
    agent_->messages().clear();
    return said;
  }
  template <typename What>
  static std::vector<What> Only(const std::vector<ToCoordinator>& said) {
    std::vector<What> only;
    for (const ToCoordinator& message : said) {
      if (const auto* found = std::get_if<What>(&message)) {
        only.push_back(*found);
      }
    }
    return only;
  }
  ConnectionId Connect(int32_t pid) {
    Feed(ConnectionOpened{next_connection_, {{pid, 1}, kUser, kUser}});
    return next_connection_++;
  }
  void Ask(ConnectionId connection, v1::ClientFrame frame) {
    frame.set_id(next_frame_++);
    Feed(ClientRequest{connection, frame});
  }
  void Join(ConnectionId connection, Rank rank, const std::string& name = "job",
            uint64_t deadline_ms = 60'000) {
    v1::ClientFrame frame;
    frame.mutable_join()->set_job(name);
    frame.mutable_join()->set_rank(rank);
    frame.mutable_join()->set_world_size(4);
    frame.mutable_join()->set_deadline_ms(deadline_ms);
    Ask(connection, frame);
  }
  void List(ConnectionId connection, uint64_t deadline_ms = 60'000) {
    v1::ClientFrame frame;
    frame.mutable_list()->set_job("job");
    frame.mutable_list()->set_deadline_ms(deadline_ms);
    Ask(connection, frame);
  }
  void Begin(ConnectionId connection, Step step) {
    v1::ClientFrame frame;
    frame.mutable_begin_save()->set_step(step);
    frame.mutable_begin_save()->set_slot_bytes(kSlot);
    frame.mutable_begin_save()->set_deadline_ms(60'000);
    Ask(connection, frame);
  }
  MeetJob Host(const JobUuid& uuid, const std::string& name = "job") {
    return {name, uuid, kUser, kUser, 1, 4, {}};
  }
  void Meet(const MeetJob& job) {
    agent_->Meet(job, Time());
    Settle();
  }
  void Tell(const JobUuid& job, const ToAgent& message) {
    agent_->Take(job, message, Time());
    Settle();
  }
  // A rank that has joined, over a connection of its own.
  ConnectionId Seated(const JobUuid& job, Rank rank, int32_t pid) {
    const ConnectionId connection = Connect(pid);
    Join(connection, rank);
    for (const JoinAsked& join : Only<JoinAsked>(Said(job))) {
      JoinAccepted accepted;
      accepted.token = join.token;
      accepted.attempt = 1;
      accepted.rank = join.rank;
      accepted.world_size = 4;
      Tell(job, accepted);
    }
    return connection;
  }
  void Permit(const JobUuid& job) {
    for (const SaveAsked& save : Only<SaveAsked>(Said(job))) {
      Tell(job, SavePermitted{save.token, {}});
    }
  }
  // The rank saves the step into a slot that it may have without asking for room.
  void Save(const JobUuid& job, ConnectionId connection, Step step) {
    Begin(connection, step);
    Permit(job);
    const auto replies = Take<SendReply>();
    ASSERT_TRUE(!replies.empty() && replies.back().frame.has_begin_save()) << "step " << step;
    const v1::Grant& grant = replies.back().frame.begin_save();
    v1::ClientFrame seal;
    seal.mutable_seal()->set_step(step);
    seal.mutable_seal()->set_slot(grant.slot());
    seal.mutable_seal()->set_generation(grant.generation());
    seal.mutable_seal()->set_record_offset(4096);
    seal.mutable_seal()->set_record_bytes(4096);
    Ask(connection, seal);
    EXPECT_EQ(Only<ShardSealed>(Said(job)).size(), 1u);
    Take<SendReply>();
  }
  static SealedCopy Copy(const JobUuid& job, Step step, Rank rank,
                         const std::string& name = "job") {
    SealedCopy copy;
    copy.id = {job, 1, step, rank};
    copy.job_name = name;
    copy.world_size = 4;
    copy.generation = 1;
    copy.image_bytes = 4096;
    copy.sealed_unix_ms = 5;
    return copy;
  }
  static DurableCopy OnDrive(const JobUuid& job, Step step, Rank rank,
                             const std::string& dir = "/nvme") {
    DurableCopy copy;
    copy.copy = Copy(job, step, rank);
    copy.copy.generation = 0;
    copy.record_bytes = 100;
    copy.record_crc = step;
    copy.location = dir + "/" + std::to_string(step);
    return copy;
  }
  void AddSlot(const SealedCopy& copy) {
    FoundSlot found;
    found.slot = static_cast<SlotId>(started_.slots.size());
    found.bytes = kSlot;
    found.note.set_generation(copy.generation);
    found.sealed = copy;
    started_.slots.push_back(found);
  }
  void DriveScanned(const std::vector<FoundJob>& jobs) {
    TierScanned scanned;
    scanned.dir = "/nvme";
    scanned.jobs = jobs;
    Feed(scanned);
  }
  FoundJob Found(const JobUuid& uuid, const std::vector<DurableCopy>& copies) {
    return {uuid, "job", kUser, kUser, copies, {}};
  }
  void RemoteScanned(const std::vector<FoundJob>& jobs) {
    for (const ScanRemote& scan : Take<ScanRemote>()) {
      TierScanned scanned;
      scanned.tier = TierKind::kRemote;
      scanned.drain = scan.drain;
      scanned.job_name = scan.job_name;
      scanned.jobs = jobs;
      Feed(scanned);
    }
  }
  // A fresh job that this node hosts, and that a person removes.
  std::vector<JobOpened> OpenAndRemove() {
    Start();
    DriveScanned({});
    agent_->BeginHosting("job", nullptr, Time());
    agent_->Want("job", {kUser, kUser, now_ + kRescan * 2}, Time());
    Settle();
    RemoteScanned({});
    const std::vector<JobOpened> opened = Notices<JobOpened>();
    v1::RemoveJobRequest request;
    request.set_job("job");
    Feed(AdminRequest{1, {{1, 1}, 0, 0}, request});
    return opened;
  }
  // The job's copies are being removed from drives and from the remote tier.
  void ExpectTheEndCancelsRemovalsInRemote() {
    Settle();
    std::vector<RemoveJobCopies> removals = Take<RemoveJobCopies>();
    ASSERT_EQ(removals.size(), 2u);
    std::erase_if(removals, [](const auto& each) { return each.tier != TierKind::kRemote; });
    ASSERT_EQ(removals.size(), 1u);
    Take<CancelDrain>();
    agent_->EndHosting("job");
    Settle();
    const auto cancelled = Take<CancelDrain>();
    ASSERT_EQ(cancelled.size(), 1u);
    EXPECT_EQ(cancelled[0].drain, removals[0].drain);
  }
  const Coordinator* Hosted(const JobUuid& uuid) {
    const auto job = agent_->jobs().find(uuid);
    return job == agent_->jobs().end() ? nullptr : job->second.coordinator.get();
  }
  std::vector<std::string> Problems() {
    Feed(AdminRequest{++admin_, {{1, 1}, 0, 0}, v1::GetStatusRequest()});
    const auto replies = Take<AdminReply>();
    const auto& reply = std::get<v1::GetStatusReply>(replies.back().reply);
    return {reply.daemon().problems().begin(), reply.daemon().problems().end()};
  }
  std::vector<v1::Failure> Failures() {
    std::vector<v1::Failure> failures;
    for (const SendReply& reply : Take<SendReply>()) {
      if (reply.frame.has_failure()) {
        failures.push_back(reply.frame.failure());
      }
    }
    return failures;
  }

  v1::DaemonConfig config_;
  Started started_;
  MonotonicTime now_{1'000'000'000};
  std::unique_ptr<Agent> agent_;
  std::vector<Action> actions_;
  bool keep_notes_ = false;
  ConnectionId next_connection_ = 1;
  uint64_t next_frame_ = 1;
  AdminToken admin_ = 100;
  const JobUuid x_ = Uuid(1);
  const JobUuid y_ = Uuid(2);
};

}  // namespace holdfast
