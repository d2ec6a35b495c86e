#include "client-lib/src/element_windows.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/digest.h"

namespace holdfast::client {
namespace {

Status CheckRange(const std::vector<SavedItem>& items, const ElementRange& range) {
  if (range.item >= items.size()) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("there is no item ", range.item, " of ", items.size()));
  }
  const SavedItem& item = items[range.item];
  if (!item.problem.empty()) {
    return Status(Code::kInvalidArgument, item.problem);
  }
  if (range.first > item.elements || range.count > item.elements - range.first) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("'", item.name, "' has ", item.elements, " elements, wanted are ",
                               range.count, " from ", range.first, " on"));
  }
  return Status();
}

// How many of the range's elements go into a window that has room for `room` bytes.
uint64_t Fitting(const ElementRange& range, uint64_t element_bytes, uint64_t room) {
  if (range.count <= room / element_bytes) {
    return range.count;
  }
  const uint64_t begin = range.first * element_bytes;
  const uint64_t behind = (begin + room) / kDigestBlockBytes * kDigestBlockBytes;
  return behind > begin ? (behind - begin) / element_bytes : 0;
}

}  // namespace

Result<std::vector<ElementWindow>> CutIntoWindows(const std::vector<SavedItem>& items,
                                                  const std::vector<ElementRange>& ranges,
                                                  uint64_t window_bytes) {
  if (window_bytes < kDigestBlockBytes) {
    return Status(Code::kInvalidArgument,
                  absl::StrCat("a window of ", window_bytes, " bytes: at least ", kDigestBlockBytes,
                               " are needed"));
  }
  std::vector<ElementWindow> windows;
  for (ElementRange range : ranges) {
    if (const Status valid = CheckRange(items, range); !valid.ok()) {
      return valid;
    }
    const uint64_t element_bytes = TypeBytes(items[range.item].type);
    while (range.count > 0) {
      if (windows.empty()) {
        windows.emplace_back();
      }
      const uint64_t fitting = Fitting(range, element_bytes, window_bytes - windows.back().bytes);
      if (fitting > 0) {
        windows.back().ranges.push_back({range.item, range.first, fitting});
        windows.back().bytes += fitting * element_bytes;
        range.first += fitting;
        range.count -= fitting;
      }
      if (range.count > 0) {
        windows.emplace_back();
      }
    }
  }
  return windows;
}

}  // namespace holdfast::client
