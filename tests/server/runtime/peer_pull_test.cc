// A shard's whole way from one node's slot to another's, both ends of it real: by one-sided reads,
// by the stream where those fail, and not at all where what comes is not the shard.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <thread>

#include "base/process.h"
#include "base/status.h"
#include "holdfast/v1/peer.grpc.pb.h"
#include "server/peers/pull_client.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/passed_on.h"
#include "server/runtime/pull_transfer.h"
#include "server/runtime/tiers/drain_operations.h"
#include "server/runtime/tiers/durable_tiers.h"
#include "server/runtime/tiers/operation.h"
#include "tests/server/runtime/pull_source.h"
#include "tests/tiers/memory/memory_harness.h"
#include "tests/tiers/peer/refused_registrations.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SlotId kInto = 5;

// Node a reads it into its slot kInto.
class PeerPullTest : public ::testing::Test {
 protected:
  PeerPullTest() {
    EXPECT_TRUE(store_->Create(kInto, kSlot).ok());
    EXPECT_TRUE(store_->WriteNote(kInto, NoteOf(1, kSlot)).ok());
  }
  void WithFabric() { fabric_ = OpenPort(store_); }

  std::shared_ptr<PullClient> Client(const std::map<std::string, Source*>& sources) {
    std::map<std::string, std::string> addresses;
    for (const auto& [name, source] : sources) {
      addresses[name] = source->Serve();
    }
    return ClientOf(addresses);
  }
  static std::shared_ptr<PullClient> ClientOf(const std::map<std::string, std::string>& addresses) {
    PullClient::Options options;
    options.self = "a";
    options.env = Env::System();
    auto client = std::make_shared<PullClient>(std::move(options));
    ChangePeers peers;
    for (const auto& [name, address] : addresses) {
      peers.up[name] = {address, 1};
    }
    client->ChangePeers(peers);
    return client;
  }
  FetchShard Action(std::vector<std::string> peers) const {
    FetchShard action;
    action.drain = 1;
    action.from = TierKind::kPeer;
    action.key = {content_.expected.id, content_.expected.job_name, content_.expected.world_size};
    action.slot = kInto;
    action.generation = 1;
    action.slot_bytes = kSlot;
    action.peers = std::move(peers);
    return action;
  }
  FetchEnded Fetch() { return FetchFrom({{"b", &b_}}); }
  FetchEnded FetchFrom(const std::map<std::string, Source*>& sources) {
    std::vector<std::string> names;
    for (const auto& [name, source] : sources) {
      names.push_back(name);
    }
    return FetchBy(Client(sources), names);
  }
  FetchEnded FetchBy(std::shared_ptr<PullClient> client, const std::vector<std::string>& names) {
    auto context = std::make_shared<DrainContext>(std::make_shared<EventOutlet>(nullptr));
    context->env = Env::System();
    context->slots = store_;
    context->node_name = "a";
    context->fabric = fabric_.get();
    context->pulls = std::move(client);
    auto operation = std::make_shared<Operation>(
        1, [](Operation&) { return Event(TimerFired{}); }, [] { return Event(TimerFired{}); });
    return FetchFromPeers(context, Action(names), *operation);
  }
  void ExpectIsHere(const FetchEnded& ended) {
    ASSERT_TRUE(ended.status.ok()) << ended.status;
    EXPECT_EQ(ended.copy.id, content_.expected.id);
    EXPECT_THAT(ended.bad_peers, IsEmpty());
    std::string image(content_.sample.image.size(), '\0');
    auto file = store_->OpenImageFile(kInto, false);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE((*file)->ReadAt(0, std::as_writable_bytes(std::span(image))).ok());
    EXPECT_TRUE(image == content_.sample.image);
  }

  const SlotContent content_ = MakeSlotContent(5, 1);
  const SharedMemoryDirectory dir_;
  const std::shared_ptr<SlotStore> store_ = OpenStore(dir_.path());
  std::unique_ptr<FabricPort> fabric_;
  Source b_{content_};
};

TEST_F(PeerPullTest, ByTheStreamWhereThereIsNoFabric) {
  ExpectIsHere(Fetch());
}

TEST_F(PeerPullTest, ByOneSidedReads) {
  WithFabric();
  b_.OpenFabric();
  ExpectIsHere(Fetch());
  EXPECT_EQ(b_.fabric().problem(), "");
}

TEST_F(PeerPullTest, ByTheStreamWhereTheSourceMayNotPinItsMemory) {
  WithFabric();
  b_.OpenFabric();
  const RefusedRegistrations refused(b_.fabric().fabric(), 0);
  ExpectIsHere(Fetch());
  EXPECT_NE(b_.fabric().problem(), "");
}

TEST_F(PeerPullTest, ByTheStreamWhereTheReaderMayNotPinItsMemory) {
  WithFabric();
  b_.OpenFabric();
  fabric_->fabric().devices()[0]->info().domain_attr->mr_mode |= FI_MR_LOCAL;
  const RefusedRegistrations refused(fabric_->fabric(), 0);
  ExpectIsHere(Fetch());
}

// As from a device that calls reads done that were not.
TEST_F(PeerPullTest, ByTheStreamWhereOneSidedReadsBringOtherBytes) {
  const SharedMemoryDirectory elsewhere;
  const auto others = OpenStore(elsewhere.path());
  ASSERT_TRUE(SealSlot(*others, kFrom, MakeSlotContent(6, 1)).ok());
  WithFabric();
  b_.OpenFabric(others);
  ExpectIsHere(Fetch());
}

TEST_F(PeerPullTest, WhatIsBadInTheSlotIsNotTakenEitherWay) {
  b_.FlipBit();
  WithFabric();
  b_.OpenFabric();
  const FetchEnded ended = Fetch();
  EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
  EXPECT_TRUE(ended.source_bad);
  EXPECT_THAT(ended.bad_peers, ElementsAre("b"));
}

// What comes behind the bad block is on its way already when that is found.
TEST_F(PeerPullTest, ABadBlockAmidALongImageIsTheSources) {
  const SlotContent content = MakeSlotContent(5, 1, 450'000);
  ASSERT_GT(content.sample.image.size(), kPullChunkBytes * 3 / 2);
  Source big(content, "big");
  big.FlipBit(content.sample.image.size() - kPullChunkBytes / 2);
  const FetchEnded ended = FetchFrom({{"big", &big}});
  EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
  EXPECT_THAT(ended.bad_peers, ElementsAre("big"));
}

TEST_F(PeerPullTest, AfterOneThatIsBadTheNextOneIsTaken) {
  b_.FlipBit();
  Source c(content_, "c");
  const FetchEnded ended = FetchFrom({{"b", &b_}, {"c", &c}});
  ASSERT_TRUE(ended.status.ok()) << ended.status;
  EXPECT_EQ(ended.peer, "c");
  EXPECT_THAT(ended.bad_peers, ElementsAre("b"));
}

// Rather this node's memory than that of two others.
TEST_F(PeerPullTest, OfTwoThatAreBadNeitherIsBlamed) {
  b_.FlipBit();
  Source c(content_, "c");
  c.FlipBit();
  const FetchEnded ended = FetchFrom({{"b", &b_}, {"c", &c}});
  EXPECT_TRUE(absl::IsUnavailable(ended.status)) << ended.status;
  EXPECT_FALSE(ended.source_bad);
  EXPECT_THAT(ended.bad_peers, IsEmpty());
}

// What the third one has shows that it is not this node's.
TEST_F(PeerPullTest, OfTwoThatAreBadBothAreBlamedByAThirdThatIsGood) {
  b_.FlipBit();
  Source c(content_, "c");
  c.FlipBit();
  Source d(content_, "d");
  const FetchEnded ended = FetchFrom({{"b", &b_}, {"c", &c}, {"d", &d}});
  ASSERT_TRUE(ended.status.ok()) << ended.status;
  EXPECT_EQ(ended.peer, "d");
  EXPECT_THAT(ended.bad_peers, ElementsAre("b", "c"));
}

TEST_F(PeerPullTest, WhatIsRefilledWhileItIsReadIsNotTakenThoughTheBytesFit) {
  for (const bool by_fabric : {false, true}) {
    SCOPED_TRACE(by_fabric);
    Source refilled{content_, "r"};
    refilled.RefillOnceHeld();
    if (by_fabric) {
      WithFabric();
      refilled.OpenFabric();
    }
    const FetchEnded ended = FetchFrom({{"r", &refilled}});
    EXPECT_TRUE(absl::IsNotFound(ended.status) || absl::IsUnavailable(ended.status))
        << ended.status;
    EXPECT_THAT(ended.bad_peers, IsEmpty()) << "nothing is wrong with it";
    EXPECT_FALSE(store_->ReadRecord(kInto).ok()) << "nothing was published";
  }
  Source refilled{content_, "a-refilled"};
  refilled.RefillOnceHeld();
  ExpectIsHere(FetchFrom({{"a-refilled", &refilled}, {"b", &b_}}));
}

TEST_F(PeerPullTest, AnotherShardIsNotTaken) {
  Source c(MakeSlotContent(6, 1), "c");
  c.AnswerAnything();
  const FetchEnded ended = FetchFrom({{"c", &c}});
  EXPECT_TRUE(absl::IsDataLoss(ended.status)) << ended.status;
}

// "Cancelled" is nothing for a source to say: the next one is asked.
TEST_F(PeerPullTest, NoSourceEndsTheTry) {
  b_.Refuse(absl::CancelledError("so I say"));
  Source c(content_, "c");
  const FetchEnded ended = FetchFrom({{"b", &b_}, {"c", &c}});
  ASSERT_TRUE(ended.status.ok()) << ended.status;
  EXPECT_EQ(ended.peer, "c");
}

// Offers the shard, and ends when it is asked for the bytes, calling its copy bad.
class EndsWithDataLoss final : public v1::Pulls::Service {
 public:
  EndsWithDataLoss(std::string record, uint64_t image_bytes) : record_(std::move(record)) {
    offer_.mutable_source()->set_record_bytes(record_.size());
    offer_.mutable_source()->set_image_bytes(image_bytes);
  }
  grpc::Status Pull(grpc::ServerContext*,
                    grpc::ServerReaderWriter<v1::PullTold, v1::PullAsked>* reader) override {
    v1::PullAsked asked;
    reader->Read(&asked);
    reader->Write(offer_);
    v1::PullTold record;
    record.set_record(record_);
    reader->Write(record);
    reader->Read(&asked);
    return {grpc::StatusCode::DATA_LOSS, "so I say"};
  }

 private:
  const std::string record_;
  v1::PullTold offer_;
};

TEST_F(PeerPullTest, ASourceThatEndsByCallingItsCopyBadIsPassedOver) {
  EndsWithDataLoss service(*b_.store().ReadRecord(kFrom), content_.sample.image.size());
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  const std::string address = "127.0.0.1:" + std::to_string(port);
  const FetchEnded alone = FetchBy(ClientOf({{"ends", address}}), {"ends"});
  EXPECT_TRUE(absl::IsUnavailable(alone.status)) << alone.status;
  EXPECT_THAT(Message(alone.status), ::testing::HasSubstr("so I say"));
  EXPECT_THAT(alone.bad_peers, IsEmpty()) << "nobody has compared anything";
  const FetchEnded ended = FetchBy(ClientOf({{"ends", address}, {"b", b_.Serve()}}), {"ends", "b"});
  EXPECT_EQ(ended.peer, "b");
  ExpectIsHere(ended);
}

TEST_F(PeerPullTest, AReaderThatSaysNothingIsSentAway) {
  const auto channel = grpc::CreateChannel(b_.Serve(), grpc::InsecureChannelCredentials());
  const auto stub = v1::Pulls::NewStub(channel);
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto stream = stub->Pull(&call);
  v1::PullTold told;
  EXPECT_FALSE(stream->Read(&told));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(PeerPullTest, IsCalledOff) {
  b_.AnswerAfter(1'000'000);  // it loads, and loads
  std::promise<FetchEnded> ended;
  DurableTiers::Options options;
  options.env = Env::System();
  options.slots = store_;
  options.post = [&](Event event) {
    if (auto* fetched = std::get_if<FetchEnded>(&event)) {
      ended.set_value(std::move(*fetched));
    }
  };
  auto tiers = DurableTiers::Create(std::move(options));
  ASSERT_TRUE(tiers.ok()) << tiers.status();
  ASSERT_TRUE((*tiers)->SetPeers(Client({{"b", &b_}}), nullptr).ok());
  (*tiers)->Perform(Action({"b"}));
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (b_.asked() < 2 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  (*tiers)->Perform(CancelDrain{1});
  auto answer = ended.get_future();
  ASSERT_EQ(answer.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  const absl::Status status = answer.get().status;
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST_F(PeerPullTest, WhoIsNoMemberAnyMoreIsNotWaitedFor) {
  b_.AnswerAfter(1'000'000);
  auto context = std::make_shared<DrainContext>(std::make_shared<EventOutlet>(nullptr));
  context->env = Env::System();
  context->slots = store_;
  context->node_name = "a";
  context->pulls = Client({{"b", &b_}});
  Operation operation(
      1, [](Operation&) { return Event(TimerFired{}); }, [] { return Event(TimerFired{}); });
  auto ended = std::async(std::launch::async,
                          [&] { return FetchFromPeers(context, Action({"b"}), operation); });
  while (b_.asked() == 0 &&
         ended.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
  }
  ChangePeers change;
  change.down = {"b"};
  context->pulls->ChangePeers(change);
  const absl::Status status = ended.get().status;
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(Message(status), ::testing::HasSubstr("'b' has left the cluster"));
}

TEST_F(PeerPullTest, WhatTheSourceHasToLoadFirstIsWaitedFor) {
  b_.AnswerAfter(3);
  ExpectIsHere(Fetch());
  EXPECT_EQ(b_.asked(), 4);
}

// A source that says what it likes.
class Liar final : public PullStream {
 public:
  explicit Liar(std::vector<v1::PullTold> says) : says_(std::move(says)) {}
  absl::Status Ask(const v1::PullAsked&) override { return absl::OkStatus(); }
  absl::StatusOr<v1::PullTold> Next() override {
    if (next_ == says_.size()) {
      return absl::UnavailableError("it says no more");
    }
    return says_[next_++];
  }

 private:
  const std::vector<v1::PullTold> says_;
  size_t next_ = 0;
};

class LiarTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytesMax = 1 << 20;

  static v1::PullTold Source(uint64_t record_bytes, uint64_t image_bytes) {
    v1::PullTold told;
    told.mutable_source()->set_record_bytes(record_bytes);
    told.mutable_source()->set_image_bytes(image_bytes);
    return told;
  }
  static v1::PullTold Record(const std::string& bytes) {
    v1::PullTold told;
    told.set_record(bytes);
    return told;
  }
  static absl::Status Offer(std::vector<v1::PullTold> says) {
    Liar liar(std::move(says));
    return ReadPullOffer(liar, kBytesMax, nullptr).status();
  }
  absl::Status Pull(std::vector<v1::PullTold> says) {
    const SlotContent content = MakeSlotContent(5, 1);
    PullOffer offer;
    offer.image = {content.sample.record, content.sample.layout};
    into_.assign(content.sample.image.size(), std::byte{0});
    Liar liar(std::move(says));
    TransferControl control;
    return PullByStream(liar, offer, into_, "b", nullptr, control);
  }
  static v1::PullTold Data(size_t bytes) {
    v1::PullTold told;
    told.set_data(std::string(bytes, 'x'));
    return told;
  }

  std::vector<std::byte> into_;
};

TEST_F(LiarTest, WhoPromisesMoreThanThereCanBeIsNotListenedTo) {
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(10, kBytesMax + 1)})));
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(4 * kBytesMax, kBytesMax)})));
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(UINT64_MAX, kBytesMax)})));
  EXPECT_TRUE(absl::IsUnavailable(Offer({Source(3 * kBytesMax, kBytesMax)})))
      << "it may have so much";
}

TEST_F(LiarTest, WhatComesIsWhatWasSaidOrNothing) {
  EXPECT_TRUE(absl::IsDataLoss(Offer({Record("it begins with this")})));
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(10, 10), Record("")})));
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(10, 10), Record("12345"), Record("678901")})));
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(10, 10), Record("1234567890")}))) << "no record";
  EXPECT_TRUE(absl::IsDataLoss(Offer({Source(10, 10), Source(10, 10)})));
}

TEST_F(LiarTest, BytesThatWereNotAskedForGoNowhere) {
  const size_t bytes = MakeSlotContent(5, 1).sample.image.size();
  EXPECT_TRUE(absl::IsDataLoss(Pull({Data(bytes + 1)})));
  EXPECT_TRUE(absl::IsDataLoss(Pull({Data(0)})));
  EXPECT_TRUE(absl::IsDataLoss(Pull({Data(bytes)}))) << "they contradict the digests";
  EXPECT_TRUE(absl::IsUnavailable(Pull({Data(1)})));
}

}  // namespace
}  // namespace holdfast
