// Who said it: the system, or somebody who looked at what was read. EIO and a wrong digest are both
// DataLoss; only the second says something about the file for sure.
#pragma once

#include <optional>

#include "absl/status/status.h"

namespace holdfast {

// What the system said, of a status that came out of ErrnoStatus (base/status.h), annotated or not.
std::optional<int> ErrnoOf(const absl::Status& status);

// Whether the status came out of ErrnoStatus (base/status.h), annotated or not.
bool IsErrno(const absl::Status& status);

// ENOSPC or EDQUOT: the file system, or a quota on it, is full. (The code alone says less:
// descriptors and memory run out under the same one.)
bool IsNoSpace(const absl::Status& status);

// EIO, ESTALE, a shortage, a call that timed out or was not permitted: what it was asked for may be
// there, and another try may read it.
bool MayPass(const absl::Status& status);

// ENOTDIR: a file lies where a directory is needed.
bool IsNotADirectory(const absl::Status& status);

}  // namespace holdfast
