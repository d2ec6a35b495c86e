#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/ask.h"
#include "ckptctl/commands.h"
#include "ckptctl/each_job.h"
#include "ckptctl/json.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/repair.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr size_t kBadKeptMax = 10'000;  // for --json, and to follow; the count goes on

Duration FromMs(int64_t ms) {
  return std::chrono::milliseconds(ms);
}

// What one job's verification came to.
struct JobOutcome {
  std::string job;
  absl::Status status;  // NotFound: there is nothing to verify
  uint64_t bytes = 0;
  uint32_t shards = 0;
  uint32_t skipped = 0;
  uint64_t bad_count = 0;
  std::vector<v1::BadShard> bad;
  bool done = false;
};

class Verification {
 public:
  // A bar from the first moment on: how much there is to read is known at once.
  Verification(const Context& context, AdminClient& client)
      : context_(context), client_(client), line_(context, Duration(0)) {}

  JobOutcome Run(const v1::VerifyRequest& request) {
    outcome_ = JobOutcome{.job = request.job()};
    begin_ = context_.clock->Now();
    static const std::atomic<bool> kNever{false};
    const std::atomic<bool>& cancel =
        context_.interrupted == nullptr ? kNever : *context_.interrupted;
    outcome_.status =
        client_.Verify(request, cancel, [this](const v1::VerifyProgress& p) { OnProgress(p); });
    line_.Clear();
    if (outcome_.status.ok() && !outcome_.done) {
      outcome_.status =
          absl::UnavailableError("the daemon ended the verification before it was done");
    }
    return std::move(outcome_);
  }

  int64_t ElapsedMs() const {
    return (context_.clock->Now() - begin_) / std::chrono::milliseconds(1);
  }

 private:
  void OnProgress(const v1::VerifyProgress& progress) {
    outcome_.bytes = progress.bytes_done();
    outcome_.shards = progress.shards_checked();
    outcome_.skipped = progress.shards_skipped();
    outcome_.done = progress.done();
    for (const v1::BadShard& bad : progress.bad()) {
      ++outcome_.bad_count;
      if (!context_.json) {
        line_.Clear();
        *context_.out << "BAD: " << EscapeText(outcome_.job) << " " << RenderBadShard(bad)
                      << std::endl;
      }
      if (outcome_.bad.size() < kBadKeptMax) {
        outcome_.bad.push_back(bad);
      }
    }
    line_.Draw([&] {
      return absl::StrCat(EscapeText(outcome_.job), " ",
                          RenderVerifyProgress(progress, ElapsedMs()));
    });
  }

  const Context& context_;
  AdminClient& client_;
  JobOutcome outcome_;
  MonotonicTime begin_;
  ProgressLine line_;
};

enum class WhatFollows { kRestoreElsewhere, kMending };

void ShowOutcome(const Context& context, const JobOutcome& outcome, int64_t elapsed_ms,
                 WhatFollows next) {
  const std::string checked = absl::StrCat(
      Count(outcome.shards, "shard", "shards"), ", ", FormatBytes(outcome.bytes), " in ",
      FormatAge(elapsed_ms), " (",
      FormatRate(outcome.bytes, FromMs(std::max<int64_t>(elapsed_ms, 1))), ")",
      outcome.skipped == 0 ? ""
                           : absl::StrCat("; ", Count(outcome.skipped, "more was", "more were"),
                                          " given up for newer steps meanwhile"));
  *context.out << "job " << EscapeText(outcome.job) << ": ";
  if (!outcome.status.ok()) {
    *context.out << "not verified: " << EscapeText(Message(outcome.status)) << "\n";
  } else if (outcome.bad_count == 0) {
    *context.out << "every digest is right: " << checked << "\n";
  } else {
    *context.out << Count(outcome.bad_count, "shard is", "shards are") << " BAD: " << checked;
    if (next == WhatFollows::kRestoreElsewhere) {
      *context.out << ". A restore takes another good copy, or another step; ckptctl list "
                   << EscapeText(outcome.job) << " shows which";
    }
    *context.out << "\n";
  }
}

nlohmann::ordered_json JobOutcomeToJson(const JobOutcome& outcome, int64_t elapsed_ms) {
  nlohmann::ordered_json json;
  json["job"] = outcome.job;
  json["verified"] = outcome.status.ok();
  json["why_not"] = outcome.status.ok() ? "" : Message(outcome.status);
  json["shards_checked"] = outcome.shards;
  json["shards_skipped"] = outcome.skipped;
  json["bytes_checked"] = outcome.bytes;
  json["elapsed_ms"] = elapsed_ms;
  json["bad_count"] = outcome.bad_count;
  json["bad"] = nlohmann::ordered_json::array();
  for (const v1::BadShard& bad : outcome.bad) {
    json["bad"].push_back(MessageToJson(bad));
  }
  return json;
}

v1::VerifyRequest RequestOf(const VerifyArguments& arguments, const std::string& job) {
  v1::VerifyRequest request;
  request.set_job(job);
  request.set_step(arguments.step.value_or(0));
  request.set_attempt(arguments.attempt);
  request.set_all_steps(arguments.all);
  request.set_tier(arguments.tier);
  request.set_newest(!arguments.all && !arguments.step.has_value());
  return request;
}

v1::VerifyRequest RequestOf(const ScrubArguments& arguments, const std::string& job) {
  v1::VerifyRequest request;
  request.set_job(job);
  request.set_all_steps(true);
  request.set_tier(arguments.tier);
  request.set_bandwidth_bytes_per_s_max(arguments.bandwidth);
  request.set_no_repair(arguments.no_repair);
  return request;
}

// What is bad in memory is taken anew by itself, where it is wanted; there is nothing to wait for.
v1::RepairRequest RepairOf(const ScrubArguments& arguments, const std::string& job) {
  v1::RepairRequest request;
  request.set_job(job);
  request.set_all_steps(true);
  request.set_tier(arguments.tier);
  return request;
}

// `of_all`: one that has nothing committed yet is no failure. Damage that was found before is what
// the exit code must say.
absl::StatusOr<JobDone> VerifyJob(const Context& context, AdminClient& client,
                                  const v1::VerifyRequest& request, bool of_all,
                                  uint64_t bad_before) {
  Verification verification(context, client);
  const JobOutcome outcome = verification.Run(request);
  const bool failed = !outcome.status.ok() && !(of_all && absl::IsNotFound(outcome.status));
  if (failed && outcome.bad_count + bad_before == 0) {
    return outcome.status;
  }
  JobDone done{.bad = outcome.bad_count, .ends = failed};
  if (context.json) {
    done.json = JobOutcomeToJson(outcome, verification.ElapsedMs());
  } else {
    ShowOutcome(context, outcome, verification.ElapsedMs(), WhatFollows::kRestoreElsewhere);
  }
  return done;
}

absl::StatusOr<JobDone> ScrubJob(const Context& context, AdminClient& client,
                                 const ScrubArguments& arguments, const std::string& job,
                                 uint64_t bad_before) {
  // 1. Every copy is read.
  Verification verification(context, client);
  const JobOutcome outcome = verification.Run(RequestOf(arguments, job));
  const bool failed =
      !outcome.status.ok() && !(arguments.job.empty() && absl::IsNotFound(outcome.status));
  if (failed && outcome.bad_count + bad_before == 0) {
    return outcome.status;
  }
  // 2. What is bad is written anew.
  Mended mended;
  const bool mends = !arguments.no_repair && arguments.tier != "memory" && outcome.bad_count > 0 &&
                     !RepairInterrupted(context);
  if (mends) {
    HF_ASSIGN_OR_RETURN(mended, MendCopies(context, client, RepairOf(arguments, job), outcome.bad));
  }
  JobDone done{.bad = mends ? mended.bad() + mended.not_known : outcome.bad_count,
               .interrupted = mended.interrupted,
               .ends = failed};
  done.bad += failed ? 1 : 0;  // not all of it was read
  if (context.json) {
    done.json = JobOutcomeToJson(outcome, verification.ElapsedMs());
    if (mends) {
      AddMended(mended, done.json);
    } else {
      done.json["copies"] = nlohmann::ordered_json::array();
    }
  } else {
    ShowOutcome(context, outcome, verification.ElapsedMs(),
                mends ? WhatFollows::kMending : WhatFollows::kRestoreElsewhere);
    *context.out << (mends ? RenderMended(job, mended) : "");
  }
  return done;
}

ExitCode ShowScrub(const Context& context) {
  const auto reply = AskFor(context, &AdminClient::GetStatus, v1::GetStatusRequest());
  if (!reply.ok()) {
    return ReportError(context, reply.status());
  }
  const v1::ScrubStatus& scrub = reply->daemon().scrub();
  if (context.json) {
    ShowJson(context, "", scrub);
  } else {
    *context.out << RenderScrub(scrub, reply->daemon().unix_ms());
  }
  return scrub.problem().empty() ? ExitCode::kOk : ExitCode::kDamaged;
}

}  // namespace

std::string RenderScrub(const v1::ScrubStatus& scrub, int64_t unix_ms) {
  if (scrub.period_ms() == 0) {
    return "scrub: off (scrub.period_ms is 0); ckptctl scrub reads all copies now\n";
  }
  std::string out = absl::StrCat(
      "scrub: ", Count(scrub.copies(), "copy", "copies"), " (", FormatBytes(scrub.bytes()),
      ") read within ", FormatDuration(FromMs(static_cast<int64_t>(scrub.period_ms()))), ", at ",
      scrub.bandwidth_bytes_per_s_max() == 0
          ? std::string("any speed")
          : absl::StrCat("most ", FormatBytes(scrub.bandwidth_bytes_per_s_max()), "/s"),
      "\n");
  if (scrub.copies() > 0) {
    absl::StrAppend(&out, "  longest not read: ", FormatAge(unix_ms - scrub.oldest_unix_ms()),
                    scrub.reading().empty()
                        ? absl::StrCat("; next in ", FormatAge(std::max<int64_t>(
                                                         scrub.due_unix_ms() - unix_ms, 0)))
                        : absl::StrCat("; reads ", EscapeText(scrub.reading())),
                    "\n");
  }
  absl::StrAppend(
      &out, "  since the daemon started: ", Count(scrub.copies_read(), "copy", "copies"), " (",
      FormatBytes(scrub.bytes_read()), ") read, ", scrub.copies_bad(), " found bad\n");
  if (!scrub.problem().empty()) {
    absl::StrAppend(&out, "  BEHIND: ", EscapeText(scrub.problem()), "\n");
  }
  return out;
}

absl::StatusOr<std::vector<std::string>> JobsOf(AdminClient& client, const std::string& job) {
  if (!job.empty()) {
    return std::vector<std::string>{job};
  }
  v1::GetStatusReply reply;
  HF_RETURN_IF_ERROR(client.GetStatus(v1::GetStatusRequest(), reply));
  std::vector<std::string> names;
  for (const v1::JobStatus& status : reply.jobs()) {
    names.push_back(status.name());
  }
  return names;
}

std::string RenderBadShard(const v1::BadShard& bad) {
  return absl::StrCat("step ", bad.step(), " (attempt ", bad.attempt(), ") rank ", bad.rank(), ", ",
                      EscapeText(bad.location()), ": ", EscapeText(bad.what()));
}

std::string RenderVerifyProgress(const v1::VerifyProgress& p, int64_t elapsed_ms) {
  return ByteProgress(p.bytes_done(), p.bytes_total(), elapsed_ms);
}

ExitCode RunVerify(const Context& context, const VerifyArguments& arguments) {
  return ForEachJob(context, "verify", arguments.job,
                    [&](AdminClient& client, const std::string& job, uint64_t bad_before) {
                      return VerifyJob(context, client, RequestOf(arguments, job),
                                       arguments.job.empty(), bad_before);
                    });
}

ExitCode RunScrub(const Context& context, const ScrubArguments& arguments) {
  if (arguments.status) {
    return ShowScrub(context);
  }
  return ForEachJob(context, "scrub", arguments.job,
                    [&](AdminClient& client, const std::string& job, uint64_t bad_before) {
                      return ScrubJob(context, client, arguments, job, bad_before);
                    });
}

}  // namespace holdfast
