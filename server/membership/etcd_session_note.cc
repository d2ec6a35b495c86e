// What the cluster has agreed on for good: its id, and which remote directory is its own.
#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/membership/etcd_session.h"

namespace holdfast {
namespace {

constexpr size_t kIdDigits = 32;

bool IsNotedId(const std::string& text) {
  return text.size() == kIdDigits && std::all_of(text.begin(), text.end(), [](const char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) || (c >= 'a' && c <= 'f');
         });
}

void PutUnlessThere(etcd::TxnRequest* request, const std::string& key, const std::string& value) {
  etcd::Compare* absent = request->add_compare();
  absent->set_target(etcd::Compare::CREATE);
  absent->set_key(key);
  absent->set_create_revision(0);
  etcd::PutRequest* put = request->add_success()->mutable_request_put();
  put->set_key(key);
  put->set_value(value);
}

void ReadKey(etcd::RequestOp* op, const std::string& key) {
  op->mutable_request_range()->set_key(key);
}

const etcd::KeyValue* NotedValue(const etcd::TxnResponse& response, int index) {
  return index < response.responses_size() &&
                 response.responses(index).response_range().kvs_size() == 1
             ? &response.responses(index).response_range().kvs(0)
             : nullptr;
}

}  // namespace

void EtcdSession::Ask(const AskNote& ask) {
  note_.wanted = true;
  if (!ask.remembered.empty()) {
    note_.id = ask.remembered;
  }
}

void EtcdSession::Ask(const AskNoteRemote& ask) {
  note_.wanted = true;
  note_.remote = ask.id;
  note_.instead_of = ask.instead_of;
}

void EtcdSession::PumpNote() {
  if (note_.wanted && !note_.asking && Due(note_.backoff)) {
    ReadNote();
  }
}

bool EtcdSession::NoteFailed(const absl::Status& status, bool makes_sense) {
  note_.asking = false;
  if (Refused(status)) {
    return true;
  }
  if (status.ok() && makes_sense) {
    note_.backoff = {};
    SetProblem("cluster note", "");
    return false;
  }
  SetProblem(
      "cluster note",
      absl::StrCat(
          "etcd does not say which cluster this is (", keys_.Cluster(), ", ", keys_.Remote(), "): ",
          status.ok() ? "the values are no ids; delete what is wrong there" : Message(status)));
  Failed(note_.backoff, kRetryMax);
  return true;
}

// Its id is put with the first question; who asks first says which.
void EtcdSession::ReadNote() {
  note_.asking = true;
  if (!IsNotedId(note_.id)) {
    note_.id = absl::StrCat(absl::Hex(random_(), absl::kZeroPad16),
                            absl::Hex(random_(), absl::kZeroPad16));
  }
  etcd::TxnRequest request;
  PutUnlessThere(&request, keys_.Cluster(), note_.id);
  ReadKey(request.add_success(), keys_.Remote());
  ReadKey(request.add_failure(), keys_.Cluster());
  ReadKey(request.add_failure(), keys_.Remote());
  Send(std::move(request), [this, own = note_.id](const absl::Status& status, Response& response) {
    const auto* txn = std::get_if<etcd::TxnResponse>(&response);
    ClusterNote note{own, ""};
    const etcd::KeyValue* remote = nullptr;
    bool makes_sense = txn != nullptr && txn->responses_size() == 2;
    if (makes_sense) {
      remote = NotedValue(*txn, 1);
      const etcd::KeyValue* const id = txn->succeeded() ? nullptr : NotedValue(*txn, 0);
      note.id = txn->succeeded() ? own : id != nullptr ? id->value() : "";
      note.remote = remote != nullptr ? remote->value() : "";
      makes_sense = IsNotedId(note.id) && (note.remote.empty() || IsNotedId(note.remote));
    }
    if (NoteFailed(status, makes_sense)) {
      return;
    }
    if (!note_.remote.empty() && note.remote == note_.instead_of) {
      return WriteRemote(remote != nullptr ? remote->mod_revision() : 0);
    }
    note_.wanted = false;
    note_.remote.clear();
    note_.id = note.id;  // where etcd loses it, this is what it was
    note_.told = true;
    actions_.emplace_back(std::move(note));
  });
}

// If nobody has changed it since. Whatever comes of it: it is read again.
void EtcdSession::WriteRemote(int64_t revision) {
  note_.asking = true;
  etcd::TxnRequest request;
  etcd::Compare* same = request.add_compare();
  same->set_target(etcd::Compare::MOD);
  same->set_key(keys_.Remote());
  same->set_mod_revision(revision);
  etcd::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(keys_.Remote());
  put->set_value(note_.remote);
  Send(std::move(request), [this, id = note_.remote](const absl::Status& status, Response&) {
    if (!NoteFailed(status, true) && note_.remote == id) {
      note_.remote.clear();
    }
  });
}

}  // namespace holdfast
