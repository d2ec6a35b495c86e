// Whether two slices have the same bytes, where one of them, or both, lie on other nodes: some MiB
// at a time, each block verified.
//
//   SideBySide compared({&first, 3}, {&second, 5}, engine, deadline);
//   compared.Add(0, 4096, 1024);                       // bytes from there on, in each
//   HF_TRY_ASSIGN(const bool same, compared.Finish());
//
// Both may be slices of one shard. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "client-lib/src/copy_engine.h"
#include "client-lib/src/deadline.h"
#include "client-lib/src/held_shard.h"
#include "holdfast/status.h"

namespace holdfast::client {

class SideBySide {
 public:
  struct Side {
    HeldShard* held;
    uint32_t slice;
  };
  SideBySide(const Side& one, const Side& other, CopyEngine& engine, Deadline deadline)
      : one_{one}, other_{other}, engine_(engine), deadline_(deadline) {}

  void Add(uint64_t one, uint64_t other, uint64_t bytes);
  // kCorrupt, kUnavailable: what of them cannot be had.
  Result<bool> Finish();
  // Of which of the two something could not be had; null: of neither.
  const HeldShard* failed() const { return failed_; }

 private:
  struct Run {
    uint64_t one;
    uint64_t other;
    uint64_t bytes;
  };
  // Blocks of one slice, and where they lie now.
  struct Blocks {
    Side side;
    std::vector<uint64_t> wanted = {};
    std::map<uint64_t, const std::byte*> shown = {};

    bool full() const;
    bool Want(uint64_t begin, uint64_t bytes, bool only_look);
    void AddTo(ShardRanges& ranges, ShardSlices& slices) const;
    // Of the block of byte `at`: that byte.
    const std::byte* At(uint64_t at) const;
  };

  void Compare();
  bool Equal(const Run& run) const;
  Status ShowAll();
  // `both`: of one shard, whose memory shows what was brought last.
  Status Show(const std::vector<Blocks*>& both);

  Blocks one_;
  Blocks other_;
  CopyEngine& engine_;
  Deadline deadline_;
  std::vector<Run> runs_;
  Result<bool> same_ = true;
  const HeldShard* failed_ = nullptr;
};

}  // namespace holdfast::client
