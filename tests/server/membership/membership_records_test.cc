#include "server/membership/membership_records.h"

#include <gtest/gtest.h>

#include <random>

#include "base/env.h"
#include "base/status.h"
#include "server/membership/membership_note.h"
#include "tests/base/temporary_directory.h"

namespace holdfast {
namespace {

TEST(MembershipRecords, WhatIsWrittenIsRead) {
  const NodeInfo node{"n-1", "10.0.0.1:9465", {{"rack", "r"}, {"zone", "z"}},
                      5,     "0.1.0",         UINT64_MAX};
  EXPECT_EQ(*DecodeNode("n-1", EncodeNode(node)), node);
  const JobHost host{"n-1", 7, 9};
  EXPECT_EQ(*DecodeHost(EncodeHost(host)), host);
  EXPECT_EQ(*DecodeEpoch(EncodeEpoch(12)), 12u);
  const auto state = DecodeState(EncodeState({3, 4, std::string("\0x", 2)}));
  EXPECT_EQ(state->state, std::string("\0x", 2));
  EXPECT_EQ(state->epoch, 3u);
  EXPECT_EQ(state->version, 4u);
}

TEST(MembershipRecords, WhatCannotBeIsRefused) {
  const NodeInfo good{"n", "h:1", {}, 0, "v", 1};
  EXPECT_FALSE(DecodeNode("m", EncodeNode(good)).ok());
  for (const auto& spoil : std::vector<std::function<void(NodeInfo*)>>{
           [](NodeInfo* n) { n->name = "../n"; },
           [](NodeInfo* n) { n->address = "h"; },
           [](NodeInfo* n) { n->address = "h:0"; },
           [](NodeInfo* n) { n->address = "h:70000"; },
           [](NodeInfo* n) { n->address = "h:1 x:2"; },
           [](NodeInfo* n) { n->address = "[::1]x:1"; },
           [](NodeInfo* n) { n->version = std::string(300, 'v'); },
           [](NodeInfo* n) { n->version = "a\nb"; },
           [](NodeInfo* n) {
             n->labels = {{"zone", ""}};
           },
           [](NodeInfo* n) {
             n->labels = {{"zone", "1"}, {"zone", "2"}};
           },
           [](NodeInfo* n) {
             n->labels.assign(65, {"l", "v"});
           },
       }) {
    NodeInfo node = good;
    spoil(&node);
    EXPECT_FALSE(DecodeNode(node.name, EncodeNode(node)).ok()) << node.name << ' ' << node.address;
  }
  NodeInfo v6 = good;
  v6.address = "[fe80::1%eth0]:1";
  EXPECT_TRUE(CheckAddress("[::1]:9465").ok());
  EXPECT_FALSE(DecodeHost(EncodeHost({"n", 1, 0})).ok());
  EXPECT_FALSE(DecodeHost(EncodeHost({"", 1, 1})).ok());
  EXPECT_FALSE(DecodeEpoch(EncodeEpoch(kEpochMax + 1)).ok());
  EXPECT_FALSE(DecodeState(EncodeState({1, 1, std::string(kAgreedStateBytesMax + 1, 'x')})).ok());
  EXPECT_FALSE(DecodeState(EncodeState({1, 0, "x"})).ok());
}

TEST(MembershipRecords, AnyBytesAreReadOrRefused) {
  std::mt19937_64 random(1);
  const std::string seeds[] = {EncodeNode({"n", "h:1", {{"a", "b"}}, 9, "v", 1}),
                               EncodeHost({"n", 1, 2}), EncodeEpoch(3), EncodeState({1, 2, "abc"}),
                               EncodeMembershipNote({"n", {1, 2}, 3})};
  for (int i = 0; i < 50'000; ++i) {
    std::string bytes = seeds[random() % 5];
    for (uint64_t flips = random() % 4; flips > 0 && !bytes.empty(); --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    bytes.resize(random() % 3 == 0 ? random() % (bytes.size() + 1) : bytes.size());
    if (const auto node = DecodeNode("n", bytes); node.ok()) {
      EXPECT_TRUE(CheckNode(*node).ok());
    }
    (void)DecodeHost(bytes);
    (void)DecodeEpoch(bytes);
    (void)DecodeState(bytes);
    (void)DecodeMembershipNote(bytes);
  }
}

TEST(MembershipRecords, RangesOfPrefixes) {
  EXPECT_EQ(EndOfPrefix("/a/"), "/a0");
  EXPECT_EQ(EndOfPrefix("a\xff"), "b");
  EXPECT_EQ(EndOfPrefix("\xff\xff"), std::string(1, '\0'));
  const EtcdKeys keys("/holdfast/c/");
  EXPECT_EQ(keys.Node("n"), "/holdfast/c/nodes/n");
  EXPECT_EQ(keys.Host("j"), "/holdfast/c/jobs/j/host");
  EXPECT_EQ(keys.EpochOf("j"), "/holdfast/c/jobs/j/epoch");
  EXPECT_EQ(keys.State("j"), "/holdfast/c/jobs/j/state");
  EXPECT_EQ(keys.Id(), "/holdfast/c/id");
  EXPECT_EQ(keys.Cluster(), "/holdfast/c/cluster");
  EXPECT_EQ(keys.Remote(), "/holdfast/c/remote");
}

TEST(MembershipNote, IsReadBackAndOthersAreNot) {
  const TemporaryDirectory directory;
  Env& env = *Env::System();
  const std::string path = MembershipNotePath(directory.path());
  EXPECT_TRUE(ReadMembershipNote(env, path, "n")->leases.empty());
  ASSERT_TRUE(WriteNote(env, path, {"n", {5, 6}, 7}).ok());
  const auto note = ReadMembershipNote(env, path, "n");
  EXPECT_EQ(note->leases, (std::vector<int64_t>{5, 6}));
  EXPECT_EQ(note->epoch, 7u);
  // A node that was given another name does not end the leases of the one that has its old name
  // now.
  EXPECT_TRUE(ReadMembershipNote(env, path, "m")->leases.empty());
  ASSERT_TRUE(WriteFileAtomically(env, path, "torn").ok());
  EXPECT_TRUE(absl::IsDataLoss(ReadMembershipNote(env, path, "n").status()));
}

}  // namespace
}  // namespace holdfast
