#include "ckptctl/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "holdfast/v1/admin.pb.h"

namespace holdfast {
namespace {

TEST(MessageToJson, NamesEveryFieldAlsoWhenEmpty) {
  const auto json = MessageToJson(v1::BadShard());
  EXPECT_EQ(DumpJson(json), R"({"attempt":0,"step":0,"rank":0,"location":"","what":""})");
  EXPECT_EQ(DumpJson(MessageToJson(v1::GetStatusRequest())), R"({"job":""})");
}

TEST(MessageToJson, NumbersAreNumbersAndEnumsAreWords) {
  v1::JobStatus job;
  job.set_attempt(UINT64_MAX);
  job.set_phase(v1::JobStatus::ATTEMPT_PHASE_RUNNING);
  auto* p = job.add_protection();
  p->set_kind(v1::Protection::FAILURE_KIND_ALL_NODES);
  p->set_any(true);
  p->set_age_ms(-3);
  const auto json = MessageToJson(job);
  EXPECT_EQ(json["attempt"].get<uint64_t>(), UINT64_MAX);
  EXPECT_EQ(json["phase"], "running");
  EXPECT_EQ(json["protection"][0]["kind"], "all_nodes");
  EXPECT_EQ(json["protection"][0]["any"], true);
  EXPECT_EQ(json["protection"][0]["age_ms"], -3);
  EXPECT_EQ(json["losses"], nlohmann::ordered_json::array());
}

TEST(MessageToJson, AValueOfANewerDaemonIsKept) {
  v1::Checkpoint checkpoint;
  checkpoint.set_state(static_cast<v1::Checkpoint::State>(77));
  EXPECT_EQ(MessageToJson(checkpoint)["state"], "unknown_77");
  checkpoint.set_state(v1::Checkpoint::STATE_BAD);
  EXPECT_EQ(MessageToJson(checkpoint)["state"], "bad");
}

TEST(MessageToJson, BytesAreHex) {
  v1::InspectShardReply reply;
  reply.set_record(std::string("\x00\xff", 2));
  EXPECT_EQ(MessageToJson(reply)["record"], "00ff");
}

TEST(MessageToJson, MessagesNest) {
  v1::GetStatusReply reply;
  reply.mutable_daemon()->set_node_name("node-a");
  reply.add_jobs()->set_name("llama");
  const auto json = MessageToJson(reply);
  EXPECT_EQ(json["daemon"]["node_name"], "node-a");
  EXPECT_EQ(json["jobs"][0]["name"], "llama");
}

TEST(DumpJson, IsAsciiSoThatATerminalMayShowIt) {
  nlohmann::ordered_json json;
  json["a"] = "\x1b[2J\x7f\u009b\n\"重";
  json["b"] = "\xff";
  EXPECT_EQ(DumpJson(json), "{\"a\":\"\\u001b[2J\\u007f\\u009b\\n\\\"\\u91cd\",\"b\":\"\\ufffd\"}");
}

}  // namespace
}  // namespace holdfast
