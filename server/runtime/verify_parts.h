// A verification over the nodes that have copies: each reads its own, this one sums up. A node that
// does not answer for kSilentMax is not waited for any more, and named at the end.
//
//   VerifyParts parts(context, caller, exact_request, plan);
//   do { progress = parts.Next(200ms); } while (!progress.done());
//   return parts.result();
//
// One thread. What other nodes do for it ends with it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "holdfast/v1/admin.pb.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/verify.h"

namespace holdfast {

class VerifyParts {
 public:
  static constexpr Duration kAskEvery = std::chrono::seconds(1);
  static constexpr Duration kSilentMax = std::chrono::seconds(15);

  // `what` names the step, and its attempt, or all.
  VerifyParts(AdminContext& context, const Caller& caller, const v1::VerifyRequest& what,
              const v1::PlanVerifyReply& plan);
  ~VerifyParts();
  VerifyParts(const VerifyParts&) = delete;
  VerifyParts& operator=(const VerifyParts&) = delete;

  // What is new after at most so long; done: all have ended.
  v1::VerifyProgress Next(Duration at_most);
  // Once done: OK when every copy that the plan knows of was looked at.
  absl::Status result() const;

 private:
  struct Part {
    std::string node;
    std::unique_ptr<VerifyRun> here = nullptr;  // on this node
    v1::VerifyProgress progress{};
    uint32_t bad_known = 0;
    bool begun = false;
    bool done = false;
    absl::Status status{};
    MonotonicTime heard{};
  };
  void Begin(Part& part, const v1::VerifyRequest& what);
  void AskMore(Part& part, v1::VerifyProgress& sum);
  void TakeBad(const Part& part, const v1::BadShard& bad, v1::VerifyProgress& sum) const;
  template <typename Reply, typename Request>
  absl::StatusOr<Reply> Ask(const Request& request);

  AdminContext& context_;
  const Caller caller_;
  const std::string unread_;
  const std::string job_;
  uint64_t run_ = 0;
  std::vector<Part> parts_;
  MonotonicTime asked_{};
  uint32_t checked_ = 0;
};

}  // namespace holdfast
