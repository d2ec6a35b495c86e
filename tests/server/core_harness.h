// Drives a NodeCore in tests: performs its actions at once on files that are plain values, and lets
// a test script clients.
//
//   CoreHarness h;
//   TestClient a = h.Connect(100);                       // pid 100, uid 1000
//   ASSERT_TRUE(a.Join("job", 0, 1));
//   ASSERT_TRUE(a.Save(10));                             // BeginSave and Seal
//   h.Restart();                                         // the daemon dies and starts again; files
//   stay
//
// After every event the core's invariants are checked. Completions can be delayed (`delay`) or
// failed (`fail`).
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/node_core.h"
#include "tests/server/fake_tiers.h"

namespace holdfast::testing {

inline constexpr uint64_t kSlot = 2ull << 20;

struct Answer {
  v1::DaemonFrame frame;
  Descriptors descriptors = Descriptors::kNone;
  SlotId slot = 0;
};

struct SlotFile {
  uint64_t bytes = 0;
  v1::SlotNote note;
  std::optional<SealedCopy> record;
};

class CoreHarness;

// One connection of one process. Copies refer to the same one.
class TestClient {
 public:
  TestClient(CoreHarness* harness, ConnectionId connection, ProcessId process)
      : h_(harness), connection_(connection), process_(process) {}

  uint64_t Send(v1::ClientFrame frame);
  std::optional<Answer> Take(uint64_t id);      // its answer, if there is one by now
  v1::DaemonFrame Call(v1::ClientFrame frame);  // fails the test when it is not answered at once
  v1::Failure::Reason Reason(v1::ClientFrame frame) {
    return Call(std::move(frame)).failure().reason();
  }

  static v1::ClientFrame JoinFrame(const std::string& job, Rank rank, uint32_t world,
                                   uint64_t deadline_ms = 0, const std::string& launch = "",
                                   Attempt attempt = 0, Attempt leave = 0);
  static v1::ClientFrame BeginFrame(Step step, uint64_t bytes = kSlot, uint64_t deadline_ms = 0);
  static v1::ClientFrame EnterFrame(uint64_t deadline_ms = 1000,
                                    std::optional<CheckpointId> wanted = std::nullopt);
  static v1::ClientFrame ReportFrame(const v1::SessionOutcome& of, bool loaded, bool bad = false,
                                     uint64_t deadline_ms = 1000);
  static v1::ClientFrame AwaitFrame(Step step, v1::AwaitSave::Stage stage,
                                    uint64_t deadline_ms = 0);
  static v1::ClientFrame SealFrame(Step step, const v1::Grant& grant);

  ::testing::AssertionResult Join(const std::string& job, Rank rank, uint32_t world);
  ::testing::AssertionResult Begin(Step step, uint64_t bytes = kSlot);  // keeps the grant
  ::testing::AssertionResult Seal(Step step);                           // of the kept grant
  ::testing::AssertionResult Save(Step step, uint64_t bytes = kSlot);
  bool Committed(Step step);
  void Release(const v1::Source& source);

  const v1::JoinReply& joined() const { return joined_; }
  const v1::Grant& grant() const { return grant_; }
  ConnectionId connection() const { return connection_; }
  ProcessId process() const { return process_; }

 private:
  CoreHarness* h_;
  ConnectionId connection_;
  ProcessId process_;
  v1::JoinReply joined_;
  v1::Grant grant_;
};

class CoreHarness {
 public:
  // `shared_remote`: the remote tier of several nodes.
  explicit CoreHarness(std::function<void(v1::DaemonConfig&)> adjust = nullptr,
                       std::shared_ptr<FakeTier> shared_remote = std::make_shared<FakeTier>());
  ~CoreHarness();

  // ---- the world ----
  TestClient Connect(int32_t pid, uint32_t uid = 1000);
  void Close(const TestClient& client);
  // SIGKILL: its sockets close first, its end is noticed after.
  void Kill(const TestClient& client);
  void Advance(Duration by);
  // The daemon dies and starts again: what it had told the runtime and is not done yet is lost.
  void Restart(bool memory_lost = false);
  void Feed(const Event& event);
  // Performs what was delayed, oldest first.
  void PerformDelayed();
  // What the runtime does by itself after a start; `late_drives` leaves it to the test.
  void AnswerDrives();
  int64_t unix_ms() const;

  // ---- admin ----
  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Admin(Request request, uint32_t uid = 1000) {
    if (const absl::Status asked = Ask(std::move(request), uid); !asked.ok()) {
      return asked;
    }
    return std::get<Reply>(answered.reply);
  }
  v1::JobStatus Status(const std::string& job);
  v1::DaemonStatus Daemon();
  // Steps on the line that are committed, newest first, as "attempt:step".
  std::vector<std::string> Committed(const std::string& job);
  size_t CountReports(Report::Kind kind) const;

  v1::DaemonConfig config;
  uint64_t bytes_max = 1000 * kSlot;
  uint64_t nvme_bytes_max = 0;
  bool late_drives = false;
  bool fetches_hang = false;  // in the kernel: a fetch that is delayed answers no cancel
  MonotonicTime now{1'000'000'000};
  std::unique_ptr<NodeCore> core;
  std::vector<LeftAloneSlot> left_alone;  // for the next Start
  std::map<SlotId, SlotFile> files;
  FakeTier nvme;
  const std::shared_ptr<FakeTier> remote_tier;
  FakeTier& remote = *remote_tier;
  std::vector<std::pair<TierKind, ShardId>> opened;  // for clients, or tried
  std::string failing_drive;                         // its scans fail
  std::vector<std::string> drives_read;              // scans of drives so far
  std::vector<std::string> unknown_files;            // what a scan of the first drive finds besides
  std::string boot_id = "boot-1";
  std::map<std::string, v1::JobState> states;  // by uuid
  std::set<ProcessId> living;
  std::set<ProcessId> watched;
  std::map<ConnectionId, std::map<uint64_t, Answer>> answers;
  std::map<AdminToken, AdminReply> admin_replies;
  std::vector<ConnectionId> closed;
  std::vector<Report> reports;
  std::optional<MonotonicTime> timer;
  std::function<bool(const Action&)> delay;  // true: performed only by PerformDelayed
  std::function<absl::Status(const Action&)>
      fail;  // what the action ends with instead of being performed
  std::vector<Action> delayed;
  std::function<void()> after_request;  // the rest of the world goes on
  // Reads that node's copy of the shard, as FetchShard::key names it; DataLoss: it contradicts its
  // digests.
  std::function<absl::StatusOr<SealedCopy>(const std::string& node, const FetchShard& wanted)>
      read_peer;
  std::set<ShardId> damaged_in_memory;
  std::map<bool, int> pulls;     // by whether they were in the background
  std::vector<DrainId> hurried;  // fetches that somebody began to wait for
  std::vector<DrainId> ended_parts;
  std::vector<Action> to_cluster;  // what it said to its cluster, in order
  // What other nodes want read here; without it they are left waiting.
  std::function<std::optional<ReadForPeer>(const PeerReads&)> read_for_peer;
  std::deque<Event> completions;
  ConnectionId next_connection = 1;
  AdminToken next_token = 1;
  AdminToken last_token = 0;
  uint64_t starts = 0;
  std::optional<ApplyLimits> limits;
  std::map<std::pair<TierKind, ShardId>, std::string> index;  // the catalog's

 private:
  absl::Status Ask(decltype(AdminRequest::request) request, uint32_t uid);  // into `answered`
  void Start();

  void Perform(const Actions& actions);
  void Do(const SendReply& a, const absl::Status& status);
  void Do(const CloseConnection& a, const absl::Status&);
  void Do(const WatchProcess& a, const absl::Status&);
  void Do(const UnwatchProcess& a, const absl::Status&);
  void Do(const CreateSlot& a, const absl::Status& status);
  void Do(const PopulateSlot& a, const absl::Status& status);
  void Do(const WriteNote& a, const absl::Status& status);
  void Do(const PublishRecord& a, const absl::Status& status);
  void Do(const RemoveRecord& a, const absl::Status& status);
  void Do(const DeleteSlot& a, const absl::Status& status);
  void Do(const WriteJobState& a, const absl::Status& status);
  void Do(const RemoveJobState& a, const absl::Status& status);
  FakeTier& TierOf(TierKind tier);
  void Do(const FlushShard& a, const absl::Status& status);
  void Do(const CancelDrain& a, const absl::Status&);
  void Do(const HurryFetch& a, const absl::Status&) { hurried.push_back(a.drain); }
  void Do(const ReadParts& a, const absl::Status& status);
  void Do(const GatherRecords& a, const absl::Status& status);
  void Do(const EndParts& a, const absl::Status&) { ended_parts.push_back(a.opened); }
  void Do(const FetchShard& a, const absl::Status& status);
  void FetchFromPeers(const FetchShard& a, FetchEnded& ended);
  void Do(const OpenDurable& a, const absl::Status& status);
  void Do(const PublishManifest& a, const absl::Status& status);
  void Do(const RemoveCopies& a, const absl::Status& status);
  void Do(const RemoveJobCopies& a, const absl::Status& status);
  void Do(const ScanRemote& a, const absl::Status&);
  void Do(const ScanNvme& a, const absl::Status&);
  void Do(const ApplyLimits& a, const absl::Status&);
  void Do(const IndexShard& a, const absl::Status&);
  void Do(const UnindexShard& a, const absl::Status&);
  void Do(const UnindexCopies& a, const absl::Status&);
  void Do(const SetTimer& a, const absl::Status&);
  template <typename ToCluster>
  void Do(const ToCluster& a, const absl::Status&);
  AdminReply answered;
  void Do(const AdminReply& a, const absl::Status&);
  void Do(const PeerReads& a, const absl::Status&);
  void Do(const Report& a, const absl::Status&);
};

::testing::AssertionResult Outcome(const v1::DaemonFrame& frame);  // whether it is no failure

}  // namespace holdfast::testing
