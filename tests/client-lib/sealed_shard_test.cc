// What can be wrong with a copy that the daemon passed, and whose fault it is: a copy that is bad
// makes all ranks fall back to another, what this process lacks does not.
#include "client-lib/src/sealed_shard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fault_guard.h"
#include "client-lib/src/errors.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/image/kept.h"

namespace holdfast::client {
namespace {

ForkClosedFd FileOf(const std::string& bytes) {
  ForkClosedFd fd(UniqueFd(::memfd_create("slot", MFD_CLOEXEC)));
  EXPECT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return fd;
}

ForkClosedFd Opened(const std::string& path, int flags) {
  return ForkClosedFd(UniqueFd(::open(path.c_str(), flags | O_CLOEXEC)));
}

ForkClosedFd Again(const ForkClosedFd& fd, int flags) {
  return Opened("/proc/self/fd/" + std::to_string(fd.get()), flags);
}

// A whole copy; every test spoils one thing.
struct Copy {
  Copy() {
    descriptors.push_back(FileOf(sample.image));
    descriptors.push_back(FileOf(sample.record_file));
    const ShardRecord& record = sample.record;
    source.slot = 1;
    source.generation = record.generation;
    source.image_bytes = record.image_bytes;
    source.attempt = record.id.attempt;
    source.step = record.id.step;
    source.rank = record.id.rank;
    source.world_size = record.world_size;
    source.job_uuid = record.id.job.ToBytes();
    expected = {record.job_name, record.id.rank};
  }
  Result<std::unique_ptr<SealedShard>> Open() const {
    return SealedShard::Open(source, descriptors, expected, nullptr);
  }
  const SampleImage sample = MakeSampleImage(VariedSlices(), SampleRecord());
  wire::Source source;
  std::vector<ForkClosedFd> descriptors;
  SealedShard::Expected expected;
};

using Spoil = std::function<void(Copy&)>;

// Of two replicas in the remote tier: rank 1's file has every second tensor, rank 0's the others.
struct SharedCopy : Copy {
  explicit SharedCopy(Rank rank) {
    RecordAndLayout image{sample.record, sample.layout};
    image.record.id.rank = rank;
    std::vector<Rank> owners;
    for (size_t i = 0; i < TensorsOf(sample.layout).slices.size(); ++i) {
      owners.push_back(i % 2 == 0 ? 1 : 0);
    }
    const PartImage part = **PlanPart(image, owners, {});
    file = part.from_whole.header;
    for (const ImageRun& run : part.from_whole.runs) {
      file += sample.image.substr(run.source_offset, run.bytes);
    }
    record = part.record;
    source.rank = rank;
    source.tier = "remote";
    expected.rank = rank;
    Put();
  }
  void Put() {
    descriptors[0] = FileOf(file);
    descriptors[1] = FileOf(EncodeRecord(record));
  }
  std::string file;
  ShardRecord record;
};

std::string BytesOf(const CopyOutRange& range) {
  return {static_cast<const char*>(static_cast<const void*>(range.from)), range.bytes};
}

TEST(SealedShard, WhatItsFileLeavesOutIsReadInItsOwnersFile) {
  const SharedCopy mine(1);
  const SharedCopy other(0);
  auto shard = mine.Open();
  ASSERT_TRUE(shard.ok()) << shard.status().ToString();
  ASSERT_EQ((*shard)->Owners(), std::vector<Rank>{0});
  const Status complete = (*shard)->AddOwner(other.source, other.descriptors, other.expected);
  ASSERT_TRUE(complete.ok()) << complete.ToString();
  const Layout& layout = mine.sample.layout;
  EXPECT_EQ((*shard)->layout(), layout);
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    const Slice& slice = layout.slices[i];
    const CopyOutRange range = (*shard)->SliceRange(i, nullptr);
    EXPECT_EQ(BytesOf(range), mine.sample.image.substr(slice.image_offset, slice.bytes))
        << slice.name;
    EXPECT_EQ(range.from, (*shard)->SliceBytes(i));
  }
  EXPECT_EQ(BytesOf((*shard)->HeaderRange()), mine.file.substr(0, mine.record.kept->header_bytes));
  EXPECT_FALSE((*shard)->faulted());
  // A block that is wrong names whose file it lies in.
  bool own_named = false;
  bool others_named = false;
  for (size_t i = 0; i < layout.slices.size(); ++i) {
    const std::string text = (*shard)->MismatchError({0, 0, 0}, i).ToString();
    (text.find("in the file of rank 0") == std::string::npos ? own_named : others_named) = true;
  }
  EXPECT_TRUE(own_named && others_named);
}

TEST(SealedShard, AnOwnerThatDoesNotHaveItMakesTheCopyBad) {
  const SharedCopy mine(1);
  const std::vector<std::pair<std::string, std::function<void(SharedCopy&)>>> cases = {
      {"other bytes",
       [](SharedCopy& c) {
         for (uint64_t& digest : c.record.digests) {
           ++digest;
         }
       }},
      {"another step",
       [](SharedCopy& c) {
         c.record.id.step += 1;
         c.source.step += 1;
       }},
      {"another world size",
       [](SharedCopy& c) {
         c.record.world_size += 1;
         c.source.world_size += 1;
       }},
  };
  for (const auto& [what, spoil] : cases) {
    SharedCopy other(0);
    spoil(other);
    other.Put();
    auto shard = mine.Open();
    ASSERT_TRUE(shard.ok()) << what << shard.status().ToString();
    const Status complete = (*shard)->AddOwner(other.source, other.descriptors, other.expected);
    EXPECT_EQ(complete.code(), Code::kCorrupt) << what;
    EXPECT_NE(complete.message().find("rank 0"), std::string::npos) << complete.ToString();
  }
}

// Each of these files is a mapping of its own: a process that looks at some dozens of shards of
// hundreds of replicas each must not run out of guards.
TEST(SealedShard, ThereAreGuardsForTheFilesOfManyReplicas) {
  char memory = 0;
  std::vector<std::unique_ptr<FaultGuard>> others;
  while (others.size() < 64 * 512) {
    others.push_back(std::make_unique<FaultGuard>(&memory, 1));
  }
  const SharedCopy mine(1);
  const SharedCopy other(0);
  const auto shard = mine.Open();
  ASSERT_TRUE(shard.ok()) << shard.status().ToString();
  const Status complete = (*shard)->AddOwner(other.source, other.descriptors, other.expected);
  EXPECT_TRUE(complete.ok()) << complete.ToString();
}

// A file of an owner's that is cut while it is looked at is noticed as the shard's own is.
TEST(SealedShard, AnOwnersFileThatIsCutShortIsNoticed) {
  const SharedCopy mine(1);
  const SharedCopy other(0);
  const auto shard = mine.Open();
  ASSERT_TRUE(shard.ok()) << shard.status().ToString();
  ASSERT_TRUE((*shard)->AddOwner(other.source, other.descriptors, other.expected).ok());
  ASSERT_EQ(::ftruncate(other.descriptors[0].get(), 0), 0);
  EXPECT_FALSE((*shard)->faulted());
  for (size_t i = 0; i < mine.sample.layout.slices.size(); ++i) {
    if (mine.sample.layout.slices[i].bytes > 0) {
      const volatile std::byte* const bytes = (*shard)->SliceBytes(i);
      static_cast<void>(bytes[0]);
    }
  }
  EXPECT_TRUE((*shard)->faulted());
}

TEST(SealedShard, OnlyTheRemoteTierHasFilesThatLeaveSlicesOut) {
  for (const std::string tier : {"", "memory", "nvme"}) {
    SharedCopy copy(1);
    copy.source.tier = tier;
    EXPECT_EQ(copy.Open().status().code(), Code::kCorrupt) << tier;
  }
}

TEST(SealedShard, AWholeCopyOpens) {
  const Copy copy;
  const auto shard = copy.Open();
  ASSERT_TRUE(shard.ok()) << shard.status().ToString();
  EXPECT_EQ((*shard)->layout(), copy.sample.layout);
  EXPECT_EQ((*shard)->record(), copy.sample.record);
}

TEST(SealedShard, WhatIsWrongWithTheCopyMakesItBad) {
  const std::vector<std::pair<std::string, Spoil>> cases = {
      {"another job's uuid", [](Copy& c) { c.source.job_uuid = "fedcba9876543210"; }},
      {"another attempt", [](Copy& c) { c.source.attempt += 1; }},
      {"another step", [](Copy& c) { c.source.step += 1; }},
      {"another rank", [](Copy& c) { c.source.rank += 1; }},
      {"another world size", [](Copy& c) { c.source.world_size += 1; }},
      {"another generation", [](Copy& c) { c.source.generation += 1; }},
      {"another length", [](Copy& c) { c.source.image_bytes -= 1; }},
      {"another job's name", [](Copy& c) { c.expected.job = "other"; }},
      {"another rank's", [](Copy& c) { c.expected.rank += 1; }},
      {"no record", [](Copy& c) { c.descriptors[1] = FileOf(""); }},
      {"a torn record",
       [](Copy& c) { c.descriptors[1] = FileOf(c.sample.record_file.substr(0, 100)); }},
      {"a flipped bit",
       [](Copy& c) {
         std::string record = c.sample.record_file;
         record[record.size() / 2] ^= 1;
         c.descriptors[1] = FileOf(record);
       }},
      {"a newer version",
       [](Copy& c) {
         std::string record = c.sample.record_file;
         record[8] = 3;
         c.descriptors[1] = FileOf(record);
       }},
      {"a record too large to be one",
       [](Copy& c) {
         ASSERT_EQ(::ftruncate(c.descriptors[1].get(), static_cast<off_t>(kRecordBytesMax + 1)), 0);
       }},
      {"a directory for the record", [](Copy& c) { c.descriptors[1] = Opened("/", O_RDONLY); }},
      {"a directory for the image", [](Copy& c) { c.descriptors[0] = Opened("/", O_RDONLY); }},
      {"an image cut short",
       [](Copy& c) {
         ASSERT_EQ(
             ::ftruncate(c.descriptors[0].get(), static_cast<off_t>(c.source.image_bytes - 1)), 0);
       }},
  };
  for (const auto& [what, spoil] : cases) {
    Copy copy;
    spoil(copy);
    const Status status = copy.Open().status();
    EXPECT_FALSE(status.ok()) << what;
    EXPECT_TRUE(CopyIsBad(status)) << what << ": " << status.ToString();
  }
}

TEST(SealedShard, WhatThisProcessLacksSaysNothingAboutTheCopy) {
  const std::vector<std::pair<std::string, Spoil>> cases = {
      {"may not read the record",
       [](Copy& c) { c.descriptors[1] = Again(c.descriptors[1], O_WRONLY); }},
      {"may not map the image",
       [](Copy& c) { c.descriptors[0] = Again(c.descriptors[0], O_WRONLY); }},
  };
  for (const auto& [what, spoil] : cases) {
    Copy copy;
    spoil(copy);
    const Status status = copy.Open().status();
    EXPECT_FALSE(status.ok()) << what;
    EXPECT_FALSE(CopyIsBad(status)) << what << ": " << status.ToString();
  }
  char memory = 0;
  std::vector<std::unique_ptr<FaultGuard>> all;
  while (all.empty() || all.back()->ok()) {
    all.push_back(std::make_unique<FaultGuard>(&memory, 1));
  }
  const Status no_guard = Copy().Open().status();
  EXPECT_FALSE(no_guard.ok());
  EXPECT_FALSE(CopyIsBad(no_guard)) << no_guard.ToString();
}

TEST(SealedShard, AFileThatNobodyCanReadIsBad) {
  for (const int error : {EIO, ENXIO, ESTALE, EUCLEAN, EHWPOISON}) {
    EXPECT_TRUE(CopyIsBad(SystemError(CodeOfFileError(error), error, "read"))) << error;
  }
  for (const int error : {ENOMEM, EMFILE, ENFILE, EAGAIN, EPERM, EACCES, EBADF, EFAULT}) {
    EXPECT_FALSE(CopyIsBad(SystemError(CodeOfFileError(error), error, "read"))) << error;
  }
}

TEST(SealedShard, CutShortWhileItIsReadIsNoticed) {
  const Copy copy;
  const auto shard = copy.Open();
  ASSERT_TRUE(shard.ok());
  ASSERT_EQ(::ftruncate(copy.descriptors[0].get(), 0), 0);
  const auto* const image = static_cast<const volatile std::byte*>((*shard)->HeaderRange().from);
  const std::byte first = image[0];
  EXPECT_EQ(first, std::byte{0});
  EXPECT_TRUE((*shard)->faulted());
}

// Huge pages need it, and the kernel does it by itself only where they are the mount's choice.
TEST(SlotMapping, BeginsWhereHugePagesCan) {
  constexpr uintptr_t kHugePageBytes = 2 << 20;
  const ForkClosedFd fd = FileOf(std::string((4 << 20) + 5000, 'x'));
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{5000}, uint64_t{2} << 20, uint64_t{4} << 20}) {
    const auto mapping = SlotMapping::Map(fd.get(), bytes, SlotMapping::Access::kReadOnly);
    ASSERT_TRUE(mapping.ok()) << mapping.status().ToString();
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*mapping)->data()) % kHugePageBytes, 0u) << bytes;
    EXPECT_EQ((*mapping)->data()[bytes - 1], std::byte{'x'});
  }
  EXPECT_FALSE(SlotMapping::Map(fd.get(), UINT64_MAX, SlotMapping::Access::kReadOnly).ok());
}

}  // namespace
}  // namespace holdfast::client
