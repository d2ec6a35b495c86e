#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <future>
#include <numeric>
#include <thread>

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
  const Status status = (*view)->Verify();
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("cut short"), std::string::npos) << status.message();
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

// ---- Read ----

TEST_F(AttachTest, ReadCopiesATensorAndVerifiesIt) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  std::vector<uint32_t> got(w_.size());
  EXPECT_TRUE((*view)->Read(1, got.data()).ok());
  EXPECT_EQ(got, w_);
  EXPECT_TRUE((*view)->Read(0, nullptr).ok()) << "only looks";
  EXPECT_EQ((*view)->Read(2, got.data()).code(), Code::kInvalidArgument);
  EXPECT_FALSE((*view)->verified());
}

TEST_F(AttachTest, ReadNamesTheBadTensorAndLeavesTheOthersAlone) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  daemon_.FlipImageByte(daemon_.LastRecord().header_bytes + 12 + 1'500'000);
  std::vector<uint32_t> got(w_.size());
  const Status status = (*view)->Read(1, got.data());
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("'w'"), std::string::npos) << status.message();
  EXPECT_EQ((*view)->Read(1, nullptr).code(), Code::kCorrupt);
  EXPECT_TRUE((*view)->Read(0, got.data()).ok());
}

TEST_F(AttachTest, ReadOfAFileCutShortIsAnErrorAndWhatIsLeftCanBeRead) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  daemon_.TruncateImage(8192);
  std::vector<uint32_t> got(w_.size());
  const Status status = (*view)->Read(1, got.data());
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("'w'"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("cut short"), std::string::npos) << status.message();
  EXPECT_TRUE((*view)->Read(0, got.data()).ok()) << "that lies before the cut";
}

TEST_F(AttachTest, SeveralThreadsMayRead) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  std::vector<std::future<bool>> reads;
  for (int i = 0; i < 4; ++i) {
    reads.push_back(std::async(std::launch::async, [&] {
      std::vector<uint32_t> got(w_.size());
      return (*view)->Read(1, got.data()).ok() && got == w_;
    }));
  }
  for (std::future<bool>& read : reads) {
    EXPECT_TRUE(read.get());
  }
}

// ---- Interrupted ----

TEST_F(AttachTest, AnInterruptedAttachOrListEndsAsIfItsDeadlineHadPassed) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer&) {
    return frame.has_attach() || frame.has_list();
  });
  int asked = 0;
  options_.deadline = std::chrono::hours(1);
  options_.interrupted = [&asked] { return ++asked == 3; };
  EXPECT_EQ(Attach(options_).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(asked, 3);
  asked = 0;
  EXPECT_EQ(ListCheckpoints({.job = "test",
                             .socket = daemon_.socket(),
                             .deadline = std::chrono::hours(1),
                             .interrupted = options_.interrupted})
                .status()
                .code(),
            Code::kDeadlineExceeded);
  EXPECT_EQ(asked, 3);
}

TEST_F(AttachTest, AnInterruptedReadEndsAndCanBeRepeated) {
  bool stop = false;
  options_.interrupted = [&stop] { return stop; };
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  std::vector<uint32_t> got(w_.size());
  stop = true;
  EXPECT_EQ((*view)->Read(1, got.data()).code(), Code::kDeadlineExceeded);
  EXPECT_NE(got, w_);
  EXPECT_EQ((*view)->Verify().code(), Code::kDeadlineExceeded);
  EXPECT_FALSE((*view)->verified());
  stop = false;
  EXPECT_TRUE((*view)->Read(1, got.data()).ok());
  EXPECT_EQ(got, w_);
  EXPECT_TRUE((*view)->Verify().ok());
}

TEST_F(AttachTest, AReadThatWaitsForAnotherIsInterruptedToo) {
  std::promise<void> reads;
  std::promise<void> interrupted;
  std::thread::id reader;
  std::atomic<bool> asked{false};
  options_.interrupted = [&] {
    if (std::this_thread::get_id() != reader) {
      return reader != std::thread::id();
    }
    if (!asked.exchange(true)) {  // in the middle of the other's read
      reads.set_value();
      interrupted.get_future().wait();
    }
    return false;
  };
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  std::future<Status> read = std::async(std::launch::async, [&] {
    reader = std::this_thread::get_id();
    return (*view)->Read(1, nullptr);
  });
  reads.get_future().wait();
  EXPECT_EQ((*view)->Read(1, nullptr).code(), Code::kDeadlineExceeded);
  interrupted.set_value();
  EXPECT_TRUE(read.get().ok());
}

TEST_F(AttachTest, WhatAnInterruptedEndDidNotTellTheNextConnectionDoes) {
  bool stop = false;
  options_.interrupted = [&stop] { return stop; };
  Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  stop = true;
  view = Status();  // waits for nobody
  stop = false;
  EXPECT_EQ(daemon_.Count("release_read"), 0);
  EXPECT_EQ(daemon_.Holds(), 1u);
  EXPECT_TRUE(ListCheckpoints({.job = "test", .socket = daemon_.socket()}).ok());
  EXPECT_EQ(daemon_.Holds(), 0u);
}

// ---- Tiers ----

TEST_F(AttachTest, FromADurableTierNothingIsHeld) {
  daemon_.CopyToTier("nvme");
  daemon_.LoseMemory();
  Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_EQ((*view)->tier(), "nvme");
  EXPECT_EQ((*view)->why(), "memory copy absent");
  EXPECT_EQ((*view)->step(), 2u);
  EXPECT_EQ((*view)->world_size(), 1u);
  std::vector<uint32_t> got(w_.size());
  EXPECT_TRUE((*view)->Read(1, got.data()).ok());
  EXPECT_EQ(got, w_);
  EXPECT_TRUE((*view)->Verify().ok());
  EXPECT_EQ((*view)->objects()[0].bytes, "{}");
  view = Status();
  EXPECT_EQ(daemon_.Count("release_read"), 0);
  EXPECT_EQ(daemon_.Count("confirm_read"), 0);
}

TEST_F(AttachTest, MemoryIsSaidToBeMemory) {
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ((*view)->tier(), "memory");
  EXPECT_EQ((*view)->why(), "");
  const v1::Attach asked = daemon_.Frames("attach")[0].attach();
  EXPECT_TRUE(asked.any_tier());
  EXPECT_GT(asked.deadline_ms(), 0u);
}

TEST_F(AttachTest, ABadCopyInMemoryIsPassedOverForTheNextTierOfTheSameStep) {
  daemon_.CopyToTier("nvme");
  daemon_.ReplaceRecord("no record");
  const Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_EQ((*view)->tier(), "nvme");
  EXPECT_EQ((*view)->step(), 2u) << "not the older one that is good in memory";
  EXPECT_NE((*view)->why().find("memory copy bad: "), std::string::npos) << (*view)->why();
  EXPECT_EQ(daemon_.Count("release_read"), 1);
  const v1::Attach again = daemon_.Frames("attach")[1].attach();
  EXPECT_EQ(again.step(), 2u);
  EXPECT_EQ(again.attempt(), 1u);
}

TEST_F(AttachTest, DamagedAndNewerCopiesInDurableTiersArePassedOver) {
  daemon_.CopyToTier("nvme");
  daemon_.CopyToTier("remote");
  daemon_.LoseMemory();
  std::string& record = daemon_.tier_copies()[0].record;
  const std::string good = record;
  for (const std::string& bad : {good.substr(0, good.size() / 2), std::string(),
                                 good.substr(0, 100) + "x" + good.substr(101)}) {
    record = bad;
    const Result<std::unique_ptr<View>> view = Attach(options_);
    ASSERT_TRUE(view.ok()) << view.status().ToString();
    EXPECT_EQ((*view)->tier(), "remote");
    EXPECT_NE((*view)->why().find("memory copy absent, nvme copy bad: "), std::string::npos)
        << (*view)->why();
  }
  record = good;
  ASSERT_EQ(::ftruncate(daemon_.tier_copies()[0].image.get(), 4096), 0);
  EXPECT_EQ((*Attach(options_))->tier(), "remote");
  ASSERT_EQ(::ftruncate(daemon_.tier_copies()[1].image.get(), 4096), 0);
  const Status none = Attach(options_).status();
  EXPECT_EQ(none.code(), Code::kCorrupt);
  EXPECT_NE(none.message().find("nvme copy bad"), std::string::npos) << none.message();
  EXPECT_NE(none.message().find("remote copy bad"), std::string::npos) << none.message();
}

TEST_F(AttachTest, ABitThatFlippedInADurableTierIsFoundByRead) {
  daemon_.CopyToTier("nvme");
  daemon_.CopyToTier("remote");
  const uint64_t offset = daemon_.LastRecord().header_bytes + 12 + 1'500'000;
  daemon_.LoseMemory();
  char byte = 0;
  const int image = daemon_.tier_copies()[0].image.get();
  ASSERT_EQ(::pread(image, &byte, 1, static_cast<off_t>(offset)), 1);
  byte = static_cast<char>(byte ^ 0x40);
  ASSERT_EQ(::pwrite(image, &byte, 1, static_cast<off_t>(offset)), 1);
  Result<std::unique_ptr<View>> view = Attach(options_);
  ASSERT_TRUE(view.ok());
  std::vector<uint32_t> got(w_.size());
  const Status status = (*view)->Read(1, got.data());
  EXPECT_EQ(status.code(), Code::kCorrupt);
  EXPECT_NE(status.message().find("'w'"), std::string::npos) << status.message();
  // The way out.
  options_.without = {(*view)->tier()};
  view = Attach(options_);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ((*view)->tier(), "remote");
  EXPECT_TRUE((*view)->Read(1, got.data()).ok());
}

TEST_F(AttachTest, AnOlderDaemonServesMemoryAndABadCopyEndsIt) {
  daemon_.SetHook([this](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_attach()) {
      return false;
    }
    v1::ClientFrame as_it_reads = frame;
    as_it_reads.mutable_attach()->clear_any_tier();
    as_it_reads.mutable_attach()->clear_without();
    as_it_reads.mutable_attach()->clear_deadline_ms();
    daemon_.AnswerLate(as_it_reads, peer);
    return true;
  });
  EXPECT_TRUE(Attach(options_).ok());
  daemon_.ReplaceRecord("no record");
  const Status status = Attach(options_).status();
  EXPECT_EQ(status.code(), Code::kCorrupt) << status.ToString();
  EXPECT_EQ(daemon_.Count("attach"), 3) << "asked twice, and not for ever";
  EXPECT_EQ(daemon_.Holds(), 0u);
}

// ---- ListCheckpoints ----

TEST_F(AttachTest, ListsAllPagesNewestFirst) {
  const State state{{{"w", Type::kU32, {w_.size()}, w_.data()}}, {}};
  EXPECT_TRUE(job_->Save(3, state).ok());
  const Result<std::vector<CheckpointInfo>> all =
      ListCheckpoints({.job = "test", .socket = daemon_.socket()});
  ASSERT_TRUE(all.ok()) << all.status().ToString();
  ASSERT_EQ(all->size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*all)[i].step, 3 - i);
    EXPECT_EQ((*all)[i].attempt, 1u);
    EXPECT_EQ((*all)[i].world_size, 1u);
    EXPECT_TRUE((*all)[i].on_line);
    EXPECT_EQ((*all)[i].tiers, std::vector<std::string>{"memory"});
    EXPECT_EQ((*all)[i].bytes, 1000u);
    EXPECT_EQ((*all)[i].saved_unix_ms, 7);
  }
  EXPECT_EQ(daemon_.Count("list"), 2);
}

TEST_F(AttachTest, AListThatDoesNotEndIsRefused) {
  for (const bool empty : {false, true}) {
    daemon_.SetHook([empty](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      if (!frame.has_list()) {
        return false;
      }
      v1::DaemonFrame reply;
      reply.set_id(frame.id());
      reply.mutable_list()->set_more(true);
      if (!empty) {
        reply.mutable_list()->add_checkpoints()->set_step(5);
      }
      peer.Send(reply);
      return true;
    });
    EXPECT_EQ(ListCheckpoints({.job = "test", .socket = daemon_.socket()}).status().code(),
              Code::kInternal);
  }
}

TEST_F(AttachTest, ADaemonThatCannotListIsSaidToBeOlder) {
  daemon_.SetHook([](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (frame.has_list()) {
      peer.Close();
    }
    return frame.has_list();
  });
  const Status status = ListCheckpoints({.job = "test", .socket = daemon_.socket()}).status();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_NE(status.message().find("older than this library"), std::string::npos);
  EXPECT_EQ(ListCheckpoints({.job = "bad/name"}).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace holdfast
