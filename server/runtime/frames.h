// The framing of the client socket: u32 little-endian length, then a protobuf message
// (proto/holdfast/v1/client.proto).
//
//   reader.Append(bytes);
//   while (auto frame = reader.Next(); frame.ok() && frame->has_value()) Parse(**frame);
//
// Values and plain functions; one owner.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "holdfast/v1/client.pb.h"

namespace holdfast {

class FrameReader {
 public:
  explicit FrameReader(uint32_t bytes_max) : bytes_max_(bytes_max) {}
  void Append(std::string_view bytes);
  // The next whole frame, valid until the next call; nothing if it is not there yet;
  // InvalidArgument for a length of 0 or beyond the limit.
  absl::StatusOr<std::optional<std::string_view>> Next();

 private:
  const uint32_t bytes_max_;
  std::string buffer_;
  size_t begin_ = 0;  // of what has not been given out
};

std::string EncodeFrame(const v1::DaemonFrame& frame);
// Makes the frame a Failure with this status.
void SetFailure(const absl::Status& status, v1::DaemonFrame& frame);

}  // namespace holdfast
