// Intents, JOB, claims, manifests: wire format, what is refused, and the names that go with them.
#include "tiers/durable/small_files.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/attempts.h"
#include "base/digest.h"
#include "base/status.h"
#include "holdfast/v1/record.pb.h"
#include "holdfast/v1/state.pb.h"
#include "tests/tiers/durable/small_file_examples.h"
#include "tiers/durable/names.h"
#include "tiers/image/frame.h"

namespace holdfast {
namespace {

std::string ReadSource(const std::string& path) {
  std::ifstream in(std::string(HOLDFAST_SOURCE_DIR) + "/" + path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string HexDump(const std::string& bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size(); at += 16) {
    absl::StrAppend(&out, absl::Hex(at, absl::kZeroPad4), " ");
    std::string text;
    for (size_t i = 0; i < 16; ++i) {
      if (at + i < bytes.size()) {
        const auto byte = static_cast<unsigned char>(bytes[at + i]);
        absl::StrAppend(&out, " ", absl::Hex(byte, absl::kZeroPad2));
        text.push_back(byte >= 0x20 && byte < 0x7f ? static_cast<char>(byte) : '.');
      } else {
        absl::StrAppend(&out, "   ");
      }
    }
    absl::StrAppend(&out, "  |", text, "|\n");
  }
  absl::StrAppend(&out, absl::Hex(bytes.size(), absl::kZeroPad4), "\n");
  return out;
}

std::string BodyOf(FrameKind kind, const std::string& file) {
  return std::string(DecodeFrame(kind, file).value());
}

// Every version ever released stays readable; today's writer makes the same bytes; the document
// shows them.
TEST(SmallFilesTest, FixturesOfVersion1) {
  const std::string job = ReadSource("tests/fixtures/v1/example.job");
  EXPECT_EQ(*DecodeJobFile(job), ExampleJob());
  EXPECT_EQ(EncodeJobFile(ExampleJob()), job);
  const std::string claim = ReadSource("tests/fixtures/v1/example.claim");
  EXPECT_EQ(*DecodeClaim(claim), ExampleClaim());
  EXPECT_EQ(EncodeClaim(ExampleClaim()), claim);
  const std::string intent = ReadSource("tests/fixtures/v1/example.intent");
  EXPECT_EQ(*DecodeIntent(intent), ExampleIntent());
  EXPECT_EQ(EncodeIntent(ExampleIntent()), intent);
  const std::string manifest = ReadSource("tests/fixtures/v1/example.manifest");
  EXPECT_EQ(*DecodeManifest(manifest), ExampleManifest());
  EXPECT_EQ(EncodeManifest(ExampleManifest()), manifest);

  const std::string document = ReadSource("docs/formats.md");
  for (const auto& [name, bytes] : {std::pair{"example.job", job},
                                    {"example.claim", claim},
                                    {"example.intent", intent},
                                    {"example.manifest", manifest}}) {
    const std::string wanted =
        absl::StrCat("<!-- dump of ", name, ": begin -->\n```\n", HexDump(bytes),
                     "```\n<!-- dump of ", name, ": end -->");
    EXPECT_NE(document.find(wanted), std::string::npos) << "docs/formats.md lacks\n" << wanted;
  }
}

// Protobuf's own code reads what we write, and writes what we read.
TEST(SmallFilesTest, IsWireCompatibleWithItsMessages) {
  v1::Intent intent;
  ASSERT_TRUE(intent.ParseFromString(BodyOf(FrameKind::kIntent, EncodeIntent(ExampleIntent()))));
  EXPECT_EQ(intent.kind(), v1::Intent::KIND_PUBLISH);
  EXPECT_EQ(intent.unique(), ExampleIntent().unique);
  EXPECT_EQ(intent.job_uuid(), ExampleUuid().ToBytes());
  EXPECT_EQ(intent.job_name(), "demo");
  EXPECT_EQ(intent.attempt(), 1u);
  EXPECT_EQ(intent.step(), 7u);
  EXPECT_EQ(intent.world_size(), 2u);
  ASSERT_EQ(intent.ranks_size(), 1);
  EXPECT_EQ(intent.ranks(0), 1u);
  Intent compressed = ExampleIntent();
  compressed.compressed = true;
  v1::Intent says_so;
  ASSERT_TRUE(says_so.ParseFromString(BodyOf(FrameKind::kIntent, EncodeIntent(compressed))));
  EXPECT_EQ(says_so.kind(), v1::Intent::KIND_PUBLISH_COMPRESSED);
  EXPECT_EQ(*DecodeIntent(EncodeIntent(compressed)), compressed);
  intent.set_kind(v1::Intent::KIND_REMOVE);
  intent.set_world_size(1000);
  intent.add_ranks(999);
  intent.set_manifest_first(true);
  Intent removal = ExampleIntent();
  removal.kind = IntentKind::kRemove;
  removal.world_size = 1000;
  removal.ranks = {1, 999};
  removal.manifest_first = true;
  EXPECT_EQ(*DecodeIntent(EncodeFrame(FrameKind::kIntent, intent.SerializeAsString())), removal);

  v1::JobIdentity job;
  ASSERT_TRUE(job.ParseFromString(BodyOf(FrameKind::kJobIdentity, EncodeJobFile(ExampleJob()))));
  EXPECT_EQ(job.name(), "demo");
  EXPECT_EQ(job.uid(), 1000u);
  EXPECT_EQ(job.gid(), 100u);
  EXPECT_EQ(*DecodeJobFile(EncodeFrame(FrameKind::kJobIdentity, job.SerializeAsString())),
            ExampleJob());

  v1::AttemptClaim claim;
  ASSERT_TRUE(claim.ParseFromString(BodyOf(FrameKind::kAttemptClaim, EncodeClaim(ExampleClaim()))));
  EXPECT_EQ(claim.opening(), "launch-1");
  EXPECT_EQ(*DecodeClaim(EncodeFrame(FrameKind::kAttemptClaim, claim.SerializeAsString())),
            ExampleClaim());

  v1::Manifest manifest;
  ASSERT_TRUE(
      manifest.ParseFromString(BodyOf(FrameKind::kManifest, EncodeManifest(ExampleManifest()))));
  EXPECT_EQ(manifest.step(), 7u);
  EXPECT_EQ(manifest.committed_unix_ms(), 1'700'000'000'000);
  ASSERT_EQ(manifest.shards_size(), 2);
  EXPECT_EQ(manifest.shards(1).rank(), 1u);
  EXPECT_EQ(manifest.shards(1).record_crc(), 0x1122334455667789u);
  EXPECT_EQ(manifest.shards(0).layout_hash(), std::string(16, '\xa0'));
  EXPECT_EQ(manifest.descent(0).attempt(), 1u);
  EXPECT_EQ(*DecodeManifest(EncodeFrame(FrameKind::kManifest, manifest.SerializeAsString())),
            ExampleManifest());
  // Who holds the same, where that is known: no part of what is promised.
  Manifest alike = ExampleManifest();
  alike.shards[1].likeness.tensors.fill(0xb0);
  alike.shards[1].likeness.content.fill(0xc0);
  EXPECT_EQ(*DecodeManifest(EncodeManifest(alike)), alike);
  EXPECT_EQ(DifferenceOf(alike, ExampleManifest()), "");
  EXPECT_EQ(DifferenceOf(ExampleManifest(), alike), "");
  v1::Manifest with_likeness = manifest;
  with_likeness.mutable_shards(1)->set_likeness(std::string(16, '\xb0') + std::string(16, '\xc0'));
  EXPECT_EQ(*DecodeManifest(EncodeFrame(FrameKind::kManifest, with_likeness.SerializeAsString())),
            alike);
  with_likeness.mutable_shards(1)->set_likeness("short");
  EXPECT_TRUE(absl::IsDataLoss(
      DecodeManifest(EncodeFrame(FrameKind::kManifest, with_likeness.SerializeAsString()))
          .status()));
  // Of a rank whose file leaves slices out; never of one whose file has all, or more.
  manifest.mutable_shards(1)->set_shard_bytes(manifest.shards(1).image_bytes() + 7);
  Manifest shared = ExampleManifest();
  shared.shards[1].shard_bytes = shared.shards[1].image_bytes + 7;
  EXPECT_EQ(shared.shards[1].WholeBytes(), shared.shards[1].image_bytes + 7);
  EXPECT_EQ(shared.shards[0].WholeBytes(), shared.shards[0].image_bytes);
  EXPECT_EQ(*DecodeManifest(EncodeFrame(FrameKind::kManifest, manifest.SerializeAsString())),
            shared);
  EXPECT_EQ(*DecodeManifest(EncodeManifest(shared)), shared);
  EXPECT_NE(DifferenceOf(shared, ExampleManifest()), "");
  EXPECT_NE(
      ManifestJson(shared).find(absl::StrCat("\"shard_bytes\": ", shared.shards[1].shard_bytes)),
      std::string::npos);
  shared.shards[1].shard_bytes = shared.shards[1].image_bytes;
  EXPECT_TRUE(absl::IsInvalidArgument(CheckManifest(shared)));
}

TEST(SmallFilesTest, EveryDamagedByteAndEveryTornLengthIsRefused) {
  const std::vector<std::pair<std::string, std::function<absl::Status(std::string_view)>>> kinds = {
      {EncodeIntent(ExampleIntent()), [](std::string_view b) { return DecodeIntent(b).status(); }},
      {EncodeJobFile(ExampleJob()), [](std::string_view b) { return DecodeJobFile(b).status(); }},
      {EncodeClaim(ExampleClaim()), [](std::string_view b) { return DecodeClaim(b).status(); }},
      {EncodeManifest(ExampleManifest()),
       [](std::string_view b) { return DecodeManifest(b).status(); }}};
  for (const auto& [good, decode] : kinds) {
    ASSERT_TRUE(decode(good).ok());
    for (size_t at = 0; at < good.size(); ++at) {
      EXPECT_TRUE(absl::IsDataLoss(decode(std::string_view(good).substr(0, at)))) << at;
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 1);
      EXPECT_FALSE(decode(bad).ok()) << at;
    }
    EXPECT_TRUE(absl::IsDataLoss(decode(good + "x")));
    std::string newer = good;
    newer[8] = 2;
    EXPECT_TRUE(absl::IsFailedPrecondition(decode(newer)));
  }
}

TEST(SmallFilesTest, IntentsThatNoWriterMakes) {
  const auto refused = [](const std::function<void(v1::Intent&)>& change) {
    v1::Intent intent;
    EXPECT_TRUE(intent.ParseFromString(BodyOf(FrameKind::kIntent, EncodeIntent(ExampleIntent()))));
    change(intent);
    return absl::IsDataLoss(
        DecodeIntent(EncodeFrame(FrameKind::kIntent, intent.SerializeAsString())).status());
  };
  EXPECT_FALSE(refused([](v1::Intent&) {}));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_job_name("../../etc"); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_job_name(".holdfast"); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_unique("../0123456789abcdef0123456789abc"); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.clear_unique(); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_job_uuid("short"); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_attempt(0); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_ranks(0, 2); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.clear_ranks(); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.add_ranks(0); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_world_size(kWorldSizeMax + 1); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_manifest_first(true); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_kind(v1::Intent::KIND_UNSPECIFIED); }));
  EXPECT_TRUE(refused([](v1::Intent& i) { i.set_kind(v1::Intent::KIND_CREATE_JOB); }));
}

TEST(SmallFilesTest, ManifestsThatNoWriterMakes) {
  const auto refused = [](const std::function<void(Manifest&)>& change) {
    Manifest manifest = ExampleManifest();
    change(manifest);
    const absl::Status decoded = DecodeManifest(EncodeManifest(manifest)).status();
    EXPECT_EQ(CheckManifest(manifest).ok(), decoded.ok());
    return absl::IsDataLoss(decoded);
  };
  EXPECT_FALSE(refused([](Manifest&) {}));
  EXPECT_TRUE(refused([](Manifest& m) { m.shards.pop_back(); }));
  EXPECT_TRUE(refused([](Manifest& m) { std::swap(m.shards[0], m.shards[1]); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.shards[1].rank = 0; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.shards[1].image_bytes = 0; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.shards[1].image_bytes = kImageBytesMax + 1; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.shards[1].record_bytes = kRecordBytesMax + 1; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.world_size = 0; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.job_name = "a/b"; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.job = {}; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.checkpoint.attempt = 0; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.descent = {{2, {1, 5}}}; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.descent = {{1, {1, 5}}}; }));
}

TEST(SmallFilesTest, WhatTellsTwoManifestsApart) {
  const Manifest a = ExampleManifest();
  Manifest b = a;
  b.committed_unix_ms += 1;
  EXPECT_EQ(DifferenceOf(a, b), "");
  b.shards[1].record_crc ^= 1;
  EXPECT_NE(DifferenceOf(a, b).find("rank 1"), std::string::npos);
  b = a;
  b.world_size = 3;
  EXPECT_NE(DifferenceOf(a, b).find("world size"), std::string::npos);
}

// The CRC of a file that ends with its own CRC is the same for all: it names nothing.
TEST(SmallFilesTest, RecordsAreNamedByTheCrcBeforeTheirEnd) {
  const std::string a = ReadSource("tests/fixtures/v1/example.record");
  const std::string b = ReadSource("tests/fixtures/v1/varied.record");
  EXPECT_EQ(Crc64(a), Crc64(b));
  EXPECT_NE(RecordCrcOf(a), RecordCrcOf(b));
  EXPECT_EQ(RecordCrcOf(a), 0x10200b93aefd4421u);
  EXPECT_EQ(RecordCrcOf("short"), RecordCrcOf(""));
}

TEST(NamesTest, OnlyTheExactFormCounts) {
  constexpr auto kNvme = DurableKind::kNvme;
  constexpr auto kRemote = DurableKind::kRemote;
  EXPECT_EQ(StepDirectoryName({3, 900}), "900-a3");
  EXPECT_EQ(ParseStepDirectoryName("18446744073709551615-a1"), (CheckpointId{1, UINT64_MAX}));
  for (const char* bad : {"", "-a", "900", "0900-a3", "900-a03", "900-a0", "900-a", "+1-a1",
                          " 1-a1", "18446744073709551616-a1", "900-a3 ", "900-a3-a3"}) {
    EXPECT_FALSE(ParseStepDirectoryName(bad).has_value()) << bad;
  }
  EXPECT_EQ(ImageFileName(kNvme, 7, 100), "7.safetensors");
  EXPECT_EQ(RecordFileName(kRemote, 7, 100), "shard-00007-of-00100.record");
  EXPECT_EQ(ImageFileName(kRemote, 1'048'575, 1'048'576), "shard-1048575-of-1048576.safetensors");
  const StepFile file = ParseStepFileName(kRemote, "shard-00007-of-00100.record");
  EXPECT_EQ(file.role, StepFileRole::kRecord);
  EXPECT_EQ(file.rank, 7u);
  EXPECT_EQ(file.world_size, 100u);
  EXPECT_EQ(ParseStepFileName(kNvme, "7.safetensors").role, StepFileRole::kImage);
  EXPECT_EQ(ParseStepFileName(kRemote, "MANIFEST").role, StepFileRole::kManifest);
  EXPECT_EQ(ParseStepFileName(kNvme, "MANIFEST").role, StepFileRole::kUnknown);
  EXPECT_EQ(ParseStepFileName(kRemote, "writing").role, StepFileRole::kMark);
  EXPECT_EQ(ParseStepFileName(kNvme, "writing").role, StepFileRole::kUnknown);
  for (const char* bad : {"07.record", "-1.record", "7.record~", "record", ".record",
                          "1048576.record", "7.safetensors.zst"}) {
    EXPECT_EQ(ParseStepFileName(kNvme, bad).role, StepFileRole::kUnknown) << bad;
  }
  for (const char* bad :
       {"shard-7-of-00100.record", "shard-00100-of-00100.record", "shard-00007-of-00000.record",
        "shard-00007.record", "7.record", "shard-00007-of-1048577.record"}) {
    EXPECT_EQ(ParseStepFileName(kRemote, bad).role, StepFileRole::kUnknown) << bad;
  }
  EXPECT_EQ(ParseClaimName("attempt-12"), 12u);
  EXPECT_FALSE(ParseClaimName("attempt-012").has_value());
  EXPECT_FALSE(ParseClaimName("attempt-0").has_value());
  // The next attempt must be one still.
  EXPECT_EQ(ParseClaimName("attempt-1000000000000"), kAttemptMax);
  for (const std::string bad : {"1000000000001", "18446744073709551615"}) {
    EXPECT_FALSE(ParseClaimName("attempt-" + bad).has_value()) << bad;
    EXPECT_FALSE(ParseStepDirectoryName("3-a" + bad).has_value()) << bad;
  }
}

TEST(NamesTest, Temporaries) {
  const std::string unique = NewUnique();
  EXPECT_TRUE(IsUnique(unique));
  EXPECT_NE(unique, NewUnique());
  const std::string name = TemporaryName("7.safetensors", unique);
  EXPECT_EQ(name, ".7.safetensors." + unique + ".tmp");
  EXPECT_FALSE(name.ends_with(".safetensors"));
  EXPECT_EQ(ParseTemporaryName(name), "7.safetensors");
  EXPECT_EQ(ParseStepFileName(DurableKind::kNvme, name).role, StepFileRole::kTemporary);
  for (const std::string& bad :
       {std::string(".tmp"), "7." + unique + ".tmp", "." + unique + ".tmp",
        ".7." + unique.substr(1) + ".tmp", ".7." + unique, ".7.X" + unique.substr(1) + ".tmp"}) {
    EXPECT_FALSE(ParseTemporaryName(bad).has_value()) << bad;
  }
}

}  // namespace
}  // namespace holdfast
