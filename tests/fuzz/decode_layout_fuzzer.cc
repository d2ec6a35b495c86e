// 8 bytes header length (in 4096s), 8 bytes image length, the layout.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tiers/image/layout.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 16) {
    return 0;
  }
  uint64_t header_pages = 0;
  uint64_t image_bytes = 0;
  std::memcpy(&header_pages, data, 8);
  std::memcpy(&image_bytes, data + 8, 8);
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 16, size - 16);
  const auto layout =
      holdfast::DecodeLayout(bytes, header_pages * holdfast::kImageAlignment, image_bytes);
  if (layout.ok()) {
    // What is accepted is what PlanImage makes of the same slices, and survives encoding.
    const auto again = holdfast::DecodeLayout(holdfast::EncodeLayout(*layout), layout->header_bytes,
                                              layout->image_bytes);
    const auto plan = holdfast::PlanImage(layout->slices, 0);
    if (!again.ok() || *again != *layout || !plan.ok()) {
      std::abort();
    }
    if (layout->slices.size() < 1000) {
      holdfast::FindOverlaps(*layout);
    }
  }
  return 0;
}
