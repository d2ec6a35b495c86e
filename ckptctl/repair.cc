#include "ckptctl/repair.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <ostream>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ckptctl/each_job.h"
#include "ckptctl/json.h"
#include "ckptctl/progress.h"
#include "ckptctl/render.h"
#include "ckptctl/text.h"
#include "ckptctl/views.h"

namespace holdfast {
namespace {

constexpr auto kRepairLook = std::chrono::milliseconds(100);  // between two questions
constexpr int kLooksForWhatWasFound = 20;
// While nothing becomes of copies that no answer names.
constexpr Duration kUntoldQuiet = std::chrono::seconds(30);
constexpr size_t kFollowedMax = 10'000;  // by name; the others are counted

using BadPlace = std::tuple<Attempt, Step, Rank, std::string, std::string>;

BadPlace BadPlaceOf(const v1::BadCopy& copy) {
  return {copy.attempt(), copy.step(), copy.rank(), copy.tier(), copy.node()};
}

// Whether nothing more comes of it just then: what was tried in vain is tried again by itself.
bool RepairSettled(const v1::BadCopy& copy) {
  switch (copy.state()) {
    case v1::BadCopy::STATE_UNDER_WAY:
      return false;
    case v1::BadCopy::STATE_WAITS:
      return !copy.problem().empty();
    default:
      return true;
  }
}

// Of another node's it is "node: /mnt/…".
bool IsOf(const v1::BadCopy& copy, const v1::BadShard& bad) {
  return copy.attempt() == bad.attempt() && copy.step() == bad.step() &&
         copy.rank() == bad.rank() && !copy.location().empty() &&
         bad.location().ends_with(copy.location());
}

bool IsStillBad(const v1::BadCopy& copy) {
  return copy.state() != v1::BadCopy::STATE_MENDED &&
         copy.state() != v1::BadCopy::STATE_UNSPECIFIED;
}

// What becomes of the copies that a repair was asked for, from answer to answer. One answer names
// some of those that are bad and counts the others, which later ones name as the first are mended.
class Followed {
 public:
  explicit Followed(const v1::RepairReply& first) {
    for (const v1::BadCopy& copy : first.mended()) {
      mended_before_.insert(BadPlaceOf(copy));
    }
    Take(first);
  }

  void Take(const v1::RepairReply& now) {
    // (Of what was mended more than once, the last time; and what is bad is bad again.)
    std::map<BadPlace, const v1::BadCopy*> told;
    for (const v1::BadCopy& copy : now.mended()) {
      told[BadPlaceOf(copy)] = &copy;
    }
    for (const v1::BadCopy& copy : now.copies()) {
      told[BadPlaceOf(copy)] = &copy;
    }
    for (const auto& [place, index] : at_) {
      v1::BadCopy& copy = copies_[index];
      if (const auto found = told.find(place); found != told.end()) {
        copy = *found->second;
      } else if (IsStillBad(copy)) {
        copy.set_state(v1::BadCopy::STATE_UNSPECIFIED);  // it has gone
      }
    }
    for (const auto& [place, copy] : told) {
      if (copy->state() != v1::BadCopy::STATE_MENDED || mended_before_.count(place) == 0) {
        Add(*copy);
      }
    }
    const auto named = std::count_if(now.copies().begin(), now.copies().end(),
                                     [&](const auto& c) { return at_.count(BadPlaceOf(c)) > 0; });
    untold_ = now.copies_bad() - std::min(now.copies_bad(), static_cast<uint64_t>(named));
  }

  // Takes from `found` what is known by now.
  void Recognize(const v1::RepairReply& now, std::vector<v1::BadShard>& found) {
    std::erase_if(found, [&](const v1::BadShard& bad) {
      const auto is_it = [&](const v1::BadCopy& copy) { return IsOf(copy, bad); };
      const auto mended = std::find_if(now.mended().rbegin(), now.mended().rend(), is_it);
      if (std::any_of(copies_.begin(), copies_.end(), is_it) ||
          std::any_of(now.copies().begin(), now.copies().end(), is_it)) {
        return true;
      }
      if (mended != now.mended().rend()) {
        Add(*mended);
        return true;
      }
      return false;
    });
  }

  const std::vector<v1::BadCopy>& copies() const { return copies_; }
  // That are bad, and not among those.
  uint64_t untold() const { return untold_; }
  // Of which more is to come.
  uint64_t open() const {
    return static_cast<uint64_t>(
        std::count_if(copies_.begin(), copies_.end(),
                      [](const v1::BadCopy& copy) { return !RepairSettled(copy); }));
  }

 private:
  void Add(const v1::BadCopy& copy) {
    if (copies_.size() < kFollowedMax && at_.emplace(BadPlaceOf(copy), copies_.size()).second) {
      copies_.push_back(copy);
    }
  }

  std::vector<v1::BadCopy> copies_;
  std::map<BadPlace, size_t> at_;  // in copies_
  std::set<BadPlace> mended_before_;
  uint64_t untold_ = 0;
};

// Of how many in nvme and remote nothing is known: those in memory have no path.
size_t CountDurable(const std::vector<v1::BadShard>& found) {
  return static_cast<size_t>(std::count_if(found.begin(), found.end(), [](const v1::BadShard& bad) {
    return bad.location().find('/') != std::string::npos;
  }));
}

const char* BadStateName(v1::BadCopy::State state) {
  switch (state) {
    case v1::BadCopy::STATE_UNDER_WAY:
      return "under_way";
    case v1::BadCopy::STATE_WAITS:
      return "waits";
    case v1::BadCopy::STATE_NO_SOURCE:
      return "no_source";
    case v1::BadCopy::STATE_MENDED:
      return "mended";
    case v1::BadCopy::STATE_LEFT:
      return "left";
    default:
      return "gone";
  }
}

// Of a rank that never was nothing is bad either, which is no good news for who meant another one.
absl::Status CheckRank(AdminClient& client, const std::string& job, Rank rank) {
  v1::ListCheckpointsRequest request;
  request.set_job(job);
  v1::ListCheckpointsReply reply;
  HF_RETURN_IF_ERROR(client.ListCheckpoints(request, reply));
  uint32_t most = 0;
  for (const v1::Checkpoint& checkpoint : reply.checkpoints()) {
    most = std::max(most, checkpoint.world_size());
  }
  return rank < most || most == 0
             ? absl::OkStatus()
             : absl::NotFoundError(absl::StrCat("it has no rank ", rank, ": at most ",
                                                Count(most, "rank", "ranks"),
                                                " saved a step of it, and the first one is 0"));
}

}  // namespace

bool RepairInterrupted(const Context& context) {
  return context.interrupted != nullptr && *context.interrupted;
}

uint64_t Mended::bad() const {
  return not_told + static_cast<uint64_t>(std::count_if(copies.begin(), copies.end(), IsStillBad));
}

absl::StatusOr<Mended> MendCopies(const Context& context, AdminClient& client,
                                  const v1::RepairRequest& request,
                                  std::vector<v1::BadShard> found) {
  v1::RepairReply reply;
  HF_RETURN_IF_ERROR(client.Repair(request, reply));
  Followed followed(reply);
  followed.Recognize(reply, found);
  v1::RepairRequest look = request;
  look.set_look(true);
  ProgressLine line(context);
  uint64_t untold = followed.untold();
  MonotonicTime untold_since = context.clock->Now();
  for (int looks = 0;; ++looks) {
    // (What another node has found its host hears of a moment later.)
    const bool heard = CountDurable(found) == 0 || looks >= kLooksForWhatWasFound;
    if (std::exchange(untold, followed.untold()) != followed.untold()) {
      untold_since = context.clock->Now();
    }
    const bool quiet = untold == 0 || context.clock->Now() - untold_since >= kUntoldQuiet;
    const bool interrupted = RepairInterrupted(context);
    if ((followed.open() == 0 && heard && quiet) || interrupted) {
      return Mended{.copies = followed.copies(),
                    .not_told = untold,
                    .not_known = found.size(),
                    .interrupted = interrupted};
    }
    line.Draw([&] {
      return absl::StrCat("repair ", EscapeText(request.job()), ": ",
                          Count(followed.open() + untold, "copy is", "copies are"),
                          " still to be written anew");
    });
    std::this_thread::sleep_for(kRepairLook);
    HF_RETURN_IF_ERROR(client.Repair(look, reply));
    followed.Take(reply);
    followed.Recognize(reply, found);
  }
}

std::string RenderMendedCopy(const std::string& job, const v1::BadCopy& copy) {
  const std::string where = absl::StrCat(
      EscapeText(job), " step ", copy.step(), " (attempt ", copy.attempt(), ") rank ", copy.rank(),
      ", ", EscapeText(copy.tier()), copy.node().empty() ? "" : " on " + EscapeText(copy.node()),
      ", ", EscapeText(copy.location()));
  switch (copy.state()) {
    case v1::BadCopy::STATE_MENDED:
      return absl::StrCat("MENDED: ", where, ": written anew from ", EscapeText(copy.source()),
                          "; it was bad: ", EscapeText(copy.what()));
    case v1::BadCopy::STATE_UNSPECIFIED:
      return absl::StrCat("gone: ", where, ": the copy was removed meanwhile");
    default:
      return absl::StrCat(
          "BAD: ", where, ": ", EscapeText(copy.what()), "; it stays as it is: ",
          copy.state() == v1::BadCopy::STATE_LEFT ? std::string("as it was asked for")
                                                  : EscapeText(copy.problem()),
          copy.state() == v1::BadCopy::STATE_WAITS ? " (tried again by itself)" : "");
  }
}

std::string RenderMended(const std::string& job, const Mended& mended) {
  std::string out;
  for (const v1::BadCopy& copy : mended.copies) {
    absl::StrAppend(&out, RenderMendedCopy(job, copy), "\n");
  }
  const uint64_t bad = mended.bad();
  const size_t whole = static_cast<size_t>(std::count_if(
      mended.copies.begin(), mended.copies.end(),
      [](const v1::BadCopy& copy) { return copy.state() == v1::BadCopy::STATE_MENDED; }));
  absl::StrAppend(&out, "job ", EscapeText(job), ": ",
                  mended.copies.empty() && bad == 0
                      ? std::string("no copy in nvme or remote is known to be bad")
                      : absl::StrCat(Count(whole, "copy", "copies"), " mended, ", bad,
                                     bad == 1 ? " is" : " are", " bad still"),
                  mended.not_told == 0
                      ? ""
                      : absl::StrCat(" (", mended.not_told,
                                     mended.not_told == 1 ? " of them is" : " of them are",
                                     " not named here: ask for less, by --step, --rank or --tier)"),
                  "\n");
  return out;
}

void AddMended(const Mended& mended, nlohmann::ordered_json& json) {
  nlohmann::ordered_json copies = nlohmann::ordered_json::array();
  for (const v1::BadCopy& copy : mended.copies) {
    nlohmann::ordered_json one = MessageToJson(copy);
    one["state"] = BadStateName(copy.state());
    copies.push_back(std::move(one));
  }
  json["copies"] = std::move(copies);
  json["copies_bad"] = mended.bad();
  json["copies_not_told"] = mended.not_told;
}

ExitCode RunRepair(const Context& context, const RepairArguments& arguments) {
  const auto mend = [&](AdminClient& client, const std::string& job,
                        uint64_t /*bad_before*/) -> absl::StatusOr<JobDone> {
    v1::RepairRequest request;
    request.set_job(job);
    request.set_step(arguments.step.value_or(0));
    request.set_attempt(arguments.attempt);
    request.set_all_steps(!arguments.step.has_value());
    request.set_tier(arguments.tier);
    if (arguments.rank) {
      request.set_rank(*arguments.rank);
    }
    HF_ASSIGN_OR_RETURN(const Mended mended, MendCopies(context, client, request));
    if (arguments.rank && !arguments.job.empty() && mended.copies.empty() && mended.bad() == 0) {
      HF_RETURN_IF_ERROR(CheckRank(client, job, *arguments.rank));
    }
    JobDone done{.bad = mended.bad(), .interrupted = mended.interrupted};
    if (context.json) {
      done.json = {{"job", job}};
      AddMended(mended, done.json);
    } else {
      *context.out << RenderMended(job, mended);
    }
    return done;
  };
  return ForEachJob(context, "repair", arguments.job, mend);
}

}  // namespace holdfast
