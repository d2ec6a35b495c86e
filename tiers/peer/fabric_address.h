// What a node tells others so that they find its devices: the provider, and libfabric's name of
// each endpoint. Internal to tiers/peer/.
//
//   HF_ASSIGN_OR_RETURN(FabricAddress peer, DecodeFabricAddress(bytes));
//
// Values and plain functions. Decoding takes any bytes.
//
// Version (1 byte, 2), length of the provider's name (1 byte), the name, address format (4 bytes,
// little endian, FI_SOCKADDR_…), the token (16 bytes), count of endpoints (1 byte), of each: length
// (2 bytes), bytes, length of its device's name (1 byte), the name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace holdfast {

struct FabricEndpoint {
  std::string address;
  std::string device;
  bool operator==(const FabricEndpoint&) const = default;
};

struct FabricAddress {
  std::string provider;
  uint32_t format = 0;
  std::string token;  // what it wants to hear of those who connect: told by itself they were
  std::vector<FabricEndpoint> endpoints;
  bool operator==(const FabricAddress&) const = default;
};

inline constexpr size_t kFabricTokenBytes = 16;

// What a reader says when it connects: the token of the one it wants to read from, and who it is
// (8 bytes, little endian), so that its connections can be closed when it is gone.
std::string FabricGreeting(const std::string& token, uint64_t reader_id);
// Of what follows the token; 0: it did not say. Takes any bytes.
uint64_t FabricReaderIdFrom(std::string_view said);

std::string EncodeFabricAddress(const FabricAddress& address);
// InvalidArgument when that is none.
absl::StatusOr<FabricAddress> DecodeFabricAddress(std::string_view bytes);
// FailedPrecondition when the peer's devices cannot be reached from `own`'s: another provider.
// InvalidArgument: what it says of itself is no address of that provider.
absl::Status CheckReachable(const FabricAddress& own, const FabricAddress& peer);

// "10.0.0.7:34121": an endpoint for people.
std::string FabricEndpointForPeople(uint32_t format, const std::string& endpoint);

}  // namespace holdfast
