// What membership needs to know of etcd, in one process and with a clock that the test moves:
// revisions, leases, transactions, watches, compaction, and data that is erased.
//
//   FakeEtcd etcd;
//   etcd.Advance(now);
//   EtcdSession::CallEnded ended = etcd.Apply(call);
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/membership/etcd_session.h"

namespace holdfast {

class FakeEtcd {
 public:
  using Response = EtcdSession::Response;

  // Leases end by this clock.
  void Advance(int64_t now_ns) {
    now_ = now_ns;
    std::vector<int64_t> ended;
    for (const auto& [id, lease] : leases_) {
      if (lease.expires <= now_) {
        ended.push_back(id);
      }
    }
    for (const int64_t id : ended) {
      EndLease(id);
    }
  }

  EtcdSession::CallEnded Apply(const EtcdCall& call) {
    EtcdSession::CallEnded ended{call.id, absl::OkStatus(), {}};
    if (!token.empty() && call.token != token &&
        !std::holds_alternative<etcd::AuthenticateRequest>(call.request)) {
      ended.status = absl::UnauthenticatedError("etcdserver: invalid auth token");
    } else {
      std::visit([&](const auto& request) { ended.status = Do(request, &ended.response); },
                 call.request);
    }
    return ended;
  }

  void Watch(uint64_t stream, const etcd::WatchRequest& request) {
    if (request.has_cancel_request()) {
      watchers_.erase({stream, request.cancel_request().watch_id()});
      return;
    }
    const etcd::WatchCreateRequest& create = request.create_request();
    etcd::WatchResponse created = Message(create.watch_id());
    created.set_created(true);
    out_.emplace_back(stream, created);
    if (create.start_revision() <= compacted_) {
      etcd::WatchResponse canceled = Message(create.watch_id());
      canceled.set_canceled(true);
      canceled.set_compact_revision(compacted_);
      out_.emplace_back(stream, canceled);
      return;
    }
    watchers_[{stream, create.watch_id()}] = {create.key(), create.range_end(),
                                              create.start_revision()};
  }
  void CloseStream(uint64_t stream) {
    std::erase_if(watchers_, [&](const auto& watcher) { return watcher.first.first == stream; });
  }
  // What the watches are told since the last time.
  std::vector<std::pair<uint64_t, etcd::WatchResponse>> TakeMessages() {
    for (auto& [id, watcher] : watchers_) {
      etcd::WatchResponse message = Message(id.second);
      for (const etcd::Event& event : history_) {
        if (event.kv().mod_revision() >= watcher.next &&
            Within(event.kv().key(), watcher.key, watcher.end)) {
          *message.add_events() = event;
        }
      }
      if (message.events_size() > 0) {
        watcher.next = message.events(message.events_size() - 1).kv().mod_revision() + 1;
        out_.emplace_back(id.first, message);
      }
    }
    return std::exchange(out_, {});
  }

  void Compact() {
    compacted_ = revision;
    history_.clear();
  }
  void Wipe() {
    kv.clear();
    leases_.clear();
    history_.clear();
    watchers_.clear();
    revision = 1;
    compacted_ = 0;
  }
  void Put(const std::string& key, const std::string& value, int64_t lease = 0) {
    ++revision;
    PutAt(key, value, lease);
  }
  void Delete(const std::string& key) {
    ++revision;
    DeleteAt(key);
  }
  bool HasLease(int64_t id) const { return leases_.contains(id); }

  std::map<std::string, etcd::KeyValue> kv;
  int64_t revision = 1;
  uint64_t cluster_id = 7;
  std::string token;  // not empty: who does not bring it is refused
  std::string password;
  std::function<void(const etcd::KeyValue&)> on_put;
  std::optional<absl::Status> refuse_txns;

 private:
  struct Lease {
    int64_t ttl_s = 0;
    int64_t expires = 0;
  };
  struct Watcher {
    std::string key;
    std::string end;
    int64_t next = 0;
  };

  static bool Within(const std::string& key, const std::string& from, const std::string& end) {
    return end.empty() ? key == from : key >= from && key < end;
  }
  etcd::ResponseHeader Header() const {
    etcd::ResponseHeader header;
    header.set_cluster_id(cluster_id);
    header.set_revision(revision);
    return header;
  }
  etcd::WatchResponse Message(int64_t watch_id) const {
    etcd::WatchResponse message;
    *message.mutable_header() = Header();
    message.set_watch_id(watch_id);
    return message;
  }
  void EndLease(int64_t id) {
    leases_.erase(id);
    std::vector<std::string> keys;
    for (const auto& [key, value] : kv) {
      if (value.lease() == id) {
        keys.push_back(key);
      }
    }
    revision += keys.empty() ? 0 : 1;
    for (const std::string& key : keys) {
      DeleteAt(key);
    }
  }
  void PutAt(const std::string& key, const std::string& value, int64_t lease) {
    etcd::KeyValue& entry = kv[key];
    if (entry.create_revision() == 0) {
      entry.set_key(key);
      entry.set_create_revision(revision);
    }
    entry.set_mod_revision(revision);
    entry.set_version(entry.version() + 1);
    entry.set_value(value);
    entry.set_lease(lease);
    etcd::Event event;
    *event.mutable_kv() = entry;
    history_.push_back(event);
    if (on_put) {
      on_put(entry);
    }
  }
  void DeleteAt(const std::string& key) {
    if (kv.erase(key) == 0) {
      return;
    }
    etcd::Event event;
    event.set_type(etcd::Event::DELETE);
    event.mutable_kv()->set_key(key);
    event.mutable_kv()->set_mod_revision(revision);
    history_.push_back(event);
  }
  bool Holds(const etcd::Compare& compare) const {
    const auto found = kv.find(compare.key());
    const etcd::KeyValue value = found == kv.end() ? etcd::KeyValue() : found->second;
    switch (compare.target()) {
      case etcd::Compare::CREATE:
        return value.create_revision() == compare.create_revision();
      case etcd::Compare::MOD:
        return value.mod_revision() == compare.mod_revision();
      case etcd::Compare::VALUE:
        return found != kv.end() && value.value() == compare.value();
      default:
        return false;
    }
  }

  absl::Status Do(const etcd::RangeRequest& request, Response* out) {
    if (request.revision() > 0 && request.revision() < compacted_) {
      return absl::OutOfRangeError("etcdserver: mvcc: required revision has been compacted");
    }
    *out = List(request);
    return absl::OkStatus();
  }
  etcd::RangeResponse List(const etcd::RangeRequest& request) const {
    etcd::RangeResponse response;
    *response.mutable_header() = Header();
    for (const auto& [key, value] : kv) {
      if (Within(key, request.key(), request.range_end())) {
        if (request.limit() > 0 && response.kvs_size() == request.limit()) {
          response.set_more(true);
          break;
        }
        *response.add_kvs() = value;
      }
    }
    return response;
  }
  absl::Status Do(const etcd::TxnRequest& request, Response* out) {
    if (refuse_txns) {
      return *refuse_txns;
    }
    etcd::TxnResponse response;
    response.set_succeeded(
        std::all_of(request.compare().begin(), request.compare().end(),
                    [&](const etcd::Compare& compare) { return Holds(compare); }));
    const auto& ops = response.succeeded() ? request.success() : request.failure();
    bool writes = false;
    for (const etcd::RequestOp& op : ops) {
      writes |= !op.has_request_range();
      if (op.has_request_put() && op.request_put().lease() != 0 &&
          !HasLease(op.request_put().lease())) {
        return absl::NotFoundError("etcdserver: requested lease not found");
      }
    }
    revision += writes ? 1 : 0;
    for (const etcd::RequestOp& op : ops) {
      etcd::ResponseOp* answer = response.add_responses();
      if (op.has_request_range()) {
        *answer->mutable_response_range() = List(op.request_range());
      } else if (op.has_request_put()) {
        PutAt(op.request_put().key(), op.request_put().value(), op.request_put().lease());
        answer->mutable_response_put();
      } else {
        DeleteAt(op.request_delete_range().key());
        answer->mutable_response_delete_range();
      }
    }
    *response.mutable_header() = Header();
    *out = std::move(response);
    return absl::OkStatus();
  }
  absl::Status Do(const etcd::LeaseGrantRequest& request, Response* out) {
    if (HasLease(request.id())) {
      return absl::FailedPreconditionError("etcdserver: lease already exists");
    }
    leases_[request.id()] = {request.ttl(), now_ + request.ttl() * 1'000'000'000};
    etcd::LeaseGrantResponse response;
    *response.mutable_header() = Header();
    response.set_id(request.id());
    response.set_ttl(request.ttl());
    *out = std::move(response);
    return absl::OkStatus();
  }
  absl::Status Do(const etcd::LeaseRevokeRequest& request, Response* out) {
    if (!HasLease(request.id())) {
      return absl::NotFoundError("etcdserver: requested lease not found");
    }
    EndLease(request.id());
    etcd::LeaseRevokeResponse response;
    *response.mutable_header() = Header();
    *out = std::move(response);
    return absl::OkStatus();
  }
  absl::Status Do(const etcd::LeaseKeepAliveRequest& request, Response* out) {
    etcd::LeaseKeepAliveResponse response;
    *response.mutable_header() = Header();
    response.set_id(request.id());
    if (const auto lease = leases_.find(request.id()); lease != leases_.end()) {
      lease->second.expires = now_ + lease->second.ttl_s * 1'000'000'000;
      response.set_ttl(lease->second.ttl_s);
    }
    *out = std::move(response);
    return absl::OkStatus();
  }
  absl::Status Do(const etcd::AuthenticateRequest& request, Response* out) {
    if (request.password() != password) {
      return absl::InvalidArgumentError(
          "etcdserver: authentication failed, invalid user ID or password");
    }
    etcd::AuthenticateResponse response;
    *response.mutable_header() = Header();
    response.set_token(token);
    *out = std::move(response);
    return absl::OkStatus();
  }

  int64_t now_ = 0;
  int64_t compacted_ = 0;
  std::map<int64_t, Lease> leases_;
  std::deque<etcd::Event> history_;
  std::map<std::pair<uint64_t, int64_t>, Watcher> watchers_;
  std::vector<std::pair<uint64_t, etcd::WatchResponse>> out_;
};

}  // namespace holdfast
