// Where windows of elements end, and what is refused before anything is read.
#include "client-lib/src/element_windows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace holdfast::client {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

SavedItem Item(Type type, uint64_t elements) {
  SavedItem item;
  item.name = "w";
  item.type = type;
  item.shape = {elements};
  item.elements = elements;
  item.bytes = elements * TypeBytes(type);
  return item;
}

std::vector<std::vector<uint64_t>> Cut(const std::vector<SavedItem>& items,
                                       const std::vector<ElementRange>& ranges, uint64_t window) {
  const Result<std::vector<ElementWindow>> windows = CutIntoWindows(items, ranges, window);
  EXPECT_TRUE(windows.ok()) << windows.status().ToString();
  std::vector<std::vector<uint64_t>> cut;
  for (const ElementWindow& each : *windows) {
    EXPECT_LE(each.bytes, window);
    uint64_t bytes = 0;
    for (const ElementRange& range : each.ranges) {
      cut.push_back(
          {static_cast<uint64_t>(&each - windows->data()), range.item, range.first, range.count});
      EXPECT_GT(range.count, 0U);
      bytes += range.count * TypeBytes(items[range.item].type);
    }
    EXPECT_EQ(each.bytes, bytes);
  }
  return cut;
}

using Ranges = std::vector<std::vector<uint64_t>>;  // window, item, first, count

TEST(Windows, SmallOnesTogether) {
  const std::vector<SavedItem> items = {Item(Type::kU8, 10), Item(Type::kF64, 3),
                                        Item(Type::kU8, 0)};
  EXPECT_EQ(Cut(items, {{0, 0, 10}, {2, 0, 0}, {1, 1, 2}}, kMiB),
            (Ranges{{0, 0, 0, 10}, {0, 1, 1, 2}}));
  EXPECT_EQ(Cut(items, {}, kMiB), Ranges());
}

TEST(Windows, LargeOnesAreCutWhereBlocksEnd) {
  const std::vector<SavedItem> items = {Item(Type::kU8, 100), Item(Type::kF32, kMiB)};  // 4 MiB
  // What fits behind the small one is up to the block's end, and no more.
  EXPECT_EQ(Cut(items, {{0, 0, 100}, {1, 0, kMiB}}, 2 * kMiB + 50),
            (Ranges{{0, 0, 0, 100},
                    {0, 1, 0, kMiB / 4},
                    {1, 1, kMiB / 4, kMiB / 2},
                    {2, 1, 3 * kMiB / 4, kMiB / 4}}));
  // Nothing of it fits behind a window that is nearly full.
  const std::vector<SavedItem> two = {Item(Type::kU8, kMiB - 7), Item(Type::kU8, 2 * kMiB)};
  EXPECT_EQ(Cut(two, {{0, 0, kMiB - 7}, {1, 0, 2 * kMiB}}, kMiB),
            (Ranges{{0, 0, 0, kMiB - 7}, {1, 1, 0, kMiB}, {2, 1, kMiB, kMiB}}));
  // From the middle on: the first window ends with the block that it began in, or a later one.
  EXPECT_EQ(Cut(two, {{1, 1000, 2 * kMiB - 1000}}, kMiB),
            (Ranges{{0, 1, 1000, kMiB - 1000}, {1, 1, kMiB, kMiB}}));
}

TEST(Windows, WhatIsNotThereIsRefused) {
  std::vector<SavedItem> items = {Item(Type::kF32, 4)};
  const auto refused = [&](std::vector<ElementRange> ranges, uint64_t window) {
    const Status status = CutIntoWindows(items, ranges, window).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_THAT(refused({{1, 0, 0}}, kMiB), HasSubstr("no item 1"));
  EXPECT_THAT(refused({{0, 5, 0}}, kMiB), HasSubstr("has 4 elements"));
  EXPECT_THAT(refused({{0, 1, 4}}, kMiB), HasSubstr("wanted are 4 from 1 on"));
  EXPECT_THAT(refused({{0, 1, UINT64_MAX}}, kMiB), HasSubstr("has 4 elements"));
  EXPECT_THAT(refused({{0, 0, 4}}, kMiB - 1), HasSubstr("at least"));
  items[0].problem = "tensor 'w': a hole";
  EXPECT_EQ(refused({{0, 0, 4}}, kMiB), "tensor 'w': a hole");
}

}  // namespace
}  // namespace holdfast::client
