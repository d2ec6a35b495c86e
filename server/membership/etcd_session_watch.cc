// The lists that are followed, and the members.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/membership/etcd_session.h"

namespace holdfast {
namespace {

constexpr int64_t kPageLimit = 512;
constexpr size_t kStrangeMax = 1024;

// Nobody keeps more of a value than he can make use of.
void KeepValue(size_t bytes_max, etcd::KeyValue* value) {
  if (value->value().size() > bytes_max) {
    value->set_value("larger than any record of ours");
  }
}

}  // namespace

std::shared_ptr<EtcdSession::Range> EtcdSession::Follow(const std::string& key,
                                                        const std::string& end) {
  auto range = std::make_shared<Range>();
  range->key = key;
  range->end = end;
  page_limit_ = kPageLimit;
  return range;
}

void EtcdSession::Unfollow(Range& range) {
  if (range.watch_id != 0 && watches_.erase(range.watch_id) != 0 && stream_ != 0) {
    EtcdWriteWatch cancel{stream_, {}};
    cancel.request.mutable_cancel_request()->set_watch_id(range.watch_id);
    actions_.emplace_back(std::move(cancel));
  }
  range.watch_id = 0;
}

void EtcdSession::PumpWatches() {
  if (stream_ == 0 && Due(watch_backoff_)) {
    stream_ = ++last_id_;
    actions_.emplace_back(EtcdOpenWatch{stream_, token_});
  }
  PumpRange(members_range_);
}

void EtcdSession::PumpRange(const std::shared_ptr<Range>& range) {
  if (range->state == Range::State::kToList && Due(range->backoff)) {
    range->next_key = range->key;
    range->list_revision = 0;
    range->listed.clear();
    ++range->round;
    ListPage(range);
  }
  if (range->state == Range::State::kToWatch && stream_ != 0) {
    range->state = Range::State::kWatching;
    range->watch_id = static_cast<int64_t>(++last_id_);
    range->confirmed = false;
    range->asked = now_;
    watches_[range->watch_id] = range;
    EtcdWriteWatch write{stream_, {}};
    etcd::WatchCreateRequest* create = write.request.mutable_create_request();
    create->set_key(range->key);
    create->set_range_end(range->end);
    create->set_start_revision(range->next_revision);
    create->set_progress_notify(true);
    create->set_watch_id(range->watch_id);
    create->set_fragment(true);
    actions_.emplace_back(std::move(write));
  }
}

// --- Listing
// --------------------------------------------------------------------------------------

void EtcdSession::ListPage(const std::shared_ptr<Range>& range) {
  range->state = Range::State::kListing;
  etcd::RangeRequest request;
  request.set_key(range->next_key);
  request.set_range_end(range->end);
  request.set_limit(page_limit_);
  request.set_revision(range->list_revision);
  Send(std::move(request), [this, weak = std::weak_ptr<Range>(range), round = range->round](
                               const absl::Status& status, Response& response) {
    const std::shared_ptr<Range> asked = weak.lock();
    if (asked != nullptr && asked->state == Range::State::kListing && asked->round == round) {
      OnPage(asked, status, response);
    } else {
      Refused(status);
    }
  });
}

void EtcdSession::OnPage(const std::shared_ptr<Range>& range, const absl::Status& status,
                         Response& response) {
  if (Refused(status)) {
    range->state = Range::State::kToList;
    return;
  }
  auto* page = std::get_if<etcd::RangeResponse>(&response);
  if (!status.ok() || page == nullptr) {
    // Values far larger than ours may lie there: fewer at a time. A revision that was compacted
    // under way: anew.
    if (absl::IsResourceExhausted(status)) {
      page_limit_ = std::max<int64_t>(page_limit_ / 8, 1);
    } else if (!absl::IsOutOfRange(status)) {
      SetProblem("list", absl::StrCat("etcd does not list ", range->key, ": ", Message(status)));
    }
    range->state = Range::State::kToList;
    Failed(range->backoff, kRetryMax);
    return;
  }
  if (range->list_revision == 0) {
    range->list_revision = page->header().revision();
  }
  for (etcd::KeyValue& value : *page->mutable_kvs()) {
    KeepValue(kNodeRecordBytesMax, &value);
    range->next_key = value.key() + std::string(1, '\0');
    range->listed.push_back(std::move(value));
  }
  if (page->more() && page->kvs_size() > 0 && range->listed.size() <= kMembersMax) {
    ListPage(range);
    return;
  }
  range->state = Range::State::kToWatch;
  range->next_revision = range->list_revision + 1;
  range->backoff = {};
  page_limit_ = kPageLimit;
  SetProblem("list", "");
  range->on_list(*range);
  range->listed.clear();
}

void EtcdSession::ListAgain(Range& range) {
  Unfollow(range);
  range.state = Range::State::kToList;
}

// --- Watching
// -------------------------------------------------------------------------------------

void EtcdSession::OnWatchMessage(const etcd::WatchResponse& message) {
  if (!SeeHeader(message.header(), {})) {
    return;
  }
  const auto found = watches_.find(message.watch_id());
  const std::shared_ptr<Range> range = found == watches_.end() ? nullptr : found->second.lock();
  if (range == nullptr) {
    return;
  }
  if (message.canceled()) {
    watches_.erase(found);
    range->watch_id = 0;
    range->state = Range::State::kToList;
    // What was compacted is listed anew at once. Anything else is etcd's refusal.
    if (message.compact_revision() == 0) {
      SetProblem("watch",
                 absl::StrCat("etcd ends the watch of ", range->key, ": ",
                              Utf8Text(message.cancel_reason().substr(0, kForeignTextBytesMax))));
      Failed(range->backoff, kRetryMax);
    }
    return;
  }
  if (!range->confirmed) {
    range->confirmed = true;
    watch_backoff_ = {};
    SetProblem("watch", "");
  }
  // A connection that was replaced tells some of them twice.
  int64_t last = 0;
  for (const etcd::Event& event : message.events()) {
    last = std::max(last, event.kv().mod_revision());
    if (event.kv().mod_revision() >= range->next_revision &&
        range->state == Range::State::kWatching) {
      range->on_event(event);
    }
  }
  if (last != 0 && !message.fragment()) {
    range->next_revision = std::max(range->next_revision, last + 1);
  } else if (message.events().empty() && !message.created()) {
    range->next_revision = std::max(range->next_revision, message.header().revision() + 1);
  }
}

void EtcdSession::OnWatchEnded(const absl::Status& status) {
  if (status.ok()) {
    GiveUpConnection("it ended the watch", Then::kNextEndpoint);
    return;
  }
  if (Refused(status)) {
    return;
  }
  // For instance a message larger than we take: what it said is found by listing.
  LeaveStream();
  ListAllAgain();
  SetProblem("watch", absl::StrCat("etcd ends the watch: ",
                                   Utf8Text(Message(status).substr(0, kForeignTextBytesMax))));
  Failed(watch_backoff_, kRetryMax);
}

void EtcdSession::LeaveStream() {
  stream_ = 0;
  for (const auto& [id, watch] : watches_) {
    if (const std::shared_ptr<Range> range = watch.lock(); range != nullptr) {
      range->watch_id = 0;
      range->state = Range::State::kToWatch;
    }
  }
  watches_.clear();
}

// --- Members
// --------------------------------------------------------------------------------------

std::optional<NodeInfo> EtcdSession::TakeMember(const std::string& name,
                                                const etcd::KeyValue& value) {
  absl::StatusOr<NodeInfo> node = DecodeNode(name, value.value());
  if (node.ok() && value.lease() == 0) {
    node = absl::FailedPreconditionError(absl::StrCat(
        "it has no lease, so no daemon that lives put it there. The daemon of that node "
        "replaces it. If there is none any more, remove it: etcdctl del ",
        keys_.Node(name)));
  }
  if (node.ok() && members_.size() >= kMembersMax && !members_.contains(name)) {
    node = absl::ResourceExhaustedError(absl::StrCat("more than ", kMembersMax, " nodes"));
  }
  if (node.ok()) {
    strange_members_.erase(name);
    return *std::move(node);
  }
  if (strange_members_.size() < kStrangeMax) {
    strange_members_[name] = Message(node.status());
  }
  return std::nullopt;
}

void EtcdSession::TellStrange() {
  if (strange_members_.empty()) {
    SetProblem("members", "");
    return;
  }
  const auto& [name, why] = *strange_members_.begin();
  const bool one = strange_members_.size() == 1;
  SetProblem("members", absl::StrCat(strange_members_.size(), one ? " key" : " keys", " under ",
                                     keys_.Nodes(), one ? " is" : " are", " passed over: '",
                                     Utf8Text(name.substr(0, kNodeTextBytesMax)), "': ", why));
}

void EtcdSession::OnMembers(const Range& range) {
  members_.clear();
  strange_members_.clear();
  bool own_seen = false;
  for (const etcd::KeyValue& value : range.listed) {
    const std::string name = value.key().substr(std::min(range.key.size(), value.key().size()));
    own_seen |= name == options_.self.name && value.lease() == lease_;
    if (std::optional<NodeInfo> node = TakeMember(name, value)) {
      members_[name] = *std::move(node);
    }
  }
  MembersAre all;
  all.members.reserve(members_.size());
  for (const auto& [name, node] : members_) {
    all.members.push_back(node);
  }
  Tell(std::move(all));
  TellStrange();
  if (member() && !own_seen && range.list_revision > published_revision_) {
    published_revision_ = 0;  // somebody removed it: PumpLease publishes it again
  }
}

void EtcdSession::OnMemberEvent(const etcd::Event& event) {
  const std::string& key = event.kv().key();
  const std::string name = key.substr(std::min(members_range_->key.size(), key.size()));
  const bool deleted = event.type() == etcd::Event::DELETE;
  std::optional<NodeInfo> node;
  if (deleted) {
    strange_members_.erase(name);
  } else {
    node = TakeMember(name, event.kv());
  }
  const auto known = members_.find(name);
  if (node && (known == members_.end() || !(known->second == *node))) {
    members_[name] = *node;
    Tell(MemberUp{*std::move(node)});
  } else if (!node && known != members_.end()) {
    members_.erase(known);
    Tell(MemberGone{name});
  }
  TellStrange();
  if (name != options_.self.name) {
    return;
  }
  if (member() && event.kv().mod_revision() > published_revision_ &&
      (deleted || event.kv().lease() != lease_)) {
    published_revision_ = 0;
  }
  publish_backoff_ = {};  // now it may be free
}

}  // namespace holdfast
