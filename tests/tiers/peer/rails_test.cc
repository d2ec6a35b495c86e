// Several devices, of which one fails: the others bring the rest. And connections that are closed
// for their age.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "base/units.h"
#include "tests/tiers/peer/peer_harness.h"
#include "tiers/peer/device_order.h"
#include "tiers/peer/fabric_address.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

constexpr Duration kShortStall = std::chrono::milliseconds(300);
constexpr uint64_t kSlice = 20 * kMiB;

sockaddr_in ToAddress(const std::string& endpoint) {
  sockaddr_in address{};
  std::memcpy(&address, endpoint.data(), std::min(sizeof address, endpoint.size()));
  return address;
}

std::string ToEndpoint(int listening) {
  sockaddr_in address{};
  socklen_t bytes = sizeof address;
  EXPECT_EQ(::getsockname(listening, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  return std::string(reinterpret_cast<const char*>(&address), sizeof address);
}

UniqueFd Listen() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(fd.get(), 16), 0);
  return fd;
}

// A cable to a device: what is sent to it goes on there, until it is cut, or pulled out.
class Cable {
 public:
  // What comes over a new connection is passed on after so long.
  explicit Cable(const std::string& to, Duration at_first = {})
      : to_(ToAddress(to)),
        at_first_(at_first),
        door_(Listen()),
        end_(ToEndpoint(door_.get())),
        thread_([this] { Run(); }) {}
  ~Cable() {
    stop_ = true;
    thread_.join();
  }
  const std::string& end() const { return end_; }
  void Pull() { pulled_ = true; }         // nobody hears anything any more
  void Cut() { stop_ = true; }            // both ends are told, and nobody gets in again
  void PullOne() { one_pulled_ = true; }  // of one connection nothing is heard any more

 private:
  void Run() {
    std::vector<Connection> connections;
    while (!stop_) {
      std::vector<pollfd> waits = {{door_.get(), POLLIN, 0}};
      for (size_t i = 0; i < connections.size(); ++i) {
        const bool passes =
            Clock::System()->Now() >= connections[i].from && !(i == 0 && one_pulled_);
        for (const UniqueFd& end : connections[i].ends) {
          waits.push_back({passes ? end.get() : -1, POLLIN, 0});  // (poll leaves those out)
        }
      }
      ::poll(waits.data(), pulled_ ? 0 : waits.size(), 10);
      if (pulled_) {
        continue;
      }
      for (size_t i = 1; i < waits.size() && !stop_; ++i) {
        if (waits[i].revents != 0) {
          PassOn(waits[i].fd, waits[((i - 1) ^ 1) + 1].fd);
        }
      }
      if (waits[0].revents != 0) {
        Connection& connection = connections.emplace_back();
        connection.from = Clock::System()->Now() + at_first_;
        std::array<UniqueFd, 2>& added = connection.ends;
        added[0].reset(::accept4(door_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        added[1].reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        ::connect(added[1].get(), reinterpret_cast<const sockaddr*>(&to_), sizeof to_);
      }
    }
    door_.reset();
  }

  static void PassOn(int from, int to) {
    std::array<char, 64 * kKiB> bytes;
    const ssize_t got = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
    for (ssize_t sent = 0; sent < got;) {
      const ssize_t now =
          ::send(to, bytes.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
      if (now <= 0) {
        return;
      }
      sent += now;
    }
    if (got == 0) {
      ::shutdown(to, SHUT_WR);
    }
  }

  struct Connection {
    std::array<UniqueFd, 2> ends;
    MonotonicTime from;
  };

  const sockaddr_in to_;
  const Duration at_first_;
  UniqueFd door_;
  const std::string end_;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> pulled_ = false;
  std::atomic<bool> one_pulled_ = false;
  std::thread thread_;
};

FabricOptions TwoDevices() {
  FabricOptions options = LoopbackOptions();
  options.devices = {"127.0.0.1", "127.0.0.1"};
  return options;
}

class RailsTest : public ::testing::Test {
 protected:
  // A source, but one of its devices is found at the end of that.
  static PullSource Through(PullSource source, size_t device, const std::string& end) {
    FabricAddress address = ValueOf(DecodeFabricAddress(source.address));
    address.endpoints[device].address = end;
    source.address = EncodeFabricAddress(address);
    return source;
  }
  PullSource Through(size_t device, const std::string& end) const {
    return Through(peer_.source, device, end);
  }
  std::string Endpoint(size_t device) const {
    return ValueOf(DecodeFabricAddress(peer_.source.address)).endpoints[device].address;
  }

  // `then` happens when so much of it is there.
  template <typename Then>
  TransferResult PullWhile(const PullSource& source, TestSlot& target, Then then,
                           uint64_t bytes = kSlice / 2, uint64_t bytes_per_s = 100 * kMiB) {
    Pacer pacer(bytes_per_s);
    TransferControl control;
    std::thread meddler([&] {
      EXPECT_TRUE(Eventually([&] { return control.bytes_done() >= bytes; }));
      then();
    });
    const TransferResult result =
        Pull(source, target, {.stall_timeout = kShortStall, .pacer = &pacer, .control = &control});
    meddler.join();
    bytes_moved_ = control.bytes_done();
    return result;
  }

  TransferResult Pull(const PullSource& source, TestSlot& target, const PullOptions& options = {}) {
    return PullImage(*fabric_, source, target.span(), sample_.record, sample_.layout, options);
  }

  void ExpectWhole(const TransferResult& result, TestSlot& target) {
    EXPECT_TRUE(result.ok()) << ToString(result.status);
    EXPECT_TRUE(target.text(sample_.image.size()) == sample_.image);
  }

  const SampleImage sample_ = MakeTransferImage(kSlice);
  TestSlot slot_{sample_.image.size(), sample_.image};
  LocalSource peer_{slot_, TwoDevices()};
  std::unique_ptr<Fabric> fabric_ = ValueOf(Fabric::Open(TwoDevices()));
  uint64_t bytes_moved_ = 0;
};

std::string Nowhere() {
  const UniqueFd door = Listen();
  return ToEndpoint(door.get());
}

TEST_F(RailsTest, OneLeadsNowhere) {
  const std::string nowhere = Nowhere();
  for (const size_t device : {size_t{0}, size_t{1}}) {
    TestSlot target(sample_.image.size());
    ExpectWhole(Pull(Through(device, nowhere), target), target);
  }
  TestSlot target(sample_.image.size());
  const TransferResult failed = Pull(Through(Through(0, nowhere), 1, nowhere), target);
  EXPECT_TRUE(absl::IsUnavailable(failed.status)) << ToString(failed.status);
  EXPECT_EQ(failed.faulty, FaultySide::kSource);
}

// One piece needs one connection: of the first device, which is not there.
TEST_F(RailsTest, OneLeadsNowhereAndThereIsLittleToRead) {
  std::vector<std::byte> into(4096);
  for (int i = 0; i < 3; ++i) {
    const absl::Status read = ReadRemote(*fabric_, Through(0, Nowhere()), 0, into, {});
    EXPECT_TRUE(read.ok()) << ToString(read);
    EXPECT_EQ(std::memcmp(into.data(), sample_.image.data(), into.size()), 0);
  }
  const UniqueFd door = Listen();  // never answers
  const PullSource silent = Through(0, ToEndpoint(door.get()));
  const absl::Status read = ReadRemote(*fabric_, silent, 0, into, {.stall_timeout = kShortStall});
  EXPECT_TRUE(read.ok()) << ToString(read);
  // Who reads next does not wait for it once more.
  const absl::Status next = ReadRemote(
      *fabric_, silent, 0, into, {.deadline = Clock::System()->Now() + std::chrono::seconds(10)});
  EXPECT_TRUE(next.ok()) << ToString(next);
}

// A network that swallows everything: who has another way does not wait for it each time.
TEST_F(RailsTest, WhereNothingCouldBeReadIsLeftAlone) {
  const UniqueFd door = Listen();
  const std::string silent = ToEndpoint(door.get());
  const PullSource dead = Through(Through(0, silent), 1, silent);
  TestSlot target(sample_.image.size());
  PullOptions options{.stall_timeout = kShortStall};
  options.another_way = true;
  EXPECT_TRUE(absl::IsUnavailable(Pull(dead, target, options).status));
  const TransferResult next = Pull(dead, target, options);
  EXPECT_TRUE(absl::IsFailedPrecondition(next.status)) << ToString(next.status);
  EXPECT_EQ(next.faulty, FaultySide::kNone);
  EXPECT_EQ(fabric_->Problems().size(), 2u);
  EXPECT_THAT(fabric_->Problems()[0], HasSubstr("device 'lo' leads nowhere: read from 'n1'"));
  options.another_way = false;  // there is only this one
  EXPECT_TRUE(absl::IsUnavailable(Pull(dead, target, options).status));
  ExpectWhole(Pull(peer_.source, target), target);  // other devices of it are not meant
}

TEST_F(RailsTest, OneNeverAnswers) {
  const UniqueFd door = Listen();
  for (const size_t device : {size_t{0}, size_t{1}}) {
    TestSlot target(sample_.image.size());
    ExpectWhole(Pull(Through(device, ToEndpoint(door.get())), target), target);
  }
}

// The first device swallows everything, and there is little to read: the next one is opened only
// when that is known, and is not let in at once.
TEST_F(RailsTest, TheNextOneHasTimeToLetUsIn) {
  const UniqueFd door = Listen();
  Cable slow(Endpoint(1), std::chrono::milliseconds(200));
  const PullSource source = Through(Through(0, ToEndpoint(door.get())), 1, slow.end());
  std::vector<std::byte> into(4096);
  const absl::Status read =
      ReadRemote(*fabric_, source, 0, into, {.stall_timeout = std::chrono::seconds(3)});
  EXPECT_TRUE(read.ok()) << ToString(read);
  EXPECT_EQ(fabric_->Problems().size(), 1u) << "of the first one alone";
}

// Of several connections over one device: what it was asked for comes over the others.
TEST_F(RailsTest, OneConnectionOfADeviceFallsSilent) {
  const LocalSource peer(slot_, LoopbackOptions());
  Cable cable(ValueOf(DecodeFabricAddress(peer.source.address)).endpoints[0].address);
  fabric_ = ValueOf(Fabric::Open(LoopbackOptions()));
  TestSlot target(sample_.image.size());
  const uint64_t nearly_all = sample_.image.size() - 4 * kMiB;
  ExpectWhole(
      PullWhile(
          Through(peer.source, 0, cable.end()), target, [&] { cable.PullOne(); }, nearly_all),
      target);
  EXPECT_EQ(bytes_moved_, sample_.image.size());
  EXPECT_THAT(fabric_->Problems(), ::testing::IsEmpty());
}

// What the source does not let be read any more says nothing of the way to it.
TEST_F(RailsTest, WhatIsRefusedInTheMiddleBlamesNoDevice) {
  TestSlot target(sample_.image.size());
  const TransferResult result =
      PullWhile(peer_.source, target, [&] { peer_.registration.reset(); });
  EXPECT_TRUE(absl::IsUnavailable(result.status)) << ToString(result.status);
  EXPECT_THAT(fabric_->Problems(), ::testing::IsEmpty());
}

TEST_F(RailsTest, OneIsCutInTheMiddle) {
  for (const size_t device : {size_t{0}, size_t{1}}) {
    for (const uint64_t bytes : {kSlice / 2, kSlice - 2 * kMiB}) {
      Cable cable(Endpoint(device));
      TestSlot target(sample_.image.size());
      ExpectWhole(PullWhile(
                      Through(device, cable.end()), target, [&] { cable.Cut(); }, bytes),
                  target);
    }
  }
}

TEST_F(RailsTest, OneFallsSilentInTheMiddle) {
  for (const size_t device : {size_t{0}, size_t{1}}) {
    Cable cable(Endpoint(device));
    TestSlot target(sample_.image.size());
    ExpectWhole(PullWhile(Through(device, cable.end()), target, [&] { cable.Pull(); }), target);
    EXPECT_EQ(bytes_moved_, sample_.image.size()) << "what the other one had brought stays";
  }
}

TEST_F(RailsTest, WhoeverFallsSilentOnAllIsGivenUp) {
  Cable first(Endpoint(0));
  Cable second(Endpoint(1));
  TestSlot target(sample_.image.size());
  const TransferResult result =
      PullWhile(Through(Through(0, first.end()), 1, second.end()), target, [&] {
        first.Pull();
        second.Pull();
      });
  EXPECT_TRUE(absl::IsUnavailable(result.status)) << ToString(result.status);
  EXPECT_THAT(Message(result.status), HasSubstr("nothing came for"));
  EXPECT_EQ(result.faulty, FaultySide::kSource);
}

TEST_F(RailsTest, ThoseThatCannotBeOpenedAreLeftOut) {
  FabricOptions options = TwoDevices();
  options.devices = {"eth77", "127.0.0.1"};
  const auto some = ValueOf(Fabric::Open(options));
  ASSERT_EQ(some->info().devices.size(), 1u);
  ASSERT_EQ(some->info().problems.size(), 1u);
  EXPECT_THAT(some->info().problems[0], HasSubstr("'eth77'"));
  TestSlot target(sample_.image.size());
  ExpectWhole(PullImage(*some, peer_.source, target.span(), sample_.record, sample_.layout, {}),
              target);
  EXPECT_TRUE(fabric_->info().problems.empty());
  // Whose name is of the one provider need not be of the other, too.
  options.devices = {"127.0.0.1"};
  options.provider = "auto";
  EXPECT_THAT(ValueOf(Fabric::Open(options))->Problems(), ::testing::IsEmpty());
}

// A reader that lost its power leaves a connection behind that nobody ends. One that is still at
// it goes on over a new one.
TEST_F(RailsTest, OldConnectionsAreClosed) {
  FabricOptions options = TwoDevices();
  options.connection_age_max = std::chrono::milliseconds(100);
  const LocalSource impatient(slot_, options);
  TestSlot target(sample_.image.size());
  // The last ones may be closed before anybody looks, so it is looked at all the time.
  size_t most = 0;
  std::atomic<bool> done = false;
  std::thread counter([&] {
    while (!done) {
      most = std::max(most, CountDescriptors());
    }
  });
  const TransferResult result = PullWhile(
      impatient.source, target, [] {}, kSlice / 2, 50 * kMiB);
  done = true;
  counter.join();
  ExpectWhole(result, target);
  EXPECT_TRUE(Eventually([&] { return CountDescriptors() < most; }));  // (the reader's ends stay)
}

TEST(PairDevicesTest, ByNameAndThenInOrder) {
  using Pairs = std::vector<int>;
  EXPECT_EQ(PairDevices({"a", "b"}, {"a", "b"}, {0, 1}), (Pairs{0, 1}));
  EXPECT_EQ(PairDevices({"b", "c"}, {"a", "b", "c"}, {0, 1, 2}), (Pairs{1, 2}))
      << "the first of them is broken here";
  EXPECT_EQ(PairDevices({"a", "b"}, {"b"}, {0}), (Pairs{-1, 0})) << "and there";
  EXPECT_EQ(PairDevices({"x", "y"}, {"a", "b"}, {0, 1}), (Pairs{0, 1}));
  EXPECT_EQ(PairDevices({"x", "b"}, {"b", "c"}, {0, 1}), (Pairs{1, 0}));
  EXPECT_EQ(PairDevices({"a", "a"}, {"a", "a", "a"}, {0, 1, 2}), (Pairs{0, 1})) << "twice the same";
  EXPECT_EQ(PairDevices({"a", "b"}, {"a", "b"}, {1}), (Pairs{-1, 1})) << "without the memory";
  EXPECT_EQ(PairDevices({"", "a"}, {"", ""}, {0, 1}), (Pairs{0, 1}));
}

}  // namespace
}  // namespace holdfast
