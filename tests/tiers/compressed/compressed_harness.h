// What the tests of compressed images share: images that compress somewhat, files to keep them in.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "tests/base/temporary_directory.h"
#include "tests/tiers/transfer/transfer_harness.h"
#include "tiers/compressed/compressed_file.h"
#include "tiers/compressed/compressing_file.h"

namespace holdfast {

// Half of every four bytes is noise: it compresses, and no frame is like another.
std::string HalfNoise(uint64_t bytes, uint64_t seed = 1);
std::span<const std::byte> BytesOf(std::string_view text, uint64_t offset, uint64_t bytes);

// A directory, and files in it.
class CompressedPlace {
 public:
  std::string PathOf(const std::string& name) const { return directory_.path() + "/" + name; }
  std::unique_ptr<File> Create(const std::string& name);
  std::unique_ptr<File> OpenPlain(const std::string& name);
  std::string Content(const std::string& name) { return ContentOf(PathOf(name)); }
  void Write(const std::string& name, const std::string& content);
  // The image compressed into a new file, frame by frame in order.
  void Compress(const std::string& name, const std::string& image, int level = 3);
  absl::StatusOr<std::unique_ptr<CompressedFile>> Open(const std::string& name,
                                                       uint64_t image_bytes);
  // All of it, or why not.
  absl::StatusOr<std::string> Read(const std::string& name, uint64_t image_bytes);

 private:
  TemporaryDirectory directory_;
};

}  // namespace holdfast
