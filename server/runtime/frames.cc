#include "server/runtime/frames.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {
namespace {

constexpr size_t kLengthBytes = 4;

uint32_t ReadLength(const char* at) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(at);
  return static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8 |
         static_cast<uint32_t>(bytes[2]) << 16 | static_cast<uint32_t>(bytes[3]) << 24;
}

}  // namespace

void FrameReader::Append(std::string_view bytes) {
  buffer_.erase(0, begin_);
  begin_ = 0;
  buffer_.append(bytes);
}

absl::StatusOr<std::optional<std::string_view>> FrameReader::Next() {
  const size_t there = buffer_.size() - begin_;
  if (there < kLengthBytes) {
    return std::nullopt;
  }
  const uint32_t length = ReadLength(buffer_.data() + begin_);
  if (length == 0 || length > bytes_max_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of ", length, " bytes; 1 to ", bytes_max_, " are allowed"));
  }
  if (there - kLengthBytes < length) {
    return std::nullopt;
  }
  const std::string_view frame(buffer_.data() + begin_ + kLengthBytes, length);
  begin_ += kLengthBytes + length;
  return frame;
}

std::string EncodeFrame(const v1::DaemonFrame& frame) {
  const size_t length = frame.ByteSizeLong();
  std::string bytes;
  bytes.reserve(kLengthBytes + length);
  for (size_t i = 0; i < kLengthBytes; ++i) {
    bytes.push_back(static_cast<char>(length >> (8 * i)));
  }
  frame.AppendToString(&bytes);
  return bytes;
}

void SetFailure(const absl::Status& status, v1::DaemonFrame& frame) {
  v1::Failure* failure = frame.mutable_failure();
  failure->set_code(static_cast<int>(status.code()));
  failure->set_message(Message(status));
}

}  // namespace holdfast
