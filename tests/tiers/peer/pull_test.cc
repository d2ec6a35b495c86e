// Pulls that go well, and sources that lie.
#include "tiers/peer/pull.h"

#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "base/units.h"
#include "tests/tiers/peer/peer_harness.h"
#include "tests/tiers/peer/refused_registrations.h"
#include "tiers/peer/fabric_device.h"
#include "tiers/peer/reader_pool.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class PullTest : public ::testing::Test {
 protected:
  TransferResult PullInto(TestSlot& target, const PullOptions& options = {}) {
    return PullFrom(peer_.source, target, options);
  }
  TransferResult PullFrom(const PullSource& source, TestSlot& target,
                          const PullOptions& options = {}) {
    return PullImage(*fabric_, source, target.span(), sample_.record, sample_.layout, options);
  }
  void ExpectIsHere(TestSlot& target, const TransferResult& result) {
    EXPECT_TRUE(result.ok()) << ToString(result.status);
    EXPECT_EQ(result.bytes, sample_.image.size());
    EXPECT_EQ(result.faulty, FaultySide::kNone);
    EXPECT_TRUE(target.text(sample_.image.size()) == sample_.image);
    EXPECT_TRUE(target.RestIsUntouched(sample_.image.size()));
  }

  const SampleImage sample_ = MakeTransferImage();
  TestSlot slot_{sample_.image.size(), sample_.image};
  LocalSource peer_{slot_};
  std::unique_ptr<Fabric> fabric_ = OpenLoopback();
};

TEST_F(PullTest, BringsEveryByteAndNothingBehind) {
  for (const size_t piece :
       {kPullPieceBytesMin, size_t{100'000}, size_t{1} << 20, size_t{4} << 20}) {
    for (const size_t window : {size_t{1}, size_t{3}, kPullWindowMax}) {
      TestSlot target(sample_.image.size());
      TransferControl control;
      ExpectIsHere(target,
                   PullInto(target, {.piece_bytes = piece, .window = window, .control = &control}));
      EXPECT_EQ(control.bytes_done(), sample_.image.size());
    }
  }
}

TEST_F(PullTest, OverSeveralDevicesAndSplitRegistrations) {
  FabricOptions options = LoopbackOptions();
  options.devices = {"127.0.0.1", "127.0.0.1", "127.0.0.1"};
  options.registration_bytes_max = 1'234'567;
  LocalSource source(slot_, options);
  options.devices.pop_back();
  options.registration_bytes_max = 999'983;
  const auto fabric = ValueOf(Fabric::Open(options));
  TestSlot target(sample_.image.size());
  const auto registration = ValueOf(fabric->Register(target.span(), MemoryAccess::kBoth));
  ExpectIsHere(target, PullImage(*fabric, source.source, target.span(), sample_.record,
                                 sample_.layout, {.registration = registration.get()}));
  // What lies elsewhere is not covered by it.
  TestSlot other(sample_.image.size());
  EXPECT_TRUE(
      absl::IsInvalidArgument(PullImage(*fabric, source.source, other.span(), sample_.record,
                                        sample_.layout, {.registration = registration.get()})
                                  .status));
}

TEST_F(PullTest, ImageThatBeginsFurtherOnAndWhatLiesBehindIt) {
  constexpr uint64_t kOffset = 4096;
  const std::string behind = "the record's bytes";
  TestSlot slot(kOffset + sample_.image.size() + behind.size(),
                std::string(kOffset, '.') + sample_.image + behind);
  LocalSource source(slot);
  source.source.offset = kOffset;
  TestSlot target(sample_.image.size());
  ExpectIsHere(target, PullFrom(source.source, target));
  std::string read(behind.size(), '\0');
  const absl::Status status = ReadRemote(*fabric_, source.source, sample_.image.size(),
                                         std::as_writable_bytes(std::span(read)), {});
  EXPECT_TRUE(status.ok()) << ToString(status);
  EXPECT_EQ(read, behind);
  EXPECT_TRUE(ReadRemote(*fabric_, source.source, 0, {}, {}).ok());
}

TEST_F(PullTest, FlippedBitIsTheSourcesAndNamed) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 20; ++i) {
    const uint64_t byte = random() % sample_.image.size();
    FlipBitIn(slot_.file(), byte);
    TestSlot target(sample_.image.size());
    const TransferResult result = PullInto(target);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    ASSERT_TRUE(result.bad_block.has_value());
    EXPECT_LE(result.bad_block->image_offset, byte);
    EXPECT_GT(result.bad_block->image_offset + result.bad_block->bytes, byte);
    EXPECT_THAT(Message(result.status), HasSubstr("'n1'"));
    FlipBitIn(slot_.file(), byte);
  }
  TestSlot target(sample_.image.size());
  ExpectIsHere(target, PullInto(target));
}

TEST_F(PullTest, AnotherShardsBytes) {
  const SampleImage other = MakeTransferImage((5u << 20) + 14);
  TestSlot slot(other.image.size(), other.image);
  LocalSource source(slot);
  TestSlot target(sample_.image.size());
  const TransferResult result = PullFrom(source.source, target);
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_TRUE(result.bad_block.has_value());
}

TEST_F(PullTest, MemoryThatIsNotWhatItsOwnerSays) {
  TestSlot target(sample_.image.size());
  const auto refused = [&](const PullSource& source) {
    const TransferResult result =
        PullFrom(source, target, {.stall_timeout = std::chrono::seconds(5)});
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(result.faulty, FaultySide::kSource) << ToString(result.status);
    return result.status;
  };
  PullSource lie = peer_.source;
  lie.regions.front().bytes = sample_.image.size() - 1;
  EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  lie = peer_.source;
  lie.regions.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  lie = peer_.source;
  lie.regions.front().device = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  lie = peer_.source;
  lie.regions.front().base = UINT64_MAX - 5;
  EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  lie = peer_.source;
  lie.offset = UINT64_MAX - 5;
  EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  lie = peer_.source;
  lie.regions.assign(kRemoteRegionsMax + 1, peer_.source.regions.front());
  EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  // Longer than it is, with another key: the source refuses it.
  lie = peer_.source;
  lie.regions.front().key ^= 1;
  EXPECT_TRUE(absl::IsUnavailable(refused(lie)));
  lie = peer_.source;
  lie.regions.front().base += slot_.span().size() - 4096;
  EXPECT_TRUE(absl::IsUnavailable(refused(lie)));
  for (const std::string& address : {std::string(), std::string(3, '\1'), std::string(5000, 'x')}) {
    lie = peer_.source;
    lie.address = address;
    EXPECT_TRUE(absl::IsInvalidArgument(refused(lie)));
  }
  ExpectIsHere(target, PullInto(target));
}

// As with verbs, which wants what it writes to registered, too.
TEST_F(PullTest, AReaderThatMayNotPinItsOwnMemoryBlamesNobodyElse) {
  fabric_->devices()[0]->info().domain_attr->mr_mode |= FI_MR_LOCAL;
  TestSlot target(sample_.image.size());
  {
    RefusedRegistrations refused(*fabric_, 0);
    const TransferResult result = PullInto(target);
    EXPECT_TRUE(absl::IsResourceExhausted(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kDestination);
  }
  ExpectIsHere(target, PullInto(target));
}

TEST_F(PullTest, CalledWronglyIsNobodysFault) {
  TestSlot target(sample_.image.size());
  const auto status_of = [&](std::span<std::byte> into, const PullOptions& options) {
    const TransferResult result =
        PullImage(*fabric_, peer_.source, into, sample_.record, sample_.layout, options);
    EXPECT_EQ(result.faulty, FaultySide::kNone);
    return result.status;
  };
  EXPECT_TRUE(
      absl::IsInvalidArgument(status_of(target.span().first(sample_.image.size() - 1), {})));
  EXPECT_TRUE(absl::IsInvalidArgument(status_of(target.span(), {.piece_bytes = 1})));
  EXPECT_TRUE(absl::IsInvalidArgument(status_of(target.span(), {.window = 0})));
  EXPECT_TRUE(absl::IsInvalidArgument(status_of(target.span(), {.stall_timeout = Duration(0)})));
  TransferControl control;
  control.Cancel();
  EXPECT_TRUE(absl::IsCancelled(status_of(target.span(), {.control = &control})));
  EXPECT_TRUE(target.RestIsUntouched(0));
}

TEST_F(PullTest, ManyAtATime) {
  constexpr int kThreads = 12;
  TestSlot other_slot(sample_.image.size(), sample_.image);
  LocalSource other(other_slot);
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      TestSlot target(sample_.image.size());
      for (int round = 0; round < 3; ++round) {
        const TransferResult result = PullFrom(i % 2 == 0 ? peer_.source : other.source, target);
        EXPECT_TRUE(result.ok()) << ToString(result.status);
        if (result.ok() && target.text(sample_.image.size()) == sample_.image) {
          ++good;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(good, 3 * kThreads);
}

TEST_F(PullTest, ConnectionsAreLimitedAndKept) {
  FabricOptions options = LoopbackOptions();
  options.readers_max = 0;
  const auto none = ValueOf(Fabric::Open(options));
  options.readers_max = 2;
  const auto fabric = ValueOf(Fabric::Open(options));
  TestSlot target(sample_.image.size());
  const auto pull = [&](size_t window) {
    return PullImage(*fabric, peer_.source, target.span(), sample_.record, sample_.layout,
                     {.window = window});
  };
  const TransferResult refused =
      PullImage(*none, peer_.source, target.span(), sample_.record, sample_.layout, {});
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status)) << ToString(refused.status);
  EXPECT_EQ(refused.faulty, FaultySide::kNone);
  ASSERT_TRUE(pull(3).ok()) << "over those that it gets";
  const size_t descriptors = CountDescriptors();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(pull(3).ok());
    EXPECT_EQ(CountDescriptors(), descriptors);
  }
}

}  // namespace
}  // namespace holdfast
