// Nodes' EtcdSessions and a fake etcd, with a network between them that delays, loses, doubles and
// reorders, and clocks that run apart. Everything is checked after every event (Check). One seed,
// one run.
//
//   SessionWorld world(seed, {.lossy = true});
//   const size_t a = world.Add("a");
//   world.Run(std::chrono::seconds(60));
//   EXPECT_TRUE(world.IsMember(a));
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/membership/etcd_session.h"
#include "tests/server/membership/fake_etcd.h"

namespace holdfast {

struct WorldOptions {
  bool lossy =
      false;  // requests and answers are lost, doubled, late; streams break; etcd is away at times
  bool drift = false;  // clocks differ in rate, by up to 4 % each way
  bool wipes = false;  // etcd's data is erased at times
  int64_t ttl_s = 10;
};

class SessionWorld {
 public:
  struct Node {
    std::string name;
    uint64_t incarnation = 0;
    std::unique_ptr<EtcdSession> session;  // null: dead
    uint64_t life = 0;
    std::vector<int64_t> noted;
    double rate = 1;
    int64_t offset = 0;
    MonotonicTime until;  // as told
    std::map<std::string, Epoch> hosts;
    std::set<std::string> campaigns;
    std::map<std::string, uint64_t> version;
    std::map<std::string, std::optional<JobHost>> seen_hosts;
    std::map<std::string, NodeInfo> members;
    std::string problem;
    std::vector<MembershipEvent> events;
    std::vector<ClusterNote> notes;
    uint64_t etcd_life = 0;  // of the etcd that it is connected with
    uint64_t stream = 0;
    int64_t stream_in_at = 0;  // streams keep their order
    int64_t stream_out_at = 0;
    std::string user;
  };

  SessionWorld(uint64_t seed, WorldOptions options) : options_(options), random_(seed) {
    etcd.on_put = [this](const etcd::KeyValue& value) { CheckPut(value); };
    etcd.Advance(now_);
  }

  size_t Add(const std::string& name, const std::string& user = "") {
    nodes.emplace_back();
    nodes.back().name = name;
    nodes.back().user = user;
    StartNode(nodes.size() - 1);
    return nodes.size() - 1;
  }
  void StartNode(size_t n) {
    Node& node = nodes[n];
    ++node.life;
    node.incarnation = random_();
    node.rate = options_.drift ? 0.96 + 0.08 * Chance() : 1;
    node.offset = static_cast<int64_t>(Chance() * 1e15) + 1 -
                  static_cast<int64_t>(static_cast<double>(now_) * node.rate);
    node.until = {};
    node.hosts.clear();
    node.campaigns.clear();
    node.version.clear();
    node.members.clear();
    EtcdSession::Options session;
    session.self = {node.name, "127.0.0.1:" + std::to_string(1 + n), {}, 0, "v", node.incarnation};
    session.prefix = "/t/";
    session.endpoints = {"one:1", "two:2"};
    session.user = node.user;
    session.lease_ttl = std::chrono::seconds(options_.ttl_s);
    session.noted_leases = node.noted;
    session.seed = random_();
    node.session = std::make_unique<EtcdSession>(session);
    Deliver(n, EtcdSession::Begin{});
  }
  void Crash(size_t n) {
    Node& node = nodes[n];
    node.session = nullptr;
    node.until = {};
    node.hosts.clear();
    etcd.CloseStream(StreamKey(n, node.stream));
    node.stream = 0;
  }

  // Whoever erases an etcd's data has ended it before: its connections break, and what was on its
  // way is lost.
  void WipeEtcd() {
    ++etcd_life_;
    etcd.Wipe();
    for (size_t n = 0; n < nodes.size(); ++n) {
      for (const std::string& job : std::set<std::string>(nodes[n].campaigns)) {
        Deliver(n, EtcdSession::AskCampaign{job, highest_epoch});
      }
      AfterFor(n, Delay(), [this, n, stream = nodes[n].stream] {
        Deliver(n, EtcdSession::WatchEnded{stream, absl::UnavailableError("broken")});
      });
    }
  }

  // Never two who may believe in one name, or in one job.
  void Check() {
    if (options_.wipes) {
      return;
    }
    std::set<std::string> names;
    std::set<std::string> jobs;
    for (size_t n = 0; n < nodes.size(); ++n) {
      if (!IsMember(n)) {
        continue;
      }
      ASSERT_TRUE(names.insert(nodes[n].name).second)
          << "two members named " << nodes[n].name << " at " << now_;
      const auto key = etcd.kv.find("/t/nodes/" + nodes[n].name);
      ASSERT_TRUE(key != etcd.kv.end() && etcd.HasLease(key->second.lease()))
          << nodes[n].name << " believes in a lease that has ended, at " << now_;
      for (const auto& [job, epoch] : nodes[n].hosts) {
        ASSERT_TRUE(jobs.insert(job).second) << "two hosts of " << job << " at " << now_;
      }
    }
  }

  bool IsMember(size_t n) const { return nodes[n].session != nullptr && Local(n) < nodes[n].until; }

  void Run(Duration how_long) {
    const int64_t end = now_ + how_long.count();
    while (!::testing::Test::HasFatalFailure()) {
      const int64_t at = queue_.empty() ? end : queue_.begin()->first;
      if (at >= end) {
        break;
      }
      now_ = at;
      etcd.Advance(now_);
      Flush();
      Check();
      auto task = std::move(queue_.begin()->second);
      queue_.erase(queue_.begin());
      task();
      Flush();
      Check();
    }
    now_ = end;
    etcd.Advance(now_);
    Flush();
  }

  void Deliver(size_t n, EtcdSession::Event event) {
    Node& node = nodes[n];
    if (node.session != nullptr) {
      if (const auto* campaign = std::get_if<EtcdSession::AskCampaign>(&event)) {
        node.campaigns.insert(campaign->job);
      } else if (const auto* resign = std::get_if<EtcdSession::AskResign>(&event)) {
        node.campaigns.erase(resign->job);
      }
      Perform(n, node.session->Handle(std::move(event), Local(n)));
      ScheduleTimer(n);
    }
  }

  // Whether the answer of a kind was told since it was asked for last.
  template <typename T>
  std::vector<T> Told(size_t n) const {
    std::vector<T> all;
    for (const MembershipEvent& event : nodes[n].events) {
      if (const T* found = std::get_if<T>(&event)) {
        all.push_back(*found);
      }
    }
    return all;
  }

  MonotonicTime Local(size_t n) const {
    return {nodes[n].offset + static_cast<int64_t>(static_cast<double>(now_) * nodes[n].rate)};
  }
  double Chance() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  uint64_t Random() { return random_(); }
  int64_t now() const { return now_; }
  void After(Duration delay, std::function<void()> task) {
    queue_.emplace(now_ + delay.count(), std::move(task));
  }

  FakeEtcd etcd;
  bool faults = true;      // of the network, when lossy
  bool etcd_away = false;  // it answers nobody
  std::vector<Node> nodes;
  std::map<std::pair<std::string, Epoch>, size_t> elected;
  Epoch highest_epoch = 0;
  uint64_t stored = 0;

 private:
  bool lossy() const { return options_.lossy && faults; }
  Duration Delay() {
    if (!lossy()) {
      return std::chrono::microseconds(200);
    }
    const double kind = Chance();
    return std::chrono::microseconds(static_cast<int64_t>(Chance() * (kind < 0.9    ? 20'000
                                                                      : kind < 0.99 ? 1'000'000
                                                                                    : 8'000'000)));
  }
  static uint64_t StreamKey(size_t n, uint64_t stream) { return (stream << 8) | n; }

  template <typename F>
  void AfterFor(size_t n, Duration delay, F task) {
    After(delay, [this, n, life = nodes[n].life, task = std::move(task)] {
      if (nodes[n].life == life && nodes[n].session != nullptr) {
        task();
      }
    });
  }
  void ScheduleTimer(size_t n) {
    const double left =
        static_cast<double>((nodes[n].session->next_timer() - Local(n)).count()) / nodes[n].rate;
    AfterFor(n, Duration(std::max<int64_t>(1, static_cast<int64_t>(left) + 1)), [this, n] {
      if (Local(n) >= nodes[n].session->next_timer()) {
        Deliver(n, EtcdSession::Tick{});
      }
    });
  }

  void Perform(size_t n, std::vector<EtcdAction> actions) {
    for (EtcdAction& action : actions) {
      Node& node = nodes[n];
      if (const auto* connect = std::get_if<EtcdConnect>(&action)) {
        AfterFor(n, Delay(), [this, n, id = connect->connection] {
          nodes[n].etcd_life = etcd_life_;
          Deliver(n, EtcdSession::ConnectionOpened{id, absl::OkStatus(), "secret"});
        });
      } else if (std::holds_alternative<EtcdDisconnect>(action)) {
        etcd.CloseStream(StreamKey(n, node.stream));
        node.stream = 0;
      } else if (const auto* call = std::get_if<EtcdCall>(&action)) {
        Carry(n, *call);
      } else if (const auto* open = std::get_if<EtcdOpenWatch>(&action)) {
        node.stream = open->stream;
      } else if (const auto* write = std::get_if<EtcdWriteWatch>(&action)) {
        node.stream_in_at = std::max(node.stream_in_at + 1, now_ + Delay().count());
        AfterFor(n, Duration(node.stream_in_at - now_), [this, n, write = *write] {
          if (nodes[n].stream == write.stream && !etcd_away && nodes[n].etcd_life == etcd_life_) {
            etcd.Watch(StreamKey(n, write.stream), write.request);
          }
        });
      } else if (const auto* note = std::get_if<WriteMembershipNote>(&action)) {
        AfterFor(n, Delay(), [this, n, note = *note] {
          const bool fails = lossy() && Chance() < 0.05;
          if (!fails) {
            nodes[n].noted = note.note.leases;
          }
          Deliver(n, EtcdSession::NoteWritten{
                         note.serial, fails ? absl::UnavailableError("disk") : absl::OkStatus()});
        });
      } else if (const auto* event = std::get_if<MembershipEvent>(&action)) {
        Hear(n, *event);
      } else if (const auto* agreed = std::get_if<ClusterNote>(&action)) {
        node.notes.push_back(*agreed);
      }
    }
  }

  void Carry(size_t n, const EtcdCall& call) {
    const int copies = lossy() && Chance() < 0.03 ? 0 : 1;
    for (int i = 0; i < copies; ++i) {
      // A request is on its way even when the one who sent it is gone.
      After(Delay(), [this, n, life = nodes[n].life, call, etcd_life = nodes[n].etcd_life] {
        if (etcd_away) {
          return;
        }
        const EtcdSession::CallEnded ended =
            etcd_life == etcd_life_
                ? etcd.Apply(call)
                : EtcdSession::CallEnded{call.id, absl::UnavailableError("broken"), {}};
        const int answers = lossy() && Chance() < 0.05 ? (Chance() < 0.5 ? 0 : 2) : 1;
        for (int a = 0; a < answers; ++a) {
          After(Delay(), [this, n, life, ended] {
            if (nodes[n].life == life) {
              Deliver(n, ended);
            }
          });
        }
      });
    }
  }

  void Flush() {
    for (auto& [key, message] : etcd.TakeMessages()) {
      const size_t n = key & 0xff;
      const uint64_t stream = key >> 8;
      if (lossy() && Chance() < 0.01) {
        etcd.CloseStream(key);
        AfterFor(n, Delay(), [this, n, stream] {
          Deliver(n, EtcdSession::WatchEnded{stream, absl::UnavailableError("broken")});
        });
        continue;
      }
      Node& node = nodes[n];
      node.stream_out_at = std::max(node.stream_out_at + 1, now_ + Delay().count());
      AfterFor(n, Duration(node.stream_out_at - now_), [this, n, stream, message = message] {
        Deliver(n, EtcdSession::WatchMessage{stream, message});
      });
    }
  }

  void Hear(size_t n, const MembershipEvent& event) {
    Node& node = nodes[n];
    node.events.push_back(event);
    if (const auto* holds = std::get_if<LeaseHolds>(&event)) {
      ASSERT_GE(holds->until, node.until);
      node.until = holds->until;
    } else if (std::holds_alternative<LeaseLost>(event)) {
      node.until = {};
    } else if (const auto* are = std::get_if<MembersAre>(&event)) {
      node.members.clear();
      for (const NodeInfo& member : are->members) {
        node.members[member.name] = member;
      }
    } else if (const auto* up = std::get_if<MemberUp>(&event)) {
      node.members[up->member.name] = up->member;
    } else if (const auto* gone = std::get_if<MemberGone>(&event)) {
      node.members.erase(gone->name);
    } else if (const auto* problem = std::get_if<MembershipProblem>(&event)) {
      node.problem = problem->text;
    } else if (const auto* host = std::get_if<HostIs>(&event)) {
      node.seen_hosts[host->job] = host->host;
    } else if (const auto* none = std::get_if<NoHost>(&event)) {
      node.seen_hosts[none->job] = std::nullopt;
    } else if (const auto* lost = std::get_if<CampaignLost>(&event)) {
      node.campaigns.erase(lost->job);
    } else if (const auto* won = std::get_if<Elected>(&event)) {
      node.campaigns.erase(won->job);
      ASSERT_TRUE(elected.emplace(std::pair(won->job, won->epoch), n).second)
          << won->job << " epoch " << won->epoch << " was given twice";
      ASSERT_FALSE(node.hosts.contains(won->job));
      node.hosts[won->job] = won->epoch;
      node.version[won->job] = 0;
    } else if (const auto* deposed = std::get_if<Deposed>(&event)) {
      ASSERT_EQ(node.hosts.count(deposed->job), 1u);
      ASSERT_EQ(node.hosts[deposed->job], deposed->epoch);
      node.hosts.erase(deposed->job);
    } else if (const auto* kept = std::get_if<StateStored>(&event)) {
      ++stored;
      const auto largest = largest_put_.find({kept->job, kept->epoch});
      ASSERT_TRUE(options_.wipes ||
                  (largest != largest_put_.end() && largest->second >= kept->version))
          << "told as stored, and never was: " << kept->job << " epoch " << kept->epoch
          << " version " << kept->version;
    }
  }

  // etcd's own history: a state only ever goes forward, and only its host puts it.
  void CheckPut(const etcd::KeyValue& value) {
    const std::string& key = value.key();
    constexpr std::string_view kJobs = "/t/jobs/";
    constexpr std::string_view kState = "/state";
    if (key.starts_with(kJobs) && key.ends_with("/epoch")) {
      // What a floor protects from is an etcd that forgot. An election of which nobody heard before
      // that is the daemons' to settle: a host acts only once others have noted its epoch.
      highest_epoch = std::max(highest_epoch, DecodeEpoch(value.value()).value_or(0));
    }
    if (!key.starts_with(kJobs) || !key.ends_with(kState)) {
      return;
    }
    const std::string job = key.substr(kJobs.size(), key.size() - kJobs.size() - kState.size());
    const absl::StatusOr<StoredState> state = DecodeState(value.value());
    ASSERT_TRUE(state.ok());
    const auto host = etcd.kv.find("/t/jobs/" + job + "/host");
    ASSERT_TRUE(host != etcd.kv.end()) << "a state without a host";
    const absl::StatusOr<JobHost> decoded = DecodeHost(host->second.value());
    ASSERT_TRUE(decoded.ok());
    ASSERT_EQ(decoded->epoch, state->epoch) << "stored under an epoch that is not the host's";
    auto& newest = newest_put_[job];
    ASSERT_TRUE(options_.wipes || std::pair(state->epoch, state->version) > newest)
        << "a state went back";
    newest = {state->epoch, state->version};
    largest_put_[{job, state->epoch}] = state->version;
  }

  const WorldOptions options_;
  std::mt19937_64 random_;
  int64_t now_ = 1'000'000'000;
  uint64_t etcd_life_ = 0;
  std::multimap<int64_t, std::function<void()>> queue_;
  std::map<std::string, std::pair<Epoch, uint64_t>> newest_put_;
  std::map<std::pair<std::string, Epoch>, uint64_t> largest_put_;
};

}  // namespace holdfast
