// Parts of files in the remote tier that several ranks of the cluster want when they come back on
// another number of ranks: read by one node and kept at hand for a while, so that each byte is read
// there once (docs/protocol.md §20). What is not wanted is not read.
//
//   HF_ASSIGN_OR_RETURN(auto file, parts->Open(key, until, gone));
//   file->image();                                        // its record
//   parts->Want(*file, offset, bytes);                    // begins with all of it
//   HF_RETURN_IF_ERROR(parts->Read(*file, offset, into, until, gone));
//   parts->Trim(now);                                     // now and then
//
// Thread-safe; whoever calls waits, but never in a call to the mount. No digest is looked at: that
// is for whoever wants the bytes, who says Forget when they are wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/events.h"
#include "tiers/image/record.h"

namespace holdfast {

// An open file. As long as somebody has it, it is one and the same for all.
class RemotePartFile {
 public:
  const std::string& record() const { return copy_->record; }
  const RecordAndLayout& image() const { return copy_->image; }
  uint64_t bytes() const { return copy_->bytes; }

 private:
  friend class RemoteParts;
  struct Copy {
    std::string record;
    RecordAndLayout image;
    uint64_t bytes = 0;  // of the file
    // Blocks, perhaps for ever.
    std::function<absl::Status(uint64_t offset, std::span<std::byte> into)> read;
  };

  uint64_t number_ = 0;
  // The rest is guarded by the RemoteParts' mutex; the copy is there before anybody else sees it.
  std::shared_ptr<const Copy> copy_;
  bool opening_ = true;
  absl::Status failed_;  // why it could not be opened
  MonotonicTime used_{};
};

class RemoteParts : public std::enable_shared_from_this<RemoteParts> {
 public:
  using Copy = RemotePartFile::Copy;
  using Gone = std::function<bool()>;
  // False: it is too late for it, the daemon stops.
  using Work = std::function<void(bool may)>;
  struct Options {
    // Has it done on a thread that may hang. Exactly once.
    std::function<void(Work)> run;
    // Called there.
    std::function<absl::StatusOr<std::shared_ptr<const Copy>>(const CopyKey&, bool whole)> open;
    uint64_t bytes_max = uint64_t{1} << 30;  // kept at hand
  };
  static constexpr uint64_t kPageBytes = uint64_t{64} << 10;
  static constexpr uint64_t kReadBytesMax = uint64_t{4} << 20;  // at a time
  static constexpr Duration kLinger = std::chrono::seconds(30);
  static constexpr size_t kFilesMax = 256;  // beyond those that somebody has

  explicit RemoteParts(Options options) : options_(std::move(options)) {}

  // `whole`: put together with what the file leaves out; else the file alone. DeadlineExceeded: not
  // by then; asked again it goes on. Else as `open` says; Cancelled: `gone`.
  absl::StatusOr<std::shared_ptr<RemotePartFile>> Open(const CopyKey& key, bool whole,
                                                       MonotonicTime until, const Gone& gone)
      EXCLUDES(mutex_);
  void Want(const std::shared_ptr<RemotePartFile>& file, uint64_t offset, uint64_t bytes)
      EXCLUDES(mutex_);
  absl::Status Read(const std::shared_ptr<RemotePartFile>& file, uint64_t offset,
                    std::span<std::byte> into, MonotonicTime until, const Gone& gone)
      EXCLUDES(mutex_);
  // They are read anew.
  void Forget(const RemotePartFile& file, uint64_t offset, uint64_t bytes) EXCLUDES(mutex_);
  // What nobody has used for kLinger is let go of.
  void Trim(MonotonicTime now) EXCLUDES(mutex_);
  size_t files() const EXCLUDES(mutex_);  // that are open
  uint64_t bytes() const EXCLUDES(mutex_);
  uint64_t bytes_read() const EXCLUDES(mutex_);  // from the tier, ever

 private:
  using PageId = std::pair<uint64_t, uint64_t>;  // number of the file, index in it
  using Page = std::shared_ptr<const std::string>;
  struct Kept {
    Page page;            // null: it is being read
    absl::Status failed;  // or could not be: the next who wants it tries again
    std::list<PageId>::iterator turn;
  };
  struct Run {
    uint64_t first = 0;
    uint64_t pages = 0;
  };

  void Begin(const CopyKey& key, bool whole, const std::shared_ptr<RemotePartFile>& file);
  std::vector<Run> Claim(const RemotePartFile& file, uint64_t offset, uint64_t bytes)
      REQUIRES(mutex_);
  void Start(const std::shared_ptr<RemotePartFile>& file, const std::vector<Run>& runs);
  void ReadRun(RemotePartFile& file, const Run& run, bool may) EXCLUDES(mutex_);
  absl::StatusOr<Page> Await(const std::shared_ptr<RemotePartFile>& file, uint64_t index,
                             MonotonicTime until, const Gone& gone) EXCLUDES(mutex_);
  // An error: it is over.
  absl::Status WaitABit(MonotonicTime until, const Gone& gone) REQUIRES(mutex_);
  void MakeRoom() REQUIRES(mutex_);
  using Unused = std::vector<std::shared_ptr<RemotePartFile>>;
  void DropUnused(MonotonicTime now, Duration linger, Unused& unused) REQUIRES(mutex_);
  void Drop(const PageId& id) REQUIRES(mutex_);

  const Options options_;
  mutable Mutex mutex_;
  CondVar changed_;
  using FileId = std::pair<ShardId, bool>;  // the other: whether it is put together
  std::map<FileId, std::shared_ptr<RemotePartFile>> files_ GUARDED_BY(mutex_);
  uint64_t next_number_ GUARDED_BY(mutex_) = 1;
  std::map<PageId, Kept> pages_ GUARDED_BY(mutex_);
  std::list<PageId> turns_ GUARDED_BY(mutex_);  // of those that are there, the longest unused first
  uint64_t bytes_ GUARDED_BY(mutex_) = 0;
  uint64_t bytes_read_ GUARDED_BY(mutex_) = 0;
};

}  // namespace holdfast
