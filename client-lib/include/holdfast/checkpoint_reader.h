// A committed step as what it is made of, whoever saved which part: whole tensors and objects, to
// be read piece by piece, in whatever order, by one process that takes no part in the job. For
// export, for statistics, for comparing steps; of any size, with the memory that the caller has.
//
//   auto reader = holdfast::OpenCheckpoint({.job = "llama-70b"});     // the newest step
//   std::vector<holdfast::ElementRange> all;
//   for (size_t i = 0; i < (*reader)->items().size(); ++i) {
//     all.push_back({i, 0, (*reader)->items()[i].elements});
//   }
//   auto stream = (*reader)->Stream(all, 64 << 20);
//   for (auto got = (*stream)->Next(buffer); got.ok() && *got > 0; got = (*stream)->Next(buffer)) {
//     Use(buffer, *got);                       // bytes of the ranges, one behind the other
//   }
//
// What ranks have split is put together, what several have alike is read once, from the nearest
// tier that has it. Every block is compared with its digest before it counts; a copy that is
// damaged is passed over for the shard's next one, or for another rank's that has the same.
//
// Threads: a reader is constant and may be used by several; a stream is used by one thread at a
// time, and does not outlive its reader. Nothing throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/state.h"
#include "holdfast/status.h"
#include "holdfast/view.h"

namespace holdfast {

// One tensor, whole, or one object, whose elements are its bytes.
struct SavedItem {
  enum class Kind : uint8_t { kTensor, kJson, kOpaque };

  std::string name;
  Kind kind = Kind::kTensor;
  std::string codec;  // of an opaque object
  Type type = Type::kU8;
  std::vector<uint64_t> shape;  // empty: 0-dim
  uint64_t elements = 0;
  uint64_t bytes = 0;
  // Of an object: which ranks had just this one, ascending. Of a tensor: empty, or the one rank
  // whose own it is: several ranks saved tensors of this name with other values (a state of a
  // random generator), of which there is one item each.
  std::vector<uint32_t> ranks;
  // Not empty: it cannot be read as a whole, and why (elements that no rank saved; parts of several
  // ranks that contradict each other). A stream that wants it is refused.
  std::string problem;
};

// `count` elements from `first` on, as the item's row-major flattening has them.
struct ElementRange {
  size_t item = 0;
  uint64_t first = 0;
  uint64_t count = 0;
};

class ElementStream {
 public:
  virtual ~ElementStream() = default;
  // Puts what comes next at `to`, which has room for window_bytes, and says how many bytes that
  // were; 0: all has come. Whole elements; a range that is larger than a window comes in several.
  // kCorrupt: no copy of something that is wanted is good; the message names it. kNotFound,
  // kUnavailable: it is gone, or lies where nobody can be reached now. kDeadlineExceeded: the
  // time for one window has passed, or it was interrupted. After an error the
  // stream is of no more use.
  virtual Result<uint64_t> Next(void* to) = 0;
};

class CheckpointReader {
 public:
  virtual ~CheckpointReader() = default;
  virtual uint64_t attempt() const = 0;
  virtual uint64_t step() const = 0;
  virtual uint32_t world_size() const = 0;  // that saved it
  // Of all that the step is: of two steps with the same number the content is the same.
  virtual uint64_t content() const = 0;
  // Tensors by name, then objects by name; ranks' own of one name by rank.
  virtual const std::vector<SavedItem>& items() const = 0;
  // kInvalidArgument: a range that is not of its item, an item with a problem, a window that has
  // no room for 1 MiB. Nothing is read yet.
  virtual Result<std::unique_ptr<ElementStream>> Stream(std::vector<ElementRange> ranges,
                                                        uint64_t window_bytes) const = 0;
};

struct CheckpointOptions {
  std::string job;
  std::optional<uint64_t> step;           // none: the newest on the line of descent
  uint64_t attempt = 0;                   // with a step: 0 means on the line of descent
  std::string socket;                     // as in JobOptions
  Milliseconds deadline{30'000};          // until ckptd has said which steps there are
  Milliseconds window_deadline{300'000};  // for all ranks' records, and for each window of a stream
  uint32_t threads = 2;                   // that copy and compare, the caller's among them
  std::function<bool()> interrupted = {};  // as in AttachOptions; asked by the thread that waits
};
Result<std::unique_ptr<CheckpointReader>> OpenCheckpoint(const CheckpointOptions& options);

}  // namespace holdfast
