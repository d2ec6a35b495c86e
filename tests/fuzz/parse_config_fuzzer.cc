// The text of ckptd.yaml. What is refused changes nothing and says why, in text that a terminal may
// show; what is taken is taken again, and is then the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/config.h"
#include "base/status.h"
#include "base/utf8.h"
#include "holdfast/v1/config.pb.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  holdfast::v1::DaemonConfig config;
  config.set_node_name("before");
  const std::string before = config.SerializeAsString();
  const absl::Status parsed = holdfast::ParseConfig(text, "ckptd.yaml", config);
  if (!parsed.ok()) {
    const std::string why = holdfast::Message(parsed);
    if (config.SerializeAsString() != before || why.empty() || !holdfast::IsUtf8(why)) {
      std::abort();
    }
    return 0;
  }
  holdfast::v1::DaemonConfig again;
  again.set_node_name("before");
  if (!holdfast::ParseConfig(text, "ckptd.yaml", again).ok() ||
      again.SerializeAsString() != config.SerializeAsString()) {
    std::abort();
  }
  return 0;
}
