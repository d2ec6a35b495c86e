#include "server/peers/peer_network.h"

#include <algorithm>
#include <deque>
#include <future>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/status.h"
#include "server/membership/cluster_config.h"
#include "server/membership/membership.h"
#include "server/membership/task_thread.h"
#include "server/peer_codec.h"
#include "server/peers/peer_calls.h"
#include "server/peers/peer_inbox.h"
#include "server/peers/peer_service.h"
#include "server/peers/peer_tls.h"
#include "server/peers/tls_probe.h"

namespace holdfast {
namespace {

// Of a message within a batch: tag, length. And names and numbers of the batch.
constexpr size_t kFramingBytes = 8;
constexpr size_t kBatchHeadBytes = 4096;
// Batches that wait for room, of all nodes together.
constexpr size_t kWaitingBytesMax = size_t{64} << 20;
constexpr MonotonicTime kNever{INT64_MAX};
constexpr Duration kTlsProbe = std::chrono::seconds(2);

size_t BatchBytesMax(const LinkLimits& limits) {
  return limits.batch_bytes_max + kPeerMessageBytesMax + limits.batch_messages_max * kFramingBytes +
         kBatchHeadBytes;
}

uint64_t RandomBits() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

std::string Quoted(const std::string& name) {
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(name), "'");
}

std::string Belonging(const std::string& cluster, const std::string& membership) {
  return absl::StrCat("cluster ", Quoted(cluster), " (", absl::Utf8SafeCHexEscape(membership), ")");
}

}  // namespace

// Threads: `loop_` owns all that is below it and never waits; `doors_` reads files and makes and
// ends connections; `probes_` finds out what was wrong with TLS when one did not come about; the
// inbox's tells the observer; gRPC's only post to the loop.
class PeerNetwork::Impl {
 public:
  explicit Impl(PeerNetworkOptions options)
      : options_(std::move(options)),
        loop_([this] { OnTime(); }),
        calls_(options_.call_deadline, BatchBytesMax(options_.limits),
               [this](PeerCallEnded ended) {
                 loop_.Post([this, ended = std::move(ended)] { OnEnded(ended); });
               }),
        service_(
            {.request_bytes_max = BatchBytesMax(options_.limits),
             .messages_max = options_.limits.batch_messages_max,
             .message_bytes_max = kPeerMessageBytesMax},
            [this](PeerCalling calling) {
              auto shared = std::make_shared<PeerCalling>(std::move(calling));
              loop_.Post([this, shared] { OnCalling(std::move(*shared)); });
            },
            [this](uint64_t id) { loop_.Post([this, id] { OnCancelled(id); }); }) {}

  ~Impl() {
    // 1. Nothing new begins, and who waits for an answer gets it. Awaited: between two calls none
    // is under way, and the loop would begin the next one behind AwaitAll's back.
    std::promise<void> closed;
    loop_.Post([this, &closed] {
      Close();
      closed.set_value();
    });
    closed.get_future().wait();
    // 2. All calls end, in both directions; what ends is told to the loop.
    service_.Stop();
    calls_.AwaitAll();
    // 3. The threads. What they had not done yet ends here, on none of gRPC's.
    loop_.Stop();
    if (inbox_ != nullptr) {
      inbox_->Stop();
    }
    doors_.Stop();
    probes_.Stop();
  }

  absl::Status Start(PeerObserver observer) {
    HF_ASSIGN_OR_RETURN(const PeerTlsText tls, ReadPeerTls(options_.env, options_.tls));
    inbox_ = std::make_unique<PeerInbox>(
        PeerInbox::Limits{options_.inbox_messages_max, options_.inbox_bytes_max},
        std::move(observer), [this] { loop_.Post([this] { OnRoom(); }); });
    HF_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ServerCredentials> credentials,
                        PeerServerCredentials(options_.tls, tls, options_.tls_reload));
    return service_.Listen(options_.listen, credentials, options_.services);
  }
  const std::string& address() const { return service_.address(); }

  void ChangePeers(holdfast::ChangePeers change) {
    auto shared = std::make_shared<holdfast::ChangePeers>(std::move(change));
    loop_.Post([this, shared] { TakePeers(*shared); });
  }
  void Connect(const std::string& node) {
    loop_.Post([this, node] {
      if (const auto it = peers_.find(node); it != peers_.end() && !closed_) {
        it->second.wanted = true;
        it->second.link->Connect(clock_.Now());
        Pump(it->first, it->second);
      }
    });
  }
  void Say(const std::string& node, PeerChannel channel, std::string message) {
    loop_.Post([this, node, channel, message = std::move(message)]() mutable {
      const auto it = peers_.find(node);
      if (it != peers_.end() && channel != 0 && it->second.channel == channel) {
        it->second.link->Say(std::move(message), clock_.Now());
        Pump(it->first, it->second);
      }
    });
  }

 private:
  struct Peer {
    PeerAddress at;
    bool wanted = false;
    // What this node says.
    std::unique_ptr<SendLink> link;
    uint64_t link_id = 0;     // a link that takes the place of another has another one
    PeerChannel channel = 0;  // as the observer was told; 0: none
    std::string told_problem;
    std::string tls_problem;  // what a probe found; known after the problem itself
    bool probing = false;
    std::deque<LinkRequest> requests;  // wait for the connection, or the end of the last call
    std::shared_ptr<PeerCalls::Connection> connection;
    bool connecting = false;
    uint64_t call = 0;  // that is under way; 0: none
    std::optional<MonotonicTime> timer;
    // What it says.
    ReceiveLink in{0};
    uint64_t in_incarnation = 0;
    std::optional<PeerCalling> waiting;  // for room
  };
  struct Flight {
    std::string node;
    uint64_t link_id = 0;
    uint64_t request = 0;
    bool opens = false;
    std::shared_ptr<PeerCalls::Call> call;
  };

  // ---- Who there is ----

  void TakePeers(const holdfast::ChangePeers& change) {
    if (closed_) {
      return;
    }
    for (const std::string& node : change.down) {
      if (const auto it = peers_.find(node); it != peers_.end()) {
        EndLink(node, it->second, "it is no member of the cluster any more");
        EndIncoming(it->second, absl::UnavailableError("the caller is no member any more"));
        peers_.erase(it);
      }
    }
    for (const auto& [node, at] : change.up) {
      if (node == options_.self || node.empty() || node.size() > kNodeTextBytesMax ||
          (peers_.size() >= kMembersMax && !peers_.contains(node))) {
        continue;
      }
      auto [it, fresh] = peers_.try_emplace(node);
      Peer& peer = it->second;
      if (!fresh && peer.at == at) {
        continue;
      }
      if (!fresh) {
        EndLink(node, peer,
                peer.at.address != at.address
                    ? absl::StrCat("its address is ", at.address, " now, not ", peer.at.address)
                    : "it was started anew");
      }
      if (fresh || (at.incarnation != 0 && peer.in_incarnation != at.incarnation)) {
        EndIncoming(peer, absl::UnavailableError("the caller was started anew"));
      }
      peer.at = at;
      peer.tls_problem.clear();
      next_tick_ = next_tick_.value_or(clock_.Now() + options_.hearing_tick);
      peer.link = std::make_unique<SendLink>(options_.limits);
      peer.link_id = ++last_link_id_;
      if (peer.wanted) {
        peer.link->Connect(clock_.Now());
        Pump(node, peer);
      }
    }
    Wake();
  }

  // What it says from now on is not taken, until it opens a channel again.
  void EndIncoming(Peer& peer, const absl::Status& why) {
    if (peer.waiting) {
      Refuse(TakeWaiting(peer), why);
    }
    peer.in = ReceiveLink(random_());
    peer.in_incarnation = 0;
  }

  // ---- What this node says ----

  void EndLink(const std::string& node, Peer& peer, const std::string& why) {
    peer.link->Close();
    peer.requests.clear();
    SetTimer(node, peer, std::nullopt);
    if (peer.call != 0) {
      flights_.at(peer.call).call->Cancel();
      peer.call = 0;
    }
    DropConnection(peer);
    peer.connecting = false;
    peer.told_problem.clear();
    if (peer.channel != 0) {
      inbox_->Lost(node, std::exchange(peer.channel, 0), why);
    }
  }

  // After whatever happened to its link.
  void Pump(const std::string& node, Peer& peer) {
    for (const SendLink::Change change : peer.link->TakeChanges()) {
      if (change == SendLink::Change::kReached) {
        peer.channel = ++last_channel_;
        peer.told_problem.clear();
        peer.tls_problem.clear();
        inbox_->Reached(node, peer.channel);
      } else {
        inbox_->Lost(node, std::exchange(peer.channel, 0), peer.link->problem());
        peer.told_problem = peer.link->problem();
        peer.requests.clear();
        if (peer.call != 0) {  // the link waits for its answer no longer
          flights_.at(peer.call).call->Cancel();
        }
      }
    }
    if (const std::string problem = ProblemOf(peer); problem != peer.told_problem) {
      peer.told_problem = problem;
      inbox_->Problem(node, problem);
    }
    for (LinkRequest& request : peer.link->TakeRequests()) {
      peer.requests.push_back(std::move(request));
    }
    SetTimer(node, peer, peer.link->NextTime());
    Send(node, peer);
  }

  static std::string ProblemOf(const Peer& peer) {
    const std::string& problem = peer.link->problem();
    return problem.empty() || peer.tls_problem.empty()
               ? problem
               : absl::StrCat(problem, " (", peer.tls_problem, ")");
  }

  // It could not be called, and gRPC does not say what about its certificate, or ours.
  void ProbeTls(const std::string& node, Peer& peer) {
    if (options_.tls.ca_file.empty() || peer.probing) {
      return;
    }
    peer.probing = true;
    probes_.Post([this, node, link_id = peer.link_id, address = peer.at.address] {
      const absl::StatusOr<PeerTlsText> tls = ReadPeerTls(options_.env, options_.tls);
      std::string why;
      if (tls.ok()) {
        const PeerTls& files = options_.tls;
        why = WhyNoTls({files.ca_file, files.cert_file, files.key_file},
                       {tls->ca, tls->cert, tls->key}, address, clock_.Now() + kTlsProbe);
      }
      loop_.Post([this, node, link_id, why] {
        const auto it = peers_.find(node);
        if (it == peers_.end() || closed_) {
          return;
        }
        it->second.probing = false;
        if (it->second.link_id == link_id && it->second.channel == 0) {
          it->second.tls_problem = why;
          Pump(it->first, it->second);
        }
      });
    });
  }

  void Send(const std::string& node, Peer& peer) {
    if (peer.requests.empty() || peer.call != 0 || peer.connecting) {
      return;
    }
    if (peer.connection == nullptr) {
      peer.connecting = true;
      doors_.Post([this, node, link_id = peer.link_id, address = peer.at.address] {
        const absl::StatusOr<PeerTlsText> tls = ReadPeerTls(options_.env, options_.tls);
        std::shared_ptr<PeerCalls::Connection> made;
        if (tls.ok()) {
          made = calls_.Connect(address, *tls);
        }
        loop_.Post([this, node, link_id, status = tls.status(), made]() mutable {
          OnConnected(node, link_id, status, std::move(made));
        });
      });
      return;
    }
    const LinkRequest request = std::move(peer.requests.front());
    peer.requests.pop_front();
    peer.call = ++last_call_;
    Flight& flight = flights_[peer.call];
    flight.node = node;
    flight.link_id = peer.link_id;
    if (const auto* open = std::get_if<OpenChannel>(&request)) {
      flight.request = open->request;
      flight.opens = true;
      v1::OpenRequest message;
      message.set_from(options_.self);
      message.set_incarnation(options_.incarnation);
      message.set_to(node);
      message.set_to_incarnation(peer.at.incarnation);
      message.set_cluster(options_.cluster);
      message.set_membership(options_.membership);
      flight.call = calls_.Open(peer.connection, peer.call, std::move(message));
    } else {
      const auto& batch = std::get<SendBatch>(request);
      flight.request = batch.request;
      v1::Batch message;
      message.set_from(options_.self);
      message.set_incarnation(options_.incarnation);
      message.set_to(node);
      message.set_channel(batch.channel);
      message.set_first(batch.first);
      for (const std::string& said : batch.messages) {
        message.add_messages(said);
      }
      flight.call = calls_.Deliver(peer.connection, peer.call, std::move(message));
    }
  }

  void OnConnected(const std::string& node, uint64_t link_id, const absl::Status& status,
                   std::shared_ptr<PeerCalls::Connection> made) {
    const auto it = peers_.find(node);
    if (it == peers_.end() || it->second.link_id != link_id || closed_) {
      return EndElsewhere(std::move(made));
    }
    Peer& peer = it->second;
    peer.connecting = false;
    peer.connection = std::move(made);
    if (!status.ok()) {
      for (const LinkRequest& request : std::exchange(peer.requests, {})) {
        std::visit(
            [&](const auto& of) { peer.link->OnFailed(of.request, Message(status), clock_.Now()); },
            request);
      }
    }
    Pump(it->first, peer);
  }

  void OnEnded(const PeerCallEnded& ended) {
    const auto flown = flights_.find(ended.call);
    Flight flight = std::move(flown->second);
    flights_.erase(flown);
    EndElsewhere(std::move(flight.call));
    const auto it = peers_.find(flight.node);
    if (it == peers_.end() || it->second.link_id != flight.link_id || closed_) {
      return;
    }
    Peer& peer = it->second;
    peer.call = 0;
    SendLink& link = *peer.link;
    const MonotonicTime now = clock_.Now();
    if (!ended.error.empty()) {
      DropConnection(peer);
      link.OnFailed(flight.request, absl::StrCat(peer.at.address, ": ", ended.error), now);
      if (flight.opens && ended.unreached) {
        ProbeTls(it->first, peer);
      }
    } else if (ended.answer == v1::PEER_ANSWER_WRONG_NODE) {
      DropConnection(peer);
      link.OnRefused(
          flight.request,
          absl::StrCat(peer.at.address, " belongs to another node than ", Quoted(flight.node),
                       ", or to another start of it: membership has not told yet, or "
                       "an address is set twice"),
          now);
    } else if (flight.opens && ended.answer == v1::PEER_ANSWER_TAKEN && ended.channel != 0) {
      link.OnOpened(flight.request, ended.channel, now);
    } else if (!flight.opens && ended.answer == v1::PEER_ANSWER_TAKEN) {
      link.OnBatchAnswered(flight.request, BatchAnswer::kTaken, now);
    } else if (!flight.opens && ended.answer == v1::PEER_ANSWER_UNKNOWN_CHANNEL) {
      link.OnBatchAnswered(flight.request, BatchAnswer::kUnknownChannel, now);
    } else {
      link.OnFailed(flight.request,
                    absl::StrCat(peer.at.address, " answers what this version does not know (",
                                 static_cast<int>(ended.answer), ")"),
                    now);
    }
    Pump(it->first, peer);
  }

  // The next call reads the certificates anew, and connects anew.
  void DropConnection(Peer& peer) { EndElsewhere(std::exchange(peer.connection, nullptr)); }
  template <typename Held>
  void EndElsewhere(std::shared_ptr<Held> held) {
    if (held != nullptr) {
      doors_.Post([held = std::move(held)] {});
    }
  }

  // ---- Time ----

  void SetTimer(const std::string& node, Peer& peer, std::optional<MonotonicTime> at) {
    if (peer.timer != at) {
      if (peer.timer) {
        timers_.erase({*peer.timer, node});
      }
      if (at) {
        timers_.insert({*at, node});
      }
      peer.timer = at;
    }
    Wake();
  }
  void Wake() {
    const MonotonicTime timer = timers_.empty() ? kNever : timers_.begin()->first;
    loop_.WakeAt(std::min(timer, next_tick_.value_or(kNever)));
  }
  void OnTime() {
    const MonotonicTime now = clock_.Now();
    std::vector<std::string> due;
    for (const auto& [at, node] : timers_) {
      if (at > now) {
        break;
      }
      due.push_back(node);
    }
    for (const std::string& node : due) {
      Peer& peer = peers_.at(node);
      peer.link->OnTime(now);
      Pump(node, peer);
    }
    if (next_tick_ && *next_tick_ <= now) {
      next_tick_ = now + options_.hearing_tick;
      for (auto& [node, peer] : peers_) {
        if (peer.in.OnTick()) {
          inbox_->Silent(node);
        }
      }
    }
    Wake();
  }

  // ---- What others say ----

  static void Answer(const PeerCalling& calling, v1::PeerAnswer answer, uint64_t channel = 0) {
    calling.answer(absl::OkStatus(), answer, channel);
  }
  static void Refuse(const PeerCalling& calling, const absl::Status& why) {
    calling.answer(why, v1::PEER_ANSWER_UNSPECIFIED, 0);
  }

  void OnCalling(PeerCalling calling) {
    if (closed_) {
      return Refuse(calling, absl::UnavailableError("the daemon stops"));
    }
    if (calling.to != options_.self || (calling.to_incarnation != 0 && options_.incarnation != 0 &&
                                        calling.to_incarnation != options_.incarnation)) {
      return Answer(calling, v1::PEER_ANSWER_WRONG_NODE);
    }
    if (calling.opens && !calling.cluster.empty() && !options_.cluster.empty() &&
        std::tie(calling.cluster, calling.membership) !=
            std::tie(options_.cluster, options_.membership)) {
      return Refuse(
          calling, absl::FailedPreconditionError(absl::StrCat(
                       "node ", Quoted(options_.self), " belongs to ",
                       Belonging(options_.cluster, options_.membership), ", and node ",
                       Quoted(calling.from), " to ", Belonging(calling.cluster, calling.membership),
                       ": make the section 'cluster' of their configurations the same")));
    }
    const auto it = peers_.find(calling.from);
    if (it == peers_.end()) {
      return Refuse(calling, absl::UnavailableError(absl::StrCat(
                                 "node ", Quoted(options_.self), " knows of no node ",
                                 Quoted(calling.from), ": membership may not have told it yet")));
    }
    Peer& peer = it->second;
    if (calling.opens) {
      return OpenFor(it->first, peer, calling);
    }
    if (calling.incarnation != peer.in_incarnation || !peer.in.open()) {
      return Answer(calling, v1::PEER_ANSWER_UNKNOWN_CHANNEL);
    }
    peer.in.Hear();
    if (peer.waiting) {  // its caller waits no longer: a link has one call under way
      Refuse(TakeWaiting(peer), absl::AbortedError("another call has come"));
    }
    // Behind those that wait already; who has nothing to say needs no room.
    if (calling.messages.empty() || (waiting_.empty() && inbox_->HasRoom(calling.messages))) {
      return TakeBatch(it->first, peer, std::move(calling));
    }
    const size_t bytes = BytesOf(calling);
    if (waiting_bytes_ + bytes > kWaitingBytesMax) {
      return Refuse(
          calling, absl::ResourceExhaustedError(absl::StrCat(
                       "node ", Quoted(options_.self), " is too slow for all that is said to it")));
    }
    waiting_bytes_ += bytes;
    waiting_.emplace(calling.id, it->first);
    peer.waiting = std::move(calling);
  }

  void OpenFor(const std::string& node, Peer& peer, const PeerCalling& calling) {
    if (peer.at.incarnation != 0 && calling.incarnation != peer.at.incarnation) {
      return Refuse(calling, absl::UnavailableError(absl::StrCat(
                                 "node ", Quoted(options_.self), " knows another start of node ",
                                 Quoted(node), ": membership may not have told it yet")));
    }
    if (peer.waiting) {
      Answer(TakeWaiting(peer), v1::PEER_ANSWER_UNKNOWN_CHANNEL);
    }
    peer.in_incarnation = calling.incarnation;
    const uint64_t channel = peer.in.Open();
    inbox_->Began(node);
    Answer(calling, v1::PEER_ANSWER_TAKEN, channel);
  }

  void TakeBatch(const std::string& node, Peer& peer, PeerCalling calling) {
    std::vector<std::string> messages;
    const BatchAnswer taken = peer.in.Take({.channel = calling.channel,
                                            .first = calling.first,
                                            .messages = std::move(calling.messages)},
                                           messages);
    if (!messages.empty()) {
      inbox_->Spoke(node, std::move(messages));
    }
    Answer(calling,
           taken == BatchAnswer::kTaken ? v1::PEER_ANSWER_TAKEN : v1::PEER_ANSWER_UNKNOWN_CHANNEL);
  }

  static size_t BytesOf(const PeerCalling& calling) {
    size_t bytes = 0;
    for (const std::string& message : calling.messages) {
      bytes += message.size();
    }
    return bytes;
  }
  PeerCalling TakeWaiting(Peer& peer) {
    PeerCalling calling = *std::exchange(peer.waiting, std::nullopt);
    waiting_.erase(calling.id);
    waiting_bytes_ -= BytesOf(calling);
    return calling;
  }
  // Whoever has waited longest first.
  void OnRoom() {
    while (!waiting_.empty()) {
      const std::string node = waiting_.begin()->second;
      Peer& peer = peers_.at(node);
      if (!inbox_->HasRoom(peer.waiting->messages)) {
        return;
      }
      TakeBatch(node, peer, TakeWaiting(peer));
    }
  }
  void OnCancelled(uint64_t id) {
    if (const auto it = waiting_.find(id); it != waiting_.end()) {
      Refuse(TakeWaiting(peers_.at(it->second)), absl::CancelledError("the caller has gone"));
    }
  }

  void Close() {
    closed_ = true;
    for (auto& [node, peer] : peers_) {
      EndIncoming(peer, absl::UnavailableError("the daemon stops"));
      DropConnection(peer);
    }
    for (auto& [number, flight] : flights_) {
      flight.call->Cancel();
    }
    peers_.clear();
    timers_.clear();
    next_tick_.reset();
    loop_.WakeAt(kNever);
  }

  const PeerNetworkOptions options_;
  const Clock& clock_ = *Clock::System();
  std::unique_ptr<PeerInbox> inbox_;

  std::map<std::string, Peer> peers_;
  std::map<uint64_t, Flight> flights_;
  std::set<std::pair<MonotonicTime, std::string>> timers_;
  std::optional<MonotonicTime> next_tick_;   // of those that are heard
  std::map<uint64_t, std::string> waiting_;  // calls that wait for room, oldest first; whose
  size_t waiting_bytes_ = 0;
  std::mt19937_64 random_{RandomBits()};
  uint64_t last_link_id_ = 0;
  uint64_t last_channel_ = 0;
  uint64_t last_call_ = 0;
  bool closed_ = false;

  TaskThread probes_;
  TaskThread doors_;
  TaskThread loop_;
  PeerCalls calls_;
  PeerService service_;
};

PeerNetwork::PeerNetwork(PeerNetworkOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

PeerNetwork::~PeerNetwork() = default;

absl::Status PeerNetwork::Start(PeerObserver observer) {
  return impl_->Start(std::move(observer));
}

const std::string& PeerNetwork::address() const {
  return impl_->address();
}

void PeerNetwork::ChangePeers(holdfast::ChangePeers change) {
  impl_->ChangePeers(std::move(change));
}

void PeerNetwork::Connect(const std::string& node) {
  impl_->Connect(node);
}

void PeerNetwork::Say(const std::string& node, PeerChannel channel, std::string message) {
  impl_->Say(node, channel, std::move(message));
}

}  // namespace holdfast
