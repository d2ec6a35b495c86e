#include "server/runtime/peer_reader.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/runtime/copy_reading.h"

namespace holdfast {
namespace {

constexpr Duration kLookEvery = std::chrono::seconds(1);  // for what was forgotten

}  // namespace

PeerReader::PeerReader(AdminContext& context, Answer answer)
    : context_(context), answer_(std::move(answer)), thread_([this] { Work(); }) {}

PeerReader::~PeerReader() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void PeerReader::Read(PeerReads reads) {
  {
    MutexLock lock(mutex_);
    if (!stopping_ && waiting_.size() < kWaitingMax) {
      waiting_.push_back(std::move(reads));
      changed_.NotifyAll();
      return;
    }
  }
  answer_({reads.token,
           absl::ResourceExhaustedError("other nodes ask for too much at once; try again"),
           std::monostate()});
}

void PeerReader::Work() {
  for (;;) {
    PeerReads next;
    bool any = false;
    {
      MutexLock lock(mutex_);
      const auto until = std::chrono::steady_clock::now() + kLookEvery;
      while (waiting_.empty() && !stopping_) {
        if (!changed_.WaitUntil(mutex_, until)) {
          break;
        }
      }
      if (stopping_) {
        break;
      }
      if (!waiting_.empty()) {
        next = std::move(waiting_.front());
        waiting_.pop_front();
        any = true;
      }
    }
    if (any) {
      answer_(Do(next));
    }
    EndForgotten();
  }
  for (auto& [id, run] : runs_) {
    End(id, run);
  }
}

ReadForPeer PeerReader::Do(const PeerReads& reads) {
  ReadForPeer done;
  done.token = reads.token;
  std::visit(
      [&](const auto& request) {
        auto reply = Do(reads.caller, request);
        done.status = reply.status();
        if (reply.ok()) {
          done.reply = *std::move(reply);
        }
      },
      reads.request);
  return done;
}

absl::StatusOr<v1::ReadShardReply> PeerReader::Do(const Caller& caller,
                                                  const v1::ReadShardRequest& request) {
  v1::InspectShardRequest inspect;
  inspect.set_job(request.job());
  inspect.set_attempt(request.attempt());
  inspect.set_step(request.step());
  inspect.set_rank(request.rank());
  return ReadRecordHere(context_, caller, inspect, context_.request_timeout);
}

// Asked twice it is begun once.
absl::StatusOr<v1::VerifyPartReply> PeerReader::Do(const Caller& caller,
                                                   const v1::VerifyPartRequest& request) {
  const RunId id{caller.uid, request.run()};
  if (runs_.count(id) > 0) {
    return v1::VerifyPartReply();
  }
  if (runs_.size() >= kRunsMax) {
    return absl::ResourceExhaustedError("too many verifications for other nodes; try again");
  }
  HF_ASSIGN_OR_RETURN(ListedShards listed, ListHere(context_, caller, request.what()));
  HF_RETURN_IF_ERROR(context_.verify_seats.Take(caller.uid));
  Run& run = runs_[id];
  run.asked = Clock::System()->Now();
  run.verify = BeginVerify(context_, caller, HowOf(request.what()), std::move(listed.shards));
  return v1::VerifyPartReply();
}

absl::StatusOr<v1::VerifyMoreReply> PeerReader::Do(const Caller& caller,
                                                   const v1::VerifyMoreRequest& request) {
  const auto found = runs_.find({caller.uid, request.run()});
  v1::VerifyMoreReply reply;
  if (found == runs_.end()) {
    return request.stop() ? absl::StatusOr<v1::VerifyMoreReply>(reply)
                          : absl::NotFoundError(
                                "the verification is not known: it was given up, or ckptd was "
                                "started anew; verify again");
  }
  Run& run = found->second;
  if (request.stop()) {
    End(found->first, run);
    runs_.erase(found);
    return reply;
  }
  run.asked = Clock::System()->Now();
  if (run.verify != nullptr && run.verify->WaitFor(Duration(0), &run.progress)) {
    run.result = run.verify->result();
    End(found->first, run);
  }
  const bool done = run.verify == nullptr;
  for (const v1::BadShard& bad : run.progress.bad()) {
    if (run.bad.size() < kBadKeptMax) {
      run.bad.push_back(bad);
    }
  }
  run.progress.clear_bad();
  *reply.mutable_progress() = run.progress;
  const size_t from = std::min<size_t>(request.bad_known(), run.bad.size());
  const size_t to = std::min(run.bad.size(), from + kBadToldMax);
  for (size_t i = from; i < to; ++i) {
    *reply.mutable_progress()->add_bad() = run.bad[i];
  }
  reply.mutable_progress()->set_done(done && to == run.bad.size());
  if (done && !run.result.ok()) {
    reply.set_code(static_cast<int>(run.result.code()));
    reply.set_message(Message(run.result));
  }
  return reply;
}

// It does no more; what it has found may still be asked for.
void PeerReader::End(const RunId& id, Run& run) {
  if (run.verify != nullptr) {
    run.verify.reset();  // which waits for its thread
    context_.verify_seats.Leave(id.first);
  }
}

void PeerReader::EndForgotten() {
  const MonotonicTime now = Clock::System()->Now();
  for (auto it = runs_.begin(); it != runs_.end();) {
    if (now < it->second.asked + kForgotten) {
      ++it;
      continue;
    }
    End(it->first, it->second);
    it = runs_.erase(it);
  }
}

}  // namespace holdfast
