#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>

#include "tests/client-lib/fake_daemon.h"

namespace holdfast {
namespace {

class AttachTest : public testing::Test {
 protected:
  AttachTest() : w_(600'000) {
    std::iota(w_.begin(), w_.end(), 0);
    Result<std::unique_ptr<Job>> job = Job::Open(daemon_.Options());
    EXPECT_TRUE(job.ok());
    job_ = *std::move(job);
    const State state{{{"w", Type::kU32, {w_.size()}, w_.data()},
                       Tensor::Flat("f", Type::kU32, {100}, 7, 3, w_.data())},
                      {{"o", "{}", true, ""}}};
    EXPECT_TRUE(job_->Save(1, state).ok());
    EXPECT_TRUE(job_->Save(2, state).ok());
    options_.job = "test";
    options_.socket = daemon_.socket();
  }

  FakeDaemon daemon_;
  std::unique_ptr<Job> job_;
  std::vector<uint32_t> w_;
  AttachOptions options_;
};

TEST_F(AttachTest, TensorsLieInTheSlotUnverifiedUntilVerify) {
  Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_EQ((*view)->step(), 2u);
  EXPECT_EQ((*view)->attempt(), 1u);
  ASSERT_EQ((*view)->tensors().size(), 2u);
  const Tensor& f = (*view)->tensors()[0];
  const Tensor& w = (*view)->tensors()[1];
  EXPECT_EQ(f.name, "f");
  EXPECT_EQ(f.place, Tensor::Place::kFlat);
  EXPECT_EQ(f.flat_start, 7u);
  EXPECT_EQ(w.bytes, w_.size() * 4);
  EXPECT_EQ(std::memcmp(w.data, w_.data(), w.bytes), 0);
  ASSERT_EQ((*view)->objects().size(), 1u);
  EXPECT_EQ((*view)->objects()[0].bytes, "{}");
  EXPECT_FALSE((*view)->verified());
  EXPECT_TRUE((*view)->Verify().ok());
  EXPECT_TRUE((*view)->verified());
  EXPECT_EQ(daemon_.Count("release_read"), 0);
  view = Status();
  EXPECT_EQ(daemon_.Count("release_read"), 1);
}

TEST_F(AttachTest, TheMemoryIsReadOnly) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  const auto address = reinterpret_cast<uintptr_t>((*view)->tensors()[0].data);
  std::ifstream maps("/proc/self/maps");
  std::string permissions;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char text[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, text) == 3 && begin <= address &&
        address < end) {
      permissions = text;
    }
  }
  EXPECT_EQ(permissions, "r--s");
}

TEST_F(AttachTest, VerifyNamesTheBadSlice) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  daemon_.FlipImageByte(daemon_.LastRecord().header_bytes + 12 + 1'500'000);  // f has 12 bytes
  const Status status = (*view)->Verify();
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("'w'"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("block 1"), std::string::npos) << status.message();
  EXPECT_FALSE((*view)->verified());
}

TEST_F(AttachTest, ASlotCutShortReadsAsZerosAndFailsVerify) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  daemon_.TruncateImage(8192);
  const auto* w = static_cast<const uint32_t*>((*view)->tensors()[1].data);
  EXPECT_EQ(w[599'999], 0u);
  EXPECT_EQ((*view)->Verify().code(), Code::kCorrupt);
}

TEST_F(AttachTest, AStepThatIsNotThere) {
  options_.newest = false;
  options_.step = 99;
  EXPECT_EQ(Attach(options_).status().code(), Code::kNotFound);
  options_.step = 1;
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ((*view)->step(), 1u);
}

TEST_F(AttachTest, ReleasesThroughANewConnectionWhenTheDaemonWasRestarted) {
  Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  daemon_.Stop();
  EXPECT_TRUE((*view)->Verify().ok());  // the memory stays
  daemon_.Start();
  view = Status();
  EXPECT_EQ(daemon_.Count("release_read"), 1);
}

TEST_F(AttachTest, ABadRecordReleasesTheCopy) {
  daemon_.ReplaceRecord("no record");
  EXPECT_EQ(Attach(options_).status().code(), Code::kCorrupt);
  EXPECT_EQ(daemon_.Count("release_read"), 1);
}

}  // namespace
}  // namespace holdfast
