// Reads the memory tier's directory and decides what each file there is worth: the rules of
// docs/formats.md, "Memory tier directory". Internal to tiers/memory; the caller keeps everybody
// else from changing the directory meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "base/env.h"
#include "tiers/memory/slot_store.h"

namespace holdfast {

struct SlotScanInput {
  Env* env = nullptr;
  std::string dir;
  std::string boot_id;
  // Slots that this process made and has not given a note yet: they are not what a crash left.
  std::function<bool(SlotId)> awaits_note;
};

struct SlotScanResult {
  MemoryScan scan;
};

absl::StatusOr<SlotScanResult> ScanSlots(const SlotScanInput& input);

}  // namespace holdfast
