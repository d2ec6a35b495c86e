#include "tiers/transfer/uring_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <deque>

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(RequestTagsTest, AnAnswerToAnEarlierSubmissionIsNone) {
  RequestTags tags(4);
  const uint64_t first = tags.Issue(2);
  EXPECT_EQ(tags.PlaceOf(first), 2u);
  // Its rest is submitted anew: what still comes for the first part is nobody's.
  const uint64_t rest = tags.Issue(2);
  EXPECT_NE(rest, first);
  EXPECT_EQ(tags.PlaceOf(first), std::nullopt);
  EXPECT_EQ(tags.PlaceOf(rest), 2u);
  // The request ended; then another has its place.
  tags.Retire(2);
  EXPECT_EQ(tags.PlaceOf(rest), std::nullopt);
  const uint64_t next = tags.Issue(2);
  EXPECT_EQ(tags.PlaceOf(rest), std::nullopt);
  EXPECT_EQ(tags.PlaceOf(first), std::nullopt);
  EXPECT_EQ(tags.PlaceOf(next), 2u);
}

TEST(RequestTagsTest, PlacesAreApart) {
  RequestTags tags(2);
  const uint64_t first = tags.Issue(0);
  const uint64_t second = tags.Issue(1);
  tags.Retire(0);
  EXPECT_EQ(tags.PlaceOf(first), std::nullopt);
  EXPECT_EQ(tags.PlaceOf(second), 1u);
}

TEST(RequestTagsTest, WhatNobodyWaitsForIsNobodys) {
  RequestTags tags(2);
  EXPECT_EQ(tags.PlaceOf(RequestTags::kNobody), std::nullopt);
  EXPECT_EQ(tags.PlaceOf(2), std::nullopt) << "a place that there is not";
  EXPECT_EQ(tags.PlaceOf(uint64_t{7} << 32), std::nullopt) << "a submission that there was not";
}

// A queue, and what the kernel answers: how many entries it takes, or minus an errno. It gives the
// last answer again and again.
struct FakeQueue {
  unsigned queued;
  std::deque<int> answers;
  int calls = 0;

  int Submit() {
    ++calls;
    const int answer = answers.front();
    if (answers.size() > 1) {
      answers.pop_front();
    }
    queued -= answer > 0 ? static_cast<unsigned>(answer) : 0;
    return answer;
  }
  int SubmitAll() {
    return SubmitQueued([this] { return Submit(); }, [this] { return queued; });
  }
};

TEST(SubmitQueuedTest, WhatTheKernelLeftIsSubmittedAgain) {
  for (const std::deque<int>& answers :
       {std::deque<int>{2}, {1, 1}, {0, 2}, {-EAGAIN, 1, -EINTR, 1}, {-EBUSY, 1, 0, 1}}) {
    FakeQueue queue{2, answers};
    EXPECT_EQ(queue.SubmitAll(), 0) << testing::PrintToString(answers);
    EXPECT_EQ(queue.queued, 0u) << testing::PrintToString(answers);
  }
  FakeQueue empty{0, {-EIO}};
  EXPECT_EQ(empty.SubmitAll(), 0);
  EXPECT_EQ(empty.calls, 0);
}

TEST(SubmitQueuedTest, ARefusalIsTheLastEntrys) {
  FakeQueue refused{2, {1, -EBADF}};
  EXPECT_EQ(refused.SubmitAll(), EBADF);
  EXPECT_EQ(refused.queued, 1u);
  EXPECT_EQ(refused.calls, 2);
  for (const int answer : {-EAGAIN, 0}) {  // for ever
    FakeQueue stuck{2, {1, answer}};
    EXPECT_EQ(stuck.SubmitAll(), EAGAIN) << answer;
    EXPECT_EQ(stuck.queued, 1u) << answer;
  }
}

TEST(RegisteredSlicesTest, NoneIsLargerThanTheKernelTakes) {
  EXPECT_THAT(RegisteredSlices(0), IsEmpty());
  EXPECT_THAT(RegisteredSlices(4096), ElementsAre(MemorySlice{0, 4096}));
  EXPECT_THAT(RegisteredSlices(kGiB), ElementsAre(MemorySlice{0, kGiB}));
  EXPECT_THAT(
      RegisteredSlices(2 * kGiB + 8192),
      ElementsAre(MemorySlice{0, kGiB}, MemorySlice{kGiB, kGiB}, MemorySlice{2 * kGiB, 8192}));
}

}  // namespace
}  // namespace holdfast
