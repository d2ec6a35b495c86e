// Files in memory that are handed to clients: nobody can cut one short, which would be a SIGBUS for
// all who have it mapped.
//
//   HF_ASSIGN_OR_RETURN(UniqueFd fd, SealedMemory("parts", bytes, {}));          // to be written
//   into HF_ASSIGN_OR_RETURN(UniqueFd fd, SealedMemory("record", size, {record}));    // to be read
//   alone
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace holdfast {

// Of so many bytes; the first are those of `content`, one piece behind the other. With any content
// nothing in it can be changed afterwards.
absl::StatusOr<UniqueFd> SealedMemory(const char* name, uint64_t bytes,
                                      std::span<const std::string_view> content);

// Of such a file; 0: it is another one.
uint64_t SealedBytes(int fd);

}  // namespace holdfast
