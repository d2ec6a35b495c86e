// A node that has a shard in one of its slots, and serves it to others as the daemon does.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "server/runtime/admin_gateway.h"
#include "server/runtime/fabric_port.h"
#include "server/runtime/found_state.h"
#include "server/runtime/passed_on.h"
#include "server/runtime/pull_service.h"
#include "tests/tiers/memory/memory_harness.h"

namespace holdfast {

inline constexpr SlotId kFrom = 3;

inline std::shared_ptr<SlotStore> OpenStore(const std::string& dir) {
  auto opened = SlotStore::Open(StoreOptions(*Env::System(), dir));
  EXPECT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE((*opened)->Scan().ok());
  return *std::move(opened);
}

inline std::unique_ptr<FabricPort> OpenPort(const std::shared_ptr<SlotStore>& slots) {
  v1::FabricConfig config;
  config.set_provider("tcp");
  auto port = FabricPort::Open({config, "127.0.0.1:7070", slots, Env::System()});
  EXPECT_TRUE(port.ok()) << port.status();
  return *std::move(port);
}

// A node that has the shard in its slot kFrom.
class Source {
 public:
  explicit Source(const SlotContent& content, const std::string& name = "b") : content_(content) {
    EXPECT_TRUE(SealSlot(*store_, kFrom, content_).ok());
    context_.node_name = name;
    context_.gateway = &gateway_;
    context_.store = store_.get();
  }
  ~Source() {
    if (server_ != nullptr) {
      server_->Shutdown();
    }
    gateway_.Stop();
  }
  SlotStore& store() { return *store_; }
  AdminGateway& gateway() { return gateway_; }
  FabricPort& fabric() { return *fabric_; }
  int asked() const { return asked_; }
  // Registers the slots of this store, as if they were its own.
  void OpenFabric(const std::shared_ptr<SlotStore>& slots) { fabric_ = OpenPort(slots); }
  void OpenFabric() { OpenFabric(store_); }
  // So often it is not there yet when somebody asks.
  void AnswerAfter(int times) { unanswered_ = times; }
  void BeOf(const std::string& cluster) { cluster_ = cluster; }
  void Refuse(absl::Status why) { refusal_ = std::move(why); }
  // Its slot is filled anew, with the same shard, as soon as it has said that it holds it: as if
  // its hold had been lost.
  void RefillOnceHeld() { refills_ = true; }
  void Refill() {
    const SlotContent again = MakeSlotContent(content_.expected.id.step, 2);
    ASSERT_EQ(again.sample.image, content_.sample.image);
    ASSERT_TRUE(store_->RemoveRecord(kFrom).ok());
    ASSERT_TRUE(store_->WriteNote(kFrom, NoteOf(2, kSlot)).ok());
    ASSERT_TRUE(FillSlot(*store_, kFrom, again).ok());
    ASSERT_TRUE(PublishSlot(*store_, kFrom, again).ok());
  }
  // A reader is sent away when it takes nothing for so long.
  void BePatientFor(Duration at_most) { silence_max_ = at_most; }
  // Membership says that the others are gone.
  void BeAlone() { alone_ = true; }
  // Whatever is asked for, it has this.
  void AnswerAnything() { anything_ = true; }
  // In the byte so far from the end of its image.
  void FlipBit(size_t from_end = 1) {
    auto image = store_->OpenImageFile(kFrom, true);
    ASSERT_TRUE(image.ok()) << image.status();
    std::string bytes = content_.sample.image;
    char& byte = bytes.at(bytes.size() - from_end);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_TRUE((*image)->WriteAt(0, std::as_bytes(std::span(bytes))).ok());
  }
  std::string Serve() {
    pulls_.emplace(PullServer::Options{
        &context_, fabric_.get(), std::make_shared<PassedOn>(),
        [this](const v1::OpenRequest& who) {
          return who.cluster() == cluster_ ? absl::OkStatus()
                                           : absl::FailedPreconditionError("a stranger");
        },
        std::chrono::milliseconds(unanswered_ > 0 ? 20 : 30'000), std::chrono::milliseconds(50),
        silence_max_, [this](const std::string&) { return !alone_; }});
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(pulls_->service());
    server_ = builder.BuildAndStart();
    EXPECT_NE(server_, nullptr);
    return "127.0.0.1:" + std::to_string(port);
  }

 private:
  void Take(const Event& event) {
    const auto* request = std::get_if<AdminRequest>(&event);
    const auto* hold = request == nullptr ? nullptr : std::get_if<HoldShard>(&request->request);
    if (hold == nullptr || asked_++ < unanswered_) {
      return;
    }
    AdminReply reply{request->token, absl::NotFoundError("it has no such shard"), {}};
    if (!refusal_.ok()) {
      reply.status = refusal_;
    } else if ((anything_ || hold->id == content_.expected.id) && hold->load) {
      const auto record = DecodeRecordAndLayout(*store_->ReadRecord(kFrom));
      reply.status = record.status();
      if (record.ok()) {
        reply.reply =
            ReadableShards{{{ToSealedCopy(record->record), kFrom, TierKind::kMemory, ""}}};
      }
      if (refills_) {
        Refill();
      }
    }
    gateway_.Deliver(std::move(reply));
  }

  const SlotContent content_;
  const SharedMemoryDirectory dir_;
  const std::shared_ptr<SlotStore> store_ = OpenStore(dir_.path());
  std::atomic<int> asked_{0};
  std::atomic<int> unanswered_{0};
  std::atomic<bool> alone_{false};
  absl::Status refusal_;
  std::string cluster_;
  bool anything_ = false;
  bool refills_ = false;
  Duration silence_max_ = std::chrono::seconds(60);
  AdminGateway gateway_{[this](Event event) { Take(event); }};
  AdminContext context_;
  std::unique_ptr<FabricPort> fabric_;
  std::optional<PullServer> pulls_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace holdfast
