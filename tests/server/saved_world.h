#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "tests/server/tier_world.h"

namespace holdfast::testing {

// A job of two ranks that has saved steps 1 and 2.
struct SavedWorld : TierWorld {
  SavedWorld() : TierWorld(2) {
    EXPECT_TRUE(Save(1));
    EXPECT_TRUE(Save(2));
  }
  // New processes, so many ranks.
  void Again(uint32_t ranks_now) {
    world = ranks_now;
    Launch();
    Join();
    ASSERT_TRUE(joined) << join_failure.message();
  }
  v1::AttemptState Newest() const {
    const v1::JobState& state = h.states.at(Uuid().ToBytes());
    return state.attempts(state.attempts_size() - 1);
  }
};

}  // namespace holdfast::testing
