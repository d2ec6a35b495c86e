// Strict reading of protobuf's wire format, field by field, over untrusted bytes. For Holdfast's
// own code without a protobuf runtime: tiers/image (records, layouts), tiers/memory (slot notes)
// and client-lib (answers of the daemon).
//
// Why not protozero's own reader: it cuts field keys and lengths to 32 bits where protobuf refuses
// them, asserts on a wire type that the caller did not expect, and throws. Here every surprise is a
// Status. Writing is protozero's.
//
//   WireReader reader("Slice", bytes);
//   for (WireField field; reader.Next(field);) {
//     switch (field.number) {
//       case 1: HF_RETURN_IF_ERROR(reader.Bytes(field, slice.name)); break;
//       default: break;  // fields of later versions are skipped
//     }
//   }
//   HF_RETURN_IF_ERROR(reader.status());
//
// The reader and the fields point into `bytes`, which the caller keeps.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace holdfast::image_internal {

enum class WireType : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

struct WireField {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t value = 0;      // kVarint, kFixed64, kFixed32
  std::string_view bytes;  // kBytes
};

class WireReader {
 public:
  // `message` is a literal that errors call it by.
  WireReader(std::string_view message, std::string_view bytes) : message_(message), rest_(bytes) {}

  // False at the end, and at the first malformed byte: then status() says why.
  bool Next(WireField& field);
  const absl::Status& status() const { return status_; }
  // What Next has not come to yet.
  std::string_view rest() const { return rest_; }

  // The field's value, if it has the right wire type, fits, and is the first of its number (numbers
  // below 64).
  absl::Status Unsigned(const WireField& field, uint64_t value_max, uint64_t& out);
  absl::Status Bytes(const WireField& field, std::string_view& out);
  absl::Status Bytes(const WireField& field, std::string& out);
  absl::Status PackedUnsigned(const WireField& field, size_t count_max, std::vector<uint64_t>& out);
  absl::Status PackedFixed64(const WireField& field, std::vector<uint64_t>& out);
  // One of several: only the wire type is checked.
  absl::Status Repeated(const WireField& field, std::string_view& out) const;

 private:
  absl::Status Expect(const WireField& field, WireType type);
  absl::Status Malformed(const WireField& field, std::string_view why) const;
  void Stop(std::string_view why);

  std::string_view message_;
  std::string_view rest_;
  uint64_t seen_ = 0;  // bit n: field n was read
  absl::Status status_;
};

}  // namespace holdfast::image_internal
