// This node's lease and name.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/membership/etcd_session.h"

namespace holdfast {
namespace {

// The other daemon of this name may end at any moment.
constexpr Duration kNameRetryMax = std::chrono::seconds(1);
constexpr int64_t kTtlMaxS = 86'400;

}  // namespace

void EtcdSession::PumpLease() {
  switch (lease_state_) {
    case Lease::kNone:
      if (Due(lease_backoff_)) {
        BeginLease();
      }
      return;
    case Lease::kNoting:
    case Lease::kLeft:
      return;
    case Lease::kRevoking:
      if (old_leases_.empty()) {
        lease_state_ = Lease::kGranting;
        PumpLease();
      } else if (ready() && !lease_call_ && Due(lease_backoff_)) {
        RevokeOld();
      }
      return;
    case Lease::kGranting:
      if (ready() && !lease_call_ && Due(lease_backoff_)) {
        Grant();
      }
      return;
    case Lease::kHeld:
      if (link_ == Link::kUp && !lease_call_ && DueAt(keep_alive_at_)) {
        KeepAlive();
      }
      if (ready() && lease_state_ == Lease::kHeld && !member() && !publishing_ &&
          Due(publish_backoff_)) {
        Publish();
      }
      return;
    case Lease::kLeaving:
      if (old_leases_.empty()) {
        lease_state_ = Lease::kLeft;
        Tell(Left{});
      } else if (ready() && !lease_call_ && Due(lease_backoff_)) {
        RevokeOld();
      }
      return;
  }
}

// The lease's number is chosen here and noted durably before etcd hears of it: whatever becomes of
// this process, its next life finds every lease that it may have had.
void EtcdSession::BeginLease() {
  std::uniform_int_distribution<int64_t> ids(1, INT64_MAX);
  lease_ = ids(random_);
  lease_state_ = Lease::kNoting;
  note_serial_ = ++last_id_;
  MembershipNoteData note{options_.self.name, old_leases_, 0};
  note.leases.push_back(lease_);
  actions_.emplace_back(WriteMembershipNote{note_serial_, std::move(note)});
}

void EtcdSession::OnNoteWritten(const NoteWritten& event) {
  if (lease_state_ != Lease::kNoting || event.serial != note_serial_) {
    return;
  }
  if (!event.status.ok()) {
    SetProblem("note", absl::StrCat("membership waits until its note can be written: ",
                                    Message(event.status)));
    lease_state_ = Lease::kNone;
    lease_ = 0;
    Failed(lease_backoff_, kRetryMax);
    return;
  }
  SetProblem("note", "");
  lease_state_ = Lease::kRevoking;
}

void EtcdSession::RevokeOld() {
  lease_call_ = true;
  etcd::LeaseRevokeRequest request;
  const int64_t old = old_leases_.front();
  request.set_id(old);
  Send(std::move(request), [this, old](const absl::Status& status, Response&) {
    lease_call_ = false;
    if (Refused(status)) {
      return;
    }
    // One that etcd does not know has ended. One that we may not end is not ours any more.
    if (status.ok() || absl::IsNotFound(status) || absl::IsPermissionDenied(status)) {
      std::erase(old_leases_, old);
      lease_backoff_ = {};
      SetProblem("lease", "");
      return;
    }
    SetProblem("lease",
               absl::StrCat("etcd does not end this node's earlier lease: ", Message(status)));
    Failed(lease_backoff_, kRetryMax);
  });
}

void EtcdSession::Grant() {
  lease_call_ = true;
  etcd::LeaseGrantRequest request;
  request.set_id(lease_);
  request.set_ttl(std::chrono::ceil<std::chrono::seconds>(options_.lease_ttl).count());
  Send(std::move(request), [this, sent = now_, slept = slept_, lease = lease_](
                               const absl::Status& status, Response& response) {
    lease_call_ = false;
    if (Refused(status) || lease_state_ != Lease::kGranting || lease != lease_) {
      return;
    }
    const auto* granted = std::get_if<etcd::LeaseGrantResponse>(&response);
    if (status.ok() && granted != nullptr && granted->id() == lease_ && granted->ttl() > 0) {
      lease_state_ = Lease::kHeld;
      lease_backoff_ = {};
      valid_until_ = {};
      SetProblem("lease", "");
      ExtendLease(sent, slept, granted->ttl());
      return;
    }
    // Perhaps it is there all the same (asked for twice, and only the second answer arrived): how
    // long it lasts is not known then. Another one is.
    SetProblem("lease",
               absl::IsFailedPrecondition(status)
                   ? ""
                   : absl::StrCat("etcd grants no lease: ",
                                  status.ok() ? "an answer that makes no sense" : Message(status)));
    old_leases_.push_back(lease_);
    lease_ = 0;
    lease_state_ = Lease::kNone;
    Failed(lease_backoff_, kRetryMax);
  });
}

void EtcdSession::KeepAlive() {
  lease_call_ = true;
  etcd::LeaseKeepAliveRequest request;
  request.set_id(lease_);
  Send(std::move(request), [this, sent = now_, slept = slept_, lease = lease_](
                               const absl::Status& status, Response& response) {
    lease_call_ = false;
    if (Refused(status) || lease_state_ != Lease::kHeld || lease != lease_) {
      return;
    }
    const auto* kept = std::get_if<etcd::LeaseKeepAliveResponse>(&response);
    if (absl::IsNotFound(status) || (status.ok() && kept != nullptr && kept->ttl() <= 0)) {
      // By our clock it had time left: what else was forgotten is not known.
      ListAllAgain();
      LoseLease("etcd does not know it any more");
      return;
    }
    if (!status.ok() || kept == nullptr || kept->id() != lease_) {
      SetProblem("lease", absl::StrCat("etcd does not renew this node's lease: ", Message(status)));
      Failed(lease_backoff_, kRetryMax);
      keep_alive_at_ = lease_backoff_.not_before;
      return;
    }
    SetProblem("lease", "");
    lease_backoff_ = {};
    ExtendLease(sent, slept, kept->ttl());
  });
}

// While a machine is suspended its clock stands still, and etcd counts on: how long the lease holds
// is known no more when that took as much as the margin that is left for clocks.
void EtcdSession::OnSlept(Duration duration) {
  slept_ += duration;
  keep_alive_at_ = now_;
  LoseLeaseIfSlept();
}

void EtcdSession::LoseLeaseIfSlept() {
  if (slept_ - slept_then_ > Margin(options_.lease_ttl) / 2) {
    LoseLease("this machine was suspended");
  }
}

// etcd counts from when it heard the request, which was after it was sent. `slept`: how long this
// machine had been suspended by then.
void EtcdSession::ExtendLease(MonotonicTime sent, Duration slept, int64_t ttl_s) {
  slept_then_ = slept;
  LoseLeaseIfSlept();
  if (lease_state_ != Lease::kHeld) {
    return;
  }
  const Duration ttl = std::chrono::seconds(std::min(ttl_s, kTtlMaxS));
  valid_until_ = std::max(valid_until_, sent + (ttl - Margin(ttl)));
  keep_alive_at_ = slept_ > slept ? now_ : sent + ttl / 3;  // (suspended since: again at once)
  if (now_ >= valid_until_) {
    LoseLease("etcd answered too late");
    return;
  }
  if (member() && valid_until_ > told_until_) {
    told_until_ = valid_until_;
    Tell(LeaseHolds{valid_until_});
  }
}

void EtcdSession::LoseLease(const std::string& why) {
  if (lease_state_ != Lease::kHeld) {
    return;
  }
  // It may live on in etcd: it is ended there before there is another one, so that nobody waits for
  // it.
  old_leases_.push_back(lease_);
  lease_ = 0;
  lease_state_ = Lease::kNone;
  published_revision_ = 0;
  publish_backoff_ = {};
  if (told_until_ != MonotonicTime{}) {
    told_until_ = {};
    Tell(LeaseLost{why});
  }
  JobsLoseLease();
}

void EtcdSession::Publish() {
  publishing_ = true;
  const std::string key = keys_.Node(options_.self.name);
  etcd::TxnRequest request;
  etcd::Compare* absent = request.add_compare();
  absent->set_target(etcd::Compare::CREATE);
  absent->set_key(key);
  absent->set_create_revision(0);
  etcd::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(key);
  put->set_value(EncodeNode(options_.self));
  put->set_lease(lease_);
  request.add_failure()->mutable_request_range()->set_key(key);
  Send(std::move(request), [this, lease = lease_](const absl::Status& status, Response& response) {
    publishing_ = false;
    if (Refused(status) || lease_state_ != Lease::kHeld || lease != lease_) {
      return;
    }
    if (absl::IsNotFound(status)) {
      ListAllAgain();
      LoseLease("etcd does not know it any more");
      return;
    }
    const auto* txn = std::get_if<etcd::TxnResponse>(&response);
    if (!status.ok() || txn == nullptr) {
      SetProblem("name", absl::StrCat("this node could not be published: ", Message(status)));
      Failed(publish_backoff_, kRetryMax);
      return;
    }
    if (txn->succeeded()) {
      OnPublished(txn->header().revision());
      return;
    }
    if (txn->responses_size() != 1 || txn->responses(0).response_range().kvs_size() != 1) {
      GiveUpConnection("an answer that makes no sense", Then::kNextEndpoint);
      return;
    }
    const etcd::KeyValue& holder = txn->responses(0).response_range().kvs(0);
    if (holder.lease() == lease_) {
      OnPublished(holder.create_revision());
    } else if (holder.lease() == 0 && DecodeNode(options_.self.name, holder.value()).ok()) {
      RemoveStaleName(holder.mod_revision());
    } else {
      NameTaken(holder);
    }
  });
}

// Daemons put their names on their leases. One without is of none that lives: it was put back from
// a copy of etcd's data. When it is gone, this node publishes its own.
void EtcdSession::RemoveStaleName(int64_t mod_revision) {
  publishing_ = true;
  const std::string key = keys_.Node(options_.self.name);
  etcd::TxnRequest request;
  etcd::Compare* same = request.add_compare();
  same->set_target(etcd::Compare::MOD);
  same->set_key(key);
  same->set_mod_revision(mod_revision);
  request.add_success()->mutable_request_delete_range()->set_key(key);
  Send(std::move(request), [this, key, lease = lease_](const absl::Status& status, Response&) {
    publishing_ = false;
    if (Refused(status) || status.ok() || lease_state_ != Lease::kHeld || lease != lease_) {
      return;
    }
    SetProblem("name",
               absl::StrCat("this node could not be published: the key ", key,
                            " is a stale copy without a lease, and etcd does not remove it: ",
                            Message(status), ". Remove it: etcdctl del ", key));
    Failed(publish_backoff_, kRetryMax);
  });
}

void EtcdSession::OnPublished(int64_t create_revision) {
  published_revision_ = create_revision;
  publish_backoff_ = {};
  SetProblem("name", "");
  told_until_ = valid_until_;
  Tell(LeaseHolds{valid_until_});
}

void EtcdSession::NameTaken(const etcd::KeyValue& holder) {
  const absl::StatusOr<NodeInfo> other = DecodeNode(options_.self.name, holder.value());
  std::string who =
      other.ok() ? absl::StrCat("a daemon at ", other->address, " (version ", other->version, ")")
                 : absl::StrCat("something that is no node (", Message(other.status()), ")");
  if (holder.lease() == 0) {
    absl::StrAppend(&who, ", without a lease, so it will never end: delete the key ",
                    keys_.Node(options_.self.name));
  }
  SetProblem("name", absl::StrCat("the node name '", options_.self.name, "' is used by ", who,
                                  "; give this node another node_name, or end the other one"));
  Failed(publish_backoff_, kNameRetryMax);
  if (told_until_ != MonotonicTime{}) {
    LoseLease("another daemon has this node's name");
  }
}

void EtcdSession::Leave() {
  if (lease_state_ == Lease::kLeaving || lease_state_ == Lease::kLeft) {
    return;
  }
  LoseLease("this node leaves");
  if (lease_ != 0) {
    old_leases_.push_back(lease_);
    lease_ = 0;
  }
  lease_backoff_ = {};
  lease_state_ = Lease::kLeaving;
}

}  // namespace holdfast
