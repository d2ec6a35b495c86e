// One job, as an EtcdSession sees it.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "server/membership/etcd_session.h"

namespace holdfast {

struct EtcdSession::Job {
  enum class Campaign { kNone, kToRead, kReading, kTrying };
  struct Removal {  // of a host key of ours
    int64_t create_revision = 0;
    std::string value;
    bool forget = false;  // the state, too
    bool asked = false;
  };

  std::string name;
  uint64_t round = 0;  // answers to what was asked in an earlier one mean nothing

  bool watched = false;
  std::shared_ptr<Range> range;  // the host's key
  bool host_known = false;
  std::optional<JobHost> host;
  // What the watch showed and was told. Nothing counts as told when this node ceases to host the
  // job: that it did the watch may never have shown, and what it shows next is news then.
  std::optional<std::optional<JobHost>> told;

  Campaign campaign = Campaign::kNone;
  Epoch floor = 0;
  JobHost trying;
  Backoff backoff;  // of campaigns and removals
  Epoch last_elected = 0;
  bool may_be_elected = false;  // by a try that was given up: until the lease ends
  std::optional<Removal> removal;

  bool hosting = false;
  Epoch epoch = 0;
  std::string host_value;
  int64_t host_revision = 0;   // at which our key was created
  int64_t state_revision = 0;  // the state's, as far as we know; 0: there is none
  uint64_t stored_version = 0;
  std::optional<StoredState> storing;  // one at a time
  bool storing_asked = false;
  std::optional<StoredState> next;  // the newest that waits
  std::deque<uint64_t> superseded;  // by `next`: told with it
  Backoff store_backoff;

  bool read_wanted = false;
  bool read_asked = false;
  Backoff read_backoff;

  bool FollowsHost() const { return watched || hosting || may_be_elected; }
  bool Idle() const {
    return !FollowsHost() && campaign == Campaign::kNone && !removal && !read_wanted;
  }
  void BeginRound() {
    ++round;
    storing_asked = false;
    read_asked = false;
    if (removal) {
      removal->asked = false;
    }
  }
  uint64_t NewestVersion() const {
    return next ? next->version : storing ? storing->version : stored_version;
  }

  // The host's key is still the one of this election: created then, and with this epoch in it.
  void Fence(etcd::TxnRequest* request, const EtcdKeys& keys, int64_t create_revision,
             const std::string& value) const {
    etcd::Compare* created = request->add_compare();
    created->set_target(etcd::Compare::CREATE);
    created->set_key(keys.Host(name));
    created->set_create_revision(create_revision);
    etcd::Compare* same = request->add_compare();
    same->set_target(etcd::Compare::VALUE);
    same->set_key(keys.Host(name));
    same->set_value(value);
  }

  // Each store that has no answer yet, oldest first.
  template <typename Answer>
  void AnswerStores(Answer answer) {
    if (storing) {
      answer(storing->version);
    }
    for (const uint64_t version : superseded) {
      answer(version);
    }
    if (next) {
      answer(next->version);
    }
    storing.reset();
    next.reset();
    superseded.clear();
  }
};

}  // namespace holdfast
