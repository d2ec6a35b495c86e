#include "tests/tiers/compressed/compressed_harness.h"

#include <algorithm>
#include <random>
#include <span>

namespace holdfast {

std::string HalfNoise(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text(bytes, '\0');
  for (uint64_t i = 0; i < bytes; ++i) {
    text[i] = i % 4 < 2 ? static_cast<char>(random()) : static_cast<char>(i % 4);
  }
  return text;
}

std::span<const std::byte> BytesOf(std::string_view text, uint64_t offset, uint64_t bytes) {
  return std::as_bytes(std::span(text)).subspan(offset, bytes);
}

std::unique_ptr<File> CompressedPlace::Create(const std::string& name) {
  return ValueOf(Env::System()->Open(PathOf(name), OpenMode::kCreateExclusive));
}

std::unique_ptr<File> CompressedPlace::OpenPlain(const std::string& name) {
  return ValueOf(Env::System()->Open(PathOf(name), OpenMode::kReadWrite));
}

void CompressedPlace::Write(const std::string& name, const std::string& content) {
  Env::System()->Unlink(PathOf(name)).IgnoreError();
  const absl::Status written = Create(name)->WriteAt(0, std::as_bytes(std::span(content)));
  EXPECT_TRUE(written.ok()) << ToString(written);
}

void CompressedPlace::Compress(const std::string& name, const std::string& image, int level) {
  CompressingFile file(Create(name), image.size(), level);
  for (uint64_t at = 0; at < image.size(); at += kFrameBytes) {
    const absl::Status written =
        file.WriteAt(at, BytesOf(image, at, std::min(kFrameBytes, image.size() - at)));
    ASSERT_TRUE(written.ok()) << ToString(written);
  }
  const absl::Status finished = file.Finish();
  ASSERT_TRUE(finished.ok()) << ToString(finished);
}

absl::StatusOr<std::unique_ptr<CompressedFile>> CompressedPlace::Open(const std::string& name,
                                                                      uint64_t image_bytes) {
  return CompressedFile::Open(ValueOf(Env::System()->Open(PathOf(name), OpenMode::kRead)),
                              image_bytes);
}

absl::StatusOr<std::string> CompressedPlace::Read(const std::string& name, uint64_t image_bytes) {
  HF_ASSIGN_OR_RETURN(const std::unique_ptr<CompressedFile> file, Open(name, image_bytes));
  std::string image(image_bytes, '\0');
  HF_RETURN_IF_ERROR(file->ReadAt(0, std::as_writable_bytes(std::span(image))));
  return image;
}

}  // namespace holdfast
