// The input as what another daemon says.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "server/peer_codec.h"

namespace {

using holdfast::EventTime;

constexpr EventTime kNow{{1'000'000'000'000'123}, 0};

struct Encoder {
  const holdfast::PeerHeader& header;

  std::vector<std::string> operator()(const std::vector<holdfast::ToCoordinator>& messages) const {
    auto all = holdfast::EncodePeer(header, messages, kNow);
    return all.ok() ? *std::move(all) : std::vector<std::string>();
  }
  // To an agent, or to a node.
  template <typename Message>
  std::vector<std::string> operator()(const Message& message) const {
    auto bytes = holdfast::EncodePeer(header, message);
    return bytes.ok() ? std::vector<std::string>{*std::move(bytes)} : std::vector<std::string>();
  }
};

std::vector<std::string> Encoded(const holdfast::PeerSaid& said) {
  return std::visit(Encoder{said.header}, said.messages);
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
