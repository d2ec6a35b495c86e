// Sources and receivers that die, hang, or lose their memory in the middle of it.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "base/units.h"
#include "tests/tiers/peer/peer_harness.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr Duration kShortStall = std::chrono::milliseconds(300);
constexpr uint64_t kBigSlice = 20 * kMiB;

class PullFaultsTest : public ::testing::Test {
 protected:
  TransferResult PullFrom(const PullSource& source, TestSlot& target,
                          const PullOptions& options = {}) {
    return PullImage(*fabric_, source, target.span(), sample_.record, sample_.layout, options);
  }

  // Pulls at a pace at which something can happen meanwhile; `then` happens when `bytes` are there.
  template <typename Then>
  TransferResult PullWhile(const PullSource& source, TestSlot& target, uint64_t bytes, Then then,
                           PullOptions options = {}) {
    Pacer pacer(100 * kMiB);
    const auto control = std::make_shared<TransferControl>();
    options.pacer = &pacer;
    options.control = control.get();
    std::thread meddler([&] {
      EXPECT_TRUE(Eventually([&] { return control->bytes_done() >= bytes; }));
      then(*control);
    });
    const TransferResult result = PullFrom(source, target, options);
    meddler.join();
    return result;
  }

  void ExpectGoodPull(const PullSource& source) {
    TestSlot target(sample_.image.size());
    const TransferResult result = PullFrom(source, target);
    EXPECT_TRUE(result.ok()) << ToString(result.status);
    EXPECT_TRUE(target.text(sample_.image.size()) == sample_.image);
  }

  const SampleImage sample_ = MakeTransferImage(kBigSlice);
  TestSlot slot_{sample_.image.size(), sample_.image};
  std::unique_ptr<Fabric> fabric_ = OpenLoopback();
};

TEST_F(PullFaultsTest, SourceIsKilledAtAnyMoment) {
  std::mt19937_64 random(7);
  const auto other = PeerProcess::Serve(slot_);
  for (int round = 0; round < 6; ++round) {
    const auto peer = PeerProcess::Serve(slot_);
    TestSlot target(sample_.image.size());
    const uint64_t when = random() % (kBigSlice / 2);
    const TransferResult result =
        PullWhile(peer->source(), target, when, [&](TransferControl&) { peer->Kill(); });
    EXPECT_TRUE(absl::IsUnavailable(result.status)) << ToString(result.status);
    EXPECT_THAT(Message(result.status), HasSubstr("'n1'"));
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    EXPECT_LT(result.bytes, sample_.image.size());
    ExpectGoodPull(other->source());
  }
}

// Of one that is so large that a thread of its own verifies it.
TEST_F(PullFaultsTest, FlippedBitOfALargeOne) {
  std::mt19937_64 random(5);
  const LocalSource source(slot_);
  for (const uint64_t byte : {uint64_t{0}, random() % sample_.image.size(),
                              random() % sample_.image.size(), sample_.image.size() - 1}) {
    FlipBitIn(slot_.file(), byte);
    TestSlot target(sample_.image.size());
    const TransferResult result = PullFrom(source.source, target);
    EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    ASSERT_TRUE(result.bad_block.has_value()) << byte;
    EXPECT_LE(result.bad_block->image_offset, byte);
    EXPECT_GT(result.bad_block->image_offset + result.bad_block->bytes, byte);
    EXPECT_LE(result.bytes, byte);
    FlipBitIn(slot_.file(), byte);
  }
  ExpectGoodPull(source.source);
}

TEST_F(PullFaultsTest, SourceThatWasKilledBefore) {
  const auto peer = PeerProcess::Serve(slot_);
  ExpectGoodPull(peer->source());  // a connection stays open
  peer->Kill();
  TestSlot target(sample_.image.size());
  for (int i = 0; i < 3; ++i) {
    const TransferResult result = PullFrom(peer->source(), target);
    EXPECT_TRUE(absl::IsUnavailable(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    EXPECT_EQ(result.bytes, 0u);
  }
  EXPECT_TRUE(target.RestIsUntouched(0));
}

// A firewall that forgets, a source that closes its oldest: nobody is told before the next read.
TEST_F(PullFaultsTest, ConnectionThatDiedWhileItWaited) {
  const auto peer = PeerProcess::Serve(slot_);
  ExpectGoodPull(peer->source());
  int shut = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in where{};
    socklen_t bytes = sizeof where;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&where), &bytes) == 0 &&
        where.sin_family == AF_INET) {
      ::shutdown(fd, SHUT_RDWR);
      ++shut;
    }
  }
  EXPECT_GT(shut, 0);
  ExpectGoodPull(peer->source());
}

TEST_F(PullFaultsTest, ReceiversAreKilledWhileOthersAreServed) {
  const auto peer = PeerProcess::Serve(slot_);
  for (int round = 0; round < 2; ++round) {
    const auto first = PeerProcess::PullForEver(peer->source(), slot_.span().size());
    const auto second = PeerProcess::PullForEver(peer->source(), slot_.span().size());
    first->Kill();
    ExpectGoodPull(peer->source());
    second->Signal(SIGSTOP);  // its socket fills up
    ExpectGoodPull(peer->source());
  }
  ExpectGoodPull(peer->source());
}

TEST_F(PullFaultsTest, StoppedSourceIsGivenUpAndWritesNothingAfterwards) {
  const auto peer = PeerProcess::Serve(slot_);
  TestSlot target(sample_.image.size());
  const TransferResult result =
      PullWhile(peer->source(), target, 4 * kMiB, [&](TransferControl&) { peer->Signal(SIGSTOP); },
                {.stall_timeout = kShortStall});
  EXPECT_TRUE(absl::IsUnavailable(result.status)) << ToString(result.status);
  EXPECT_THAT(Message(result.status), HasSubstr("nothing came for"));
  EXPECT_EQ(result.faulty, FaultySide::kSource);
  std::memset(target.data(), 0x5a, target.span().size());
  // It never connects, either.
  TestSlot another(sample_.image.size());
  const TransferResult again = PullFrom(peer->source(), another, {.stall_timeout = kShortStall});
  EXPECT_TRUE(absl::IsUnavailable(again.status)) << ToString(again.status);
  peer->Signal(SIGCONT);
  ExpectGoodPull(peer->source());  // whatever it had still to send went out before
  const auto text = target.text(target.span().size());
  EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](char c) { return c == 0x5a; }));
}

TEST_F(PullFaultsTest, CancelledInTheMiddleWritesNothingAfterwards) {
  const auto peer = PeerProcess::Serve(slot_);
  for (const size_t window : {size_t{1}, kPullWindowMax}) {
    TestSlot target(sample_.image.size());
    const TransferResult result =
        PullWhile(peer->source(), target, 4 * kMiB,
                  [](TransferControl& control) { control.Cancel(); }, {.window = window});
    EXPECT_TRUE(absl::IsCancelled(result.status)) << ToString(result.status);
    EXPECT_EQ(result.faulty, FaultySide::kNone);
    std::memset(target.data(), 0x5a, target.span().size());
    ExpectGoodPull(peer->source());
    const auto text = target.text(target.span().size());
    EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](char c) { return c == 0x5a; }));
  }
}

TEST_F(PullFaultsTest, DeadlinePasses) {
  const auto peer = PeerProcess::Serve(slot_);
  peer->Signal(SIGSTOP);
  TestSlot target(sample_.image.size());
  const TransferResult result =
      PullFrom(peer->source(), target,
               {.deadline = Clock::System()->Now() + std::chrono::milliseconds(100)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(result.status)) << ToString(result.status);
}

// What a client can do to its slot: it holds the file.
TEST_F(PullFaultsTest, SourceIsCutShortInTheMiddle) {
  const auto peer = PeerProcess::Serve(slot_);
  const auto steady = PeerProcess::PullForEver(peer->source(), kMiB);  // of what is not cut
  TestSlot target(sample_.image.size());
  const TransferResult result =
      PullWhile(peer->source(), target, 4 * kMiB, [&](TransferControl&) { slot_.Cut(2 * kMiB); },
                {.stall_timeout = kShortStall});
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.faulty, FaultySide::kSource);
  EXPECT_THAT(Message(result.status), HasSubstr("'n1'"));
  // It lives, and serves what is left to those who ask for that.
  std::string head(kMiB, '\0');
  for (int i = 0; i < 10; ++i) {
    const absl::Status read =
        ReadRemote(*fabric_, peer->source(), 0, std::as_writable_bytes(std::span(head)), {});
    EXPECT_TRUE(read.ok()) << ToString(read);
  }
  EXPECT_TRUE(head == sample_.image.substr(0, kMiB));
}

// Parts of answers go missing, and later ones are whole again: what comes then must not be taken
// for anything else than it is. The slot's bytes are the client's, and could look like anything.
TEST_F(PullFaultsTest, SourceIsCutShortAndGrowsAgainAndAgain) {
  const auto peer = PeerProcess::Serve(slot_);
  const uint64_t slot_bytes = slot_.span().size();
  std::atomic<bool> stop{false};
  std::thread client([&] {
    while (!stop) {
      slot_.Cut(2 * kMiB + 4096);
      slot_.Cut(slot_bytes);
      std::this_thread::yield();
    }
  });
  for (int round = 0; round < 12; ++round) {
    TestSlot target(sample_.image.size());
    const TransferResult result = PullFrom(peer->source(), target,
                                           {.window = round % 2 == 0 ? size_t{8} : size_t{1},
                                            .stall_timeout = std::chrono::milliseconds(60)});
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(result.faulty, FaultySide::kSource) << ToString(result.status);
  }
  stop = true;
  client.join();
  TestSlot good(sample_.image.size(), sample_.image);
  const auto other = PeerProcess::Serve(good);
  ExpectGoodPull(other->source());
}

TEST_F(PullFaultsTest, SourceInThisProcessIsCutShort) {
  LocalSource peer(slot_);
  TestSlot whole(sample_.image.size(), sample_.image);
  const auto registration =
      ValueOf(peer.fabric->Register(whole.span(), MemoryAccess::kReadByPeers));
  PullSource whole_source = peer.source;
  whole_source.regions = registration->regions();
  ExpectGoodPull(peer.source);
  slot_.Cut(0);
  for (const size_t bytes : {size_t{1}, size_t{4000}, size_t{100'000}, size_t{2} << 20}) {
    std::string into(bytes, 'x');
    static_cast<void>(ReadRemote(*fabric_, peer.source, 5000,
                                 std::as_writable_bytes(std::span(into)),
                                 {.stall_timeout = kShortStall}));
    TestSlot target(sample_.image.size());
    const TransferResult result = PullFrom(peer.source, target, {.stall_timeout = kShortStall});
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(result.faulty, FaultySide::kSource);
    ExpectGoodPull(whole_source);
  }
}

TEST_F(PullFaultsTest, TargetIsCutShort) {
  const auto peer = PeerProcess::Serve(slot_);
  TestSlot target(sample_.image.size());
  const TransferResult result =
      PullWhile(peer->source(), target, 4 * kMiB, [&](TransferControl&) { target.Cut(0); });
  EXPECT_TRUE(absl::IsDataLoss(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kDestination);
  ExpectGoodPull(peer->source());
}

TEST_F(PullFaultsTest, RegistrationThatIsGone) {
  LocalSource peer(slot_);
  ExpectGoodPull(peer.source);
  peer.registration.reset();
  TestSlot target(sample_.image.size());
  const TransferResult result = PullFrom(peer.source, target);
  EXPECT_TRUE(absl::IsUnavailable(result.status)) << ToString(result.status);
  EXPECT_EQ(result.faulty, FaultySide::kSource);
  // Its keys are of no use for other memory either.
  const auto again = ValueOf(peer.fabric->Register(slot_.span(), MemoryAccess::kReadByPeers));
  EXPECT_FALSE(PullFrom(peer.source, target).ok());
  PullSource now = peer.source;
  now.regions = again->regions();
  ExpectGoodPull(now);
}

TEST_F(PullFaultsTest, MemoryIsUnmappedWhileItIsRead) {
  // A reader that does not take what it asked for, so that answers wait at the source.
  for (int round = 0; round < 2; ++round) {
    auto slot = std::make_unique<TestSlot>(sample_.image.size(), sample_.image);
    auto peer = std::make_unique<LocalSource>(*slot);
    const auto reader = PeerProcess::PullForEver(peer->source, slot->span().size());
    reader->Signal(SIGSTOP);
    peer->registration.reset();
    slot.reset();
    reader->Signal(SIGCONT);
    // The fabric lives.
    const auto registration =
        ValueOf(peer->fabric->Register(slot_.span(), MemoryAccess::kReadByPeers));
    PullSource source = peer->source;
    source.regions = registration->regions();
    ExpectGoodPull(source);
  }
}

}  // namespace
}  // namespace holdfast
