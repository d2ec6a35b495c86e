// Compressed images: whatever the file holds, it is refused, or as many bytes come out of it as it
// should, and nothing is written beyond. The first four bytes say how long the image is to be.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tiers/compressed/compressed_file.h"

namespace {

using holdfast::CompressedFile;

constexpr uint64_t kImageBytesMax = 3 * holdfast::kFrameBytes;

class MemoryFile : public holdfast::ReadOnlyFile {
 public:
  explicit MemoryFile(std::string_view content) : content_(content) {}
  int fd() const override { return -1; }
  const std::string& path() const override { return path_; }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    if (offset > content_.size() || out.size() > content_.size() - offset) {
      return absl::OutOfRangeError("it ends before");
    }
    std::memcpy(out.data(), content_.data() + offset, out.size());
    return absl::OkStatus();
  }
  absl::StatusOr<holdfast::FileInfo> Info() override {
    holdfast::FileInfo info;
    info.bytes = content_.size();
    return info;
  }

 private:
  const std::string path_ = "/fuzzed";
  const std::string_view content_;
};

void ExpectOk(bool ok) {
  if (!ok) {
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t wanted = 0;
  if (size < sizeof(wanted)) {
    return 0;
  }
  std::memcpy(&wanted, data, sizeof(wanted));
  const uint64_t image_bytes = wanted % kImageBytesMax + 1;
  const std::string_view content(reinterpret_cast<const char*>(data) + sizeof(wanted),
                                 size - sizeof(wanted));
  auto opened = CompressedFile::Open(std::make_unique<MemoryFile>(content), image_bytes);
  if (!opened.ok()) {
    ExpectOk(absl::IsDataLoss(opened.status()));
    return 0;
  }
  ExpectOk((*opened)->Info()->bytes == image_bytes);
  // In whole, and in parts, which must be the same.
  std::vector<std::byte> whole(image_bytes);
  const absl::Status read = (*opened)->ReadAt(0, whole);
  ExpectOk(read.ok() || absl::IsDataLoss(read));
  for (uint64_t at = 0; at < image_bytes; at += 700'001) {
    std::vector<std::byte> part(std::min<uint64_t>(1000, image_bytes - at));
    const absl::Status partly = (*opened)->ReadAt(at, part);
    ExpectOk(partly.ok() || !read.ok());
    ExpectOk(!read.ok() ||
             std::equal(part.begin(), part.end(), whole.begin() + static_cast<ptrdiff_t>(at)));
  }
  return 0;
}
