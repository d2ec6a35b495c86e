// What a held save has copied, to be looked at: a second mapping of its slot, read-only, which
// stays when the save is sealed or given up.
//
//   Result<std::shared_ptr<const StagedTensors>> staged = MapCopies(run.slot(), run.Copies());
//
// When the slot's file is cut short, zeros are read from there on, and the program goes on; such a
// slot is never sealed. Forked children do not have the mapping.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "client-lib/src/slot_mapping.h"
#include "holdfast/job.h"

namespace holdfast::client {

// `copies` lie in `slot`.
Result<std::shared_ptr<const StagedTensors>> MapCopies(
    const SlotMapping& slot, const std::vector<std::span<const std::byte>>& copies);

}  // namespace holdfast::client
