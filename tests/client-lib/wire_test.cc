// The client's codec against protobuf's generated code, both ways: what one writes, the other reads
// as the same.
#include "client-lib/src/wire.h"

#include <gtest/gtest.h>

#include <random>

#include "holdfast/v1/client.pb.h"

namespace holdfast::client::wire {
namespace {

v1::ClientFrame Parse(uint64_t id, const Request& request) {
  Result<std::string> frame = EncodeFrame(id, request);
  EXPECT_TRUE(frame.ok());
  const uint32_t length = static_cast<unsigned char>((*frame)[0]) |
                          static_cast<unsigned char>((*frame)[1]) << 8 |
                          static_cast<unsigned char>((*frame)[2]) << 16;
  EXPECT_EQ(length + 4, frame->size());
  v1::ClientFrame parsed;
  EXPECT_TRUE(parsed.ParseFromString(frame->substr(4)));
  EXPECT_EQ(parsed.id(), id);
  // Nothing that the schema does not know: writing it again gives as many bytes.
  EXPECT_EQ(parsed.SerializeAsString().size(), frame->size() - 4);
  return parsed;
}

constexpr uint64_t kBig = 0xfedcba9876543210;

TEST(Wire, EveryRequestReadsAsWhatItIs) {
  const v1::ClientFrame hello = Parse(1, Hello{3, "someone", true});
  EXPECT_EQ(hello.hello().protocol(), 3u);
  EXPECT_EQ(hello.hello().client(), "someone");
  EXPECT_TRUE(hello.hello().network_flag());

  const v1::ClientFrame join = Parse(kBig, Join{"job", 1, 2, "launch", kBig, 4, 5});
  EXPECT_EQ(join.join().job(), "job");
  EXPECT_EQ(join.join().rank(), 1u);
  EXPECT_EQ(join.join().world_size(), 2u);
  EXPECT_EQ(join.join().launch(), "launch");
  EXPECT_EQ(join.join().attempt(), kBig);
  EXPECT_EQ(join.join().leave_attempt(), 4u);
  EXPECT_EQ(join.join().deadline_ms(), 5u);
  EXPECT_FALSE(join.join().has_passed_step());
  const v1::ClientFrame again = Parse(2, Join{"job", 1, 2, "launch", 3, 0, 5, "", 0});
  EXPECT_TRUE(again.join().has_passed_step()) << "0 is a step as any other";

  const v1::ClientFrame reach = Parse(19, ReachStep{kBig, true, 30});
  EXPECT_EQ(reach.reach_step().step(), kBig);
  EXPECT_TRUE(reach.reach_step().told_to_stop());
  EXPECT_EQ(reach.reach_step().grace_ms(), 30u);
  EXPECT_FALSE(reach.reach_step().has_passed_step());
  EXPECT_TRUE(Parse(20, ReachStep{1, false, 0, 0}).reach_step().has_passed_step());

  const v1::ClientFrame reserve = Parse(3, Reserve{kBig, 2, 3});
  EXPECT_EQ(reserve.reserve().slot_bytes(), kBig);
  EXPECT_EQ(reserve.reserve().slots(), 2u);
  EXPECT_EQ(reserve.reserve().deadline_ms(), 3u);

  const v1::ClientFrame begin = Parse(4, BeginSave{1, kBig, 3});
  EXPECT_EQ(begin.begin_save().step(), 1u);
  EXPECT_EQ(begin.begin_save().slot_bytes(), kBig);
  EXPECT_EQ(begin.begin_save().deadline_ms(), 3u);

  const v1::ClientFrame seal = Parse(5, Seal{1, 2, 3, kBig, 5});
  EXPECT_EQ(seal.seal().step(), 1u);
  EXPECT_EQ(seal.seal().slot(), 2u);
  EXPECT_EQ(seal.seal().generation(), 3u);
  EXPECT_EQ(seal.seal().record_offset(), kBig);
  EXPECT_EQ(seal.seal().record_bytes(), 5u);

  const v1::ClientFrame abort = Parse(6, AbortSave{1, 2, kBig, "why"});
  EXPECT_EQ(abort.abort_save().step(), 1u);
  EXPECT_EQ(abort.abort_save().slot(), 2u);
  EXPECT_EQ(abort.abort_save().generation(), kBig);
  EXPECT_EQ(abort.abort_save().why(), "why");

  const v1::ClientFrame await = Parse(7, AwaitSave{1, Stage::kRemote, 3});
  EXPECT_EQ(await.await_save().step(), 1u);
  EXPECT_EQ(await.await_save().stage(), v1::AwaitSave::STAGE_REMOTE);
  EXPECT_EQ(await.await_save().deadline_ms(), 3u);

  const v1::ClientFrame enter = Parse(8, EnterSession{Choice::kStep, 1, 2, 3, 4, true});
  EXPECT_EQ(enter.enter_session().hold(), 4u);
  EXPECT_TRUE(enter.enter_session().reads_by_itself());
  EXPECT_EQ(enter.enter_session().choice(), v1::EnterSession::CHOICE_STEP);
  EXPECT_EQ(enter.enter_session().step(), 1u);
  EXPECT_EQ(enter.enter_session().attempt(), 2u);
  EXPECT_EQ(enter.enter_session().deadline_ms(), 3u);

  const v1::ClientFrame report = Parse(9, ReportLoad{1, 2, true, "p", true, 6, true});
  EXPECT_EQ(report.report_load().session(), 1u);
  EXPECT_EQ(report.report_load().round(), 2u);
  EXPECT_TRUE(report.report_load().loaded());
  EXPECT_EQ(report.report_load().problem(), "p");
  EXPECT_TRUE(report.report_load().copy_is_bad());
  EXPECT_EQ(report.report_load().deadline_ms(), 6u);
  EXPECT_TRUE(report.report_load().wants_mismatch());

  const v1::ClientFrame attach =
      Parse(10, Attach{"job", 1, Choice::kStep, 2, 3, 4, kBig, true, {"nvme", "remote"}});
  EXPECT_EQ(attach.attach().deadline_ms(), kBig);
  EXPECT_TRUE(attach.attach().any_tier());
  ASSERT_EQ(attach.attach().without_size(), 2);
  EXPECT_EQ(attach.attach().without(1), "remote");
  EXPECT_EQ(attach.attach().job(), "job");
  EXPECT_EQ(attach.attach().rank(), 1u);
  EXPECT_EQ(attach.attach().choice(), v1::Attach::CHOICE_STEP);
  EXPECT_EQ(attach.attach().step(), 2u);
  EXPECT_EQ(attach.attach().attempt(), 3u);
  EXPECT_EQ(attach.attach().hold(), 4u);

  const v1::ClientFrame confirm = Parse(11, ConfirmRead{1, 2});
  EXPECT_EQ(confirm.confirm_read().slot(), 1u);
  EXPECT_EQ(confirm.confirm_read().generation(), 2u);
  const v1::ClientFrame release = Parse(12, ReleaseRead{7});
  EXPECT_EQ(release.release_read().hold(), 7u);

  const v1::ClientFrame slots = Parse(13, ReleaseSlots{{0, 7, UINT32_MAX}});
  EXPECT_EQ(std::vector<uint32_t>(slots.release_slots().slots().begin(),
                                  slots.release_slots().slots().end()),
            (std::vector<uint32_t>{0, 7, UINT32_MAX}));
  EXPECT_TRUE(Parse(14, Leave{}).has_leave());

  const v1::ClientFrame list = Parse(15, List{"job", true, kBig, 3, 4});
  EXPECT_EQ(list.list().job(), "job");
  EXPECT_TRUE(list.list().before());
  EXPECT_EQ(list.list().before_attempt(), kBig);
  EXPECT_EQ(list.list().before_step(), 3u);
  EXPECT_EQ(list.list().deadline_ms(), 4u);
}

TEST(Wire, DefaultsAreRequestsToo) {
  EXPECT_TRUE(Parse(1, Join{}).has_join());
  EXPECT_TRUE(Parse(1, EnterSession{}).has_enter_session());
  EXPECT_TRUE(Parse(1, ReleaseSlots{}).has_release_slots());
  EXPECT_TRUE(Parse(1, ReportLoad{}).has_report_load());
}

TEST(Wire, ARequestOverTheLimitIsRefused) {
  EXPECT_EQ(EncodeFrame(1, AbortSave{1, 2, 3, std::string(kMessageBytesMax, 'x')}).status().code(),
            Code::kInvalidArgument);
}

template <typename Message>
Message Decode(const v1::DaemonFrame& frame) {
  const Result<DaemonFrame> decoded = DecodeFrame(frame.SerializeAsString());
  EXPECT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(decoded->id, frame.id());
  const Message* message = std::get_if<Message>(&decoded->reply);
  EXPECT_NE(message, nullptr);
  return message == nullptr ? Message() : *message;
}

void Fill(v1::Descent* descent, uint64_t base) {
  descent->set_attempt(base);
  descent->set_parent_attempt(base + 1);
  descent->set_parent_step(base + 2);
}

void Fill(v1::Source* source) {
  source->set_slot(1);
  source->set_generation(2);
  source->set_image_bytes(kBig);
  source->set_attempt(4);
  source->set_step(5);
  source->set_job_uuid("uuid");
  source->set_rank(7);
  source->set_world_size(8);
}

void ExpectFilled(const Source& source) {
  EXPECT_EQ(source.slot, 1u);
  EXPECT_EQ(source.generation, 2u);
  EXPECT_EQ(source.image_bytes, kBig);
  EXPECT_EQ(source.attempt, 4u);
  EXPECT_EQ(source.step, 5u);
  EXPECT_EQ(source.job_uuid, "uuid");
  EXPECT_EQ(source.rank, 7u);
  EXPECT_EQ(source.world_size, 8u);
}

TEST(Wire, EveryReplyReadsAsWhatItIs) {
  v1::DaemonFrame frame;
  frame.set_id(kBig);
  frame.mutable_failure()->set_code(-3);
  frame.mutable_failure()->set_message("no\nway");
  frame.mutable_failure()->set_reason(v1::Failure::REASON_UNKNOWN_SESSION);
  const auto failure = Decode<Failure>(frame);
  EXPECT_EQ(failure.code, -3);
  EXPECT_EQ(failure.message, "no\nway");
  EXPECT_EQ(failure.reason, Reason::kUnknownSession);

  frame.clear_failure();
  frame.mutable_hello()->set_protocol(1);
  frame.mutable_hello()->set_daemon_version("v");
  frame.mutable_hello()->set_boot_id("b");
  const auto hello = Decode<HelloReply>(frame);
  EXPECT_EQ(hello.protocol, 1u);
  EXPECT_EQ(hello.daemon_version, "v");
  EXPECT_EQ(hello.boot_id, "b");
  EXPECT_FALSE(hello.network_flag);
  EXPECT_EQ(DescriptorCount(hello), 0u);
  frame.mutable_hello()->set_network_flag(true);
  EXPECT_TRUE(Decode<HelloReply>(frame).network_flag);
  EXPECT_EQ(DescriptorCount(Decode<HelloReply>(frame)), 1u);

  v1::JoinReply* join = frame.mutable_join();
  join->set_job_uuid(std::string("\0u", 2));
  join->set_attempt(2);
  Fill(join->add_descent(), 10);
  Fill(join->add_descent(), kBig);
  join->set_decided(true);
  join->set_last_step(5);
  join->set_any_step(true);
  const auto joined = Decode<JoinReply>(frame);
  EXPECT_EQ(joined.job_uuid, std::string("\0u", 2));
  EXPECT_EQ(joined.attempt, 2u);
  EXPECT_EQ(joined.descent, (std::vector<Descent>{{10, {11, 12}}, {kBig, {kBig + 1, kBig + 2}}}));
  EXPECT_TRUE(joined.decided);
  EXPECT_EQ(joined.last_step, 5u);
  EXPECT_TRUE(joined.any_step);

  v1::ReserveReply* reserve = frame.mutable_reserve();
  reserve->set_ready(1);
  reserve->set_wanted(2);
  reserve->set_slot_bytes(kBig);
  reserve->set_with_descriptor(true);
  reserve->set_slot(5);
  const auto reserved = Decode<ReserveReply>(frame);
  EXPECT_EQ(reserved.ready, 1u);
  EXPECT_EQ(reserved.wanted, 2u);
  EXPECT_EQ(reserved.slot_bytes, kBig);
  EXPECT_TRUE(reserved.descriptor);
  EXPECT_EQ(reserved.slot, 5u);

  v1::Grant* grant = frame.mutable_begin_save();
  grant->set_slot(1);
  grant->set_generation(2);
  grant->set_slot_bytes(kBig);
  grant->set_with_descriptor(true);
  grant->set_job_uuid("u");
  grant->set_attempt(6);
  Fill(grant->add_descent(), 7);
  const auto granted = Decode<Grant>(frame);
  EXPECT_EQ(granted.slot, 1u);
  EXPECT_EQ(granted.generation, 2u);
  EXPECT_EQ(granted.slot_bytes, kBig);
  EXPECT_TRUE(granted.descriptor);
  EXPECT_EQ(granted.job_uuid, "u");
  EXPECT_EQ(granted.attempt, 6u);
  EXPECT_EQ(granted.descent, (std::vector<Descent>{{7, {8, 9}}}));

  frame.mutable_reach_step()->set_stop(true);
  frame.mutable_reach_step()->set_left_ms(kBig);
  const auto reached = Decode<StepReached>(frame);
  EXPECT_TRUE(reached.stop);
  EXPECT_FALSE(reached.stopping);
  EXPECT_EQ(reached.left_ms, kBig);
  EXPECT_EQ(DescriptorCount(reached), 0u);

  frame.mutable_seal()->set_sealed_unix_ms(-1);
  EXPECT_EQ(Decode<Sealed>(frame).sealed_unix_ms, -1);

  frame.mutable_await_save()->set_stage(v1::AwaitSave::STAGE_COMMITTED);
  frame.mutable_await_save()->set_unix_ms(123);
  EXPECT_EQ(Decode<SaveProgress>(frame).stage, Stage::kCommitted);
  EXPECT_EQ(Decode<SaveProgress>(frame).unix_ms, 123);

  v1::SessionOutcome* session = frame.mutable_enter_session();
  session->set_session(1);
  session->set_round(2);
  session->set_attempt(4);
  session->set_step(5);
  session->set_passed_over("step 6");
  Fill(session->mutable_source());
  Fill(session->add_descent(), 3);
  const auto outcome = Decode<SessionOutcome>(frame);
  EXPECT_EQ(outcome.session, 1u);
  EXPECT_EQ(outcome.round, 2u);
  EXPECT_FALSE(outcome.done);
  EXPECT_EQ(outcome.attempt, 4u);
  EXPECT_EQ(outcome.step, 5u);
  EXPECT_EQ(outcome.passed_over, "step 6");
  ASSERT_TRUE(outcome.source.has_value());
  ExpectFilled(*outcome.source);
  EXPECT_EQ(outcome.descent, (std::vector<Descent>{{3, {4, 5}}}));
  EXPECT_EQ(DescriptorCount(outcome), 2u);

  Fill(frame.mutable_attach());
  ExpectFilled(Decode<Source>(frame));

  frame.mutable_abort_save();
  Decode<Done>(frame);
  frame.mutable_confirm_read();
  Decode<Done>(frame);
  frame.mutable_release_read();
  Decode<Done>(frame);
  frame.mutable_release_slots();
  Decode<Done>(frame);
  frame.mutable_leave();
  Decode<Done>(frame);

  v1::Listing* listing = frame.mutable_list();
  listing->set_more(true);
  listing->set_unread("remote");
  v1::ListedCheckpoint* one = listing->add_checkpoints();
  one->set_attempt(kBig);
  one->set_step(2);
  one->set_world_size(3);
  one->set_on_line(true);
  one->add_tiers("memory");
  one->add_tiers("nvme");
  one->set_bytes(kBig);
  one->set_unix_ms(-7);
  listing->add_checkpoints();
  const auto listed = Decode<Listing>(frame);
  EXPECT_TRUE(listed.more);
  EXPECT_EQ(listed.unread, "remote");
  ASSERT_EQ(listed.checkpoints.size(), 2u);
  EXPECT_EQ(listed.checkpoints[0].attempt, kBig);
  EXPECT_EQ(listed.checkpoints[0].step, 2u);
  EXPECT_EQ(listed.checkpoints[0].world_size, 3u);
  EXPECT_TRUE(listed.checkpoints[0].on_line);
  EXPECT_EQ(listed.checkpoints[0].tiers, (std::vector<std::string>{"memory", "nvme"}));
  EXPECT_EQ(listed.checkpoints[0].bytes, kBig);
  EXPECT_EQ(listed.checkpoints[0].unix_ms, -7);
  EXPECT_TRUE(listed.checkpoints[1].tiers.empty());
}

TEST(Wire, DescriptorsAreAnnouncedByTheReply) {
  EXPECT_EQ(DescriptorCount(Grant{.descriptor = true}), 1u);
  EXPECT_EQ(DescriptorCount(Grant{}), 0u);
  EXPECT_EQ(DescriptorCount(ReserveReply{.descriptor = true}), 1u);
  EXPECT_EQ(DescriptorCount(Source{}), 2u);
  EXPECT_EQ(DescriptorCount(SessionOutcome{.done = true}), 0u);
  EXPECT_EQ(DescriptorCount(Failure{}), 0u);
  EXPECT_EQ(DescriptorCount(Listing{}), 0u);
}

TEST(Wire, AStepIsOfferedWithoutASource) {
  v1::DaemonFrame frame;
  frame.set_id(1);
  v1::SessionOutcome& session = *frame.mutable_enter_session();
  session.set_session(3);
  session.set_round(1);
  session.set_attempt(2);
  session.set_step(9);
  EXPECT_FALSE(DecodeFrame(frame.SerializeAsString()).ok()) << "it goes on with nothing";
  session.set_reshard(12'288);
  const auto outcome = Decode<SessionOutcome>(frame);
  EXPECT_EQ(outcome.reshard, 12'288u);
  EXPECT_FALSE(outcome.source.has_value());
  EXPECT_EQ(DescriptorCount(outcome), 0u);
  session.set_reshard(kWorldSizeMax + 1);
  EXPECT_FALSE(DecodeFrame(frame.SerializeAsString()).ok());
  // With a source its descriptors come.
  session.set_reshard(2);
  session.mutable_source()->set_slot(1);
  EXPECT_EQ(DescriptorCount(Decode<SessionOutcome>(frame)), 2u);
}

TEST(Wire, NoReplyOrTwoOrHalfOneIsRefused) {
  v1::DaemonFrame empty;
  empty.set_id(1);
  EXPECT_EQ(DecodeFrame(empty.SerializeAsString()).status().code(), Code::kInternal);
  EXPECT_EQ(DecodeFrame("").status().code(), Code::kInternal);

  v1::DaemonFrame one;
  one.mutable_seal()->set_sealed_unix_ms(5);
  v1::DaemonFrame other;
  other.mutable_leave();
  EXPECT_EQ(DecodeFrame(one.SerializeAsString() + other.SerializeAsString()).status().code(),
            Code::kInternal);

  v1::DaemonFrame session;
  session.mutable_enter_session()->set_session(1);  // goes on, without a source
  EXPECT_EQ(DecodeFrame(session.SerializeAsString()).status().code(), Code::kInternal);
}

TEST(Wire, TornAndRandomBytesAreRefusedOrReadAndNeverMore) {
  v1::DaemonFrame frame;
  frame.set_id(9);
  Fill(frame.mutable_enter_session()->mutable_source());
  Fill(frame.mutable_enter_session()->add_descent(), 3);
  const std::string whole = frame.SerializeAsString();
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_FALSE(DecodeFrame(whole.substr(0, i)).ok()) << i;
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 100'000; ++i) {
    std::string mutated = whole;
    for (int flips = 0; flips < 3; ++flips) {
      mutated[random() % mutated.size()] = static_cast<char>(random());
    }
    const Result<DaemonFrame> decoded = DecodeFrame(mutated);
    EXPECT_TRUE(decoded.ok() || decoded.status().code() == Code::kInternal);
  }
}

}  // namespace
}  // namespace holdfast::client::wire
