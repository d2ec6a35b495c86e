// Copies in the remote tier that leave slices out, since other ranks' files have them: what a
// flush leaves out, and what a reader puts together.
//
// SliceOwners: thread-safe. The functions: any thread.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "recovery/ownership.h"
#include "server/events.h"
#include "tiers/durable/copy_store.h"
#include "tiers/image/kept.h"
#include "tiers/transfer/transfer_control.h"

namespace holdfast {

// Which rank of a group keeps which slice: computed when a group or a layout is new, and remembered
// for the next steps. The ranks of a node are of several groups where models are split.
class SliceOwners {
 public:
  // Of the tensor slices of the image, in order. `ranks` ascend, and all have these tensors.
  absl::StatusOr<std::vector<Rank>> Of(const RecordAndLayout& image, const std::vector<Rank>& ranks)
      EXCLUDES(mutex_);

 private:
  struct Known {
    LayoutHash tensors{};
    std::vector<Rank> ranks;
    std::shared_ptr<const Ownership> ownership;
    size_t slices = 0;
  };
  std::shared_ptr<const Ownership> Find(const LayoutHash& tensors, const std::vector<Rank>& ranks)
      REQUIRES(mutex_);

  Mutex mutex_;
  std::list<Known> known_ GUARDED_BY(mutex_);  // the one that was used last comes first
};

// The file that this flush writes; none: the whole image. Anything that does not fit together is a
// reason to write the whole image, never to fail.
std::optional<PartImage> PartOf(SliceOwners& owners, const FlushShard& action,
                                const RecordAndLayout& image);

// Of the owners' files of one image so many are open at a time, and two more for each thread that
// reads (the one that it reads, and the one that it closes); which of the others is read is opened
// again.
inline constexpr size_t kOwnersOpenMax = 64;

class OwnersFiles;

// A shard whose file leaves slices out, put together: what is read.
struct WholeCopy {
  std::shared_ptr<File> file;  // of the whole image
  std::function<std::string(uint64_t)> path_at;
  std::shared_ptr<OwnersFiles> owners;
  // What `file` is made of: where each part lies, and in which of the files; the first one is the
  // rank's own, and then one for each of `ranks`.
  std::shared_ptr<const ImageMap> map;
  std::vector<std::shared_ptr<File>> files;
  std::vector<Rank> ranks;
  uint32_t own_piece_unit = 1;  // of the rank's own file (BufferedCopySpec::piece_unit)
  // After the last byte, of the owners' files that are still open. (What was read of the others was
  // compared with its digests.)
  absl::Status Confirm();
  // Of those: one that was put in the place of what is read by now; "": none.
  std::string OwnerWrittenAnew();
};
// `image` is of `reading`. The status is of the first file that is gone, bad, or does not have what
// it should, and names it. Of an owner's record nothing is kept. `control` hears of each.
// IsOwnersFault: of whether it is another rank's file that cannot be read; the rank's own says
// nothing wrong then.
bool IsOwnersFault(const absl::Status& opening);
absl::StatusOr<WholeCopy> OpenWhole(const std::shared_ptr<CopyStore>& store, const CopyKey& key,
                                    std::shared_ptr<CopyStore::Reading> reading,
                                    const RecordAndLayout& image, TransferControl& control);

}  // namespace holdfast
