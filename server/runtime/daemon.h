// ckptd as an object: owns the core, performs its actions, and feeds it what happens.
//
//   HF_ASSIGN_OR_RETURN(auto daemon, Daemon::Start(config, read_settings));
//   HF_RETURN_IF_ERROR(daemon->Run());     // until SIGTERM or SIGINT; SIGHUP: settings read again
//
// Threads: Start and Run belong to the caller's; Run's loop is where the core runs. Work in
// memory.dir and populating have worker threads (SerialExecutor), the disk under state_dir one of
// its own (CatalogWriter), gRPC, /metrics and the cluster theirs; they reach the core through
// Reactor::Post alone.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "base/mutex.h"
#include "holdfast/v1/config.pb.h"
#include "server/events.h"
#include "server/node_core.h"
#include "server/runtime/admin_gateway.h"
#include "server/runtime/admin_server.h"
#include "server/runtime/admin_tls.h"
#include "server/runtime/catalog.h"
#include "server/runtime/catalog_writer.h"
#include "server/runtime/certificate_watch.h"
#include "server/runtime/client_server.h"
#include "server/runtime/cluster_runtime.h"
#include "server/runtime/daemon_metrics.h"
#include "server/runtime/event_command.h"
#include "server/runtime/event_journal.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/health_server.h"
#include "server/runtime/lag_watch.h"
#include "server/runtime/memory_watch.h"
#include "server/runtime/metrics_server.h"
#include "server/runtime/network_flags.h"
#include "server/runtime/part_reader.h"
#include "server/runtime/passed_memory.h"
#include "server/runtime/peer_reader.h"
#include "server/runtime/populator.h"
#include "server/runtime/process_watcher.h"
#include "server/runtime/pull_service.h"
#include "server/runtime/reactor.h"
#include "server/runtime/record_gatherer.h"
#include "server/runtime/scrubber.h"
#include "server/runtime/serial_executor.h"
#include "server/runtime/settings_reload.h"
#include "server/runtime/status_page/status_page.h"
#include "server/runtime/tiers/durable_tiers.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

class Daemon {
 public:
  // As `config` was read, from the same place, complete and checked. On a thread of its own.
  using ReadSettings = std::function<absl::StatusOr<v1::DaemonConfig>()>;
  // Takes the locks, opens what is there, listens. Every error says what to do.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const v1::DaemonConfig& config,
                                                       ReadSettings read_settings);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Returns after a clean stop; DeadlineExceeded when something did not end in time (then the
  // process is to exit at once).
  absl::Status Run();

 private:
  Daemon(const v1::DaemonConfig& config, ReadSettings read_settings);
  void AwaitPredecessors();
  absl::Status Open();
  absl::Status JoinCluster();
  void OpenFabric();
  void MakeRecords();
  void MakePartReader(std::shared_ptr<PullClient> pulls);
  UniqueFd MakeNetworkFlag(ConnectionId id);
  absl::Status Listen();
  void ServeMetrics();
  void ServeHealth();
  void ServeStatusPage();
  void ServeAdminTls();
  void WatchCertificates();
  void StartEventCommand();
  void StartScrub();
  void StopScrubber();
  absl::Status WatchSignals();
  void TakeSettings(const absl::StatusOr<v1::DaemonConfig>& read) EXCLUDES(problems_mutex_);
  void ApplySettings(const v1::DaemonConfig& config);
  void SetSettingsProblem(const std::string& problem) EXCLUDES(problems_mutex_);
  void SetTlsProblem(const std::string& what, const std::string& problem) EXCLUDES(problems_mutex_);

  // Events to the core, one at a time, in the order fed. The reactor's thread.
  void Feed(Event event);
  void Perform(SendReply action);
  void Perform(CloseConnection action);
  void Perform(WatchProcess action);
  void Perform(UnwatchProcess action);
  void Perform(CreateSlot action);
  void Perform(PopulateSlot action);
  void Perform(WriteNote action);
  void Perform(PublishRecord action);
  void Perform(RemoveRecord action);
  void Perform(DeleteSlot action);
  void Perform(WriteJobState action);
  void Perform(RemoveJobState action);
  void Perform(IndexShard action);
  void Perform(UnindexShard action);
  void Perform(UnindexCopies action);
  void Perform(FlushShard action);
  void Perform(CancelDrain action);
  void Perform(HurryFetch action);
  void Perform(FetchShard action);
  void Perform(OpenDurable action);
  void Perform(ReadParts action);
  void Perform(EndParts action);
  void Perform(GatherRecords action);
  void Perform(PublishManifest action);
  void Perform(RemoveCopies action);
  void Perform(RemoveJobCopies action);
  void Perform(ScanRemote action);
  void Perform(ScanNvme action);
  void Perform(ApplyLimits action);
  void CheckTiers();
  void LookAtPlaces();
  void FollowClusterNote();
  void WatchTiers();
  void Perform(SetTimer action);
  void Perform(AdminReply action);
  void Perform(PeerReads action);
  void Perform(Report action);
  void Perform(WatchHost action);
  void Perform(UnwatchHost action);
  void Perform(CampaignFor action);
  void Perform(ResignFrom action);
  void Perform(StoreAgreedState action);
  void Perform(ForgetAgreedState action);
  void Perform(ChangePeers action);
  void Perform(ConnectPeer action);
  void Perform(SayToPeer action);
  template <typename ClusterAction>
  void PerformInCluster(ClusterAction action);
  void SendOpenedCopy(SendReply action);
  void SendWithDescriptors(SendReply action);
  void JobStateTried(const JobUuid& job, const WriteJobState& action, const absl::Status& status);

  // Runs `work` on the lane's threads in the key's order, and what it returns on the reactor's.
  using Completion = std::function<void()>;
  void RegisterAhead(SlotId slot, const JobUuid& job);
  void RegisterExpected(SlotId slot);
  void RunOn(SerialExecutor::Lane lane, SerialExecutor::Key key, std::function<Completion()> work);
  // The same, when the completion is one event.
  void RunForEvent(SerialExecutor::Lane lane, SerialExecutor::Key key, std::function<Event()> work);

  // What waits for the catalog alone: `event` is fed with what it answered, or that it did not.
  using CatalogEvent = std::function<Event(const absl::Status&)>;
  void AwaitCatalog(const std::function<void(CatalogWriter::Done)>& ask, CatalogEvent event);
  void EndCatalogWait(uint64_t wait, const absl::Status& status);
  void EndOverdueCatalogWaits();

  void AddProblem(const std::string& problem) EXCLUDES(problems_mutex_);
  // Of this node itself.
  // `job`: only on the reactor's thread.
  void NoteEvent(v1::Severity severity, const std::string& kind, const std::string& text,
                 const std::string& job = "");
  void NoteMembership(const Event& event);
  void NoteCommand(uint32_t uid, const std::string& job, const std::string& what, bool done);
  void FillDaemonStatus(v1::DaemonStatus& status) EXCLUDES(problems_mutex_);
  void RefreshMetrics();
  void AskTimeline(const std::string& job);
  void WatchMemory();
  void CountPassedMemory();
  absl::Status Charge(ConnectionId connection, std::span<const UniqueFd> files);
  // Once what is being saved here is sealed, but not for long; a second time: at once.
  void AskToStop(const std::string& why);
  void StopWhenSaved();
  void BeginStop(const std::string& why);
  void StopWhenIdle();

  const v1::DaemonConfig config_;  // as it was started with
  v1::DaemonConfig running_;       // as it is now: the reactor's thread
  const ReadSettings read_settings_;
  Env* const env_;
  const MonotonicTime started_;
  DaemonMetrics metrics_;
  LagWatch lag_watch_;
  bool member_ = false;  // as the events say
  EventJournal events_of_node_;
  std::shared_ptr<SlotStore> store_;
  std::unique_ptr<Catalog> catalog_;
  std::unique_ptr<CatalogWriter> catalog_writer_;
  std::unique_ptr<Reactor> reactor_;
  std::unique_ptr<SettingsReload> settings_reload_;
  std::unique_ptr<NodeCore> core_;
  std::unique_ptr<ProcessWatcher> watcher_;
  std::unique_ptr<MemoryWatch> memory_watch_;
  std::unique_ptr<PassedMemory> passed_memory_;
  std::unique_ptr<Populator> populator_;
  const std::shared_ptr<NetworkFlags> network_flags_;
  std::unique_ptr<ClientServer> clients_;
  std::unique_ptr<FabricPort> fabric_;  // in a cluster, where there is one
  std::unique_ptr<PullServer> pull_server_;
  std::unique_ptr<DurableTiers> tiers_;
  std::unique_ptr<ClusterRuntime> cluster_;  // where one is configured
  std::unique_ptr<AdminGateway> gateway_;
  AdminContext admin_context_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<AdminTls> admin_tls_;  // where one is configured; before admin_ ends
  std::unique_ptr<Scrubber> scrubber_;   // asks the gateway; before that ends
  std::unique_ptr<CertificateWatch> certificate_watch_;  // where there are certificates
  std::unique_ptr<EventCommand> event_command_;
  std::unique_ptr<HealthServer> health_;           // where one is configured
  std::unique_ptr<MetricsServer> metrics_server_;  // likewise
  std::unique_ptr<StatusPage> status_page_;        // likewise
  std::unique_ptr<PeerReader> peer_reader_;        // in a cluster
  std::unique_ptr<PartReader> part_reader_;        // likewise
  std::shared_ptr<const LocalRecords> records_;
  std::unique_ptr<RecordGatherer> record_gatherer_;
  UniqueFd signals_;

  std::deque<Event> events_;
  bool feeding_ = false;
  uint64_t in_flight_ = 0;  // works handed to the executor whose completions have not run
  struct CatalogWait {
    MonotonicTime until;
    CatalogEvent event;
  };
  std::map<uint64_t, CatalogWait> catalog_waits_;  // in the order begun, so also of their ends
  uint64_t next_catalog_wait_ = 1;
  std::string stop_asked_;  // why; empty: it was not
  bool stopping_ = false;
  bool cluster_stopping_ = false;
  bool catalog_stopping_ = false;
  bool overdue_ = false;
  absl::Status failure_;  // why it stopped by itself
  bool metrics_due_ = false;
  std::string timeline_asked_;  // the job's, by RefreshMetrics, just now
  Reactor::TimerId core_timer_ = 0;
  Reactor::TimerId metrics_timer_ = 0;
  Reactor::TimerId stop_timer_ = 0;
  Reactor::TimerId last_saves_timer_ = 0;
  Reactor::TimerId catalog_timer_ = 0;
  Reactor::TimerId tiers_timer_ = 0;
  Reactor::TimerId places_timer_ = 0;
  Reactor::TimerId beat_timer_ = 0;
  bool tiers_watched_ = false;
  std::atomic<uint32_t> connections_{0};

  Mutex problems_mutex_;
  std::deque<std::string> problems_ GUARDED_BY(problems_mutex_);
  std::string settings_problem_ GUARDED_BY(problems_mutex_);
  // Of certificates: by who has found it.
  std::map<std::string, std::string> tls_problems_ GUARDED_BY(problems_mutex_);

  // Last: its threads use what is above, and end first.
  std::unique_ptr<SerialExecutor> executor_;
};

// Tells whoever started the daemon (systemd's NOTIFY_SOCKET protocol); does nothing when nobody
// asked.
void NotifySupervisor(const std::string& state);

}  // namespace holdfast
