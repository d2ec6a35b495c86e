// The memory that clients have by descriptor (sealed_memory.h: records, memory for parts, network
// flags) is charged to ckptd, and stays for as long as anybody has it open or mapped. This counts
// it for each user who was given it, and refuses what would be more than a user's share.
//
//   HF_ASSIGN_OR_RETURN(auto passed, PassedMemory::Start(*reactor));
//   HF_RETURN_IF_ERROR(passed->Charge(uid, files.descriptors));   // then pass them
//
// The kernel says when nobody has a file any more: for one without a name IN_DELETE_SELF comes with
// the last reference to it. (A lease, F_SETLEASE, does not see descriptors by O_PATH.) Files that
// are no sealed memory are not counted: slots have their budget.
//
// Owner: the Daemon; the reactor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "server/runtime/reactor.h"

namespace holdfast {

class PassedMemory {
 public:
  static constexpr uint64_t kBytesPerUserMax = uint64_t{4} << 30;
  static constexpr uint32_t kFilesPerUserMax = 4096;

  static absl::StatusOr<std::unique_ptr<PassedMemory>> Start(Reactor& reactor);
  ~PassedMemory();
  PassedMemory(const PassedMemory&) = delete;
  PassedMemory& operator=(const PassedMemory&) = delete;

  // ResourceExhausted: the user has so much that these must not be passed. Those that were counted
  // until then count until they are closed.
  absl::Status Charge(uint32_t uid, std::span<const UniqueFd> files);

 private:
  using Watch = int;  // of inotify: one for each file
  struct File {
    uint64_t bytes = 0;
    std::set<uint32_t> users;
  };
  struct User {
    uint64_t bytes = 0;
    uint32_t files = 0;
  };

  PassedMemory(Reactor& reactor, UniqueFd inotify);
  absl::Status ChargeOne(uint32_t uid, int fd, uint64_t bytes);
  void Read();
  void LookAtAll();
  void Forget(Watch watch);

  Reactor& reactor_;
  const UniqueFd inotify_;
  std::unordered_map<Watch, File> files_;
  std::unordered_map<uint32_t, User> users_;  // those who have something
};

}  // namespace holdfast
