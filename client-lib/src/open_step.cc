#include "client-lib/src/open_step.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client-lib/src/connection.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/socket.h"

namespace holdfast::client {
namespace {

std::string NameOf(const CheckpointOptions& options, const CheckpointInfo& info) {
  return absl::StrCat("job '", options.job, "' step ", info.step, " of attempt ", info.attempt);
}

Result<std::shared_ptr<const OpenStep>> Open(const CheckpointOptions& options,
                                             const CheckpointInfo& info) {
  Interrupt interrupt(options.interrupted);
  const Deadline deadline = Deadline::In(options.window_deadline).Or(interrupt);
  const std::string socket = SocketPath(options.socket);
  HF_TRY_ASSIGN(std::shared_ptr<Connection> connection, Connection::Dial(socket, deadline));
  HF_TRY_ASSIGN(StepShards shards,
                StepShards::Read({socket, std::move(connection), options.interrupted}, options.job,
                                 {info.attempt, info.step}, info.world_size, deadline));
  HF_TRY_ASSIGN(SavedItems items, SavedItems::Of(shards, deadline));
  return std::make_shared<const OpenStep>(
      OpenStep{options, info, std::move(shards), std::move(items)});
}

}  // namespace

Result<std::shared_ptr<const OpenStep>> OpenStep::Of(const CheckpointOptions& options,
                                                     const CheckpointInfo& info) {
  Result<std::shared_ptr<const OpenStep>> open = Open(options, info);
  HF_TRY(WithContext(open.status(), NameOf(options, info)));
  return open;
}

std::string OpenStep::Name() const {
  return NameOf(options, info);
}

Result<std::vector<Object>> OpenStep::ReadObjects(const std::vector<size_t>& which) const {
  Interrupt interrupt(options.interrupted);
  const std::unique_ptr<CopyEngine> engine = MakeHostCopyEngine(1);
  std::vector<size_t> objects;
  objects.reserve(which.size());
  for (const size_t item : which) {
    objects.push_back(items.object(item));
  }
  Result<std::vector<SavedObject>> saved =
      shards.ReadObjects(objects, *engine, Deadline::In(options.window_deadline).Or(interrupt));
  HF_TRY(WithContext(saved.status(), Name()));
  std::vector<Object> read;
  read.reserve(saved->size());
  for (SavedObject& each : *saved) {
    read.push_back(std::move(each.object));
  }
  return read;
}

}  // namespace holdfast::client
