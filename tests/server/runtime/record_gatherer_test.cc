// The records of a step from several nodes, both ends real: into one file, what cannot be had left
// out.
#include "server/runtime/record_gatherer.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <deque>
#include <map>

#include "base/mutex.h"
#include "server/peers/pull_client.h"
#include "server/runtime/passed_files.h"
#include "tests/server/runtime/pull_source.h"

namespace holdfast {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);

// A node whose core lists one shard of each of some ranks, all of the same content.
class Holder {
 public:
  Holder(const SlotContent& content, std::vector<Rank> ranks, std::string name)
      : content_(content), ranks_(std::move(ranks)) {
    EXPECT_TRUE(SealSlot(*store_, kFrom, content_).ok());
    context_.node_name = std::move(name);
    context_.gateway = &gateway_;
    context_.store = store_.get();
    context_.request_timeout = std::chrono::seconds(5);
    records_ = std::make_shared<const LocalRecords>(LocalRecords::Options{
        &context_, nullptr,
        [this](const ReadableShard&, const LocalRecords::Gone&) -> absl::StatusOr<std::string> {
          ++from_drive_;
          return store_->ReadRecord(kFrom);
        }});
  }
  ~Holder() {
    if (server_ != nullptr) {
      server_->Shutdown();
    }
    gateway_.Stop();
  }
  void HaveOnDrive(Rank rank) { on_drive_.push_back(rank); }
  void LoseRecord() { ASSERT_TRUE(store_->RemoveRecord(kFrom).ok()); }
  std::shared_ptr<const LocalRecords> records() const { return records_; }
  int from_drive() const { return from_drive_; }
  std::string Serve() {
    PullServer::Options options;
    options.context = &context_;
    options.check = [](const v1::OpenRequest&) { return absl::OkStatus(); };
    options.records = records_;
    pulls_.emplace(std::move(options));
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(pulls_->service());
    server_ = builder.BuildAndStart();
    return "127.0.0.1:" + std::to_string(port);
  }

 private:
  void Take(const Event& event) {
    const auto* request = std::get_if<AdminRequest>(&event);
    const auto* verify =
        request == nullptr ? nullptr : std::get_if<v1::VerifyRequest>(&request->request);
    if (verify == nullptr) {
      return;
    }
    ListedShards listed;
    const auto add = [&](Rank rank, TierKind tier) {
      SealedCopy copy;
      copy.id = content_.expected.id;
      copy.id.rank = rank;
      listed.shards.push_back({copy, kFrom, tier, ""});
    };
    for (const Rank rank : on_drive_) {
      add(rank, TierKind::kNvme);
    }
    for (const Rank rank : ranks_) {
      add(rank, TierKind::kMemory);
    }
    AdminReply reply{request->token, absl::OkStatus(), {}};
    if (verify->step() == content_.expected.id.step) {
      reply.reply = std::move(listed);
    } else {
      reply.status = absl::NotFoundError("no such step");
    }
    gateway_.Deliver(std::move(reply));
  }

  const SlotContent content_;
  const std::vector<Rank> ranks_;
  std::vector<Rank> on_drive_;
  std::atomic<int> from_drive_{0};
  const SharedMemoryDirectory dir_;
  const std::shared_ptr<SlotStore> store_ = OpenStore(dir_.path());
  AdminGateway gateway_{[this](Event event) { Take(event); }};
  AdminContext context_;
  std::shared_ptr<const LocalRecords> records_;
  std::optional<PullServer> pulls_;
  std::unique_ptr<grpc::Server> server_;
};

class RecordGathererTest : public ::testing::Test {
 protected:
  struct Entry {
    uint32_t tier = 0;
    std::string record;
    bool operator==(const Entry&) const = default;
  };
  void Start(const std::map<std::string, Holder*>& others) {
    PullClient::Options options;
    options.self = "a";
    options.env = Env::System();
    auto pulls = std::make_shared<PullClient>(std::move(options));
    ChangePeers peers;
    for (const auto& [name, holder] : others) {
      peers.up[name] = {holder->Serve(), 1};
    }
    pulls->ChangePeers(peers);
    gatherer_.emplace(RecordGatherer::Options{"a", a_.records(), pulls, [this](Event event) {
                                                const MutexLock lock(mutex_);
                                                events_.push_back(std::move(event));
                                                changed_.NotifyAll();
                                              }});
  }
  GatherRecords Wanted(std::vector<GatherRecords::Holder> holders) const {
    GatherRecords wanted;
    wanted.gather = 5;
    wanted.job = content_.expected.id.job;
    wanted.job_name = content_.expected.job_name;
    wanted.checkpoint = content_.expected.id.checkpoint();
    wanted.world_size = 8;
    wanted.holders = std::move(holders);
    return wanted;
  }
  std::optional<RecordsGathered> Gather(const GatherRecords& wanted) {
    gatherer_->Gather(wanted);
    const auto until = std::chrono::steady_clock::now() + kPatience;
    const MutexLock lock(mutex_);
    while (events_.empty() && changed_.WaitUntil(mutex_, until)) {
    }
    if (events_.empty()) {
      return std::nullopt;
    }
    auto gathered = std::get<RecordsGathered>(events_.front());
    events_.pop_front();
    EXPECT_EQ(gathered.gather, wanted.gather);
    return gathered;
  }
  // What the file has, by rank, which must ascend.
  std::map<uint32_t, Entry> In(const RecordsGathered& gathered) {
    std::string bytes(gathered.bytes, '\0');
    const int file = gathered.files->descriptors[0].get();
    EXPECT_EQ(::pread(file, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    EXPECT_NE(::pwrite(file, "x", 1, 0), 1) << "a client could change it for all others";
    std::map<uint32_t, Entry> entries;
    for (size_t at = 0; at < bytes.size();) {
      uint32_t rank = 0;
      uint64_t size = 0;
      Entry entry;
      std::memcpy(&rank, &bytes[at], 4);
      std::memcpy(&entry.tier, &bytes[at + 4], 4);
      std::memcpy(&size, &bytes[at + 8], 8);
      entry.record = bytes.substr(at + 16, size);
      EXPECT_TRUE(entries.empty() || entries.rbegin()->first < rank);
      entries[rank] = entry;
      at += 16 + size;
    }
    return entries;
  }
  Entry Of(v1::Tier tier) const {
    return {static_cast<uint32_t>(tier), content_.sample.record_file};
  }

  const SlotContent content_ = MakeSlotContent(5, 1);
  Holder a_{content_, {0, 1}, "a"};
  Holder b_{content_, {2, 3, 4}, "b"};
  Holder c_{content_, {5}, "c"};
  Mutex mutex_;
  CondVar changed_;
  std::deque<Event> events_ GUARDED_BY(mutex_);
  std::optional<RecordGatherer> gatherer_;
};

TEST_F(RecordGathererTest, FromThisNodeAndFromOthers) {
  Start({{"b", &b_}, {"c", &c_}});
  const auto gathered = Gather(Wanted({{"a", false, {{0, 2}}},
                                       {"b", false, {{2, 1}, {4, 1}}},  // rank 3 is not asked for
                                       {"c", false, {{5, 2}}}}));       // of 6 it has nothing
  ASSERT_TRUE(gathered && gathered->status.ok());
  const auto entries = In(*gathered);
  std::vector<uint32_t> ranks;
  for (const auto& [rank, entry] : entries) {
    ranks.push_back(rank);
    EXPECT_EQ(entry, Of(rank < 2 ? v1::TIER_MEMORY : v1::TIER_PEER)) << "rank " << rank;
  }
  EXPECT_EQ(ranks, (std::vector<uint32_t>{0, 1, 2, 4, 5}));
}

TEST_F(RecordGathererTest, WhatLiesOnDrivesAlone) {
  a_.HaveOnDrive(1);  // memory has it, too
  a_.HaveOnDrive(7);
  Start({});
  const auto gathered = Gather(Wanted({{"a", false, {{0, 8}}}}));
  ASSERT_TRUE(gathered && gathered->status.ok());
  const auto entries = In(*gathered);
  EXPECT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries.at(1).tier, static_cast<uint32_t>(v1::TIER_MEMORY));
  EXPECT_EQ(entries.at(7), Of(v1::TIER_NVME));
  EXPECT_EQ(a_.from_drive(), 1);
}

TEST_F(RecordGathererTest, NodesThatHaveNothingAreLeftOut) {
  c_.LoseRecord();
  Start({{"c", &c_}});
  const auto gathered =
      Gather(Wanted({{"gone", false, {{2, 3}}}, {"c", false, {{5, 1}}}, {"a", false, {{0, 1}}}}));
  ASSERT_TRUE(gathered && gathered->status.ok());
  EXPECT_EQ(In(*gathered).size(), 1u);
  const auto none = Gather(Wanted({{"gone", false, {{2, 3}}}}));
  ASSERT_TRUE(none.has_value());
  EXPECT_TRUE(absl::IsNotFound(none->status)) << none->status;
  // A node without a remote tier that is said to read there.
  const auto remote = Gather(Wanted({{"a", true, {{0, 8}}}}));
  ASSERT_TRUE(remote.has_value());
  EXPECT_TRUE(absl::IsNotFound(remote->status)) << remote->status;
}

TEST_F(RecordGathererTest, SoManyWaitAtATime) {
  Start({});
  for (size_t i = 0; i < 2 * RecordGatherer::kWaitingMax; ++i) {
    gatherer_->Gather(Wanted({{"a", false, {{0, 2}}}}));
  }
  const auto until = std::chrono::steady_clock::now() + kPatience;
  const MutexLock lock(mutex_);
  while (events_.size() < 2 * RecordGatherer::kWaitingMax && changed_.WaitUntil(mutex_, until)) {
  }
  EXPECT_EQ(events_.size(), 2 * RecordGatherer::kWaitingMax) << "each has one answer";
}

}  // namespace
}  // namespace holdfast
