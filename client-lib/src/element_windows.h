// Ranges of elements cut into windows of bounded size. Pure.
//
//   HF_TRY_ASSIGN(std::vector<ElementWindow> windows, CutIntoWindows(items, ranges, 64 << 20));
//
// Windows end, where that is possible, where digest blocks of a tensor that was saved whole do: a
// block that two windows share is read twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "holdfast/checkpoint_reader.h"

namespace holdfast::client {

struct ElementWindow {
  std::vector<ElementRange> ranges;  // none is empty
  uint64_t bytes = 0;
};

// kInvalidArgument: as CheckpointReader::Stream says.
Result<std::vector<ElementWindow>> CutIntoWindows(const std::vector<SavedItem>& items,
                                                  const std::vector<ElementRange>& ranges,
                                                  uint64_t window_bytes);

}  // namespace holdfast::client
