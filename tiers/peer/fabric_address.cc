#include "tiers/peer/fabric_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>

#include <array>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tiers/peer/fabric.h"

namespace holdfast {
namespace {

constexpr char kVersion = 2;
constexpr size_t kEndpointBytesMax = 256;
constexpr size_t kDeviceNameBytesMax = 64;

class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : rest_(bytes) {}

  bool Take(size_t count, std::string_view& out) {
    if (count > rest_.size()) {
      return false;
    }
    out = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return true;
  }
  // Little endian.
  bool TakeNumber(size_t count, uint32_t& out) {
    std::string_view bytes;
    if (!Take(count, bytes)) {
      return false;
    }
    out = 0;
    for (size_t i = 0; i < count; ++i) {
      out |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return true;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

void AppendNumber(std::string& to, size_t count, size_t number) {
  for (size_t i = 0; i < count; ++i) {
    to.push_back(static_cast<char>(number >> (8 * i) & 0xff));
  }
}

absl::Status Malformed(const std::string& why) {
  return absl::InvalidArgumentError("fabric address: " + why);
}

// What is handed to libfabric is looked at by it as a socket address of its format.
absl::Status CheckEndpoint(uint32_t format, const std::string& endpoint) {
  sa_family_t family = 0;
  if (endpoint.size() >= sizeof family) {
    std::memcpy(&family, endpoint.data(), sizeof family);
  }
  const auto port = [&endpoint](size_t offset) {
    in_port_t port_number = 0;
    std::memcpy(&port_number, endpoint.data() + offset, sizeof port_number);
    return ntohs(port_number);
  };
  switch (format) {
    case FI_SOCKADDR_IN:
      if (endpoint.size() != sizeof(sockaddr_in) || family != AF_INET ||
          port(offsetof(sockaddr_in, sin_port)) == 0) {
        return Malformed("an endpoint is no IPv4 address with a port");
      }
      return absl::OkStatus();
    case FI_SOCKADDR_IN6:
      if (endpoint.size() != sizeof(sockaddr_in6) || family != AF_INET6 ||
          port(offsetof(sockaddr_in6, sin6_port)) == 0) {
        return Malformed("an endpoint is no IPv6 address with a port");
      }
      return absl::OkStatus();
    default:
      return absl::OkStatus();
  }
}

}  // namespace

std::string EncodeFabricAddress(const FabricAddress& address) {
  std::string bytes(1, kVersion);
  AppendNumber(bytes, 1, address.provider.size());
  bytes += address.provider;
  AppendNumber(bytes, 4, address.format);
  bytes += address.token;
  AppendNumber(bytes, 1, address.endpoints.size());
  for (const FabricEndpoint& endpoint : address.endpoints) {
    const std::string device = endpoint.device.substr(0, kDeviceNameBytesMax);
    AppendNumber(bytes, 2, endpoint.address.size());
    bytes += endpoint.address;
    AppendNumber(bytes, 1, device.size());
    bytes += device;
  }
  return bytes;
}

std::string FabricGreeting(const std::string& token, uint64_t reader_id) {
  std::string greeting = token;
  AppendNumber(greeting, 8, reader_id);
  return greeting;
}

uint64_t FabricReaderIdFrom(std::string_view said) {
  if (said.size() < 8) {
    return 0;
  }
  uint64_t reader_id = 0;
  for (size_t i = 0; i < 8; ++i) {
    reader_id |= static_cast<uint64_t>(static_cast<unsigned char>(said[i])) << (8 * i);
  }
  return reader_id;
}

absl::StatusOr<FabricAddress> DecodeFabricAddress(std::string_view text) {
  if (text.size() > kFabricAddressBytesMax) {
    return Malformed(absl::StrCat("of ", text.size(), " bytes"));
  }
  Bytes bytes(text);
  FabricAddress address;
  uint32_t version = 0;
  uint32_t provider_bytes = 0;
  uint32_t count = 0;
  std::string_view provider;
  std::string_view token;
  if (!bytes.TakeNumber(1, version) || version != static_cast<uint32_t>(kVersion)) {
    return Malformed("of no known version");
  }
  if (!bytes.TakeNumber(1, provider_bytes) || provider_bytes == 0 ||
      !bytes.Take(provider_bytes, provider) || !bytes.TakeNumber(4, address.format) ||
      !bytes.Take(kFabricTokenBytes, token) || !bytes.TakeNumber(1, count) || count == 0 ||
      count > kFabricDevicesMax) {
    return Malformed("cut short, or without endpoints");
  }
  address.provider = provider;
  address.token = token;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t endpoint_bytes = 0;
    uint32_t device_bytes = 0;
    std::string_view endpoint;
    std::string_view device;
    if (!bytes.TakeNumber(2, endpoint_bytes) || endpoint_bytes == 0 ||
        endpoint_bytes > kEndpointBytesMax || !bytes.Take(endpoint_bytes, endpoint) ||
        !bytes.TakeNumber(1, device_bytes) || device_bytes > kDeviceNameBytesMax ||
        !bytes.Take(device_bytes, device)) {
      return Malformed("an endpoint is cut short");
    }
    address.endpoints.push_back({std::string(endpoint), std::string(device)});
  }
  if (!bytes.empty()) {
    return Malformed("bytes behind its end");
  }
  return address;
}

absl::Status CheckReachable(const FabricAddress& own, const FabricAddress& peer) {
  if (peer.provider != own.provider || peer.format != own.format) {
    // Of the peer's own words only those that are a name's.
    std::string name;
    for (const char c : peer.provider.substr(0, 40)) {
      name.push_back(c > ' ' && c < 127 ? c : '?');
    }
    return absl::FailedPreconditionError(
        absl::StrCat("fabric: the peer has provider '", name, "' with addresses of format ",
                     peer.format, ", this node '", own.provider, "' with format ", own.format,
                     ": set the same fabric.provider on all nodes"));
  }
  for (const FabricEndpoint& endpoint : peer.endpoints) {
    if (endpoint.address.size() != own.endpoints.front().address.size()) {
      return Malformed("an endpoint is of another length than this node's own");
    }
    HF_RETURN_IF_ERROR(CheckEndpoint(peer.format, endpoint.address));
  }
  return absl::OkStatus();
}

std::string FabricEndpointForPeople(uint32_t format, const std::string& endpoint) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (format == FI_SOCKADDR_IN && endpoint.size() == sizeof(sockaddr_in)) {
    sockaddr_in address;
    std::memcpy(&address, endpoint.data(), sizeof address);
    ::inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size());
    return absl::StrCat(text.data(), ":", ntohs(address.sin_port));
  }
  if (format == FI_SOCKADDR_IN6 && endpoint.size() == sizeof(sockaddr_in6)) {
    sockaddr_in6 address;
    std::memcpy(&address, endpoint.data(), sizeof address);
    ::inet_ntop(AF_INET6, &address.sin6_addr, text.data(), text.size());
    return absl::StrCat("[", text.data(), "]:", ntohs(address.sin6_port));
  }
  return absl::StrCat("0x", absl::BytesToHexString(endpoint));
}

}  // namespace holdfast
