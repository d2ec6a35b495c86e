// One rank's shard of a committed checkpoint as the file that it is: its header, then its slices in
// image order, a window at a time, whatever lies where; for who writes it elsewhere.
//
//   HF_TRY_ASSIGN(auto image, ShardImage::Open(source, {.job = "llama", .checkpoint = id, …}));
//   for (auto got = image->Next(window); got.ok() && *got > 0; got = image->Next(window)) {
//     … the next *got bytes of the file …
//   }
//   … beside it: EncodeRecord(image->record()) …
//
// Every byte is compared with the record's digests before it counts. A copy that is bad, or cannot
// be reached, is passed over for that in the next tier, which goes on at the same byte: its record
// must be the same. A slot is held for as long as a window takes: one that was held for as long as
// a slow disk takes would be missing to the job's next saves. A file is kept open.
//
// Used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "client-lib/src/copy_engine.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/held_shard.h"

namespace holdfast::client {

struct ShardImageOptions {
  std::string job;
  CheckpointId checkpoint;
  Rank rank = 0;
  uint32_t world_size = 0;  // that saved it
  uint32_t threads = 1;     // that copy and compare
  Milliseconds deadline{};  // for each window, opening the shard included
};

class ShardImage {
 public:
  static constexpr uint64_t kWindowBytesMin = uint64_t{1} << 20;

  static Result<std::unique_ptr<ShardImage>> Open(const ShardSource& source,
                                                  const ShardImageOptions& options);

  // The record of the whole image as it lies beside a file: of generation 0, with all its slices.
  const ShardRecord& record() const { return image_.record; }
  // Puts what comes next into the window, which has kWindowBytesMin at least, and says how many
  // bytes that were; 0: all has come. kCorrupt: no copy is good, naming what was found. kNotFound,
  // kUnavailable: it is gone, or lies where nobody can be reached now. After an error the image is
  // of no more use.
  Result<uint64_t> Next(std::span<std::byte> window);
  // What became of copies that were passed over; empty: nothing.
  const std::string& why() const { return why_; }

 private:
  ShardImage(ShardSource source, const ShardImageOptions& options);
  // Behind the last byte that has come: in the header, or in a slice.
  struct Place {
    uint64_t in_header = 0;
    size_t slice = 0;
    uint64_t in_slice = 0;
  };

  Status OpenCopy(Deadline deadline);
  Status CheckCopy(HeldShard& held);
  Result<Place> Read(std::span<std::byte> window, Deadline deadline, uint64_t& bytes);
  Status CopyHeader(std::span<std::byte> to, uint64_t begin, Deadline deadline);

  const ShardSource source_;
  const ShardImageOptions options_;
  Interrupt interrupt_;
  const std::unique_ptr<CopyEngine> engine_;
  std::vector<std::string> without_;
  std::string why_;
  Status bad_;  // of the last copy that was passed over
  bool opened_ = false;
  RecordAndLayout image_;
  std::unique_ptr<HeldShard> held_;
  Place done_;
};

}  // namespace holdfast::client
