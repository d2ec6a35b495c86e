// The gRPC service Admin for the callers of one uid: translates calls into questions to the core,
// and reads copies for InspectShard and Verify. Who may see what is the core's decision; this only
// tells it who asks.
//
//   auto service = MakeAdminService(context, caller);
//   builder.RegisterService(service.get());
//
// Calls come on gRPC's threads. The context outlives the service.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "holdfast/v1/admin.pb.h"
#include "server/runtime/admin_gateway.h"
#include "tiers/memory/slot_store.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace holdfast {

class EventJournal;
class FabricPort;
class Pacer;
class PullClient;

// Verify reads whole checkpoints: more of them at once would only be slower each. One user's are
// not to keep others from theirs, so each has one.
class VerifySeats {
 public:
  static constexpr size_t kMax = 4;  // of all users

  absl::Status Take(uint32_t uid) EXCLUDES(mutex_);
  void Leave(uint32_t uid) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::set<uint32_t> taken_ GUARDED_BY(mutex_);
};

// Whoever follows events has a thread of gRPC's for as long.
class FollowerSeats {
 public:
  static constexpr size_t kMax = 32;  // of all users
  static constexpr size_t kPerUidMax = 4;

  absl::Status Take(uint32_t uid) EXCLUDES(mutex_);
  void Leave(uint32_t uid) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::multiset<uint32_t> taken_ GUARDED_BY(mutex_);
};

struct AdminContext {
  std::string node_name;
  AdminGateway* gateway = nullptr;
  EventJournal* events = nullptr;
  // Any thread: somebody has changed something, or was refused. `job`: empty: the daemon's own.
  std::function<void(uint32_t uid, const std::string& job, const std::string& what, bool done)>
      audit = [](uint32_t, const std::string&, const std::string&, bool) {};
  SlotStore* store = nullptr;
  std::atomic<Duration> request_timeout{};
  std::function<void(v1::DaemonStatus&)>
      fill_daemon_status;  // any thread: what the core does not know
  // Any thread: as VerifyRun::Callbacks::durable.
  std::function<absl::StatusOr<std::string>(
      const ReadableShard&, const std::function<bool(uint64_t)>&, std::shared_ptr<Pacer>)>
      verify_durable;
  // Any thread: DurableTiers::WriteJobFiles.
  std::function<absl::StatusOr<std::vector<std::string>>(const v1::RebuildRequest::Owner&,
                                                         const std::function<bool()>& gone)>
      write_job_files;
  // Any thread: the remote directory is this cluster's, instead of that one's.
  std::function<absl::Status(const std::string& from, const std::function<bool()>& gone)>
      adopt_remote;
  // Any thread: a copy was read whole and judged.
  std::function<void(const ReadableShard&)> verified = [](const ReadableShard&) {};
  // Any thread: DurableTiers::ForgetDrive.
  std::function<absl::StatusOr<std::string>(const std::string& id)> forget_drive;
  VerifySeats verify_seats;
  FollowerSeats follower_seats;
  // What `ckptctl fabric` shows and measures with; set before anybody asks.
  FabricPort* fabric = nullptr;  // null: there is none, and no_fabric says why
  std::string no_fabric;
  PullClient* pulls = nullptr;  // null: this node is alone
  std::atomic<uint64_t> fabric_bandwidth_bytes_per_s_max{0};
  std::atomic<bool> measuring{false};
};

// The daemon's operators: they see all; those on its node get in however many others there are.
bool IsOperator(uint32_t uid);

// `who`: the caller, as the audit calls it.
std::unique_ptr<grpc::Service> MakeAdminService(AdminContext& context, const Caller& caller,
                                                const std::string& who);

}  // namespace holdfast
