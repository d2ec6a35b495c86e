#include "tests/server/core_harness.h"

#include <algorithm>

namespace holdfast::testing {

CoreHarness::CoreHarness(std::function<void(v1::DaemonConfig&)> adjust,
                         std::shared_ptr<FakeTier> shared_remote)
    : remote_tier(std::move(shared_remote)) {
  config.set_node_name("node");
  config.mutable_memory()->set_slots_per_rank(3);
  config.mutable_memory()->set_slots_max(1000);
  config.mutable_save()->set_commit_deadline_ms(600'000);
  config.mutable_restore()->set_wait_for_copies_ms(120'000);
  config.mutable_session()->set_deadline_max_ms(3'600'000);
  config.mutable_socket()->set_requests_per_connection_max(64);
  config.mutable_admin()->set_request_timeout_ms(30'000);
  for (v1::TierPolicy* tier :
       {config.mutable_policy()->mutable_nvme(), config.mutable_policy()->mutable_remote()}) {
    tier->set_every_steps(1);
    tier->set_every_ms(0);
    tier->set_keep_last(2);
    tier->set_keep_every_steps(0);
    tier->set_bytes_max(0);
    tier->set_verify(v1::TierPolicy::VERIFY_SAMPLE);
  }
  config.mutable_nvme()->set_high_watermark_percent(90);
  config.mutable_nvme()->set_low_watermark_percent(80);
  if (adjust) {
    adjust(config);
  }
  Start();
}

CoreHarness::~CoreHarness() = default;
TestClient CoreHarness::Connect(int32_t pid, uint32_t uid) {
  const ProcessId process{pid, 1};
  living.insert(process);
  const ConnectionId id = next_connection++;
  Feed(ConnectionOpened{id, {process, uid, uid}});
  return TestClient(this, id, process);
}

void CoreHarness::Close(const TestClient& client) {
  Feed(ConnectionClosed{client.connection()});
}
void CoreHarness::Kill(const TestClient& client) {
  living.erase(client.process());
  Feed(ConnectionClosed{client.connection()});
  if (watched.count(client.process()) > 0) {
    Feed(ProcessEnded{client.process()});
  }
}

void CoreHarness::Advance(Duration by) {
  now = now + by;
  while (timer && *timer <= now) {
    timer.reset();
    Feed(TimerFired{});
  }
}

void CoreHarness::Restart(bool memory_lost) {
  delayed.clear();
  if (memory_lost) {
    files.clear();
    boot_id += "+1";
  }
  answers.clear();
  admin_replies.clear();
  Start();
}

void CoreHarness::Feed(const Event& event) {
  Perform(core->Handle(event, now, unix_ms()));
  ASSERT_EQ(core->CheckInvariants(), "");
  while (!completions.empty()) {
    const Event completion = completions.front();
    completions.pop_front();
    Perform(core->Handle(completion, now, unix_ms()));
    ASSERT_EQ(core->CheckInvariants(), "");
  }
}

void CoreHarness::PerformDelayed() {
  delay = nullptr;
  std::vector<Action> actions;
  actions.swap(delayed);
  Perform(actions);
  while (!completions.empty()) {
    const Event completion = completions.front();
    completions.pop_front();
    Feed(completion);
  }
}

void CoreHarness::AnswerDrives() {
  Do(ScanNvme{}, absl::OkStatus());
  while (!completions.empty()) {
    const Event completion = completions.front();
    completions.pop_front();
    Feed(completion);
  }
}

int64_t CoreHarness::unix_ms() const {
  return 1'700'000'000'000 + now.ns / 1'000'000;
}
absl::Status CoreHarness::Ask(decltype(AdminRequest::request) request, uint32_t uid) {
  const AdminToken token = next_token++;
  Feed(AdminRequest{token, Caller{{1, 1}, uid, uid}, std::move(request)});
  if (after_request) {
    after_request();
  }
  const auto found = admin_replies.find(token);
  if (found == admin_replies.end()) {
    return absl::UnavailableError("not answered yet");
  }
  last_token = token;
  answered = std::move(found->second);
  admin_replies.erase(found);
  return answered.status;
}

v1::JobStatus CoreHarness::Status(const std::string& job) {
  v1::GetStatusRequest request;
  request.set_job(job);
  const auto reply = Admin<v1::GetStatusReply>(request, 0);
  return reply.ok() && reply->jobs_size() == 1 ? reply->jobs(0) : v1::JobStatus();
}

v1::DaemonStatus CoreHarness::Daemon() {
  const auto reply = Admin<v1::GetStatusReply>(v1::GetStatusRequest(), 0);
  return reply.ok() ? reply->daemon() : v1::DaemonStatus();
}

std::vector<std::string> CoreHarness::Committed(const std::string& job) {
  v1::ListCheckpointsRequest request;
  request.set_job(job);
  const auto reply = Admin<v1::ListCheckpointsReply>(request, 0);
  std::vector<std::string> result;
  if (reply.ok()) {
    for (const v1::Checkpoint& c : reply->checkpoints()) {
      if (c.on_line() && c.state() == v1::Checkpoint::STATE_COMMITTED) {
        result.push_back(std::to_string(c.attempt()) + ":" + std::to_string(c.step()));
      }
    }
  }
  return result;
}

size_t CoreHarness::CountReports(Report::Kind kind) const {
  size_t count = 0;
  for (const Report& report : reports) {
    count += report.kind == kind ? 1 : 0;
  }
  return count;
}

void CoreHarness::Start() {
  core = std::make_unique<NodeCore>(config, config.node_name(),
                                    7 + starts++ + 1000 * config.node_name().back(), 0);
  timer.reset();
  watched.clear();
  completions.clear();
  Started started;
  started.memory_bytes_max = bytes_max;
  started.nvme_bytes_max = nvme_bytes_max;
  for (const auto& [id, file] : files) {
    FoundSlot found{id, file.bytes, file.note, std::nullopt};
    if (found.note.has_writer() &&
        living.count({found.note.writer().pid(), found.note.writer().start_ticks()}) == 0) {
      found.note.clear_writer();
    }
    found.note.clear_readers();
    for (const v1::Reader& reader : file.note.readers()) {
      if (living.count({reader.pid(), reader.start_ticks()}) > 0) {
        *found.note.add_readers() = reader;
      }
    }
    if (file.record && file.record->generation == file.note.generation()) {
      found.sealed = file.record;
    }
    started.slots.push_back(found);
  }
  started.left_alone = left_alone;
  started.boot_id = boot_id;
  for (const auto& [uuid, state] : states) {
    started.jobs.push_back(state);
  }
  Feed(started);
  if (!late_drives) {
    AnswerDrives();
  }
}

void CoreHarness::Perform(const Actions& actions) {
  for (const Action& action : actions) {
    if (delay && delay(action)) {
      delayed.push_back(action);
      continue;
    }
    const absl::Status status = fail ? fail(action) : absl::OkStatus();
    std::visit([&](const auto& a) { Do(a, status); }, action);
  }
}

void CoreHarness::Do(const SendReply& a, const absl::Status& status) {
  if (!status.ok()) {
    completions.push_back(HandOverFailed{a, status});
    return;
  }
  answers[a.connection][a.frame.id()] = {a.frame, a.descriptors, a.slot};
}

void CoreHarness::Do(const CloseConnection& a, const absl::Status&) {
  closed.push_back(a.connection);
}
void CoreHarness::Do(const WatchProcess& a, const absl::Status&) {
  watched.insert(a.process);
  if (living.count(a.process) == 0) {
    completions.push_back(ProcessEnded{a.process});
  }
}

void CoreHarness::Do(const UnwatchProcess& a, const absl::Status&) {
  watched.erase(a.process);
}
void CoreHarness::Do(const CreateSlot& a, const absl::Status& status) {
  if (status.ok()) {
    files[a.slot] = {a.bytes, {}, std::nullopt};
  }
  completions.push_back(SlotCreated{a.slot, status});
}

void CoreHarness::Do(const PopulateSlot& a, const absl::Status& status) {
  completions.push_back(SlotPopulated{a.slot, status});
}

void CoreHarness::Do(const WriteNote& a, const absl::Status& status) {
  if (status.ok()) {
    files.at(a.slot).note = a.note;
  }
  completions.push_back(NoteWritten{a.slot, a.note_version, status});
}

void CoreHarness::Do(const PublishRecord& a, const absl::Status& status) {
  RecordPublished published{a.slot, a.generation, status, a.expected};
  published.copy.image_bytes = kSlot / 2;
  published.copy.sealed_unix_ms = unix_ms();
  published.record_bytes = a.record_bytes;
  if (status.ok()) {
    files.at(a.slot).record = published.copy;
  }
  completions.push_back(published);
}

void CoreHarness::Do(const RemoveRecord& a, const absl::Status& status) {
  if (status.ok()) {
    files.at(a.slot).record.reset();
  }
  completions.push_back(RecordRemoved{a.slot, a.generation, status});
}

void CoreHarness::Do(const DeleteSlot& a, const absl::Status& status) {
  if (status.ok()) {
    files.erase(a.slot);
  }
  completions.push_back(SlotDeleted{a.slot, status});
}

void CoreHarness::Do(const WriteJobState& a, const absl::Status& status) {
  if (status.ok()) {
    states[a.state.job_uuid()] = a.state;
    states[a.state.job_uuid()].set_boot_id(boot_id);
  }
  completions.push_back(
      JobStateWritten{JobUuid::FromBytes(a.state.job_uuid()).value(), a.state.version(), status});
}

void CoreHarness::Do(const RemoveJobState& a, const absl::Status& status) {
  if (status.ok()) {
    states.erase(a.job.ToBytes());
  }
  completions.push_back(JobStateRemoved{a.job, status});
}

FakeTier& CoreHarness::TierOf(TierKind tier) {
  return tier == TierKind::kNvme ? nvme : remote;
}
void CoreHarness::Do(const FlushShard& a, const absl::Status& status) {
  FlushEnded ended{a.drain, status, false, {}};
  DurableCopy copy;
  if (status.ok() && a.from == TierKind::kMemory && damaged_in_memory.count(a.key.id) > 0) {
    ended.status = absl::DataLossError("digests differ");
    ended.source_bad = true;
  } else if (status.ok() && a.from == TierKind::kMemory) {
    copy.copy = *files.at(a.slot).record;
  } else if (status.ok()) {
    const FakeTier& from = TierOf(a.from);
    const auto source = from.copies.find(a.key.id);
    if (source == from.copies.end()) {
      // (NotFound, of a replacement, is said of the copy that was to be replaced.)
      ended.status = a.replace ? absl::UnavailableError("no such copy there")
                               : absl::NotFoundError("no such copy there");
    } else if (from.damaged.count(a.key.id) > 0) {
      ended.status = absl::DataLossError("digests differ");
      ended.source_bad = true;
    } else {
      copy = source->second;
    }
  }
  if (ended.status.ok()) {
    copy.copy.generation = 0;
    copy.record_bytes = 100;
    copy.record_crc = 1000 + a.key.id.step * 10 + a.key.id.rank;
    const int drives = config.nvme().dirs_size();
    copy.location =
        (a.to == TierKind::kNvme ? config.nvme().dirs(static_cast<int>(a.key.id.rank) % drives)
                                 : config.remote().dir()) +
        "/" + a.key.id.ToString();
    TierOf(a.to).copies[a.key.id] = copy;
    if (a.replace) {  // else what is there is adopted
      TierOf(a.to).damaged.erase(a.key.id);
      TierOf(a.to).cut.erase(a.key.id);
    }
    TierOf(a.to).jobs[a.key.id.job] = {a.key.job_name, a.uid, a.gid};
    ended.copy = copy;
  }
  completions.push_back(ended);
}

void CoreHarness::Do(const CancelDrain& a, const absl::Status&) {
  for (size_t i = 0; i < delayed.size(); ++i) {
    if (const auto* flush = std::get_if<FlushShard>(&delayed[i]);
        flush != nullptr && flush->drain == a.drain) {
      delayed.erase(delayed.begin() + static_cast<ptrdiff_t>(i));
      completions.push_back(FlushEnded{a.drain, absl::CancelledError("as asked"), false, {}});
      return;
    }
    if (const auto* fetch = std::get_if<FetchShard>(&delayed[i]);
        fetch != nullptr && fetch->drain == a.drain && !fetches_hang) {
      completions.push_back(FetchEnded{
          a.drain, fetch->slot, fetch->generation, absl::CancelledError("as asked"), false, {}});
      delayed.erase(delayed.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
    if (const auto* open = std::get_if<OpenDurable>(&delayed[i]);
        open != nullptr && open->drain == a.drain) {
      completions.push_back(
          DurableOpened{a.drain, absl::CancelledError("as asked"), false, {}, nullptr});
      delayed.erase(delayed.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
  }
}

// As the runtime does it: one node after the other.
void CoreHarness::FetchFromPeers(const FetchShard& a, FetchEnded& ended) {
  ++pulls[a.background];
  ended.status = absl::UnavailableError("no node was named");
  for (const std::string& peer : a.peers) {
    ended.peer = peer;
    const absl::StatusOr<SealedCopy> read =
        read_peer ? read_peer(peer, a) : absl::UnimplementedError("there are no peers");
    ended.status = read.status();
    if (absl::IsDataLoss(read.status())) {
      ended.bad_peers.push_back(peer);
      ended.source_bad = true;
    }
    if (read.ok()) {
      ended.copy = *read;
      ended.source_bad = false;
      break;
    }
  }
  if (ended.status.ok()) {
    ended.copy.generation = a.generation;
    if (a.replaces) {
      files.at(*a.replaces).record.reset();
    }
    files.at(a.slot).record = ended.copy;
  }
}

void CoreHarness::Do(const FetchShard& a, const absl::Status& status) {
  FetchEnded ended{a.drain, a.slot, a.generation, status, false, {}};
  if (a.from == TierKind::kPeer) {
    if (status.ok()) {
      FetchFromPeers(a, ended);
    }
    completions.push_back(ended);
    return;
  }
  FakeTier& from = TierOf(a.from);
  const auto source = from.copies.find(a.key.id);
  if (status.ok() && source == from.copies.end()) {
    ended.status = absl::NotFoundError("no such copy");
  } else if (status.ok() && from.damaged.count(a.key.id) > 0) {
    ended.status = absl::DataLossError("digests differ");
    ended.source_bad = true;
  } else if (status.ok() && from.unreadable.count(a.key.id) > 0) {
    ended.status = absl::UnavailableError("input/output error");
  } else if (status.ok()) {
    ended.copy = source->second.copy;
    ended.copy.generation = a.generation;
    if (a.replaces) {
      files.at(*a.replaces).record.reset();
    }
    files.at(a.slot).record = ended.copy;
  }
  completions.push_back(ended);
}

void CoreHarness::Do(const GatherRecords& a, const absl::Status& status) {
  completions.push_back(RecordsGathered{a.gather, status, 0, nullptr});
}

void CoreHarness::Do(const ReadParts& a, const absl::Status& status) {
  completions.push_back(PartsRead{a.opened, a.token, status});
}

void CoreHarness::Do(const OpenDurable& a, const absl::Status& status) {
  opened.emplace_back(a.tier, a.key.id);
  DurableOpened event{a.drain, status, absl::IsDataLoss(status), {}, nullptr};
  FakeTier& tier = TierOf(a.tier);
  const auto source = tier.copies.find(a.key.id);
  if (status.ok() && source == tier.copies.end()) {
    event.status = absl::NotFoundError("no such copy");
  } else if (status.ok() && tier.damaged.count(a.key.id) > 0) {
    event.status = absl::DataLossError("the image was cut");
    event.bad = true;
  } else if (status.ok() && tier.unreadable.count(a.key.id) > 0) {
    event.status = absl::UnavailableError("input/output error");
  } else if (status.ok()) {
    event.copy = source->second.copy;
  }
  completions.push_back(event);
}

void CoreHarness::Do(const PublishManifest& a, const absl::Status& status) {
  ManifestPublished published{a.drain, status};
  if (status.ok()) {
    EXPECT_EQ(a.shards.size(), a.world_size);
    for (const DurableCopy& shard : a.shards) {
      const auto copy = remote.copies.find(shard.copy.id);
      if (copy == remote.copies.end()) {
        published.status = absl::FailedPreconditionError("a file is not there");
        published.missing.push_back(shard.copy.id.rank);
        continue;
      }
      EXPECT_EQ(copy->second.record_crc, shard.record_crc);
    }
  }
  if (published.status.ok()) {
    remote.manifests.insert({a.job, a.checkpoint});
  }
  completions.push_back(std::move(published));
}

void CoreHarness::Do(const RemoveCopies& a, const absl::Status& status) {
  if (status.ok()) {
    FakeTier& tier = TierOf(a.tier);
    tier.manifests.erase({a.job, a.checkpoint});
    std::erase_if(tier.copies, [&](const auto& c) {
      return c.first.job == a.job && c.first.checkpoint() == a.checkpoint;
    });
  }
  completions.push_back(CopiesRemoved{a.drain, status});
}

void CoreHarness::Do(const RemoveJobCopies& a, const absl::Status& status) {
  if (status.ok()) {
    FakeTier& tier = TierOf(a.tier);
    std::erase_if(tier.manifests, [&](const auto& m) { return m.first == a.job; });
    std::erase_if(tier.copies, [&](const auto& c) { return c.first.job == a.job; });
    tier.jobs.erase(a.job);
  }
  completions.push_back(CopiesRemoved{a.drain, status});
}

void CoreHarness::Do(const ScanRemote& a, const absl::Status&) {
  TierScanned scanned;
  scanned.tier = TierKind::kRemote;
  scanned.drain = a.drain;
  scanned.job_name = a.job_name;
  scanned.status = remote.scan;
  if (remote.scan.ok()) {
    scanned.jobs = remote.Find(a.job_name);
  }
  completions.push_back(scanned);
}

void CoreHarness::Do(const ScanNvme& a, const absl::Status&) {
  for (const std::string& dir : config.nvme().dirs()) {
    if (!a.dirs.empty() && std::count(a.dirs.begin(), a.dirs.end(), dir) == 0) {
      continue;
    }
    drives_read.push_back(dir);
    TierScanned scanned;
    scanned.tier = TierKind::kNvme;
    scanned.drain = a.drain;
    scanned.dir = dir;
    scanned.status = dir == failing_drive ? absl::DataLossError("EIO") : nvme.scan;
    if (scanned.status.ok()) {
      scanned.jobs = nvme.Find("");
      for (FoundJob& job : scanned.jobs) {
        std::erase_if(job.copies, [&](const DurableCopy& copy) {
          return copy.location.rfind(dir + "/", 0) != 0;
        });
        std::erase_if(job.bad, [&](const BadDurableCopy& bad) {
          return bad.copy.location.rfind(dir + "/", 0) != 0;
        });
      }
    }
    if (scanned.status.ok() && dir == config.nvme().dirs(0)) {
      scanned.unknown_files = unknown_files;
    }
    completions.push_back(scanned);
  }
}

void CoreHarness::Do(const ApplyLimits& a, const absl::Status&) {
  limits = a;
}
void CoreHarness::Do(const IndexShard& a, const absl::Status&) {
  index[{a.tier, a.copy.id}] = a.location;
}
void CoreHarness::Do(const UnindexShard& a, const absl::Status&) {
  index.erase({TierKind::kMemory, a.id});
}
void CoreHarness::Do(const UnindexCopies& a, const absl::Status&) {
  std::erase_if(index, [&](const auto& row) {
    const auto& [tier, id] = row.first;
    return tier == a.tier && (!a.job || id.job == *a.job) &&
           (!a.checkpoint || id.checkpoint() == *a.checkpoint);
  });
}

void CoreHarness::Do(const SetTimer& a, const absl::Status&) {
  timer = a.at;
}
template <typename ToCluster>
void CoreHarness::Do(const ToCluster& a, const absl::Status&) {
  to_cluster.emplace_back(a);
}

void CoreHarness::Do(const AdminReply& a, const absl::Status&) {
  admin_replies[a.token] = a;
}
void CoreHarness::Do(const PeerReads& a, const absl::Status&) {
  if (std::optional<ReadForPeer> read = read_for_peer ? read_for_peer(a) : std::nullopt) {
    completions.push_back(*std::move(read));
  }
}

void CoreHarness::Do(const Report& a, const absl::Status&) {
  reports.push_back(a);
}

// ---- TestClient ----

uint64_t TestClient::Send(v1::ClientFrame frame) {
  static uint64_t next_id = 1;
  frame.set_id(next_id++);
  // Every read under a name of its own.
  if (frame.has_enter_session()) {
    frame.mutable_enter_session()->set_hold(frame.id());
  } else if (frame.has_report_load()) {
    frame.mutable_report_load()->set_hold(frame.id());
  } else if (frame.has_attach()) {
    frame.mutable_attach()->set_hold(frame.id());
  }
  h_->Feed(ClientRequest{connection_, frame});
  if (h_->after_request) {
    h_->after_request();
  }
  return frame.id();
}
std::optional<Answer> TestClient::Take(uint64_t id) {
  auto& mine = h_->answers[connection_];
  const auto found = mine.find(id);
  if (found == mine.end()) {
    return std::nullopt;
  }
  const Answer answer = found->second;
  mine.erase(found);
  return answer;
}
v1::DaemonFrame TestClient::Call(v1::ClientFrame frame) {
  const uint64_t id = Send(frame);
  const std::optional<Answer> answer = Take(id);
  EXPECT_TRUE(answer.has_value()) << "not answered: " << frame.ShortDebugString();
  return answer ? answer->frame : v1::DaemonFrame();
}
v1::ClientFrame TestClient::JoinFrame(const std::string& job, Rank rank, uint32_t world,
                                      uint64_t deadline_ms, const std::string& launch,
                                      Attempt attempt, Attempt leave) {
  v1::ClientFrame frame;
  frame.mutable_join()->set_job(job);
  frame.mutable_join()->set_rank(rank);
  frame.mutable_join()->set_world_size(world);
  frame.mutable_join()->set_deadline_ms(deadline_ms);
  frame.mutable_join()->set_launch(launch);
  frame.mutable_join()->set_attempt(attempt);
  frame.mutable_join()->set_leave_attempt(leave);
  return frame;
}
v1::ClientFrame TestClient::BeginFrame(Step step, uint64_t bytes, uint64_t deadline_ms) {
  v1::ClientFrame frame;
  frame.mutable_begin_save()->set_step(step);
  frame.mutable_begin_save()->set_slot_bytes(bytes);
  frame.mutable_begin_save()->set_deadline_ms(deadline_ms);
  return frame;
}
v1::ClientFrame TestClient::EnterFrame(uint64_t deadline_ms, std::optional<CheckpointId> wanted) {
  v1::ClientFrame frame;
  frame.mutable_enter_session()->set_deadline_ms(deadline_ms);
  if (wanted) {
    frame.mutable_enter_session()->set_choice(v1::EnterSession::CHOICE_STEP);
    frame.mutable_enter_session()->set_step(wanted->step);
    frame.mutable_enter_session()->set_attempt(wanted->attempt);
  }
  return frame;
}
v1::ClientFrame TestClient::ReportFrame(const v1::SessionOutcome& of, bool loaded, bool bad,
                                        uint64_t deadline_ms) {
  v1::ClientFrame frame;
  frame.mutable_report_load()->set_session(of.session());
  frame.mutable_report_load()->set_round(of.round());
  frame.mutable_report_load()->set_loaded(loaded);
  frame.mutable_report_load()->set_copy_is_bad(bad);
  frame.mutable_report_load()->set_problem(loaded ? "" : "digests differ");
  frame.mutable_report_load()->set_deadline_ms(deadline_ms);
  return frame;
}
v1::ClientFrame TestClient::AwaitFrame(Step step, v1::AwaitSave::Stage stage,
                                       uint64_t deadline_ms) {
  v1::ClientFrame frame;
  frame.mutable_await_save()->set_step(step);
  frame.mutable_await_save()->set_stage(stage);
  frame.mutable_await_save()->set_deadline_ms(deadline_ms);
  return frame;
}
v1::ClientFrame TestClient::SealFrame(Step step, const v1::Grant& grant) {
  v1::ClientFrame frame;
  frame.mutable_seal()->set_step(step);
  frame.mutable_seal()->set_slot(grant.slot());
  frame.mutable_seal()->set_generation(grant.generation());
  frame.mutable_seal()->set_record_offset(kSlot / 2);
  frame.mutable_seal()->set_record_bytes(4096);
  return frame;
}
::testing::AssertionResult Outcome(const v1::DaemonFrame& frame) {
  if (frame.has_failure()) {
    return ::testing::AssertionFailure() << frame.failure().ShortDebugString();
  }
  return ::testing::AssertionSuccess();
}
::testing::AssertionResult TestClient::Join(const std::string& job, Rank rank, uint32_t world) {
  const v1::DaemonFrame frame = Call(JoinFrame(job, rank, world));
  joined_ = frame.join();
  return Outcome(frame);
}
::testing::AssertionResult TestClient::Begin(Step step, uint64_t bytes) {
  const v1::DaemonFrame frame = Call(BeginFrame(step, bytes));
  if (!frame.has_failure()) {
    grant_ = frame.begin_save();
  }
  return Outcome(frame);
}
::testing::AssertionResult TestClient::Seal(Step step) {
  return Outcome(Call(SealFrame(step, grant_)));
}
::testing::AssertionResult TestClient::Save(Step step, uint64_t bytes) {
  const ::testing::AssertionResult begun = Begin(step, bytes);
  return begun ? Seal(step) : begun;
}
bool TestClient::Committed(Step step) {
  return Call(AwaitFrame(step, v1::AwaitSave::STAGE_COMMITTED)).await_save().stage() ==
         v1::AwaitSave::STAGE_COMMITTED;
}
void TestClient::Release(const v1::Source& source) {
  v1::ClientFrame frame;
  frame.mutable_release_read()->set_hold(source.hold());
  Call(frame);
}

}  // namespace holdfast::testing
