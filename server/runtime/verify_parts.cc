#include "server/runtime/verify_parts.h"

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/runtime/copy_reading.h"

namespace holdfast {

VerifyParts::VerifyParts(AdminContext& context, const Caller& caller, const v1::VerifyRequest& what,
                         const v1::PlanVerifyReply& plan)
    : context_(context), caller_(caller), unread_(plan.unread()), job_(what.job()) {
  std::random_device device;
  run_ = static_cast<uint64_t>(device()) << 32 | device();
  for (const std::string& node : plan.nodes()) {
    Part part;
    part.node = node;
    parts_.push_back(std::move(part));
  }
  for (Part& part : parts_) {
    Begin(part, what);
  }
}

VerifyParts::~VerifyParts() {
  for (const Part& part : parts_) {
    if (part.begun && part.here == nullptr) {
      v1::VerifyMoreRequest stop;
      stop.set_node(part.node);
      stop.set_job(job_);
      stop.set_run(run_);
      stop.set_stop(true);
      static_cast<void>(Ask<v1::VerifyMoreReply>(stop));  // else it forgets it by itself
    }
  }
}

template <typename Reply, typename Request>
absl::StatusOr<Reply> VerifyParts::Ask(const Request& request) {
  HF_ASSIGN_OR_RETURN(AdminAnswer answer,
                      context_.gateway->Ask(request, caller_, context_.request_timeout));
  auto* reply = std::get_if<Reply>(&answer.reply);
  if (reply == nullptr) {
    return absl::InternalError("the daemon answered another question");
  }
  return std::move(*reply);
}

void VerifyParts::Begin(Part& part, const v1::VerifyRequest& what) {
  part.heard = Clock::System()->Now();
  if (part.node == context_.node_name) {
    absl::StatusOr<ListedShards> listed = ListHere(context_, caller_, what);
    if (listed.ok()) {
      part.begun = true;
      part.here = BeginVerify(context_, caller_, HowOf(what), std::move(listed->shards));
    } else {
      part.done = true;
      part.status = listed.status();
    }
  } else {
    v1::VerifyPartRequest request;
    request.set_node(part.node);
    request.set_job(job_);
    request.set_run(run_);
    *request.mutable_what() = what;
    part.status = Ask<v1::VerifyPartReply>(request).status();
    part.begun = part.status.ok();
    part.done = !part.begun;
  }
  if (absl::IsNotFound(part.status) && parts_.size() > 1) {
    part.status = absl::OkStatus();  // it went meanwhile
  }
}

void VerifyParts::TakeBad(const Part& part, const v1::BadShard& bad,
                          v1::VerifyProgress& sum) const {
  v1::BadShard& told = *sum.add_bad();
  told = bad;
  if (parts_.size() > 1 || part.here == nullptr) {
    told.set_location(absl::StrCat(part.node, ": ", bad.location()));
  }
}

void VerifyParts::AskMore(Part& part, v1::VerifyProgress& sum) {
  v1::VerifyMoreRequest request;
  request.set_node(part.node);
  request.set_job(job_);
  request.set_run(run_);
  request.set_bad_known(part.bad_known);
  const absl::StatusOr<v1::VerifyMoreReply> more = Ask<v1::VerifyMoreReply>(request);
  const MonotonicTime now = Clock::System()->Now();
  if (!more.ok()) {
    const bool silent = absl::IsUnavailable(more.status()) || IsUnanswered(more.status());
    if (!silent || part.heard + kSilentMax <= now) {
      part.done = true;
      part.status = more.status();
    }
    return;
  }
  part.heard = now;
  part.progress = more->progress();
  for (const v1::BadShard& bad : part.progress.bad()) {
    TakeBad(part, bad, sum);
    ++part.bad_known;
  }
  part.progress.clear_bad();
  part.done = part.progress.done();
  if (more->code() != 0) {
    part.status = absl::Status(static_cast<absl::StatusCode>(more->code()), more->message());
  }
}

v1::VerifyProgress VerifyParts::Next(Duration at_most) {
  v1::VerifyProgress sum;
  const auto here = std::find_if(parts_.begin(), parts_.end(), [](const Part& part) {
    return part.here != nullptr && !part.done;
  });
  const bool all_done =
      std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.done; });
  if (here != parts_.end()) {
    here->done = here->here->WaitFor(at_most, &here->progress);
    for (const v1::BadShard& bad : here->progress.bad()) {
      TakeBad(*here, bad, sum);
    }
    here->progress.clear_bad();
    if (here->done) {
      here->status = here->here->result();
    }
  } else if (!all_done) {
    std::this_thread::sleep_for(at_most);
  }
  if (const MonotonicTime now = Clock::System()->Now(); asked_ + kAskEvery <= now) {
    asked_ = now;
    for (Part& part : parts_) {
      if (!part.done && part.here == nullptr) {
        AskMore(part, sum);
      }
    }
  }
  sum.set_done(true);
  for (const Part& part : parts_) {
    sum.set_done(sum.done() && part.done);
    sum.set_bytes_done(sum.bytes_done() + part.progress.bytes_done());
    sum.set_bytes_total(sum.bytes_total() + part.progress.bytes_total());
    sum.set_shards_checked(sum.shards_checked() + part.progress.shards_checked());
    sum.set_shards_skipped(sum.shards_skipped() + part.progress.shards_skipped());
  }
  checked_ = sum.shards_checked();
  return sum;
}

// Said at the end: what could be read has been.
absl::Status VerifyParts::result() const {
  if (parts_.size() == 1 && !parts_.front().status.ok() && parts_.front().here != nullptr) {
    return parts_.front().status;
  }
  std::string why = unread_;
  absl::StatusCode code = absl::StatusCode::kUnavailable;
  for (const Part& part : parts_) {
    if (!part.status.ok()) {
      code = part.status.code();
      absl::StrAppend(&why, why.empty() ? "" : "; ", part.node, ": ", Message(part.status));
    }
  }
  return why.empty() ? absl::OkStatus()
                     : absl::Status(code, absl::StrCat(checked_,
                                                       " copies that are within reach were read; "
                                                       "not all are: ",
                                                       why));
}

}  // namespace holdfast
