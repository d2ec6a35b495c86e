#include "base/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "base/unique_fd.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricsTest, TextShowsWhatWasCounted) {
  Metrics metrics;
  metrics.AddCounter("holdfast_saves_total", "Saves by outcome.", {{"outcome", "sealed"}}).Add(2);
  metrics.AddCounter("holdfast_saves_total", "Saves by outcome.", {{"outcome", "shed"}}).Add(1);
  metrics.AddGauge("holdfast_slots", "Slots.").Set(7);
  metrics.AddHistogram("holdfast_seal_seconds", "Time to seal.", {0.1, 1}).Observe(0.5);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("# HELP holdfast_saves_total Saves by outcome.\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_saves_total{outcome=\"sealed\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_saves_total{outcome=\"shed\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_slots 7\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_seal_seconds_bucket{le=\"0.1\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("holdfast_seal_seconds_bucket{le=\"1\"} 1\n"));
}

TEST(MetricsTest, SameNameAndLabelsAreTheSameObject) {
  Metrics metrics;
  EXPECT_EQ(&metrics.AddCounter("a_total", "A.", {{"x", "1"}}),
            &metrics.AddCounter("a_total", "A.", {{"x", "1"}}));
  EXPECT_NE(&metrics.AddCounter("a_total", "A.", {{"x", "1"}}),
            &metrics.AddCounter("a_total", "A.", {{"x", "2"}}));
  EXPECT_EQ(&metrics.AddGauge("b", "B."), &metrics.AddGauge("b", "B."));
  EXPECT_EQ(&metrics.AddHistogram("c", "C.", {1}), &metrics.AddHistogram("c", "C.", {1}));
}

TEST(MetricsTest, RemovedGaugesVanishAndMayComeBack) {
  Metrics metrics;
  metrics.AddGauge("holdfast_step", "Step.", {{"job", "a"}}).Set(1);
  metrics.AddGauge("holdfast_step", "Step.", {{"job", "b"}}).Set(2);
  metrics.RemoveGauge("holdfast_step", {{"job", "a"}});
  metrics.RemoveGauge("holdfast_step", {{"job", "never there"}});
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("job=\"a\"")));
  EXPECT_THAT(metrics.Text(), HasSubstr("holdfast_step{job=\"b\"} 2\n"));
  metrics.AddGauge("holdfast_step", "Step.", {{"job", "a"}}).Set(3);
  EXPECT_THAT(metrics.Text(), HasSubstr("holdfast_step{job=\"a\"} 3\n"));
}

TEST(MetricsTest, ThreadsCountTogether) {
  Metrics metrics;
  const auto count = [&metrics] {
    for (int i = 0; i < 1000; ++i) {
      metrics.AddCounter("n_total", "N.").Add(1);
    }
  };
  std::thread other(count);
  count();
  other.join();
  EXPECT_THAT(metrics.Text(), HasSubstr("n_total 2000\n"));
}

}  // namespace
}  // namespace holdfast
