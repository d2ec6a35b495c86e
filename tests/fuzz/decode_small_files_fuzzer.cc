// The input as every kind of small file of a durable tier: whole, and as the body of one whose
// frame and CRC fit (no fuzzer guesses a CRC). Its first byte's kind of name, too.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "tiers/durable/manifest.h"
#include "tiers/durable/names.h"
#include "tiers/durable/small_files.h"
#include "tiers/image/frame.h"

namespace {

using holdfast::FrameKind;

// What was accepted once is accepted again after encoding it, and is the same.
template <typename Decode, typename Encode>
void Check(std::string_view input, FrameKind kind, const Decode& decode, const Encode& encode) {
  for (const std::string& file : {std::string(input), holdfast::EncodeFrame(kind, input)}) {
    const auto value = decode(file);
    if (value.ok()) {
      const auto again = decode(encode(*value));
      if (!again.ok() || *again != *value) {
        std::abort();
      }
    }
  }
}

void CheckNames(std::string_view name) {
  for (const auto kind : {holdfast::DurableKind::kNvme, holdfast::DurableKind::kRemote}) {
    const holdfast::StepFile file = holdfast::ParseStepFileName(kind, name);
    const bool image = file.role == holdfast::StepFileRole::kImage;
    if (image || file.role == holdfast::StepFileRole::kRecord) {
      const std::string again =
          image ? holdfast::ImageFileName(kind, file.rank, file.world_size, file.form)
                : holdfast::RecordFileName(kind, file.rank, file.world_size);
      if (again != name) {
        std::abort();
      }
    }
  }
  const auto step = holdfast::ParseStepDirectoryName(name);
  if (step.has_value() && holdfast::StepDirectoryName(*step) != name) {
    std::abort();
  }
  (void)holdfast::ParseClaimName(name);
  (void)holdfast::ParseTemporaryName(name);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  Check(input, FrameKind::kIntent, holdfast::DecodeIntent, holdfast::EncodeIntent);
  Check(input, FrameKind::kJobIdentity, holdfast::DecodeJobFile, holdfast::EncodeJobFile);
  Check(input, FrameKind::kAttemptClaim, holdfast::DecodeClaim, holdfast::EncodeClaim);
  Check(input, FrameKind::kManifest, holdfast::DecodeManifest, holdfast::EncodeManifest);
  CheckNames(input);
  return 0;
}
