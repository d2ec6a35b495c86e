#include "tiers/peer/fabric_address.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <rdma/fabric.h>

#include <cstring>
#include <random>

#include "base/status.h"
#include "tiers/peer/fabric.h"

namespace holdfast {
namespace {

std::string Endpoint(uint16_t port, sa_family_t family = AF_INET) {
  sockaddr_in address{};
  address.sin_family = family;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(0x0a000007);
  std::string bytes(sizeof address, '\0');
  std::memcpy(bytes.data(), &address, sizeof address);
  return bytes;
}

FabricAddress Sample() {
  return {"tcp",
          FI_SOCKADDR_IN,
          std::string(kFabricTokenBytes, 't'),
          {{Endpoint(4711), "eth0"}, {Endpoint(4712), ""}}};
}

TEST(FabricAddressTest, ComesBackAsItWas) {
  const auto decoded = DecodeFabricAddress(EncodeFabricAddress(Sample()));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(*decoded, Sample());
  EXPECT_EQ(FabricEndpointForPeople(FI_SOCKADDR_IN, Endpoint(4711)), "10.0.0.7:4711");
  EXPECT_EQ(FabricEndpointForPeople(FI_SOCKADDR_IN, "ab"), "0x6162");
}

TEST(FabricAddressTest, EveryPrefixAndEverythingBehindIsRefused) {
  const std::string bytes = EncodeFabricAddress(Sample());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeFabricAddress(bytes.substr(0, length)).status()));
  }
  EXPECT_FALSE(DecodeFabricAddress(bytes + "x").ok());
  EXPECT_FALSE(DecodeFabricAddress(std::string(kFabricAddressBytesMax + 1, '\1')).ok());
}

TEST(FabricAddressTest, HostileBytesOfAnyLength) {
  std::mt19937_64 random(3);
  const std::string good = EncodeFabricAddress(Sample());
  for (int i = 0; i < 200'000; ++i) {
    std::string bytes = good;
    if (i % 2 == 0) {
      bytes.resize(random() % 200);
      for (char& c : bytes) {
        c = static_cast<char>(random());
      }
    } else {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const auto decoded = DecodeFabricAddress(bytes);
    if (decoded.ok()) {
      EXPECT_EQ(EncodeFabricAddress(*decoded), bytes);
      static_cast<void>(CheckReachable(Sample(), *decoded));
    }
  }
}

TEST(FabricAddressTest, OnlyWhatThisNodeCanReach) {
  const FabricAddress own = Sample();
  EXPECT_TRUE(CheckReachable(own, own).ok());
  FabricAddress peer = own;
  peer.provider = "verbs";
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckReachable(own, peer)));
  EXPECT_THAT(Message(CheckReachable(own, peer)), ::testing::HasSubstr("'verbs'"));
  peer = own;
  peer.format = FI_SOCKADDR_IN6;
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckReachable(own, peer)));
  for (const std::string& endpoint :
       {Endpoint(0), Endpoint(4711, AF_UNIX), Endpoint(4711) + "x", std::string(1, 'x')}) {
    peer = own;
    peer.endpoints[1].address = endpoint;
    EXPECT_TRUE(absl::IsInvalidArgument(CheckReachable(own, peer)));
  }
}

}  // namespace
}  // namespace holdfast
