// Attach and ListCheckpoints: what there is of a job, and one rank's shard of it, for whoever takes
// no part in it.
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/shard_view.h"
#include "client-lib/src/socket.h"
#include "holdfast/view.h"

namespace holdfast {
namespace client {
namespace {

Result<std::unique_ptr<View>> AttachShard(const AttachOptions& options) {
  HF_TRY(FromAbslStatus(CheckJobName(options.job), "attach"));
  Interrupt interrupt(options.interrupted);
  WantedView wanted;
  wanted.socket = SocketPath(options.socket);
  wire::Attach& attach = wanted.attach;
  attach.job = options.job;
  attach.rank = options.rank;
  attach.choice = options.newest ? wire::Choice::kNewest : wire::Choice::kStep;
  attach.step = options.newest ? 0 : options.step;
  attach.attempt = options.newest ? 0 : options.attempt;
  attach.any_tier = true;
  attach.parts = true;
  attach.without = options.without;
  wanted.patience = options.deadline;
  wanted.interrupted = options.interrupted;
  Result<std::unique_ptr<View>> view =
      OpenView(std::move(wanted), Deadline::In(options.deadline).Or(interrupt));
  return view.ok() ? std::move(view)
                   : WithContext(view.status(), absl::StrCat("attach job '", options.job, "' rank ",
                                                             options.rank));
}

Result<std::vector<CheckpointInfo>> List(const ListOptions& options) {
  HF_TRY(FromAbslStatus(CheckJobName(options.job), "list"));
  Interrupt interrupt(options.interrupted);
  const Deadline deadline = Deadline::In(options.deadline).Or(interrupt);
  const std::string context = absl::StrCat("list the checkpoints of job '", options.job, "'");
  const Result<std::shared_ptr<Connection>> connection =
      Connection::Dial(SocketPath(options.socket), deadline);
  HF_TRY(WithContext(connection.status(), context));
  std::vector<CheckpointInfo> all;
  wire::List list;
  list.job = options.job;
  for (bool more = true; more;) {
    list.deadline_ms = deadline.DaemonMillis();
    Result<Answer<wire::Listing>> page = (*connection)->Call<wire::Listing>(list, deadline);
    if (page.status().code() == Code::kUnavailable && !(*connection)->alive()) {
      return WithContext(
          Status(page.status().code(),
                 absl::StrCat(page.status().message(),
                              "; is it older than this library? then it cannot list")),
          context);
    }
    HF_TRY(WithContext(page.status(), context));
    more = page->message.more;
    for (wire::ListedCheckpoint& listed : page->message.checkpoints) {
      const CheckpointId id{listed.attempt, listed.step};
      if (list.before && !(id < CheckpointId{list.before_attempt, list.before_step})) {
        return Status(
            Code::kInternal,
            absl::StrCat(context, ": ckptd lists attempt ", id.attempt, " step ", id.step,
                         " after attempt ", list.before_attempt, " step ", list.before_step));
      }
      list.before = true;
      list.before_attempt = id.attempt;
      list.before_step = id.step;
      CheckpointInfo& info = all.emplace_back();
      info.attempt = listed.attempt;
      info.step = listed.step;
      info.world_size = listed.world_size;
      info.on_line = listed.on_line;
      info.tiers = std::move(listed.tiers);
      info.bytes = listed.bytes;
      info.saved_unix_ms = listed.unix_ms;
    }
    if (more && page->message.checkpoints.empty()) {
      return Status(Code::kInternal,
                    absl::StrCat(context, ": ckptd sent an empty page, and says that more come"));
    }
  }
  return all;
}

}  // namespace
}  // namespace client

Result<std::unique_ptr<View>> Attach(const AttachOptions& options) {
  return client::NoThrow(
      [&]() -> Result<std::unique_ptr<View>> { return client::AttachShard(options); });
}

Result<std::vector<CheckpointInfo>> ListCheckpoints(const ListOptions& options) {
  return client::NoThrow(
      [&]() -> Result<std::vector<CheckpointInfo>> { return client::List(options); });
}

}  // namespace holdfast
