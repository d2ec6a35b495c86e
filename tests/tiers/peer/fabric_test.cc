// Devices opened, memory registered, and what is wrong with either.
#include "tiers/peer/fabric.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <random>
#include <set>

#include "base/unique_fd.h"
#include "base/units.h"
#include "tests/tiers/peer/peer_harness.h"
#include "tests/tiers/peer/refused_registrations.h"
#include "tiers/peer/device_order.h"
#include "tiers/peer/fabric_address.h"
#include "tiers/peer/fabric_library.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

// What the environment says before the first test, when nothing has loaded libfabric.
class EnvironmentAtStart : public ::testing::Environment {
 public:
  void SetUp() override { has_setting = ::getenv("FI_MR_CACHE_MAX_COUNT") != nullptr; }
  bool has_setting = false;
};
const auto* const kAtStart = static_cast<const EnvironmentAtStart*>(
    ::testing::AddGlobalTestEnvironment(new EnvironmentAtStart));

size_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  size_t whole = 0;
  size_t resident = 0;
  statm >> whole >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(FabricTest, SaysWhatItGot) {
  const auto fabric = OpenLoopback();
  const FabricInfo& info = fabric->info();
  EXPECT_EQ(info.provider, "tcp");
  EXPECT_GE(info.library_version, FI_VERSION(1, 11));
  ASSERT_EQ(info.devices.size(), 1u);
  const FabricDeviceInfo& device = info.devices.front();
  EXPECT_EQ(device.name, "lo");
  EXPECT_THAT(device.address, HasSubstr("127.0.0.1:"));
  EXPECT_TRUE(device.random_keys);
  EXPECT_EQ(device.key_bytes, 8u);
  EXPECT_GE(device.message_bytes_max, kPullPieceBytesMax);
  EXPECT_EQ(device.reads_max, 1u);
  EXPECT_TRUE(device.sleeps);
  EXPECT_TRUE(fabric->CheckAddress(fabric->address()).ok());
  EXPECT_THAT(ToString(info), HasSubstr("provider=tcp"));
  EXPECT_THAT(ToString(info), HasSubstr("device=lo address=127.0.0.1:"));
}

// Later there are threads, and setenv breaks those that read the environment.
TEST(FabricTest, ItsSettingsAreInTheEnvironmentBeforeItIsLoaded) {
  EXPECT_TRUE(kAtStart->has_setting);
}

TEST(FabricTest, TrafficClassIsReadBack) {
  FabricOptions options = LoopbackOptions();
  options.traffic_class = 26;
  const auto fabric = ValueOf(Fabric::Open(options));
  // What the provider does not take is not claimed.
  EXPECT_THAT(fabric->info().devices.front().traffic_class, ::testing::AnyOf(0, 26));
  options.traffic_class = 64;
  EXPECT_TRUE(absl::IsInvalidArgument(Fabric::Open(options).status()));
}

TEST(FabricTest, DevicesByNameAndByAddress) {
  FabricOptions options = LoopbackOptions();
  options.devices = {"lo"};
  EXPECT_EQ(ValueOf(Fabric::Open(options))->info().devices.size(), 1u);
  options.bind_address.clear();
  options.devices = {"127.0.0.1", "127.0.0.1"};
  EXPECT_EQ(ValueOf(Fabric::Open(options))->info().devices.size(), 2u);
  options.provider = "auto";
  EXPECT_EQ(ValueOf(Fabric::Open(options))->info().provider, "tcp");
  options.provider = "tcp;ofi_rxm";
  EXPECT_EQ(ValueOf(Fabric::Open(options))->info().provider, "tcp");
}

TEST(FabricTest, WhatIsNotThereIsNamed) {
  FabricOptions options = LoopbackOptions();
  options.devices = {"eth77"};
  absl::Status status = Fabric::Open(options).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << ToString(status);
  EXPECT_THAT(Message(status), ::testing::AllOf(HasSubstr("'eth77': there is "), HasSubstr("lo")));
  options = LoopbackOptions();
  options.provider = "carrier-pigeon";
  status = Fabric::Open(options).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("carrier-pigeon"));
  options = LoopbackOptions();
  options.bind_address = "203.0.113.9";  // nobody's
  EXPECT_FALSE(Fabric::Open(options).ok());
  options.bind_address = "n1:4711";
  EXPECT_TRUE(absl::IsInvalidArgument(Fabric::Open(options).status()));
  options = LoopbackOptions();
  options.devices.assign(kFabricDevicesMax + 1, "127.0.0.1");
  EXPECT_TRUE(absl::IsInvalidArgument(Fabric::Open(options).status()));
}

TEST(FabricTest, WithoutTheLibrary) {
  FabricOptions options = LoopbackOptions();
  options.library = "libfabric-that-nobody-has.so.1";
  absl::Status status = Fabric::Open(options).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("libfabric-that-nobody-has.so.1"));
  EXPECT_THAT(Message(status), HasSubstr("apt install libfabric1"));
  options.library = "libm.so.6";
  status = Fabric::Open(options).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("it is no libfabric"));
}

TEST(FabricTest, ItsLibrariesInstallNoSignalHandlers) {
  const std::array<int, 6> signals = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGTERM};
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a process that has not loaded them yet
  EXPECT_EXIT(
      {
        for (const int number : signals) {
          ::signal(number, SIG_DFL);
        }
        const auto fabric = OpenLoopback();
        for (const int number : signals) {
          struct sigaction now = {};
          ::sigaction(number, nullptr, &now);
          if (now.sa_handler != SIG_DFL) {
            ::_exit(1);
          }
        }
        ::_exit(fabric == nullptr ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(FabricTest, RegistrationsAreSplitWhereTheDeviceWantsIt) {
  FabricOptions options = LoopbackOptions();
  options.registration_bytes_max = 3 * kMiB;
  options.devices = {"127.0.0.1", "127.0.0.1"};
  const auto fabric = ValueOf(Fabric::Open(options));
  TestSlot slot(10 * kMiB);
  const auto registration = ValueOf(fabric->Register(slot.span(), MemoryAccess::kBoth));
  const std::vector<RemoteRegion>& regions = registration->regions();
  ASSERT_EQ(regions.size(), 8u);
  std::set<uint64_t> keys;
  for (size_t i = 0; i < regions.size(); ++i) {
    EXPECT_EQ(regions[i].device, i / 4);
    EXPECT_EQ(regions[i].bytes, i % 4 == 3 ? kMiB : 3 * kMiB);
    keys.insert(regions[i].key);
  }
  EXPECT_EQ(keys.size(), 8u);
  EXPECT_EQ(registration->At(1, slot.data()).bytes, 3 * kMiB);
  EXPECT_EQ(registration->At(1, slot.data() + 3 * kMiB - 1).bytes, 1u);
  EXPECT_EQ(registration->At(1, slot.data() + 3 * kMiB).bytes, 3 * kMiB);
  EXPECT_EQ(registration->At(1, slot.data() + 10 * kMiB - 1).bytes, 1u);
  EXPECT_TRUE(absl::IsInvalidArgument(
      fabric->Register(std::span<std::byte>(), MemoryAccess::kReadByPeers).status()));
}

TEST(FabricTest, MemoryThatMayNotBePinnedIsSaidAndNothingOfItStaysRegistered) {
  FabricOptions options = LoopbackOptions();
  options.registration_bytes_max = kMiB;
  const auto fabric = ValueOf(Fabric::Open(options));
  TestSlot slot(4 * kMiB);
  {
    RefusedRegistrations refused(*fabric, 2);
    const auto none = fabric->Register(slot.span(), MemoryAccess::kReadByPeers);
    EXPECT_TRUE(absl::IsResourceExhausted(none.status())) << none.status();
    EXPECT_THAT(std::string(none.status().message()), ::testing::HasSubstr("LimitMEMLOCK"));
    EXPECT_THAT(std::string(none.status().message()), ::testing::HasSubstr("IPC_LOCK"));
  }
  // (A device whose domain has registrations left cannot be closed: the Fabric's end says so.)
  EXPECT_TRUE(fabric->Register(slot.span(), MemoryAccess::kReadByPeers).ok());
}

TEST(FabricTest, DevicesNearTheMemoryComeFirst) {
  using Order = std::vector<size_t>;
  EXPECT_EQ(NearestFirst({0, 1, -1, 1, 0}, 1), (Order{1, 3, 2, 0, 4}));
  EXPECT_EQ(NearestFirst({0, 1, -1, 1, 0}, 0), (Order{0, 4, 2, 1, 3}));
  EXPECT_EQ(NearestFirst({0, 1}, -1), (Order{0, 1})) << "nobody can say";
  EXPECT_EQ(NearestFirst({}, 0), Order{});
  // As the system lists it; in a container it may not be allowed to say.
  TestSlot slot(kMiB);
  const int node = NumaNodeOf(slot.data());
  EXPECT_TRUE(node == -1 ||
              ::access(absl::StrCat("/sys/devices/system/node/node", node).c_str(), F_OK) == 0)
      << node;
}

TEST(FabricTest, RegistrationOutlivesItsFabric) {
  TestSlot slot(2 * kMiB);
  std::shared_ptr<Registration> registration;
  {
    const auto fabric = OpenLoopback();
    registration = ValueOf(fabric->Register(slot.span(), MemoryAccess::kReadByPeers));
  }
  EXPECT_EQ(registration->regions().size(), 1u);
}

TEST(FabricTest, OpenedAndClosedOftenLeavesNothing) {
  const SampleImage sample = MakeTransferImage(kMiB);
  TestSlot slot(sample.image.size(), sample.image);
  TestSlot target(sample.image.size());
  const auto round = [&] {
    const LocalSource peer(slot);
    const auto fabric = OpenLoopback();
    const TransferResult result =
        PullImage(*fabric, peer.source, target.span(), sample.record, sample.layout, {});
    EXPECT_TRUE(result.ok()) << ToString(result.status);
  };
  for (int i = 0; i < 30; ++i) {
    round();
  }
  const size_t descriptors = CountDescriptors();
  const size_t threads = CountThreads();
  [[maybe_unused]] const size_t bytes = ResidentBytes();
  for (int i = 0; i < 200; ++i) {
    round();
  }
  EXPECT_EQ(CountDescriptors(), descriptors);
  EXPECT_EQ(CountThreads(), threads);
#if !defined(__SANITIZE_ADDRESS__)  // which keeps what was freed, and looks for leaks itself
  EXPECT_LT(ResidentBytes(), bytes + 8 * kMiB);
#endif
}

// People who look at ports.
TEST(FabricTest, StrangersAtTheDoor) {
  const SampleImage sample = MakeTransferImage(kMiB);
  TestSlot slot(sample.image.size(), sample.image);
  const LocalSource peer(slot);
  const FabricAddress address = ValueOf(DecodeFabricAddress(peer.fabric->address()));
  sockaddr_in where{};
  ASSERT_EQ(address.endpoints.front().address.size(), sizeof where);
  std::memcpy(&where, address.endpoints.front().address.data(), sizeof where);
  std::vector<UniqueFd> strangers;
  std::mt19937_64 random(11);
  for (int i = 0; i < 40; ++i) {
    strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(strangers.back().get(), reinterpret_cast<sockaddr*>(&where), sizeof where),
              0);
    std::string noise(random() % 300, '\0');
    for (char& c : noise) {
      c = static_cast<char>(random());
    }
    static_cast<void>(::send(strangers.back().get(), noise.data(), noise.size(), MSG_NOSIGNAL));
    if (i % 2 == 0) {
      strangers.back().reset();
    }
  }
  const auto fabric = OpenLoopback();
  TestSlot target(sample.image.size());
  const TransferResult good =
      PullImage(*fabric, peer.source, target.span(), sample.record, sample.layout, {});
  EXPECT_TRUE(good.ok()) << ToString(good.status);
}

TEST(FabricTest, WhoWasNotToldTheTokenIsRefused) {
  const SampleImage sample = MakeTransferImage(kMiB);
  TestSlot slot(sample.image.size(), sample.image);
  const LocalSource peer(slot);
  const auto fabric = OpenLoopback();
  TestSlot target(sample.image.size());
  const auto pull = [&](const PullSource& source) {
    return PullImage(*fabric, source, target.span(), sample.record, sample.layout, {});
  };
  EXPECT_TRUE(pull(peer.source).ok());
  PullSource stranger = peer.source;
  FabricAddress address = ValueOf(DecodeFabricAddress(peer.fabric->address()));
  address.token[3] = static_cast<char>(address.token[3] + 1);
  stranger.address = EncodeFabricAddress(address);
  const TransferResult refused = pull(stranger);
  EXPECT_TRUE(absl::IsUnavailable(refused.status)) << ToString(refused.status);
  EXPECT_TRUE(pull(peer.source).ok());
}

// Who lost its power ends no connection. Its reads end here, and what waits to read from it there.
TEST(FabricTest, ConnectionsOfWhoIsGoneAreClosed) {
  const SampleImage sample = MakeTransferImage(kMiB);
  TestSlot slot(sample.image.size(), sample.image);
  const LocalSource peer(slot);
  FabricOptions options = LoopbackOptions();
  options.reader_id = 0x0123456789abcdef;
  const auto reader = ValueOf(Fabric::Open(options));
  TestSlot target(sample.image.size());
  const size_t before = CountDescriptors();
  const auto pull = [&] {
    return PullImage(*reader, peer.source, target.span(), sample.record, sample.layout, {}).ok();
  };
  ASSERT_TRUE(pull());
  const size_t connected = CountDescriptors();
  ASSERT_GT(connected, before);

  peer.fabric->LetGoOf(options.reader_id + 1);  // somebody else
  ASSERT_TRUE(pull());
  EXPECT_EQ(CountDescriptors(), connected) << "over the connection that there was";

  peer.fabric->LetGoOf(options.reader_id);
  EXPECT_TRUE(Eventually([&] { return CountDescriptors() < connected; }));
  reader->LetGoOf(1);
  EXPECT_TRUE(Eventually([&] { return CountDescriptors() == before; }));
  EXPECT_TRUE(pull()) << "that it was called gone holds nobody up who is there";
}

TEST(FabricTest, RegistrationModesHaveNames) {
  EXPECT_THAT(NamesOfMrMode(0), ::testing::IsEmpty());
  EXPECT_THAT(NamesOfMrMode(FI_MR_PROV_KEY | FI_MR_LOCAL),
              ::testing::ElementsAre("LOCAL", "PROV_KEY"));
  EXPECT_THAT(NamesOfMrMode(FI_MR_VIRT_ADDR | FI_MR_HMEM),
              ::testing::ElementsAre("VIRT_ADDR", std::to_string(FI_MR_HMEM)));
}

}  // namespace
}  // namespace holdfast
