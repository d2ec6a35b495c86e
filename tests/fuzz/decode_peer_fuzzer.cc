// The input as what another daemon says.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "server/peer_codec.h"

namespace {

using holdfast::EventTime;

constexpr EventTime kNow{{1'000'000'000'000'123}, 0};

std::vector<std::string> Encoded(const holdfast::PeerSaid& said) {
  if (const auto* to_agent = std::get_if<holdfast::ToAgent>(&said.messages)) {
    const auto bytes = holdfast::EncodePeer(said.header, *to_agent);
    return bytes.ok() ? std::vector<std::string>{*bytes} : std::vector<std::string>();
  }
  const auto all = holdfast::EncodePeer(
      said.header, std::get<std::vector<holdfast::ToCoordinator>>(said.messages), kNow);
  return all.ok() ? *all : std::vector<std::string>();
}

}  // namespace

// What was accepted once is one message again after encoding it, and is the same.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  holdfast::PeerContext context;
  context.now = kNow;
  const auto said = holdfast::DecodePeer({reinterpret_cast<const char*>(data), size}, context);
  if (said.ok()) {
    const std::vector<std::string> once = Encoded(*said);
    if (once.size() != 1) {
      std::abort();
    }
    const auto again = holdfast::DecodePeer(once.front(), context);
    if (!again.ok() || Encoded(*again) != once) {
      std::abort();
    }
  }
  return 0;
}
