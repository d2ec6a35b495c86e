// A look into an encoded layout for some of its tensors, for planners that look into thousands of
// layouts for a few names: nothing is decoded but what its caller asks for.
//
//   HF_RETURN_IF_ERROR(ScanLayout(layout_bytes, [&](const ScannedSlice& scanned) {
//     if (!Wanted(scanned.name)) return absl::OkStatus();
//     HF_ASSIGN_OR_RETURN(const Slice slice, DecodeSlice(scanned.bytes));
//     …
//   }));
//
// Pure, thread-safe. What slices are to each other (order, offsets, keys) is not looked at:
// DecodeLayout has done that when the bytes came in, and their hash vouches for them.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tiers/image/layout.h"

namespace holdfast {

// Within one process: for tables, which most names are not in.
uint64_t NameHash(std::string_view name);

// Points into the layout's bytes.
struct ScannedSlice {
  uint32_t number = 0;  // in the layout
  std::string_view name;
  uint64_t name_hash = 0;  // NameHash(name)
  std::string_view bytes;  // of the slice's message
};

// InvalidArgument: malformed. What `take` fails with ends the scan, and is what it returns.
absl::Status ScanLayout(std::string_view layout_bytes,
                        absl::FunctionRef<absl::Status(const ScannedSlice&)> take);

// What two ranks' slices have in common if they are the same part of the same tensor: the bytes of
// name, dtype, shape and place, in the form in which EncodeLayout writes them. Empty: in another.
std::string_view PartBytes(std::string_view slice_bytes);

// One slice. InvalidArgument: malformed, or it breaks the rules of slices.
absl::StatusOr<Slice> DecodeSlice(std::string_view slice_bytes);

}  // namespace holdfast
