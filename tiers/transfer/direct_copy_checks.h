// What every direct copy refuses beforehand. Internal to tiers/transfer/.
#pragma once

#include "tiers/transfer/direct_copy.h"

namespace holdfast {

absl::Status CheckDirectCopy(const ShardRecord& record, const Layout& layout,
                             const DirectCopyOptions& options);

}  // namespace holdfast
