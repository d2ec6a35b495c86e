#include "server/runtime/frames.h"

#include <gtest/gtest.h>

namespace holdfast {
namespace {

std::string Frame(std::string_view message) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) {
    bytes.push_back(static_cast<char>(message.size() >> (8 * i)));
  }
  return bytes.append(message);
}

TEST(FrameReader, GivesWholeFramesWhateverThePieces) {
  const std::string stream = Frame("first") + Frame("second one") + Frame("3");
  for (size_t piece = 1; piece <= stream.size(); ++piece) {
    FrameReader reader(64);
    std::vector<std::string> frames;
    for (size_t at = 0; at < stream.size(); at += piece) {
      reader.Append(std::string_view(stream).substr(at, piece));
      for (auto frame = reader.Next(); frame.ok() && frame->has_value(); frame = reader.Next()) {
        frames.emplace_back(**frame);
      }
    }
    EXPECT_EQ(frames, (std::vector<std::string>{"first", "second one", "3"}))
        << "pieces of " << piece;
  }
}

TEST(FrameReader, RefusesLengthsOutsideTheLimits) {
  for (const uint32_t length : {0u, 65u, 0x7fffffffu, 0xffffffffu}) {
    FrameReader reader(64);
    std::string bytes(4, '\0');
    for (int i = 0; i < 4; ++i) {
      bytes[i] = static_cast<char>(length >> (8 * i));
    }
    reader.Append(bytes);
    EXPECT_EQ(reader.Next().status().code(), absl::StatusCode::kInvalidArgument) << length;
  }
  FrameReader reader(64);
  reader.Append(Frame(std::string(64, 'x')));
  EXPECT_TRUE(reader.Next()->has_value());
}

TEST(EncodeFrame, IsReadBackByTheReader) {
  v1::DaemonFrame frame;
  frame.set_id(7);
  SetFailure(absl::NotFoundError("step 3"), frame);
  FrameReader reader(64);
  reader.Append(EncodeFrame(frame));
  const auto bytes = reader.Next();
  ASSERT_TRUE(bytes.ok() && bytes->has_value());
  v1::DaemonFrame again;
  ASSERT_TRUE(again.ParseFromArray((*bytes)->data(), static_cast<int>((*bytes)->size())));
  EXPECT_EQ(again.id(), 7u);
  EXPECT_EQ(again.failure().code(), static_cast<int>(absl::StatusCode::kNotFound));
  EXPECT_EQ(again.failure().message(), "step 3");
}

}  // namespace
}  // namespace holdfast
