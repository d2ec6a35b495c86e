// What the daemon has gathered of a step's records: read as far as it makes sense, and nothing that
// is of something else.
#include "client-lib/src/step_records.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/client-lib/fake_daemon.h"

namespace holdfast::client {
namespace {

constexpr char kUuid[] = "another job's id";

class StepRecordsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto job = Job::Open(daemon_.Options());
    ASSERT_TRUE(job.ok()) << job.status().message();
    std::vector<float> weights(1000, 1.5F);
    State state;
    state.tensors.emplace_back("w", Type::kF32, std::vector<uint64_t>{1000}, weights.data());
    ASSERT_TRUE((*job)->Save(7, state).ok());
    daemon_.CopyToTier("remote");
    record_ = daemon_.tier_copies()[0].record;
    const absl::StatusOr<RecordAndLayout> image = DecodeRecordAndLayout(record_);
    ASSERT_TRUE(image.ok());
    id_ = image->record.id;
  }
  static std::string Head(uint32_t rank, uint32_t tier, uint64_t bytes) {
    std::string head(16, '\0');
    std::memcpy(head.data(), &rank, 4);
    std::memcpy(head.data() + 4, &tier, 4);
    std::memcpy(head.data() + 8, &bytes, 8);
    return head;
  }
  // The daemon has that to tell, and says that it has `bytes`.
  StepRecords Told(const std::string& content, uint64_t bytes, uint32_t saved_by = 1) {
    daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
      if (!frame.has_read_records()) {
        return false;
      }
      const UniqueFd file(::memfd_create("records", MFD_CLOEXEC));
      EXPECT_EQ(::pwrite(file.get(), content.data(), content.size(), 0),
                static_cast<ssize_t>(content.size()));
      v1::DaemonFrame reply;
      reply.set_id(frame.id());
      reply.mutable_read_records()->set_job_uuid(id_.job.ToBytes());
      reply.mutable_read_records()->set_world_size(1);
      reply.mutable_read_records()->set_bytes(bytes);
      peer.Send(reply, {file.get()});
      return true;
    });
    auto connection = Connection::Dial(daemon_.socket(), Deadline::In(Milliseconds(30'000)));
    EXPECT_TRUE(connection.ok());
    auto records =
        StepRecords::Read({daemon_.socket(), *connection, nullptr}, "test", id_.checkpoint(),
                          saved_by, Deadline::In(Milliseconds(30'000)));
    EXPECT_TRUE(records.ok()) << records.status().message();
    return *std::move(records);
  }
  StepRecords Told(const std::string& content) { return Told(content, content.size()); }

  FakeDaemon daemon_;
  std::string record_;
  ShardId id_;
};

TEST_F(StepRecordsTest, WhatThereIs) {
  const StepRecords records = Told(Head(0, 4, record_.size()) + record_);
  EXPECT_EQ(records.size(), 1u);
  const std::optional<StepRecord> record = records.Of(0);
  ASSERT_TRUE(record.has_value());
  EXPECT_EQ(record->tier, "peer");
  EXPECT_EQ(record->image.record.id, id_);
  EXPECT_EQ(record->image.layout.slices[0].name, "w");
}

TEST_F(StepRecordsTest, WhatIsTornIsNotThere) {
  std::string torn = record_;
  torn[torn.size() / 2] = static_cast<char>(torn[torn.size() / 2] ^ 1);
  EXPECT_FALSE(Told(Head(0, 1, torn.size()) + torn).Of(0).has_value());
  EXPECT_FALSE(Told(Head(0, 1, record_.size() - 1) + record_).Of(0).has_value());
}

TEST_F(StepRecordsTest, WhatMakesNoSenseEndsIt) {
  for (const std::string& content :
       {Head(1, 1, record_.size()) + record_,      // there is no rank 1
        Head(0, 1, record_.size() + 1) + record_,  // it would end behind the end
        Head(0, 1, UINT64_MAX) + record_, std::string("short"), Head(0, 1, 0)}) {
    EXPECT_EQ(Told(content).size(), 0u);
    EXPECT_FALSE(Told(content).Of(0).has_value());
  }
  EXPECT_EQ(Told(Head(0, 1, record_.size()) + record_, UINT64_MAX).size(), 0u);
  EXPECT_EQ(Told("", 0).size(), 0u);
}

TEST_F(StepRecordsTest, WhatIsOfSomethingElseIsNotTaken) {
  const std::string content = Head(0, 1, record_.size()) + record_;
  EXPECT_EQ(Told(content, content.size(), 2).size(), 0u) << "of another number of ranks";
  id_.step += 1;
  EXPECT_FALSE(Told(content).Of(0).has_value());
  id_.step -= 1;
  id_.job = *JobUuid::FromBytes(kUuid);
  EXPECT_FALSE(Told(content).Of(0).has_value());
}

// One that does not know the request, or has nothing.
TEST_F(StepRecordsTest, ADaemonWithoutThemHasNone) {
  daemon_.SetHook([&](const v1::ClientFrame& frame, FakeDaemon::Peer& peer) {
    if (!frame.has_read_records()) {
      return false;
    }
    v1::DaemonFrame reply;
    reply.set_id(frame.id());
    reply.mutable_failure()->set_code(3);
    reply.mutable_failure()->set_message("the frame holds no request known here");
    peer.Send(reply);
    return true;
  });
  auto connection = Connection::Dial(daemon_.socket(), Deadline::In(Milliseconds(30'000)));
  ASSERT_TRUE(connection.ok());
  const auto records = StepRecords::Read({daemon_.socket(), *connection, nullptr}, "test",
                                         id_.checkpoint(), 3, Deadline::In(Milliseconds(30'000)));
  ASSERT_TRUE(records.ok()) << records.status().message();
  EXPECT_EQ(records->size(), 0u);
  EXPECT_FALSE(records->Of(2).has_value());
}

}  // namespace
}  // namespace holdfast::client
