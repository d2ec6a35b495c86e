#include "server/runtime/daemon.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/daemon_lock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/sync_point.h"
#include "base/units.h"
#include "base/utf8.h"
#include "client-lib/include/holdfast/version.h"
#include "server/runtime/found_state.h"
#include "server/runtime/scrubber.h"
#include "server/runtime/settings_change.h"
#include "server/runtime/status_source.h"
#include "server/runtime/tiers/nvme_budget.h"
#include "server/runtime/tiers/remote_owner.h"
#include "server/runtime/tiers/training_cores.h"

namespace holdfast {
namespace {

constexpr Duration kStopDeadline = std::chrono::seconds(10);
constexpr Duration kLastSaves = std::chrono::seconds(10);
constexpr Duration kPredecessorEnds = std::chrono::seconds(3);
constexpr Duration kMetricsEvery = std::chrono::seconds(1);
constexpr Duration kLogFlush = std::chrono::milliseconds(500);
constexpr size_t kProblemsMax = 64;
// The token of the runtime's own question for the metrics; AdminGateway's begin at 1.
constexpr AdminToken kMetricsToken = 0;

// Connections, pidfds and descriptors on their way take more than the usual 1024.
void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

uint64_t RandomSeed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

v1::HelloReply MakeHello() {
  v1::HelloReply hello;
  hello.set_protocol(kClientProtocol);
  hello.set_daemon_version(HOLDFAST_VERSION_STRING);
  hello.set_boot_id(CurrentBoot());
  return hello;
}

// The crash tests die right after the client could have read the reply.
void PassSentSyncPoints([[maybe_unused]] const v1::DaemonFrame& frame) {
  switch (frame.reply_case()) {
    case v1::DaemonFrame::kJoin:
      HF_SYNC_POINT("daemon.join.replied");
      break;
    case v1::DaemonFrame::kBeginSave:
      HF_SYNC_POINT("daemon.begin.granted");
      break;
    case v1::DaemonFrame::kSeal:
      HF_SYNC_POINT("daemon.seal.replied");
      break;
    case v1::DaemonFrame::kEnterSession:
      if (frame.enter_session().done()) {
        HF_SYNC_POINT("daemon.session.done_sent");
      } else {
        HF_SYNC_POINT("daemon.session.source_sent");
      }
      break;
    default:
      break;
  }
}

std::string PredecessorHangs(const ProcessId& process) {
  return absl::StrCat(
      process.ToString(),
      ", the ckptd from before, was killed and hangs in a call to a mount or drive. This one "
      "serves from memory; the catalog, nvme and remote follow when that call has returned. "
      "Look at what does not answer: cat /proc/",
      process.pid, "/task/*/stack");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const v1::DaemonConfig& config,
                                                      ReadSettings read_settings) {
  RaiseDescriptorLimit();
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGIO, SIG_IGN);    // somebody opens a file while we have its lease, for a moment
  ::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error of that write (EFBIG), no death
  std::unique_ptr<Daemon> daemon(new Daemon(config, std::move(read_settings)));
  // Before any thread: they inherit the mask, so that the signals come to the reactor alone.
  HF_ASSIGN_OR_RETURN(daemon->reactor_, Reactor::Create(Clock::System()));
  daemon->settings_reload_ = std::make_unique<SettingsReload>(SettingsReload::Options{
      .read = daemon->read_settings_,
      .reactor = *daemon->reactor_,
      .done = [daemon = daemon.get()](const auto& read) { daemon->TakeSettings(read); }});
  HF_RETURN_IF_ERROR(daemon->WatchSignals());
  HF_RETURN_IF_ERROR(daemon->Open());
  HF_RETURN_IF_ERROR(daemon->Listen());
  return daemon;
}

Daemon::Daemon(const v1::DaemonConfig& config, ReadSettings read_settings)
    : config_(config),
      running_(config),
      read_settings_(std::move(read_settings)),
      env_(Env::System()),
      started_(Clock::System()->Now()),
      metrics_(Clock::System()->UnixMillis()),
      events_of_node_(RandomSeed(), {0, ::geteuid()}),
      network_flags_(std::make_shared<NetworkFlags>(Clock::System())) {}

// Its own thread asks for it, too: that ends first.
void Daemon::StopScrubber() {
  if (scrubber_ != nullptr) {
    scrubber_->Stop();
    scrubber_.reset();
  }
}

Daemon::~Daemon() {
  events_of_node_.Stop();
  health_.reset();
  if (gateway_ != nullptr) {
    gateway_->Stop();
  }
  if (populator_ != nullptr) {
    populator_->Stop();
  }
  status_page_.reset();
  metrics_server_.reset();
  certificate_watch_.reset();
  admin_tls_.reset();
  admin_.reset();
  peer_reader_.reset();
  StopScrubber();  // (after those whose threads tell it what they have read)
  event_command_.reset();
  part_reader_.reset();
  record_gatherer_.reset();
  cluster_.reset();
  tiers_.reset();
  executor_.reset();
  catalog_writer_.reset();
  pull_server_.reset();
  fabric_.reset();
}

absl::Status Daemon::WatchSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  if (::pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) {
    return absl::InternalError("cannot block SIGTERM, SIGINT and SIGHUP");
  }
  signals_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) {
    return ErrnoStatus(errno, "signalfd", "SIGTERM, SIGINT and SIGHUP");
  }
  return reactor_->Watch(signals_.get(), EPOLLIN, [this](uint32_t) {
    signalfd_siginfo info = {};
    if (::read(signals_.get(), &info, sizeof(info)) != sizeof(info)) {
      return;
    }
    // (The kernel says by it that the terminal is gone, and with it whoever ran ckptd there.)
    if (info.ssi_signo == SIGHUP && info.ssi_code != SI_KERNEL) {
      return settings_reload_->Ask();
    }
    AskToStop(::strsignal(static_cast<int>(info.ssi_signo)));
  });
}

// Who was killed is gone in a moment, or else keeps its locks until its call returns: then this
// daemon goes on beside it (base/daemon_lock.h).
void Daemon::AwaitPredecessors() {
  const std::vector<std::string> locks = {JoinPath(config_.state_dir(), "lock"),
                                          JoinPath(config_.memory().dir(), "lock")};
  for (const ProcessId& process : AwaitDying(*env_, locks, kPredecessorEnds)) {
    const std::string text = PredecessorHangs(process);
    LogWarning(absl::StrCat("start: ", text));
    NoteEvent(v1::SEVERITY_WARNING, "daemon_problem", text);
  }
}

absl::Status Daemon::Open() {
  // 1. Nobody else works here: state_dir's lock, then memory.dir's.
  AwaitPredecessors();
  HF_ASSIGN_OR_RETURN(catalog_, Catalog::Open(env_, config_.state_dir()));
  HF_ASSIGN_OR_RETURN(store_, SlotStore::Open({env_, config_.memory().dir(),
                                               config_.memory().bytes_max(), CurrentBoot()}));
  // 2. What is there.
  HF_ASSIGN_OR_RETURN(Started started, FindState(*store_, *catalog_, config_.memory().bytes_max()));
  const NvmeBudget budget = AskNvmeBudget(*env_, config_.nvme());
  started.nvme_bytes_max = budget.bytes_max;
  started.problems.insert(started.problems.end(), budget.problems.begin(), budget.problems.end());
  started.boot_id = CurrentBoot();
  for (const std::string& problem : started.problems) {
    LogWarning(problem);
    NoteEvent(v1::SEVERITY_WARNING, "daemon_problem", problem);
  }
  LogInfo(absl::StrCat("found slots=", started.slots.size(), " jobs=", started.jobs.size(),
                       " memory_dir=", config_.memory().dir()));
  // 3. The machinery.
  executor_ = std::make_unique<SerialExecutor>();
  catalog_writer_ = std::make_unique<CatalogWriter>(
      *catalog_, *store_,
      CatalogWriter::Options{.failed = [this] { metrics_.CountCatalogError(); }});
  populator_ = std::make_unique<Populator>(*store_, config_.memory());
  watcher_ = std::make_unique<ProcessWatcher>(*reactor_, [this](const ProcessId& process) {
    tiers_->training_cores()->Remove(process.pid);
    Feed(ProcessEnded{process});
  });
  core_timer_ = reactor_->AddTimer([this] { Feed(TimerFired{}); });
  metrics_timer_ = reactor_->AddTimer([this] { RefreshMetrics(); });
  catalog_timer_ = reactor_->AddTimer([this] { EndOverdueCatalogWaits(); });
  stop_timer_ = reactor_->AddTimer([this] {
    overdue_ = true;
    reactor_->Stop();
  });
  last_saves_timer_ = reactor_->AddTimer([this] {
    LogWarning(absl::StrCat("stop: ", core_->SavesBeingWritten(), " saves were not sealed within ",
                            FormatDuration(kLastSaves), ", and end with this daemon"));
    BeginStop(stop_asked_);
  });
  const auto post = [this](Event event) {
    reactor_->Post([this, event = std::move(event)]() mutable { Feed(std::move(event)); });
  };
  tiers_timer_ = reactor_->AddTimer([this] { CheckTiers(); });
  places_timer_ = reactor_->AddTimer([this] { LookAtPlaces(); });
  DurableTiers::Options tiers;
  tiers.config = config_;
  tiers.env = env_;
  tiers.slots = store_;
  tiers.post = [this](Event event) {
    reactor_->Post([this, event = std::move(event)]() mutable {
      const auto* fetched = std::get_if<FetchEnded>(&event);
      if (fetched != nullptr && fetched->status.ok()) {
        RegisterAhead(fetched->slot, fetched->copy.id.job);
      }
      Feed(std::move(event));
    });
  };
  tiers.gate = network_flags_;
  tiers.note_remote = [this](const std::string& id, const std::string& instead_of) {
    reactor_->Post([this, id, instead_of] {
      if (cluster_ != nullptr) {
        cluster_->NoteRemote(id, instead_of);
      }
    });
  };
  HF_ASSIGN_OR_RETURN(tiers_, DurableTiers::Create(std::move(tiers)));
  if (tiers_->configured()) {
    reactor_->Arm(places_timer_, reactor_->clock().Now());
  }
  gateway_ = std::make_unique<AdminGateway>(post);
  admin_context_.node_name = config_.node_name();
  admin_context_.gateway = gateway_.get();
  admin_context_.events = &events_of_node_;
  admin_context_.audit = [this](uint32_t uid, const std::string& job, const std::string& what,
                                bool done) { NoteCommand(uid, job, what, done); };
  admin_context_.store = store_.get();
  admin_context_.request_timeout =
      Duration(std::chrono::milliseconds(config_.admin().request_timeout_ms()));
  admin_context_.verify_durable = [this](const ReadableShard& shard,
                                         const std::function<bool(uint64_t)>& advance,
                                         std::shared_ptr<Pacer> pacer) {
    return tiers_->Verify(shard, advance, std::move(pacer));
  };
  admin_context_.write_job_files = [this](const v1::RebuildRequest::Owner& owner,
                                          const std::function<bool()>& gone) {
    return tiers_->WriteJobFiles(owner.job(), {owner.uid(), owner.gid()}, gone);
  };
  admin_context_.forget_drive = [this](const std::string& id) { return tiers_->ForgetDrive(id); };
  admin_context_.adopt_remote = [this](const std::string& from, const std::function<bool()>& gone) {
    return tiers_->AdoptRemote(from, gone);
  };
  admin_context_.verified = [this](const ReadableShard& shard) {
    if (scrubber_ != nullptr) {
      scrubber_->NoteVerified(shard);
    }
  };
  admin_context_.fill_daemon_status = [this](v1::DaemonStatus& status) {
    FillDaemonStatus(status);
  };
  if (config_.has_cluster()) {
    peer_reader_ = std::make_unique<PeerReader>(
        admin_context_, [post](ReadForPeer done) { post(std::move(done)); });
  }
  clients_ = std::make_unique<ClientServer>(
      *reactor_, config_.socket(), MakeHello(),
      ClientServer::Callbacks{
          .opened =
              [this](ConnectionId id, const Caller& caller) {
                connections_.fetch_add(1, std::memory_order_relaxed);
                Feed(ConnectionOpened{id, caller});
              },
          .request =
              [this](ConnectionId id, v1::ClientFrame frame) {
                if (frame.has_seal()) {
                  HF_SYNC_POINT("daemon.seal.received");
                }
                network_flags_->Asked(id, frame);
                metrics_.saves().Asked(id, frame, reactor_->clock().Now());
                Feed(ClientRequest{id, std::move(frame)});
              },
          .closed =
              [this](ConnectionId id) {
                connections_.fetch_sub(1, std::memory_order_relaxed);
                network_flags_->Closed(id);
                metrics_.saves().Closed(id);
                Feed(ConnectionClosed{id});
              },
          .protocol_error = [this] { metrics_.CountProtocolError(); },
          .sent =
              [this](ConnectionId id, const v1::DaemonFrame& frame) {
                network_flags_->Answered(id, frame);
                metrics_.saves().Answered(id, frame, reactor_->clock().Now());
                PassSentSyncPoints(frame);
              },
          .network_flag = [this](ConnectionId id) { return MakeNetworkFlag(id); },
      });
  // 4. The core, with what was found.
  core_ = std::make_unique<NodeCore>(config_, config_.node_name(), RandomSeed(), ::geteuid());
  HF_RETURN_IF_ERROR(JoinCluster());
  record_gatherer_ = std::make_unique<RecordGatherer>(RecordGatherer::Options{
      config_.node_name(), records_, cluster_ == nullptr ? nullptr : cluster_->pulls(),
      [this](Event event) {
        reactor_->Post([this, event = std::move(event)]() mutable { Feed(std::move(event)); });
      }});
  WatchMemory();
  CountPassedMemory();
  Feed(std::move(started));
  Perform(ScanNvme{});
  return absl::OkStatus();
}

// `pulls`: null where this node is alone.
void Daemon::MakePartReader(std::shared_ptr<PullClient> pulls) {
  part_reader_ = std::make_unique<PartReader>(PartReader::Options{
      config_.node_name(), std::move(pulls), fabric_.get(), tiers_->remote_parts(),
      [this](Event event) {
        reactor_->Post([this, event = std::move(event)]() mutable { Feed(std::move(event)); });
      },
      [this] {
        reactor_->Post([this] {
          if (part_reader_ != nullptr) {
            part_reader_->Reap();
          }
        });
      }});
}

// Before the core begins, which has wishes at once; what is told waits until the reactor runs.
absl::Status Daemon::JoinCluster() {
  if (!config_.has_cluster()) {
    admin_context_.no_fabric = "this node is alone: there is no cluster in its settings";
    MakeRecords();
    MakePartReader(nullptr);
    return absl::OkStatus();
  }
  cluster_ = std::make_unique<ClusterRuntime>(config_, env_);
  FollowClusterNote();
  OpenFabric();
  HF_RETURN_IF_ERROR(tiers_->SetPeers(cluster_->pulls(), fabric_.get()));
  MakeRecords();
  pull_server_ = std::make_unique<PullServer>(PullServer::Options{
      .context = &admin_context_,
      .fabric = fabric_.get(),
      .passed_on = tiers_->passed_on(),
      .check = [cluster = cluster_.get()](
                   const v1::OpenRequest& who) { return cluster->CheckCaller(who); },
      .is_member = [cluster =
                        cluster_.get()](const std::string& node) { return cluster->IsPeer(node); },
      .remote_parts = tiers_->remote_parts(),
      .records = records_});
  cluster_->AddService(pull_server_->service());
  MakePartReader(cluster_->pulls());
  admin_context_.fabric = fabric_.get();
  admin_context_.pulls = cluster_->pulls().get();
  admin_context_.fabric_bandwidth_bytes_per_s_max = config_.fabric().bandwidth_bytes_per_s_max();
  const auto post = [this](Event event, std::function<void()> taken) {
    reactor_->Post([this, event = std::move(event), taken = std::move(taken)]() mutable {
      NoteMembership(event);
      Feed(std::move(event));
      taken();
    });
  };
  return cluster_->Start(post, !store_->dying().empty());
}

// The remote directory is not used before etcd has said which cluster this is.
void Daemon::FollowClusterNote() {
  const std::shared_ptr<RemoteOwner> owner = tiers_->remote_owner();
  if (owner == nullptr) {
    return;
  }
  cluster_->FollowNote(owner->remembered(), [this, owner](const ClusterNote& note) {
    if (owner->Agreed(note)) {
      reactor_->Post([this] { tiers_->LookAtPlaces(); });
    }
  });
}

// (Peers or not, the tiers are as they stay.)
void Daemon::MakeRecords() {
  records_ = std::make_shared<const LocalRecords>(
      LocalRecords::Options{&admin_context_, tiers_->remote_parts(),
                            [this](const ReadableShard& shard, const LocalRecords::Gone& gone) {
                              return tiers_->ReadRecord(shard, gone);
                            }});
}

// Nothing depends on it: without one the shards go over the daemons' own connections.
void Daemon::OpenFabric() {
  if (config_.fabric().provider() == "off") {
    admin_context_.no_fabric = "it is switched off (fabric.provider: off)";
    return;
  }
  absl::StatusOr<std::unique_ptr<FabricPort>> fabric =
      FabricPort::Open({config_.fabric(), config_.cluster().advertise_address(), store_, env_,
                        cluster_->incarnation(), [this](SlotId slot) {
                          reactor_->Post([this, slot] { RegisterExpected(slot); });
                        }});
  if (!fabric.ok()) {
    admin_context_.no_fabric = Message(fabric.status());
    return AddProblem(absl::StrCat("no fabric: ", Message(fabric.status()),
                                   "; shards go over the daemons' own connections, which is "
                                   "slower (docs/fabric.md)"));
  }
  fabric_ = *std::move(fabric);
}

// Its training does without one.
UniqueFd Daemon::MakeNetworkFlag(ConnectionId id) {
  absl::StatusOr<UniqueFd> flag = network_flags_->Make(id);
  if (!flag.ok()) {
    LogFrom(LogLevel::kWarning, "network flag",
            absl::StrCat("a client cannot say when its network is busy: ", Message(flag.status())));
    return UniqueFd();
  }
  if (!Charge(id, {&*flag, 1}).ok()) {
    network_flags_->Closed(id);
    return UniqueFd();
  }
  return *std::move(flag);
}

absl::Status Daemon::Listen() {
  StartEventCommand();
  StartScrub();  // (before anybody can ask how far it is)
  HF_RETURN_IF_ERROR(clients_->Listen());
  ServeHealth();  // (before the admin socket's: gRPC's reflection is then not among its services)
  HF_ASSIGN_OR_RETURN(admin_, AdminServer::Start(config_.admin(), admin_context_));
  ServeMetrics();
  ServeStatusPage();
  ServeAdminTls();
  WatchCertificates();
  RefreshMetrics();
  return absl::OkStatus();
}

void Daemon::StartScrub() {
  Scrubber::Options options;
  options.config = config_.scrub();
  options.state_path = JoinPath(config_.state_dir(), "scrub");
  options.env = env_;
  options.gate = network_flags_;
  options.remote = !config_.remote().dir().empty();
  options.stall_after = std::chrono::milliseconds(
      std::max(config_.nvme().stall_timeout_ms(), config_.remote().stall_timeout_ms()));
  options.tell = [this](const std::string& problem) {
    const bool behind = !problem.empty();
    NoteEvent(behind ? v1::SEVERITY_WARNING : v1::SEVERITY_INFO,
              behind ? "scrub_behind" : "scrub_in_time",
              behind ? absl::StrCat("scrub: ", problem)
                     : "scrub: every copy was read again within the period");
  };
  scrubber_ = std::make_unique<Scrubber>(admin_context_, std::move(options));
  scrubber_->Start();
}

// Nobody's training depends on it: a port that is taken is a problem in the status.
void Daemon::ServeMetrics() {
  const std::string& address = config_.metrics().address();
  if (address.empty() || address == "off") {
    return;
  }
  absl::StatusOr<std::unique_ptr<MetricsServer>> server =
      MetricsServer::Start({address, [this] { return metrics_.registry().Text(); }});
  if (!server.ok()) {
    return AddProblem(
        absl::StrCat("no metrics on ", address, " (metrics.address): ", Message(server.status())));
  }
  metrics_server_ = *std::move(server);
}

// Likewise; but who asks gets no answer then, which is one, too.
void Daemon::ServeHealth() {
  const std::string& address = config_.health().address();
  if (address.empty() || address == "off") {
    return;
  }
  absl::StatusOr<std::unique_ptr<HealthServer>> health = HealthServer::Start({.address = address});
  if (!health.ok()) {
    return AddProblem(Message(health.status()));
  }
  health_ = *std::move(health);
  beat_timer_ = reactor_->AddTimer([this] {
    health_->Beat();
    reactor_->Arm(beat_timer_, reactor_->clock().Now() + HealthServer::kBeatEvery);
  });
  reactor_->Arm(beat_timer_, reactor_->clock().Now());
}

// Likewise.
void Daemon::ServeStatusPage() {
  const v1::StatusPageConfig& config = config_.status_page();
  if (config.address().empty() || config.address() == "off") {
    return;
  }
  StatusPage::Options options;
  options.address = config.address();
  if (config.has_tls()) {
    options.tls = {config.tls().ca_file(), config.tls().cert_file(), config.tls().key_file()};
    options.env = env_;
  }
  options.report = [this]() -> absl::StatusOr<std::string> {
    GatewayStatusSource source(admin_context_);
    return StatusReport(source, *Clock::System());
  };
  absl::StatusOr<std::unique_ptr<StatusPage>> page = StatusPage::Start(std::move(options));
  if (!page.ok()) {
    return AddProblem(Message(page.status()));
  }
  status_page_ = *std::move(page);
}

// Likewise: at the socket they answer all the same.
void Daemon::ServeAdminTls() {
  const v1::AdminTlsConfig& config = config_.admin().tls();
  if (config.address().empty() || config.address() == "off") {
    return;
  }
  AdminTls::Options options;
  options.address = config.address();
  options.files = {config.ca_file(), config.cert_file(), config.key_file()};
  options.users = AdminTlsUsers(config);
  options.env = env_;
  options.welcome = [this](UniqueFd fd, const AdminTlsUser& user) {
    admin_->Welcome(std::move(fd), user.uid, user.certificate);
  };
  options.problem_changed = [this](const std::string& problem) {
    SetTlsProblem("the admin address's files", problem);
  };
  absl::StatusOr<std::unique_ptr<AdminTls>> tls = AdminTls::Start(std::move(options));
  if (!tls.ok()) {
    return AddProblem(Message(tls.status()));
  }
  admin_tls_ = *std::move(tls);
}

// Any thread. An event when something is wrong that was not; how long it still lasts is none.
void Daemon::SetTlsProblem(const std::string& what, const std::string& problem) {
  bool is_new = false;
  {
    MutexLock lock(problems_mutex_);
    std::string& known = tls_problems_[what];
    is_new = known.empty() && !problem.empty();
    known = problem;
  }
  if (is_new) {
    LogWarning(problem);
    NoteEvent(v1::SEVERITY_WARNING, "daemon_problem", problem);
  } else {
    LogInfo(problem.empty() ? absl::StrCat(what, ": good again") : problem);
  }
}

// Whom nobody lets in any more, as its certificate has expired, is a node less.
void Daemon::WatchCertificates() {
  CertificateWatch::Options options;
  options.env = env_;
  const auto watch = [&](const std::string& setting, const auto& tls, bool only_soon) {
    if (!tls.cert_file().empty()) {
      options.watched.push_back(
          {setting, {tls.ca_file(), tls.cert_file(), tls.key_file()}, only_soon});
    }
  };
  watch("cluster.tls", config_.cluster().tls(), false);
  watch("status_page.tls", config_.status_page().tls(), false);
  watch("admin.tls", config_.admin().tls(), admin_tls_ != nullptr);
  if (options.watched.empty()) {
    return;
  }
  options.changed = [this](const std::string& setting, const std::string& problem) {
    SetTlsProblem(absl::StrCat("the certificates of ", setting), problem);
  };
  absl::StatusOr<std::unique_ptr<CertificateWatch>> watching =
      CertificateWatch::Start(std::move(options));
  if (!watching.ok()) {
    return AddProblem(
        absl::StrCat("nobody notices when certificates expire: ", Message(watching.status())));
  }
  certificate_watch_ = *std::move(watching);
}

void Daemon::StartEventCommand() {
  const v1::EventsConfig& events = config_.events();
  EventCommand::Options options;
  options.command.assign(events.command().begin(), events.command().end());
  options.least = ParseSeverity(events.least()).value_or(v1::SEVERITY_WARNING);
  options.timeout = std::chrono::milliseconds(events.timeout_ms());
  options.node = config_.node_name();
  event_command_ = std::make_unique<EventCommand>(std::move(options), events_of_node_);
}

absl::Status Daemon::Run() {
  LogInfo(absl::StrCat("ready version=", HOLDFAST_VERSION_STRING, " pid=", ::getpid(),
                       " socket=", config_.socket().path(), " admin=", config_.admin().path(),
                       " memory_dir=", config_.memory().dir(),
                       " memory_bytes_max=", config_.memory().bytes_max(),
                       " metrics_port=", metrics_server_ == nullptr ? 0 : metrics_server_->port(),
                       " health_port=", health_ == nullptr ? 0 : health_->port(),
                       " status_page_port=", status_page_ == nullptr ? 0 : status_page_->port(),
                       " admin_tls_port=", admin_tls_ == nullptr ? 0 : admin_tls_->port()));
  NoteEvent(v1::SEVERITY_INFO, "daemon_started",
            absl::StrCat("ckptd ", HOLDFAST_VERSION_STRING, " serves, pid ", ::getpid()));
  if (health_ != nullptr) {
    health_->SetReady(true);
  }
  FlushLog(kLogFlush);  // before the supervisor is told; best effort
  NotifySupervisor("READY=1");
  reactor_->Run();
  events_of_node_.Stop();
  status_page_.reset();
  metrics_server_.reset();
  certificate_watch_.reset();
  admin_tls_.reset();
  admin_.reset();
  peer_reader_.reset();
  StopScrubber();          // (after those whose threads tell it what they have read)
  event_command_.reset();  // (after those whose threads ask it for its problem)
  if (overdue_) {
    return absl::DeadlineExceededError(absl::StrCat(
        "stop: ", in_flight_, " operations on slots",
        cluster_stopping_ ? " and leaving the cluster" : "",
        catalog_stopping_ ? " and the last write to the catalog" : "", " did not end within ",
        FormatDuration(kStopDeadline), "; slots and records stay as they are"));
  }
  cluster_.reset();
  executor_.reset();
  catalog_writer_.reset();
  LogInfo("stopped");
  return failure_;
}

// All of it, or nothing. What was wrong, and what needs a restart, is a problem until settings are
// read that are right.
void Daemon::TakeSettings(const absl::StatusOr<v1::DaemonConfig>& read) {
  if (stopping_) {
    return;
  }
  if (!read.ok()) {
    const std::string why = PrintableText(Message(read.status()));
    LogWarning(absl::StrCat("settings refused, nothing changes: ", why));
    NoteEvent(v1::SEVERITY_WARNING, "settings_refused",
              absl::StrCat("the settings were read again and refused; nothing changes: ", why));
    return SetSettingsProblem(
        absl::StrCat("the settings were refused when they were read again: ", why,
                     "; ckptd goes on with those from before: mend them, and reload"));
  }
  if (const absl::Status stay = CheckTiersStay(running_, *read); !stay.ok()) {
    return TakeSettings(stay);
  }
  const SettingsChange change = CompareSettings(running_, *read);
  if (const absl::Status mixture = CheckMixture(change); !mixture.ok()) {
    return TakeSettings(mixture);
  }
  const std::string restart = RestartText(change.restart);
  running_ = change.config;
  ApplySettings(running_);
  const std::string text = absl::StrCat(
      "the settings were read again: ",
      change.at_once.empty() ? "nothing has changed that takes effect at once"
                             : absl::StrCat("changed: ", absl::StrJoin(change.at_once, ", ")),
      restart.empty() ? "" : "; ", restart);
  restart.empty() ? LogInfo(text) : LogWarning(text);
  NoteEvent(restart.empty() ? v1::SEVERITY_INFO : v1::SEVERITY_WARNING, "settings_read", text);
  SetSettingsProblem(restart.empty() ? "" : absl::StrCat("settings: ", restart));
}

void Daemon::SetSettingsProblem(const std::string& problem) {
  MutexLock lock(problems_mutex_);
  settings_problem_ = problem;
}

void Daemon::ApplySettings(const v1::DaemonConfig& config) {
  if (const absl::StatusOr<LogLevel> level = ParseLogLevel(config.log().level()); level.ok()) {
    SetLogLevel(*level);
  }
  const v1::EventsConfig& events = config.events();
  event_command_->Change({events.command().begin(), events.command().end()},
                         ParseSeverity(events.least()).value_or(v1::SEVERITY_WARNING),
                         std::chrono::milliseconds(events.timeout_ms()));
  clients_->Change(config.socket());
  populator_->Change(config.memory());
  scrubber_->Change(config.scrub());
  store_->SetBytesMax(config.memory().bytes_max());
  admin_context_.request_timeout =
      Duration(std::chrono::milliseconds(config.admin().request_timeout_ms()));
  if (admin_tls_ != nullptr) {
    admin_tls_->Change(AdminTlsUsers(config.admin().tls()));
  }
  Feed(SettingsChanged{config});
}

void Daemon::WatchMemory() {
  absl::StatusOr<std::unique_ptr<MemoryWatch>> watch = MemoryWatch::Start(
      *reactor_, config_.memory().dir(),
      {.image_gone = [this](SlotId slot) { Feed(SlotFileGone{slot}); },
       .lost =
           [this](const std::string& what) {
             if (failure_.ok()) {
               failure_ = absl::DataLossError(
                   absl::StrCat("memory.dir: ", what,
                                ", and what was sealed in it is gone; start ckptd again "
                                "(it makes the directory anew), and keep cleaners away from it"));
               BeginStop(Message(failure_));
             }
           },
       .slots = [this] { return store_->Slots(); }});
  if (!watch.ok()) {
    return AddProblem(absl::StrCat("files that others remove are not noticed at once: ",
                                   Message(watch.status())));
  }
  memory_watch_ = *std::move(watch);
}

void Daemon::CountPassedMemory() {
  absl::StatusOr<std::unique_ptr<PassedMemory>> passed = PassedMemory::Start(*reactor_);
  if (!passed.ok()) {
    return AddProblem(absl::StrCat(
        "a user may keep any amount of the memory that ckptd passes: ", Message(passed.status()),
        "; raise fs.inotify.max_user_instances (sysctl)"));
  }
  passed_memory_ = *std::move(passed);
}

// To the connection's user. An error: they must not be passed.
absl::Status Daemon::Charge(ConnectionId connection, std::span<const UniqueFd> files) {
  const std::optional<uint32_t> user = clients_->UserOf(connection);
  if (passed_memory_ == nullptr || !user) {
    return absl::OkStatus();
  }
  const absl::Status charged = passed_memory_->Charge(*user, files);
  if (!charged.ok()) {
    LogFrom(LogLevel::kWarning, absl::StrCat("uid=", *user), Message(charged));
  }
  return charged;
}

void Daemon::AskToStop(const std::string& why) {
  const uint32_t saves = core_->SavesBeingWritten();
  if (saves == 0 || !stop_asked_.empty()) {
    return BeginStop(why);
  }
  LogInfo(absl::StrCat("will stop (", why, ") when ", saves, " saves that are being written are ",
                       "sealed, in ", FormatDuration(kLastSaves), " at most; to stop it at once, ",
                       "send the signal again"));
  if (health_ != nullptr) {
    health_->SetReady(false);
  }
  stop_asked_ = why;
  reactor_->Arm(last_saves_timer_, reactor_->clock().Now() + kLastSaves);
}

void Daemon::StopWhenSaved() {
  if (!stop_asked_.empty() && !stopping_ && core_->SavesBeingWritten() == 0) {
    BeginStop(stop_asked_);
  }
}

void Daemon::BeginStop(const std::string& why) {
  if (stopping_) {
    return;
  }
  LogInfo(absl::StrCat("stopping: ", why));
  NoteEvent(v1::SEVERITY_INFO, "daemon_stopping", why);
  if (health_ != nullptr) {
    health_->SetReady(false);
  }
  NotifySupervisor("STOPPING=1");
  stopping_ = true;
  reactor_->Disarm(last_saves_timer_);
  clients_->StopListening();
  gateway_->Stop();
  populator_->Stop();
  tiers_->Cancel();
  if (cluster_ != nullptr) {
    cluster_stopping_ = true;
    cluster_->Stop([this] {
      reactor_->Post([this] {
        cluster_stopping_ = false;
        StopWhenIdle();
      });
    });
  }
  reactor_->Arm(stop_timer_, reactor_->clock().Now() + kStopDeadline);
  StopWhenIdle();
}

void Daemon::StopWhenIdle() {
  if (!stopping_ || in_flight_ > 0 || cluster_stopping_ || catalog_stopping_) {
    return;
  }
  catalog_stopping_ = true;
  catalog_writer_->Stop([this](const absl::Status& status) {
    if (!status.ok()) {
      LogWarning(absl::StrCat("the catalog is not up to date: ", Message(status),
                              "; memory.dir has what it lacks"));
    }
    reactor_->Stop();
  });
}

void Daemon::Feed(Event event) {
  events_.push_back(std::move(event));
  if (feeding_) {
    return;  // an action had this as its immediate consequence: it waits for its turn
  }
  feeding_ = true;
  while (!events_.empty()) {
    const Event next = std::move(events_.front());
    events_.pop_front();
    const Clock& clock = reactor_->clock();
    const MonotonicTime before = clock.Now();
    metrics_.transfers().Ended(next, before);
    Actions actions = core_->Handle(next, before, clock.UnixMillis());
    metrics_.CountHandled(clock.Now() - before);
#ifndef NDEBUG
    if (const std::string broken = core_->CheckInvariants(); !broken.empty()) {
      LogError(absl::StrCat("invariant broken after event ", next.index(), ": ", broken));
      FlushLog(kLogFlush);
      std::abort();
    }
#endif
    for (Action& action : actions) {
      std::visit([this](auto& one) { Perform(std::move(one)); }, action);
    }
  }
  feeding_ = false;
  StopWhenSaved();
  if (!metrics_due_ && !stopping_) {
    metrics_due_ = true;
    reactor_->Arm(metrics_timer_, reactor_->clock().Now() + kMetricsEvery);
  }
}

void Daemon::NoteEvent(v1::Severity severity, const std::string& kind, const std::string& text,
                       const std::string& job) {
  v1::DaemonEvent event;
  event.set_unix_ms(Clock::System()->UnixMillis());
  event.set_severity(severity);
  event.set_kind(kind);
  event.set_text(text);
  event.set_job(job);
  events_of_node_.Add(std::move(event), job.empty() ? std::nullopt : core_->OwnerOf(job));
}

// (Of the others Perform(ChangePeers) tells.)
void Daemon::NoteMembership(const Event& event) {
  const auto* told = std::get_if<MembershipTold>(&event);
  if (told == nullptr || stopping_) {
    return;
  }
  const auto* lost = std::get_if<LeaseLost>(&told->event);
  if (lost != nullptr && std::exchange(member_, false)) {
    NoteEvent(v1::SEVERITY_WARNING, "membership_lost",
              absl::StrCat("this node is no member of the cluster any more: ", lost->why));
  } else if (std::holds_alternative<LeaseHolds>(told->event) && !std::exchange(member_, true)) {
    NoteEvent(v1::SEVERITY_INFO, "membership_held", "this node is a member of the cluster");
  }
}

// The log has it at once, whatever its level. Its job's user, whom the core's thread alone knows,
// sees it among the job's events: not whoever tried to touch the job of another.
void Daemon::NoteCommand(uint32_t uid, const std::string& job, const std::string& what, bool done) {
  // (Whoever is refused often makes none be left out of what was done.)
  LogAlways(absl::StrCat(done ? "commands of uid=" : "refused commands of uid=", uid),
            absl::StrCat("command: ", absl::Utf8SafeCEscape(what)));
  v1::DaemonEvent event;
  event.set_unix_ms(Clock::System()->UnixMillis());
  event.set_kind("command");
  event.set_job(job);
  event.set_text(what);
  reactor_->Post([this, uid, event = std::move(event)] {
    events_of_node_.Add(event, event.job().empty() ? std::nullopt : core_->OwnerOf(event.job()),
                        uid);
  });
}

void Daemon::AddProblem(const std::string& problem) {
  LogWarning(problem);
  NoteEvent(v1::SEVERITY_WARNING, "daemon_problem", problem);
  MutexLock lock(problems_mutex_);
  problems_.push_back(problem);
  if (problems_.size() > kProblemsMax) {
    problems_.pop_front();
  }
}

void Daemon::FillDaemonStatus(v1::DaemonStatus& status) {
  status.set_node_name(config_.node_name());
  status.set_version(HOLDFAST_VERSION_STRING);
  status.set_pid(::getpid());
  const Clock& clock = reactor_->clock();
  status.set_uptime_ms(
      std::chrono::duration_cast<std::chrono::milliseconds>(clock.Now() - started_).count());
  status.set_unix_ms(clock.UnixMillis());
  const uint64_t bytes_max = store_->bytes_max();
  const uint64_t bytes_used = store_->bytes_used();
  status.set_memory_bytes_max(bytes_max);
  status.set_memory_bytes_used(bytes_used);
  if (bytes_used > bytes_max) {
    status.add_problems(absl::StrCat(
        "memory.bytes_max is ", FormatBytes(bytes_max), ", and ", FormatBytes(bytes_used),
        " are in use: nothing more is reserved until slots go (ckptctl rm, or the end of a job)"));
  }
  const absl::StatusOr<FilesystemInfo> fs = env_->Filesystem(config_.memory().dir());
  status.set_memory_bytes_free_in_tmpfs(fs.ok() ? fs->bytes_free : 0);
  status.set_memory_dir(config_.memory().dir());
  status.set_connections(connections_.load(std::memory_order_relaxed));
  for (const ProcessId& process : store_->dying()) {
    if (FindDying(process.pid) == process) {
      status.add_problems(PredecessorHangs(process));
    }
  }
  if (std::string problem = catalog_writer_->problem(); !problem.empty()) {
    status.add_problems(std::move(problem));
  }
  *status.mutable_quiet() = network_flags_->Status();
  if (scrubber_ != nullptr) {  // (not before it listens)
    scrubber_->Fill(*status.mutable_scrub());
  }
  tiers_->FillStatus(status);
  metrics_.transfers().FillStatus(status);
  if (event_command_ != nullptr) {  // (likewise)
    if (std::string problem = event_command_->problem(); !problem.empty()) {
      status.add_problems(std::move(problem));
    }
  }
  if (cluster_ != nullptr) {
    for (std::string& problem : cluster_->View().problems) {
      status.add_problems(std::move(problem));
    }
  }
  MutexLock lock(problems_mutex_);
  if (!settings_problem_.empty()) {
    status.add_problems(settings_problem_);
  }
  for (const auto& [what, problem] : tls_problems_) {
    if (!problem.empty()) {
      status.add_problems(problem);
    }
  }
  for (const std::string& problem : problems_) {
    status.add_problems(problem);
  }
}

// At most once in kMetricsEvery, and only after something happened: at rest nothing runs.
void Daemon::RefreshMetrics() {
  LogLeftOut();
  AdminRequest request;
  request.token = kMetricsToken;
  request.caller.uid = 0;
  request.request = v1::GetStatusRequest();
  Feed(std::move(request));
  for (const std::string& job : metrics_.steps().TakeDue()) {
    AskTimeline(job);
  }
  metrics_due_ = metrics_.steps().any_due() && !stopping_;
  if (metrics_due_) {
    reactor_->Arm(metrics_timer_, reactor_->clock().Now() + kMetricsEvery);
  } else {
    reactor_->Disarm(metrics_timer_);
  }
}

// The core answers the daemon's own questions at once, in Perform(AdminReply).
void Daemon::AskTimeline(const std::string& job) {
  timeline_asked_ = job;
  AdminRequest request;
  request.token = kMetricsToken;
  request.caller.uid = 0;
  v1::TimelineRequest of;
  of.set_job(job);
  request.request = std::move(of);
  Feed(std::move(request));
  timeline_asked_.clear();
}

void NotifySupervisor(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address = {};
  if (path == nullptr || (path[0] != '/' && path[0] != '@') ||
      std::strlen(path) >= sizeof(address.sun_path)) {
    return;
  }
  address.sun_family = AF_UNIX;
  const size_t length = std::strlen(path);
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') {
    address.sun_path[0] = '\0';  // the abstract namespace
  }
  const UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Best effort, as the protocol has it: a supervisor that is not there notices by itself.
  ::sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
           reinterpret_cast<const sockaddr*>(&address),
           static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length));
}

}  // namespace holdfast
