// Valid inputs with random damage through every parser: nothing may crash, read out of bounds (the
// sanitizer legs see that) or be accepted when it contradicts itself. Seeded: a failure names its
// round.
#include <gtest/gtest.h>

#include <random>

#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/safetensors.h"

namespace holdfast {
namespace {

constexpr int kRounds = 20'000;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random_); }

  // One to four changes: a bit, a byte, a cut, a repeat, an insert, a run of one value.
  std::string Mutate(std::string bytes) {
    for (uint64_t i = 0, changes = 1 + Below(4); i < changes && !bytes.empty(); ++i) {
      Change(bytes);
    }
    return bytes;
  }

 private:
  void Change(std::string& bytes) {
    static constexpr unsigned char kTelling[] = {0x00, 0x01, 0x7F, 0x80, 0xFF, '"',
                                                 '\\', '{',  '[',  '-',  '9'};
    const size_t at = Below(bytes.size());
    const size_t length = 1 + Below(std::min<size_t>(16, bytes.size() - at));
    switch (Below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(Below(256));
        break;
      case 2:
        bytes[at] = static_cast<char>(kTelling[Below(std::size(kTelling))]);
        break;
      case 3:
        bytes.erase(at, length);
        break;
      case 4:
        bytes.insert(at, bytes.substr(at, length));
        break;
      case 5:
        bytes.insert(at, length, static_cast<char>(kTelling[Below(std::size(kTelling))]));
        break;
      default:
        bytes.resize(at);
        break;
    }
  }

  std::mt19937_64 random_;
};

SampleImage Sample() {
  return MakeSampleImage(VariedSlices(), SampleRecord());
}

TEST(ImageMutationTest, Layout) {
  const SampleImage sample = Sample();
  Mutator mutator(1);
  for (int round = 0; round < kRounds; ++round) {
    const auto layout = DecodeLayout(mutator.Mutate(sample.record.layout_bytes),
                                     sample.layout.header_bytes, sample.layout.image_bytes);
    if (layout.ok()) {
      // What is accepted is a layout that PlanImage would make of these slices.
      const auto plan = PlanImage(layout->slices, 1);
      ASSERT_TRUE(plan.ok()) << "round " << round << ": " << ToString(plan.status());
      EXPECT_EQ(plan->layout.image_bytes - plan->layout.header_bytes,
                layout->image_bytes - layout->header_bytes)
          << "round " << round;
      FindOverlaps(*layout);
    } else {
      EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument) << "round " << round;
    }
  }
}

TEST(ImageMutationTest, RecordFile) {
  const SampleImage sample = Sample();
  Mutator mutator(2);
  for (int round = 0; round < kRounds; ++round) {
    const std::string mutated = mutator.Mutate(sample.record_file);
    EXPECT_EQ(DecodeRecord(mutated).ok(), mutated == sample.record_file) << "round " << round;
  }
}

TEST(ImageMutationTest, RecordBodyInAFrameThatFits) {
  const SampleImage sample = Sample();
  const std::string body = sample.record_file.substr(24, sample.record_file.size() - 32);
  Mutator mutator(3);
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto record = DecodeRecord(FrameRecordBody(mutator.Mutate(body), 1));
    if (record.ok()) {
      ++accepted;
      EXPECT_EQ(HashLayout(record->layout_bytes), record->layout_hash) << "round " << round;
      const auto again = DecodeRecord(EncodeRecord(*record));
      ASSERT_TRUE(again.ok()) << "round " << round << ": " << ToString(again.status());
      EXPECT_EQ(*again, *record) << "round " << round;
    } else {
      EXPECT_EQ(record.status().code(), absl::StatusCode::kInvalidArgument) << "round " << round;
    }
  }
  EXPECT_GT(accepted, 0) << "a changed step or digest is still a valid record";
}

TEST(ImageMutationTest, SafetensorsHeader) {
  const SampleImage sample = Sample();
  const std::string json = sample.image.substr(8, sample.image.find("  ") - 8);
  const uint64_t data_bytes = sample.layout.image_bytes - sample.layout.header_bytes;
  Mutator mutator(4);
  for (int round = 0; round < kRounds; ++round) {
    const std::string mutated = mutator.Mutate(json);
    std::string file;
    for (size_t i = 0; i < 8; ++i) {
      file.push_back(static_cast<char>(mutated.size() >> (8 * i)));
    }
    file += mutated;
    const auto header = ParseSafetensors(file, file.size() + data_bytes);
    if (header.ok()) {
      uint64_t end = 0;
      for (const SafetensorsEntry& entry : header->entries) {
        EXPECT_EQ(entry.begin, end) << "round " << round;
        end = entry.end;
      }
      EXPECT_EQ(end, data_bytes) << "round " << round;
    } else {
      EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << "round " << round;
    }
    // The length field itself.
    const std::string image = mutator.Mutate(sample.image.substr(0, 64)) + sample.image.substr(64);
    (void)ParseSafetensors(image, image.size());
  }
}

}  // namespace
}  // namespace holdfast
