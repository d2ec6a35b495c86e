// Writes the fixtures of the current format version, 2: make_fixture <directory>. Run once for each
// version that is released, by hand; the tests read what is committed.
#include <cstdio>
#include <fstream>

#include "tests/tiers/image/sample_image.h"
#include "tiers/image/kept.h"

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

// Two replicas, each with an object of its own; rank 0 keeps `embedding` and `scale`, rank 1 the
// others.
SampleImage Replica(Rank rank) {
  ShardRecord identity = SampleRecord();
  identity.id.attempt = 1;
  identity.id.step = 7;
  identity.id.rank = rank;
  identity.world_size = 2;
  identity.generation = 0;
  identity.descent = {{1, {0, 0}}};
  identity.sealed_unix_ms = 1'700'000'000'000 + rank;
  return MakeImageOf(
      {Whole("embedding", DType::kF32, {2, 2}), Whole("bias", DType::kBF16, {3}),
       Part("weight", DType::kI16, {4, 2}, {{2, 0}, {2, 2}}), Whole("scale", DType::kU8, {5}),
       rank == 0 ? Json("progress", 10) : Opaque("rng", "raw", 3)},
      identity,
      // In image order: embedding, bias, weight, then bytes by name.
      {std::string("\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40", 16), "bbiiaa", "11223344",
       rank == 0 ? "{\"step\":7}" : "rng", "scale"});
}

bool WriteShared(const std::string& stem, const SampleImage& sample,
                 const std::vector<Rank>& owners) {
  const auto part =
      PlanPart({sample.record, sample.layout}, owners,
               PlanHash(LikenessOf(sample.record, sample.layout).content, std::vector<Rank>{0, 1}));
  if (!part.ok() || !part->has_value()) {
    return false;
  }
  std::string file = (*part)->from_whole.header;
  for (const ImageRun& run : (*part)->from_whole.runs) {
    file += sample.image.substr(run.source_offset, run.bytes);
  }
  return Write(stem + ".safetensors", file) &&
         Write(stem + ".record", EncodeRecord((*part)->record));
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_fixture <directory>\n");
    return 2;
  }
  const std::string directory = argv[1];
  // Tensors in image order: embedding, bias, weight, scale.
  const std::vector<holdfast::Rank> owners = {0, 1, 1, 0};
  const bool ok = holdfast::WriteShared(directory + "/shared-0", holdfast::Replica(0), owners) &&
                  holdfast::WriteShared(directory + "/shared-1", holdfast::Replica(1), owners);
  return ok ? 0 : 1;
}
