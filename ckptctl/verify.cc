#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "ckptctl/commands.h"
#include "ckptctl/json.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"
#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

constexpr size_t kBadKeptMax = 10'000;  // for --json; the count goes on

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

  JobOutcome Run(const VerifyArguments& arguments, const std::string& job) {
    outcome_ = JobOutcome{.job = job};
    begin_ = context_.clock->Now();
    v1::VerifyRequest request;
    request.set_job(job);
    request.set_step(arguments.step.value_or(0));
    request.set_attempt(arguments.attempt);
    request.set_all_steps(arguments.all);
    request.set_tier(arguments.tier);
    request.set_newest(!arguments.all && !arguments.step.has_value());
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
      } else if (outcome_.bad.size() < kBadKeptMax) {
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

absl::StatusOr<std::vector<std::string>> JobsToVerify(AdminClient& client, const std::string& job) {
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

void ShowOutcome(const Context& context, const JobOutcome& outcome, int64_t elapsed_ms) {
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
    *context.out << Count(outcome.bad_count, "shard is", "shards are") << " BAD: " << checked
                 << ". A restore will use another step; ckptctl list " << EscapeText(outcome.job)
                 << " shows which\n";
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

}  // namespace

std::string RenderBadShard(const v1::BadShard& bad) {
  return absl::StrCat("step ", bad.step(), " (attempt ", bad.attempt(), ") rank ", bad.rank(), ", ",
                      EscapeText(bad.location()), ": ", EscapeText(bad.what()));
}

std::string RenderVerifyProgress(const v1::VerifyProgress& p, int64_t elapsed_ms) {
  return ByteProgress(p.bytes_done(), p.bytes_total(), elapsed_ms);
}

ExitCode RunVerify(const Context& context, const VerifyArguments& arguments) {
  const auto client = ConnectAdmin(context);
  if (!client.ok()) {
    return ReportError(context, client.status());
  }
  const auto jobs = JobsToVerify(**client, arguments.job);
  if (!jobs.ok()) {
    return ReportError(context, jobs.status());
  }
  Verification verification(context, **client);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  uint64_t bad = 0;
  for (const std::string& job : *jobs) {
    const JobOutcome outcome = verification.Run(arguments, job);
    // A job that has nothing committed yet is no failure when all jobs were asked for.
    const bool only_empty = arguments.job.empty() && absl::IsNotFound(outcome.status);
    bad += outcome.bad_count;
    // Damage that was found before is what the exit code must say.
    if (!outcome.status.ok() && !only_empty && bad == 0) {
      return ReportError(context, Annotate(outcome.status, absl::StrCat("verify ", job)));
    }
    if (context.json) {
      results.push_back(JobOutcomeToJson(outcome, verification.ElapsedMs()));
    } else {
      ShowOutcome(context, outcome, verification.ElapsedMs());
    }
    if (!outcome.status.ok() && !only_empty) {
      break;
    }
  }
  if (context.json) {
    nlohmann::ordered_json json;
    json["ok"] = bad == 0;
    json["jobs"] = std::move(results);
    *context.out << DumpJson(json) << "\n";
  } else if (jobs->empty()) {
    *context.out << "no jobs of yours: nothing to verify\n";
  }
  return bad == 0 ? ExitCode::kOk : ExitCode::kDamaged;
}

}  // namespace holdfast
