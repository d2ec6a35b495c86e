// A sealed copy in this process: the image mapped read-only, the record read and decoded, both
// checked against what the daemon said that they are.
//
//   HF_TRY_ASSIGN(std::unique_ptr<SealedShard> shard, SealedShard::Open(source, descriptors,
//   expected)); Read(shard->image() + shard->layout().slices[i].image_offset); if
//   (shard->faulted()) …                                       // cut short meanwhile: what was
//   read is zeros
//
// A copy in the remote tier may leave slices out that other ranks' files have: then those files are
// wanted, too (Owners), each opened likewise and handed over by Complete.
//
// A shard that lies on another node has no image here, but memory that parts of it are brought into
// (in_parts): what points into its image is of addresses where nothing lies, and tells only which
// bytes are meant.
//
// Image bytes are unverified until someone compares digests. Not thread-safe; the daemon holds the
// copy until ReleaseRead, which is the owner's to send.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fault_guard.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/fork_guard.h"
#include "client-lib/src/slot_mapping.h"
#include "client-lib/src/wire.h"
#include "tiers/image/kept.h"

namespace holdfast::client {

// Whether what went wrong while a copy was loaded lies in the copy: damaged, cut short, not what it
// should be, unreadable whoever tries, or of a format that this library does not know. Then another
// copy, or an older step, is the way out. Everything else (no memory, no address space) is this
// process's own trouble and says nothing about the copy.
bool CopyIsBad(const Status& load);

class SealedShard {
 public:
  ~SealedShard();
  SealedShard(const SealedShard&) = delete;
  SealedShard& operator=(const SealedShard&) = delete;

  // What the caller asked for; the record must say the same.
  struct Expected {
    std::string job;
    uint32_t rank = 0;
  };
  // kCorrupt: the copy is damaged or not what it should be. kUnreadable: of a newer format. Another
  // code: this process lacks something.
  // `mine`: a mapping that this process has of that slot already, to be read through; it must
  // outlive the shard. Null: a new one.
  static Result<std::unique_ptr<SealedShard>> Open(const wire::Source& source,
                                                   const std::vector<ForkClosedFd>& descriptors,
                                                   const Expected& expected,
                                                   const SlotMapping* mine);

  const ShardRecord& record() const { return sealed_.record; }
  const Layout& layout() const { return sealed_.layout; }
  bool populated() const { return populated_; }  // no page of it will fault
  bool faulted() const;
  bool in_parts() const { return reserved_bytes_ != 0; }
  const std::byte* image() const { return image_; }
  std::span<const std::byte> parts_memory() const { return {mapping_->data(), mapping_->bytes()}; }

  // The ranks whose files have what this one leaves out, ascending; none: it has all.
  std::vector<Rank> Owners() const { return OwnersOf(sealed_.record); }
  // The copy of the next of them, of the same checkpoint, as Open takes it: its file stays mapped,
  // of its record nothing is kept. kCorrupt, naming the rank: it does not have what it should.
  // Until all were added, and after an error, no slice is to be had that this file leaves out.
  Status AddOwner(const wire::Source& source, const std::vector<ForkClosedFd>& descriptors,
                  const Expected& expected);

  // Whether slice i lies in this very file. Those that do are to be had without the owners.
  bool Has(size_t i) const { return places_[i].has_value(); }
  // Where slice i lies, in whichever file has it.
  const std::byte* SliceBytes(size_t i) const;

  // Slice i, to be copied to `to` or only checked.
  CopyOutRange SliceRange(size_t i, void* to) const;
  // A run of its bytes, whole blocks, to be checked only; where they lie in the slice is noted.
  CopyOutRange SlicePart(size_t i, uint64_t begin, uint64_t bytes) const;
  // The header, which is checked as slices are, and compared with nothing else.
  CopyOutRange HeaderRange() const;
  // That of the whole image, of a file that leaves slices out: made anew when all owners had been
  // added. Unverified.
  const std::string& WholeHeader() const { return whole_.header; }
  // kCorrupt, naming the slice (none: the header), where, and both digests.
  Status MismatchError(const CopyMismatch& mismatch, std::optional<size_t> slice) const;

 private:
  SealedShard() = default;
  const ImageRun& RunOf(size_t i) const;
  Status ReserveImage(uint64_t bytes);

  struct Owner {
    Rank rank = 0;
    std::unique_ptr<SlotMapping> mapping;
    std::unique_ptr<FaultGuard> guard;
  };

  std::unique_ptr<SlotMapping> mapping_;  // unless it is somebody else's
  std::byte* image_ = nullptr;
  uint64_t reserved_bytes_ = 0;  // addresses alone, in parts
  ForkOwner fork_owner_;
  bool populated_ = false;
  std::unique_ptr<FaultGuard> guard_;
  RecordAndLayout sealed_;
  std::vector<DigestedRange> ranges_;
  std::vector<std::optional<uint64_t>> places_;  // of slices, in this file
  std::vector<Owner> owners_;
  std::optional<WholeImage> together_;  // while owners are added
  ImageMap whole_;                      // of an image that leaves slices out: which file has what
};

}  // namespace holdfast::client
