// A membership of a test, with everything that it was told: a node that is no ckptd.
//
//   Member a({.name = "a", .etcd = {etcd.endpoint()}});
//   ASSERT_TRUE(a.Await<LeaseHolds>());
//   a->Campaign("job", 0);
//   const auto elected = a.Await<Elected>();
//
// Await looks at what was told since the last thing of that kind that it found.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <typeindex>
#include <utility>
#include <variant>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "holdfast/v1/config.pb.h"
#include "server/membership/cluster_config.h"
#include "server/membership/membership.h"
#include "tests/base/temporary_directory.h"
#include "tests/integration/child.h"

namespace holdfast {

struct MemberOptions {
  std::string name;
  std::vector<std::string> etcd;  // endpoints
  uint32_t lease_ttl_ms = 2000;
  uint32_t request_timeout_ms = 800;
  std::string address = "127.0.0.1:1";
  std::string state_dir;  // empty: one of its own
  std::function<void(v1::ClusterConfig*)> configure;
};

class Member {
 public:
  explicit Member(const MemberOptions& options) {
    v1::ClusterConfig config;
    config.set_plaintext(true);
    config.set_advertise_address(options.address);
    for (const std::string& endpoint : options.etcd) {
      config.mutable_etcd()->add_endpoints(endpoint);
    }
    config.mutable_etcd()->set_lease_ttl_ms(options.lease_ttl_ms);
    config.mutable_etcd()->set_request_timeout_ms(options.request_timeout_ms);
    if (options.configure) {
      options.configure(&config);
    }
    CompleteClusterConfig(options.name, &config);
    NodeInfo self;
    self.name = options.name;
    self.address = config.advertise_address();
    self.labels = {{"rack", "r1"}, {"zone", "z"}};
    self.capacity_bytes = 42;
    self.version = "test";
    auto made = CreateMembership({config, self,
                                  options.state_dir.empty() ? own_state_.path() : options.state_dir,
                                  Env::System(), nullptr});
    if (!made.ok()) {
      ADD_FAILURE() << ToString(made.status());
      return;
    }
    membership_ = *std::move(made);
    membership_->Start([this](const MembershipEvent& event) {
      const std::lock_guard<std::mutex> lock(mutex_);
      EXPECT_FALSE(busy_) << "two events at a time";
      busy_ = true;
      events_.push_back(event);
      told_.notify_all();
      busy_ = false;
    });
  }
  ~Member() { membership_ = nullptr; }

  Membership* operator->() { return membership_.get(); }
  void End() { membership_ = nullptr; }  // like a daemon that dies: the lease stays

  template <typename T>
  std::optional<T> Await(std::function<bool(const T&)> so = nullptr,
                         std::chrono::milliseconds at_most = kPatience) {
    const auto deadline = std::chrono::steady_clock::now() + at_most;
    std::unique_lock<std::mutex> lock(mutex_);
    size_t& next = next_[typeid(T)];
    while (true) {
      for (; next < events_.size(); ++next) {
        const T* event = std::get_if<T>(&events_[next]);
        if (event != nullptr && (!so || so(*event))) {
          ++next;
          return *event;
        }
      }
      if (told_.wait_until(lock, deadline) == std::cv_status::timeout && next == events_.size()) {
        return std::nullopt;
      }
    }
  }
  template <typename T>
  std::vector<T> All() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<T> all;
    for (const MembershipEvent& event : events_) {
      if (const T* found = std::get_if<T>(&event)) {
        all.push_back(*found);
      }
    }
    return all;
  }
  // As the newest list and what came after it say.
  std::map<std::string, NodeInfo> Members() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return MembersNow();
  }
  bool AwaitMembers(const std::vector<std::string>& names) {
    return Until([&] {
      std::vector<std::string> present;
      for (const auto& [name, node] : MembersNow()) {
        present.push_back(name);
      }
      return present == names;
    });
  }
  // Until it is there in another life than that one.
  bool AwaitAnotherLife(const std::string& name, uint64_t incarnation) {
    return Until([&] {
      const std::map<std::string, NodeInfo> members = MembersNow();
      const auto found = members.find(name);
      return found != members.end() && found->second.incarnation != incarnation;
    });
  }
  std::string Problem() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ProblemNow();
  }
  // Until the newest word is that there is none.
  bool AwaitNoProblem() {
    return Until([&] { return ProblemNow().empty(); });
  }
  bool AwaitProblem(const std::string& part) {
    return Await<MembershipProblem>([&](const MembershipProblem& p) {
             return part.empty() ? p.text.empty() : p.text.find(part) != std::string::npos;
           })
        .has_value();
  }

 private:
  // `so` is asked under the lock.
  bool Until(const std::function<bool()>& so) {
    std::unique_lock<std::mutex> lock(mutex_);
    return told_.wait_until(lock, std::chrono::steady_clock::now() + kPatience, so);
  }
  std::map<std::string, NodeInfo> MembersNow() const {
    std::map<std::string, NodeInfo> members;
    for (const MembershipEvent& event : events_) {
      if (const auto* are = std::get_if<MembersAre>(&event)) {
        members.clear();
        for (const NodeInfo& node : are->members) {
          members[node.name] = node;
        }
      } else if (const auto* up = std::get_if<MemberUp>(&event)) {
        members[up->member.name] = up->member;
      } else if (const auto* gone = std::get_if<MemberGone>(&event)) {
        members.erase(gone->name);
      }
    }
    return members;
  }
  std::string ProblemNow() const {
    std::string newest;
    for (const MembershipEvent& event : events_) {
      if (const auto* problem = std::get_if<MembershipProblem>(&event)) {
        newest = problem->text;
      }
    }
    return newest;
  }

  TemporaryDirectory own_state_;
  std::mutex mutex_;
  std::condition_variable told_;
  std::vector<MembershipEvent> events_;
  std::map<std::type_index, size_t> next_;
  bool busy_ = false;
  std::unique_ptr<Membership> membership_;
};

}  // namespace holdfast
