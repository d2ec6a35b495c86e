// Writes the fixtures of the current format version: make_fixture <directory>. Run once for each
// version that is released, by hand; the tests read what is committed.
#include <cstdio>
#include <fstream>

#include "tests/tiers/image/sample_image.h"

namespace holdfast {
namespace {

bool Write(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) {
    std::fprintf(stderr, "make_fixture: could not write '%s'\n", path.c_str());
  }
  return static_cast<bool>(out);
}

bool WriteBoth(const std::string& stem, const SampleImage& sample) {
  return Write(stem + ".safetensors", sample.image) && Write(stem + ".record", sample.record_file);
}

// The worked example of docs/formats.md.
SampleImage Example() {
  ShardRecord identity = SampleRecord();
  identity.id.attempt = 1;
  identity.id.step = 7;
  identity.world_size = 2;
  identity.generation = 1;
  identity.descent = {{1, {0, 0}}};
  identity.sealed_unix_ms = 1'700'000'000'000;
  const std::string floats("\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40", 16);  // 1, 2, 3, 4
  return MakeImageOf({Part("w", DType::kF32, {4, 2}, {{2, 0}, {2, 2}}), Json("progress", 10)},
                     identity, {floats, "{\"step\":7}"});
}

// Every dtype, and every kind of slice.
SampleImage Varied() {
  std::vector<Slice> slices = VariedSlices();
  for (int number = 1; number <= 17; ++number) {
    const auto dtype = static_cast<DType>(number);
    slices.push_back(Whole("dtype " + std::string(DTypeName(dtype)), dtype, {2}));
  }
  return MakeSampleImage(slices, SampleRecord());
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_fixture <directory>\n");
    return 2;
  }
  const std::string directory = argv[1];
  const bool ok = holdfast::WriteBoth(directory + "/example", holdfast::Example()) &&
                  holdfast::WriteBoth(directory + "/varied", holdfast::Varied());
  return ok ? 0 : 1;
}
