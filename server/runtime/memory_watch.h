// Notices when somebody else takes files out of memory.dir (a cleaner of /dev/shm, rm -rf, a user's
// logout with RemoveIPC): else the status would promise what is gone.
//
//   HF_ASSIGN_OR_RETURN(watch, MemoryWatch::Start(*reactor, dir, {.image_gone = …, …}));
//
// Owner: the Daemon; callbacks on the reactor's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/unique_fd.h"
#include "server/runtime/reactor.h"

namespace holdfast {

class MemoryWatch {
 public:
  struct Callbacks {
    // The image of that slot is not there. (Also after the daemon's own deletions: the core knows
    // those.)
    std::function<void(SlotId)> image_gone;
    // The directory, or the lock in it, is not there: another daemon could come.
    std::function<void(const std::string& what)> lost;
    // Whose images should be there: asked when the kernel has left out events.
    std::function<std::vector<SlotId>()> slots;
  };

  static absl::StatusOr<std::unique_ptr<MemoryWatch>> Start(Reactor& reactor,
                                                            const std::string& directory,
                                                            Callbacks callbacks);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

 private:
  MemoryWatch(Reactor& reactor, std::string directory, Callbacks callbacks, UniqueFd inotify);
  void Read();
  void LookAtAll();
  bool IsGone(const std::string& path) const;

  Reactor& reactor_;
  const std::string directory_;
  const Callbacks callbacks_;
  const UniqueFd inotify_;
};

}  // namespace holdfast
