// Processes that are none of the job's ranks: readers, and other users' who use the job's name.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_rank.h"
#include "tests/sim/cluster_world.h"

namespace holdfast::sim::cluster {

using std::chrono::milliseconds;
using std::chrono::seconds;
using v1::Failure;

namespace {

std::string WhyRefused(const Failure& failure) {
  return failure.reason() != Failure::REASON_UNSPECIFIED
             ? Failure::Reason_Name(failure.reason())
             : absl::StatusCodeToString(static_cast<absl::StatusCode>(failure.code()));
}

uint64_t ToMillis(Duration d) {
  return static_cast<uint64_t>(d / milliseconds(1));
}

}  // namespace

// A name belongs to one user in the whole cluster, whichever node is asked.
void RankProcess::JoinAsStranger() {
  if (tries_left_-- == 0) {
    return End();
  }
  const Duration deadline = w_.t.Millis(0, 15'000);
  v1::ClientFrame frame;
  v1::Join& join = *frame.mutable_join();
  join.set_job(job_.name);
  join.set_rank(rank_);
  join.set_world_size(job_.world_size);
  join.set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline, [this](const v1::DaemonFrame& reply, const FilePtr&) {
    if (!reply.has_failure()) {
      return w_.truth.Violated(
          absl::StrCat("job ", job_.name, ": another user's process joined it on ", node_.name));
    }
    w_.counts.states[absl::StrCat("stranger: ", WhyRefused(reply.failure()))]++;
    reply.failure().reason() == Failure::REASON_OTHER_OWNER
        ? End()
        : Later(milliseconds(500), &RankProcess::JoinAsStranger);
  });
}

// The newest committed step's shard of its rank, from wherever its node can read it.
void RankProcess::Read() {
  if (tries_left_-- == 0) {
    return End();
  }
  const Duration deadline = w_.t.Chance(0.2) ? Duration(0) : w_.t.Millis(1000, 20'000);
  v1::ClientFrame frame;
  v1::Attach& attach = *frame.mutable_attach();
  attach.set_job(job_.name);
  attach.set_rank(rank_);
  attach.set_any_tier(w_.t.Chance(0.8));
  attach.set_deadline_ms(ToMillis(deadline));
  Call(frame, deadline, [this](const v1::DaemonFrame& reply, const FilePtr& file) {
    if (reply.has_failure()) {
      w_.counts.states[absl::StrCat("attach: ", WhyRefused(reply.failure()))]++;
      return Later(w_.t.Millis(100, 5000), &RankProcess::Read);
    }
    w_.counts.states[absl::StrCat("attach: from ", reply.attach().tier())]++;
    OnAttached(reply.attach(), file);
  });
}

// What is mapped stays what it was for as long as it is held; an open file nobody has to hold.
void RankProcess::OnAttached(const v1::Source& source, const FilePtr& file) {
  const ShardId id{JobUuid::FromBytes(source.job_uuid()).value(), source.attempt(), source.step(),
                   source.rank()};
  w_.truth.ReaderTold(job_.name, id, rank_);
  if (source.hold() == 0) {
    return Later(w_.t.Millis(100, 5000), &RankProcess::Read);
  }
  w_.t.After(w_.t.Millis(0, 15'000), [this, source, file, id, epoch = epoch_] {
    if (!running() || epoch != epoch_) {
      return;
    }
    if (file->content != id) {
      return w_.truth.Violated(absl::StrCat(node_.name, ": slot ", file->slot, " with ",
                                            id.ToString(), " was filled again under its reader"));
    }
    Release(source, file);
    Later(w_.t.Millis(100, 5000), &RankProcess::Read);
  });
}

}  // namespace holdfast::sim::cluster
