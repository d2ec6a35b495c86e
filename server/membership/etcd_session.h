// This node's dealings with etcd, as a state machine: which connection to use, its lease and its
// name, the list of members, and the jobs' hosts and states. No I/O, threads or clock: events in,
// actions out. docs/protocol.md, "Membership", says why it is safe.
//
//   EtcdSession session(options);
//   Perform(session.Handle(EtcdSession::Begin{}, now));   // and Tick{} at session.next_timer()
//
// Owner: EtcdMembership, or a test that plays etcd. Not thread-safe. Times in one call never go
// back.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "etcd/rpc.pb.h"
#include "server/membership/cluster_note.h"
#include "server/membership/membership.h"
#include "server/membership/membership_records.h"

namespace holdfast {

namespace etcd = ::etcdserverpb;

// --- Actions ------------------------------------------------------------------------------------

// Close what there is (its calls and its watch are given up, unanswered), and open a channel to
// this endpoint: ConnectionOpened, with what the files say at that time.
struct EtcdConnect {
  uint64_t connection = 0;
  size_t endpoint = 0;
};
struct EtcdDisconnect {};
using EtcdRequest =
    std::variant<etcd::RangeRequest, etcd::TxnRequest, etcd::LeaseGrantRequest,
                 etcd::LeaseRevokeRequest, etcd::LeaseKeepAliveRequest, etcd::AuthenticateRequest>;
struct EtcdCall {  // CallEnded
  uint64_t id = 0;
  EtcdRequest request;
  std::string token;
};
struct EtcdOpenWatch {  // WatchMessages, then WatchEnded
  uint64_t stream = 0;
  std::string token;
};
struct EtcdWriteWatch {
  uint64_t stream = 0;
  etcd::WatchRequest request;
};
// Durably: NoteWritten.
struct WriteMembershipNote {
  uint64_t serial = 0;
  MembershipNoteData note;
};
using EtcdAction = std::variant<EtcdConnect, EtcdDisconnect, EtcdCall, EtcdOpenWatch,
                                EtcdWriteWatch, WriteMembershipNote, MembershipEvent, ClusterNote>;

class EtcdSession {
 public:
  struct Options {
    NodeInfo self;       // with its incarnation
    std::string prefix;  // of all keys, with the cluster's name: "/holdfast/default/"
    std::vector<std::string> endpoints;
    std::string user;  // empty: no authentication
    Duration lease_ttl = std::chrono::seconds(10);
    Duration request_timeout = std::chrono::seconds(2);
    std::vector<int64_t> noted_leases;  // of this node's earlier lives
    uint64_t seed = 0;                  // of lease ids and jitter: random in production
  };

  // --- Events -----------------------------------------------------------------------------------
  struct Begin {};
  struct Tick {};
  // The machine was suspended for so long: others' clocks went on.
  struct Slept {
    Duration duration{};
  };
  struct ConnectionOpened {
    uint64_t connection = 0;
    absl::Status status;  // of reading certificates and password
    std::string password;
  };
  using Response = std::variant<std::monostate, etcd::RangeResponse, etcd::TxnResponse,
                                etcd::LeaseGrantResponse, etcd::LeaseRevokeResponse,
                                etcd::LeaseKeepAliveResponse, etcd::AuthenticateResponse>;
  struct CallEnded {
    uint64_t id = 0;
    absl::Status status;
    Response response;  // of the request's kind when the status is OK
  };
  struct WatchMessage {
    uint64_t stream = 0;
    etcd::WatchResponse message;
  };
  struct WatchEnded {
    uint64_t stream = 0;
    absl::Status status;
  };
  struct NoteWritten {
    uint64_t serial = 0;
    absl::Status status;
  };
  // The calls of Membership.
  struct AskLeave {};
  struct AskWatchHost {
    std::string job;
  };
  struct AskUnwatchHost {
    std::string job;
  };
  struct AskCampaign {
    std::string job;
    Epoch floor = 0;
  };
  struct AskResign {
    std::string job;
  };
  struct AskStoreState {
    std::string job;
    StoredState state;
  };
  struct AskReadState {
    std::string job;
  };
  struct AskForgetJob {
    std::string job;
    Epoch epoch = 0;
  };
  // The calls of ClusterNotes.
  struct AskNote {
    std::string remembered;
  };
  struct AskNoteRemote {
    std::string id;
    std::string instead_of;
  };
  using Event =
      std::variant<Begin, Tick, Slept, ConnectionOpened, CallEnded, WatchMessage, WatchEnded,
                   NoteWritten, AskLeave, AskWatchHost, AskUnwatchHost, AskCampaign, AskResign,
                   AskStoreState, AskReadState, AskForgetJob, AskNote, AskNoteRemote>;

  explicit EtcdSession(Options options);
  ~EtcdSession();

  std::vector<EtcdAction> Handle(Event event, MonotonicTime now);
  // When to say Tick at the latest.
  MonotonicTime next_timer() const;
  // How long before etcd may end a lease of this length its holder stops to rely on it: clocks do
  // not run alike.
  static Duration Margin(Duration ttl) { return ttl / 10; }

 private:
  struct Job;

  // One try after another, further apart each time, never at the same moments as others.
  struct Backoff {
    uint32_t failures = 0;
    MonotonicTime not_before;
  };

  // A key or a prefix whose content is followed: listed once, then watched from that revision on.
  struct Range {
    enum class State { kToList, kListing, kToWatch, kWatching };
    std::string key;
    std::string end;  // empty: one key
    State state = State::kToList;
    Backoff backoff;
    // While it is being listed, page by page, at one revision.
    uint64_t round = 0;  // answers to the questions of an earlier one mean nothing
    std::string next_key;
    int64_t list_revision = 0;
    std::vector<etcd::KeyValue> listed;
    // While it is watched.
    int64_t watch_id = 0;
    bool confirmed = false;  // etcd said that the watch is there
    MonotonicTime asked;
    int64_t next_revision = 0;                  // everything before is known
    std::function<void(const Range&)> on_list;  // takes `listed`
    std::function<void(const etcd::Event&)> on_event;
  };

  // etcd's answer, or its refusal. What is never answered at all (the connection was given up) is
  // Unavailable.
  using Answer = std::function<void(const absl::Status&, Response&)>;
  struct CallInFlight {
    Answer answer;
    MonotonicTime sent;
    bool linearizable = false;
    int64_t revision_then = 0;  // the newest that was known when it was sent
  };

  // etcd_session.cc: the connection, and what all requests have in common.
  void Process(Event& event);
  void Pump();
  void Connect();
  // `next`: to another endpoint.
  enum class Then { kSameEndpoint, kNextEndpoint };
  void GiveUpConnection(const std::string& problem, Then then);
  void OnConnectionOpened(const ConnectionOpened& event);
  void Authenticate(const std::string& password);
  void Probe();
  void OnCallEnded(CallEnded& event);
  bool SeeHeader(const etcd::ResponseHeader& header, const CallInFlight& call);
  void Wiped(const std::string& what);
  bool ready() const { return link_ == Link::kUp && probed_; }
  bool Send(EtcdRequest request, Answer answer);
  bool Refused(const absl::Status& status);  // the connection is to blame, and was given up
  static constexpr Duration kRetryMax = std::chrono::seconds(3);
  static constexpr size_t kForeignTextBytesMax = 256;  // of what etcd says
  void Failed(Backoff& backoff, Duration at_most);
  bool Due(const Backoff& backoff) { return DueAt(backoff.not_before); }
  bool DueAt(MonotonicTime at);
  void WakeAt(MonotonicTime at);
  void Tell(MembershipEvent event);
  void SetProblem(const std::string& about, std::string text);
  void TellProblems();

  // etcd_session_lease.cc: this node's lease and name.
  void PumpLease();
  void BeginLease();
  void RevokeOld();
  void OnNoteWritten(const NoteWritten& event);
  void Grant();
  void KeepAlive();
  void Leave();
  void OnSlept(Duration duration);
  void LoseLeaseIfSlept();
  void ExtendLease(MonotonicTime sent, Duration slept, int64_t ttl_s);
  void LoseLease(const std::string& why);
  void Publish();
  void RemoveStaleName(int64_t mod_revision);
  void OnPublished(int64_t create_revision);
  void NameTaken(const etcd::KeyValue& holder);
  bool member() const { return published_revision_ != 0; }

  // etcd_session_watch.cc: the lists that are followed, and the members.
  void PumpWatches();
  std::shared_ptr<Range> Follow(const std::string& key, const std::string& end);
  void Unfollow(Range& range);
  void PumpRange(const std::shared_ptr<Range>& range);
  void ListPage(const std::shared_ptr<Range>& range);
  void OnPage(const std::shared_ptr<Range>& range, const absl::Status& status, Response& response);
  void ListAgain(Range& range);
  void OnWatchMessage(const etcd::WatchResponse& message);
  void OnWatchEnded(const absl::Status& status);
  void LeaveStream();
  void ListAllAgain();
  void OnMembers(const Range& range);
  void OnMemberEvent(const etcd::Event& event);
  std::optional<NodeInfo> TakeMember(const std::string& name, const etcd::KeyValue& value);
  void TellStrange();

  // etcd_session_note.cc: the cluster's id, and which remote directory it has.
  void PumpNote();
  void ReadNote();
  void WriteRemote(int64_t revision);
  bool NoteFailed(const absl::Status& status, bool makes_sense);
  void Ask(const AskNote& ask);
  void Ask(const AskNoteRemote& ask);

  // etcd_session_jobs.cc: who hosts, and the agreed states.
  std::shared_ptr<Job> JobFor(const std::string& name, std::string* why);
  void PumpJobs();
  void PumpJob(Job& job);
  void FollowHost(const std::shared_ptr<Job>& job);
  void OnHost(Job& job, const etcd::KeyValue* value, int64_t at_revision);
  void TellHost(Job& job);
  void SendForJob(Job& job, etcd::TxnRequest request,
                  void (EtcdSession::*answer)(Job&, const absl::Status&, etcd::TxnResponse&));
  void ReadForCampaign(Job& job);
  void OnCampaignRead(Job& job, const absl::Status& status, etcd::TxnResponse& response);
  void OnElection(Job& job, const absl::Status& status, etcd::TxnResponse& response);
  void JudgeCampaign(Job& job, const etcd::TxnResponse& view);
  void Win(Job& job, Epoch epoch, std::string host_value, int64_t create_revision,
           const etcd::KeyValue* state);
  void EndHosting(Job& job);
  void PutState(Job& job);
  void OnStatePut(Job& job, const absl::Status& status, etcd::TxnResponse& response);
  void RemoveHost(Job& job);
  void OnHostRemoved(Job& job, const absl::Status& status, etcd::TxnResponse& response);
  void ReadState(Job& job);
  void OnStateRead(Job& job, const absl::Status& status, etcd::TxnResponse& response);
  void JobsLoseLease();
  void JobsEndCampaigns(const std::string& why);
  void Ask(const AskWatchHost& ask);
  void Ask(const AskUnwatchHost& ask);
  void Ask(const AskCampaign& ask);
  void Ask(const AskResign& ask);
  void Ask(AskStoreState& ask);
  void Ask(const AskReadState& ask);
  void Ask(const AskForgetJob& ask);
  bool Retry(Job& job, Backoff& backoff, const absl::Status& status);

  const Options options_;
  const EtcdKeys keys_;
  std::mt19937_64 random_;
  MonotonicTime now_;
  MonotonicTime wake_at_;
  std::vector<EtcdAction> actions_;
  std::map<std::string, std::string> problems_;  // by what they are about
  std::string told_problems_;
  bool begun_ = false;

  enum class Link { kDown, kOpening, kAuthenticating, kUp };
  Link link_ = Link::kDown;
  bool probed_ = false;  // this connection's etcd is the one that is known
  uint64_t connection_ = 0;
  size_t endpoint_ = 0;
  Backoff connect_backoff_;
  MonotonicTime opened_at_;
  std::string token_;
  uint64_t last_id_ = 0;
  std::map<uint64_t, CallInFlight> calls_;
  std::string cluster_id_;  // content of the key `id`
  uint64_t header_cluster_id_ = 0;
  int64_t revision_ = 0;  // the newest that was seen
  bool probing_ = false;
  Backoff probe_backoff_;

  enum class Lease { kNone, kNoting, kRevoking, kGranting, kHeld, kLeaving, kLeft };
  Lease lease_state_ = Lease::kNone;
  int64_t lease_ = 0;
  std::vector<int64_t> old_leases_;
  uint64_t note_serial_ = 0;
  MonotonicTime valid_until_;
  MonotonicTime told_until_;
  MonotonicTime keep_alive_at_;
  Duration slept_{};         // how long this machine has been suspended so far
  Duration slept_then_{};    // and had been when the lease was asked for last, of what was answered
  bool lease_call_ = false;  // one of grant, revoke, keep-alive is under way
  Backoff lease_backoff_;
  int64_t published_revision_ = 0;  // create_revision of our key under nodes/; 0: not published
  bool publishing_ = false;
  Backoff publish_backoff_;

  uint64_t stream_ = 0;  // 0: no watch
  Backoff watch_backoff_;
  std::map<int64_t, std::weak_ptr<Range>> watches_;  // by watch_id
  std::shared_ptr<Range> members_range_;
  int64_t page_limit_ = 0;
  std::map<std::string, NodeInfo> members_;
  std::map<std::string, std::string> strange_members_;  // what cannot be read, and why

  struct Note {
    bool wanted = false;  // it is to be read and told
    bool asking = false;  // a call is under way
    bool told = false;
    std::string id;      // of the cluster: as told last, or what is put if there is none
    std::string remote;  // to be noted, if what is noted is the next
    std::string instead_of;
    Backoff backoff;
  };
  Note note_;

  std::map<std::string, std::shared_ptr<Job>> jobs_;
};

}  // namespace holdfast
