// The client socket, from both sides. As bytes that a client sends: what comes in pieces is the
// same as what comes at once, and no frame is longer than is allowed. As the message of a daemon's
// frame: the client library's own decoder takes it or refuses it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "client-lib/src/wire.h"
#include "holdfast/v1/client.pb.h"
#include "server/runtime/frames.h"

namespace {

constexpr uint32_t kFrameBytesMax = 4096;

struct Frames {
  std::vector<std::string> all;
  bool refused = false;
  bool operator==(const Frames&) const = default;
};

Frames Read(std::string_view bytes, size_t piece) {
  holdfast::FrameReader reader(kFrameBytesMax);
  Frames frames;
  for (size_t at = 0; at < bytes.size() && !frames.refused; at += piece) {
    reader.Append(bytes.substr(at, piece));
    for (;;) {
      const auto next = reader.Next();
      frames.refused = !next.ok();
      if (!next.ok() || !next->has_value()) {
        break;
      }
      if ((*next)->empty() || (*next)->size() > kFrameBytesMax) {
        std::abort();
      }
      frames.all.emplace_back(**next);
    }
  }
  return frames;
}

// (Protobuf refuses text that is no UTF-8; the client library shows it escaped.)
void CheckDaemonFrame(std::string_view message) {
  (void)holdfast::client::wire::DecodeFrame(message);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t piece = 1 + data[0] % 64;
  const Frames at_once = Read(input, std::max<size_t>(1, input.size()));
  if (Read(input, piece) != at_once) {
    std::abort();
  }
  for (const std::string& frame : at_once.all) {
    holdfast::v1::ClientFrame request;
    (void)request.ParseFromString(frame);
    CheckDaemonFrame(frame);
  }
  CheckDaemonFrame(input);
  return 0;
}
