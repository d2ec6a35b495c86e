// plan-capacity's options: what each text means, and which are refused.
#include "ckptctl/capacity_arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

using Told = std::vector<std::pair<std::string, std::string>>;

absl::StatusOr<CapacityInput> Read(const Told& told) {
  CapacityArguments arguments;
  for (const auto& [name, text] : told) {
    bool known = false;
    for (const CapacityOption& option : CapacityOptions()) {
      if (option.name == name) {
        known = true;
        HF_RETURN_IF_ERROR(option.set(text, arguments));
      }
    }
    EXPECT_TRUE(known) << name;
  }
  return CompleteCapacity(arguments);
}

// With the options that every plan needs.
absl::StatusOr<CapacityInput> With(Told more) {
  Told told = {{"--params", "1B"}, {"--ranks", "8"}, {"--step-time", "10s"}};
  for (const auto& [name, text] : more) {
    bool replaced = false;
    for (auto& [known, value] : told) {
      if (known == name) {
        value = text;
        replaced = true;
      }
    }
    if (!replaced) {
      told.emplace_back(name, text);
    }
  }
  return Read(told);
}

TEST(CapacityArguments, Sizes) {
  EXPECT_EQ(With({{"--params", "405B"}})->state_bytes, 5'670'000'000'000u);  // × 14
  EXPECT_EQ(With({{"--params", "1.8T"}})->state_bytes, 25'200'000'000'000u);
  EXPECT_EQ(With({{"--params", "350K"}})->state_bytes, 4'900'000u);
  EXPECT_EQ(With({{"--params", "350M"}})->state_bytes, 4'900'000'000u);
  EXPECT_EQ(With({{"--params", "7000000"}})->state_bytes, 98'000'000u);
  EXPECT_EQ(With({{"--profile", "fp32-adam"}})->state_bytes, 12'000'000'000u);
  EXPECT_EQ(With({{"--bytes-per-param", "10.5"}})->state_bytes, 10'500'000'000u);
  // Rounded up: a third parameter's half byte takes a byte.
  EXPECT_EQ(With({{"--params", "3"}, {"--bytes-per-param", "2.5"}})->state_bytes, 8u);
  EXPECT_EQ(
      Read({{"--state-bytes", "1.5TB"}, {"--ranks", "8"}, {"--step-time", "10s"}})->state_bytes,
      1'500'000'000'000u);
  EXPECT_EQ(With({{"--memory", "1TiB"}})->memory_bytes, uint64_t{1} << 40);
}

TEST(CapacityArguments, CadencesAreStepsOrTimes) {
  auto input = With({{"--nvme-every-ms", "4h"}, {"--remote-every-steps", "10"}});
  EXPECT_EQ(input->nvme.steps, 0u);
  EXPECT_DOUBLE_EQ(input->nvme.seconds, 14'400);
  EXPECT_EQ(input->remote.steps, 10u);
  EXPECT_DOUBLE_EQ(input->remote.seconds, 0);
  EXPECT_TRUE(input->nvme.on && input->remote.on);
  input = With({{"--nvme-every-steps", "10"}, {"--remote-every-ms", "15min"}});
  EXPECT_EQ(input->nvme.steps, 10u);
  EXPECT_EQ(input->remote.steps, 0u);
  EXPECT_DOUBLE_EQ(input->remote.seconds, 900);
  EXPECT_FALSE(With({{"--nvme-every-steps", "0"}})->nvme.on);
  EXPECT_FALSE(With({{"--remote-every-ms", "0"}})->remote.on);
  for (const std::string tier : {"--nvme", "--remote"}) {
    const Told both = {{tier + "-every-ms", "10min"}, {tier + "-every-steps", "0"}};
    EXPECT_THAT(With(both).status().message(), HasSubstr("use one of them")) << tier;
  }
}

TEST(CapacityArguments, FailuresAreTimesOrCounts) {
  EXPECT_DOUBLE_EQ(With({{"--node-mtbf", "2400h"}})->mtbf_days[2], 100);
  EXPECT_DOUBLE_EQ(With({{"--node-failures", "2.5"}})->mtbf_days[2], 400);
  const auto input = With({{"--cluster-mtbf", "30d"}});
  EXPECT_EQ(input->mtbf_told, (std::array<bool, kLosses>{false, false, false, false, true}));
  EXPECT_DOUBLE_EQ(With({{"--step-time", "800ms"}})->step_seconds, 0.8);
}

TEST(CapacityArguments, SharesArePercents) {
  EXPECT_EQ(With({{"--data-parallel", "2"}, {"--alike", "12.5%"}})->alike_share, 12'500u);
  EXPECT_EQ(With({{"--data-parallel", "2"}, {"--alike", "100"}})->alike_share, kShareUnits);
  EXPECT_FALSE(With({{"--remote-share-replicas", "false"}})->share_replicas);
}

TEST(CapacityArguments, NonsenseIsRefused) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> wrong = {
      {"--params",
       {"", "0", "-1", "nan", "inf", "1e9", "405X", "B", "4B5", "40 5B", "1001T", "BB"}},
      {"--bytes-per-param", {"0", "nan", "-2", "1e3", "1025", "0.0001", ""}},
      {"--state-bytes", {"0", "-1GB", "2EiB", "GB", "nan", "1e400"}},
      {"--ranks", {"0", "-1", "1048577", "eight", "8.0", "18446744073709551616"}},
      {"--ranks-per-node", {"0", "1025"}},
      {"--data-parallel", {"0", "3"}},
      {"--alike", {"-1", "101", "100.001%", "half", "%", "nan"}},
      {"--step-time", {"0s", "10", "-1s", "nan", "soon", "1us"}},
      {"--save-every", {"0", "x", "1000000001"}},
      {"--slots-per-rank", {"1", "1025"}},
      {"--replicas", {"9", "-1"}},
      {"--nvme-every-steps", {"-5", "often", "10min", "1.5", "1000000001"}},
      {"--remote-every-ms", {"0s", "-5", "often", "366d", "10"}},
      {"--remote-keep-last", {"0", "1000001"}},
      {"--memory", {"0", "lots"}},
      {"--drive-writes", {"0", "nan", "1001"}},
      {"--node-mtbf", {"0s", "1s", "never", "-1d"}},
      {"--node-failures", {"0", "-1", "nan", "1000001"}},
      {"--nodes-per-domain", {"0"}},
  };
  for (const auto& [name, texts] : wrong) {
    for (const std::string& text : texts) {
      Told told = {{"--ranks", "8"}, {"--step-time", "10s"}};
      if (name != "--state-bytes") {
        told.emplace_back("--params", "1B");
      }
      if (name == "--alike") {
        told.emplace_back("--data-parallel", "2");
      }
      told.emplace_back(name, text);
      EXPECT_EQ(Read(told).status().code(), absl::StatusCode::kInvalidArgument)
          << name << " '" << text << "'";
    }
  }
}

TEST(CapacityArguments, WhatIsMissingOrContradictsItselfIsNamed) {
  EXPECT_THAT(Message(Read({{"--ranks", "8"}}).status()), HasSubstr("--params"));
  EXPECT_THAT(Message(Read({{"--params", "1B"}}).status()), HasSubstr("--ranks"));
  EXPECT_THAT(Message(Read({{"--params", "1B"}, {"--ranks", "8"}}).status()),
              HasSubstr("--step-time"));
  EXPECT_THAT(Message(With({{"--state-bytes", "1TB"}}).status()), HasSubstr("either"));
  EXPECT_THAT(Message(With({{"--profile", "fp32-adam"}, {"--bytes-per-param", "3"}}).status()),
              HasSubstr("not both"));
  EXPECT_THAT(Message(With({{"--alike", "50"}}).status()), HasSubstr("--data-parallel"));
  EXPECT_THAT(Message(With({{"--domain-mtbf", "9d"}}).status()), HasSubstr("--nodes-per-domain"));
  EXPECT_THAT(Message(With({{"--node-mtbf", "9d"}, {"--node-failures", "1"}}).status()),
              HasSubstr("tell one of them"));
  // 10^15 parameters of 1024 bytes; 1 EiB is 1.15 × 10^18.
  EXPECT_EQ(With({{"--params", "1000T"}, {"--bytes-per-param", "1024"}})->state_bytes,
            1'024'000'000'000'000'000u);
}

TEST(CapacityArguments, ProfilesAreOffered) {
  for (const CapacityOption& option : CapacityOptions()) {
    if (option.name == "--profile") {
      ASSERT_EQ(option.values.size(), CapacityProfiles().size());
      EXPECT_THAT(option.about, HasSubstr("default " + CapacityProfiles()[0].name));
    }
  }
}

}  // namespace
}  // namespace holdfast
