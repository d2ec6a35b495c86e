// What a node answers to those who read from it, whatever they say.
#include "server/runtime/pull_service.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "holdfast/v1/peer.grpc.pb.h"
#include "server/peers/pull_client.h"
#include "tests/server/runtime/pull_source.h"

namespace holdfast {
namespace {

using grpc::StatusCode;

// One that reads, by hand.
class Reader {
 public:
  explicit Reader(const std::string& address)
      : stub_(
            v1::Pulls::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {
    call_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() {
    if (stream_ != nullptr && !finished_) {
      call_.TryCancel();
      stream_->Finish();
    }
  }
  grpc::ClientContext& call() { return call_; }

  void Open(const v1::PullOpen& open) {
    stream_ = stub_->Pull(&call_);
    v1::PullAsked asked;
    *asked.mutable_open() = open;
    stream_->Write(asked);
  }
  // Whether the source says what it has, record and all.
  bool IsOffered() {
    v1::PullTold told;
    if (!stream_->Read(&told) || !told.has_source()) {
      return false;
    }
    uint64_t missing = told.source().record_bytes();
    while (missing > 0 && stream_->Read(&told) && told.record().size() <= missing) {
      missing -= told.record().size();
    }
    return missing == 0;
  }
  // The bytes that come.
  std::string Read(uint64_t offset, uint64_t bytes) {
    v1::PullAsked asked;
    asked.mutable_read()->set_offset(offset);
    asked.mutable_read()->set_bytes(bytes);
    stream_->Write(asked);
    std::string data;
    for (v1::PullTold told; data.size() < bytes && stream_->Read(&told);) {
      data += told.data();
    }
    return data;
  }
  // More than any window of the connection takes, and reads none of it.
  void AskForALot(uint64_t image_bytes) {
    v1::PullAsked asked;
    asked.mutable_read()->set_bytes(image_bytes);
    for (uint64_t bytes = 0; bytes < (uint64_t{32} << 20); bytes += image_bytes) {
      if (!stream_->Write(asked)) {
        return;
      }
    }
  }
  bool IsConfirmed() {
    v1::PullAsked asked;
    asked.mutable_confirm();
    stream_->Write(asked);
    v1::PullTold told;
    return stream_->Read(&told) && told.has_confirmed();
  }
  StatusCode Finish() {
    finished_ = true;
    v1::PullTold told;
    while (stream_->Read(&told)) {
    }
    return stream_->Finish().error_code();
  }

 private:
  const std::unique_ptr<v1::Pulls::Stub> stub_;
  grpc::ClientContext call_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::PullAsked, v1::PullTold>> stream_;
  bool finished_ = false;
};

class PullServiceTest : public ::testing::Test {
 protected:
  v1::PullOpen ShardWanted() const {
    v1::PullOpen open;
    open.set_job_name(content_.expected.job_name);
    open.set_job_uuid(content_.expected.id.job.ToBytes());
    open.set_attempt(content_.expected.id.attempt);
    open.set_step(content_.expected.id.step);
    open.set_rank(content_.expected.id.rank);
    open.set_load(true);
    return open;
  }
  static v1::PullOpen ProbeWanted() {
    v1::PullOpen open;
    open.set_probe_bytes(1 << 20);
    return open;
  }

  // So many that hold their places.
  static std::vector<std::unique_ptr<Reader>> OpenMany(const std::string& address, size_t count,
                                                       const v1::PullOpen& open) {
    std::vector<std::unique_ptr<Reader>> readers;
    for (size_t i = 0; i < count; ++i) {
      readers.push_back(std::make_unique<Reader>(address));
      readers.back()->Open(open);
      EXPECT_TRUE(readers.back()->IsOffered()) << i;
    }
    return readers;
  }

  const SlotContent content_ = MakeSlotContent(5, 1);
  Source source_{content_};
};

TEST_F(PullServiceTest, GivesTheBytesAndConfirms) {
  Reader reader(source_.Serve());
  reader.Open(ShardWanted());
  ASSERT_TRUE(reader.IsOffered());
  EXPECT_EQ(reader.Read(0, content_.sample.image.size()), content_.sample.image);
  EXPECT_EQ(reader.Read(100, 7), content_.sample.image.substr(100, 7));
  EXPECT_TRUE(reader.IsConfirmed());
  EXPECT_EQ(reader.Finish(), StatusCode::OK);
}

TEST_F(PullServiceTest, WhatWasRefilledMeanwhileIsNotConfirmed) {
  Reader reader(source_.Serve());
  reader.Open(ShardWanted());
  ASSERT_TRUE(reader.IsOffered());
  EXPECT_EQ(reader.Read(0, 100), content_.sample.image.substr(0, 100));
  source_.Refill();
  EXPECT_EQ(reader.Read(100, 100), content_.sample.image.substr(100, 100)) << "the same bytes";
  EXPECT_FALSE(reader.IsConfirmed());
  EXPECT_EQ(reader.Finish(), StatusCode::NOT_FOUND);
}

// It lost its power: nothing else would say so for long, and the slot is held.
TEST_F(PullServiceTest, AReaderThatIsNoMemberAnyMoreIsLetGo) {
  source_.BePatientFor(std::chrono::minutes(10));
  Reader reader(source_.Serve());
  reader.Open(ShardWanted());
  ASSERT_TRUE(reader.IsOffered());
  source_.BeAlone();
  EXPECT_EQ(reader.Finish(), StatusCode::CANCELLED);
}

TEST_F(PullServiceTest, ServesSoManyAtATimeAndSaysSoToTheNext) {
  const std::string address = source_.Serve();
  const std::vector<std::unique_ptr<Reader>> readers =
      OpenMany(address, kPullsServedMax, ShardWanted());
  Reader late(address);
  late.Open(ShardWanted());
  EXPECT_EQ(late.Finish(), StatusCode::RESOURCE_EXHAUSTED);
  for (const auto& reader : readers) {
    EXPECT_EQ(reader->Read(0, 10), content_.sample.image.substr(0, 10)) << "all are served";
    EXPECT_TRUE(reader->IsConfirmed());
    EXPECT_EQ(reader->Finish(), StatusCode::OK);
  }
  Reader next(address);
  next.Open(ShardWanted());
  EXPECT_TRUE(next.IsOffered()) << "there is room again";
}

TEST_F(PullServiceTest, WhoTakesNothingOfWhatItAsksForIsSentAway) {
  source_.BePatientFor(std::chrono::milliseconds(300));
  const std::string address = source_.Serve();
  const std::vector<std::unique_ptr<Reader>> readers =
      OpenMany(address, kPullsServedMax, ShardWanted());
  for (const auto& reader : readers) {
    reader->AskForALot(content_.sample.image.size());
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  bool offered = false;
  while (!offered && std::chrono::steady_clock::now() < deadline) {
    Reader next(address);
    next.Open(ShardWanted());
    offered = next.IsOffered();
  }
  EXPECT_TRUE(offered) << "they have their places still";
}

TEST_F(PullServiceTest, MeasuresWithFewAtATime) {
  const std::string address = source_.Serve();
  const std::vector<std::unique_ptr<Reader>> readers =
      OpenMany(address, kProbesServedMax, ProbeWanted());
  Reader late(address);
  late.Open(ProbeWanted());
  EXPECT_EQ(late.Finish(), StatusCode::RESOURCE_EXHAUSTED);
  Reader shard(address);
  shard.Open(ShardWanted());
  EXPECT_TRUE(shard.IsOffered()) << "shards do not wait for measurements";
}

TEST_F(PullServiceTest, WhoHasNoDeadlineOrALateOneIsRefused) {
  const std::string address = source_.Serve();
  for (const auto deadline :
       {std::chrono::system_clock::time_point::max(),
        std::chrono::system_clock::now() + kPullLongest + std::chrono::minutes(1)}) {
    Reader reader(address);
    reader.call().set_deadline(deadline);
    reader.Open(ShardWanted());
    EXPECT_EQ(reader.Finish(), StatusCode::INVALID_ARGUMENT);
  }
}

TEST_F(PullServiceTest, StrangersGetNothing) {
  source_.BeOf("prod");
  const std::string address = source_.Serve();
  v1::PullOpen open = ShardWanted();
  open.mutable_who()->set_cluster("test");
  for (v1::PullOpen wanted : {open, ProbeWanted()}) {
    Reader reader(address);
    reader.Open(wanted);
    EXPECT_EQ(reader.Finish(), StatusCode::FAILED_PRECONDITION);
  }
  EXPECT_EQ(source_.asked(), 0);
  Reader reader(address);
  open.mutable_who()->set_cluster("prod");
  reader.Open(open);
  EXPECT_TRUE(reader.IsOffered());
}

TEST_F(PullServiceTest, NoMoreThanTheImageIsRead) {
  const std::string address = source_.Serve();
  const uint64_t bytes = content_.sample.image.size();
  const std::vector<std::pair<uint64_t, uint64_t>> ranges{
      {0, bytes + 1}, {bytes, 1}, {bytes + 1, 0}, {UINT64_MAX, 2}, {1, UINT64_MAX}};
  for (const auto& [offset, wanted] : ranges) {
    Reader reader(address);
    reader.Open(ShardWanted());
    ASSERT_TRUE(reader.IsOffered());
    EXPECT_EQ(reader.Read(offset, wanted), "") << offset << " " << wanted;
    EXPECT_EQ(reader.Finish(), StatusCode::INVALID_ARGUMENT) << offset << " " << wanted;
  }
}

TEST_F(PullServiceTest, NamesThatAreNoneAreRefusedBeforeAnybodyIsAsked) {
  const std::string address = source_.Serve();
  std::vector<v1::PullOpen> wrong(3, ShardWanted());
  wrong[0].set_job_name("../../etc");
  wrong[1].set_job_uuid("short");
  wrong[2].clear_job_name();
  for (const v1::PullOpen& open : wrong) {
    Reader reader(address);
    reader.Open(open);
    EXPECT_EQ(reader.Finish(), StatusCode::INVALID_ARGUMENT) << open.ShortDebugString();
  }
  EXPECT_EQ(source_.asked(), 0);
}

}  // namespace
}  // namespace holdfast
