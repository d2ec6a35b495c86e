// What shells and manuals are given: names of others that are harmless there, texts that a page
// shows as they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "ckptctl/completion.h"
#include "ckptctl/manual.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"

namespace holdfast {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(CompleteNames, OnlyPlainWordsReachAShell) {
  FakeAdmin admin({.get_status =
                       [](const auto&, v1::GetStatusReply& reply) {
                         for (const char* name : {"llama-7b", "$(reboot)", "a b", "-x", "", "x;y",
                                                  "`id`", "a\nb", "Gpt_1.5", "\x1b[2J", "é"}) {
                           reply.add_jobs()->set_name(name);
                         }
                         return absl::OkStatus();
                       },
                   .nodes =
                       [](const auto&, v1::GetNodesReply& reply) {
                         reply.add_nodes()->set_name("node-a");
                         reply.add_nodes()->set_name("node b");
                         return absl::OkStatus();
                       }});
  Console jobs(admin.socket());
  EXPECT_EQ(RunCompleteNames(jobs.context(), {.what = "jobs"}), ExitCode::kOk);
  EXPECT_EQ(jobs.out(), "llama-7b\nGpt_1.5\n");
  Console nodes(admin.socket());
  EXPECT_EQ(RunCompleteNames(nodes.context(), {.what = "nodes"}), ExitCode::kOk);
  EXPECT_EQ(nodes.out(), "node-a\n");
}

TEST(CompleteNames, NobodyWaitsForADaemonThatIsBusy) {
  Gate gate;
  FakeAdmin admin({.get_status = [&](const auto&, v1::GetStatusReply&) {
    gate.Wait();
    return absl::OkStatus();
  }});
  Console console(admin.socket());
  console.context().timeout = std::chrono::hours(1);
  console.context().progress = true;
  EXPECT_EQ(RunCompleteNames(console.context(), {.what = "jobs"}), ExitCode::kOk);
  EXPECT_EQ(console.out() + console.err(), "");
  gate.Open();
}

// A line whose text begins with one of roff's own signs is text nevertheless.
TEST(Manual, TextsAreShownAsTheyAre) {
  CliModel model{.program = "p", .version = "1", .about = ".so /etc/passwd"};
  model.options.push_back({.names = {"--odd"}, .about = "'br a\\fBb -x ~ ^ ` \"q\" … é"});
  model.commands.push_back({.name = "c", .about = "does", .footer = "Example:\n  .p c 'd'"});
  const std::string page = CkptctlManual(model);
  EXPECT_THAT(page, HasSubstr("\n\\&.so /etc/passwd\n"));
  EXPECT_THAT(page, HasSubstr("\n\\&\\(aqbr a\\efBb \\-x \\(ti \\(ha \\(ga \\(dqq\\(dq \\[u2026] "
                              "\\[u00E9]\n"));
  EXPECT_THAT(page, HasSubstr("\n\\&.p c \\(aqd\\(aq\n"));
}

TEST(Manual, OptionsAreReadFromAHelpText) {
  const CliModel model = ReadHelp("d", "1",
                                  "What it does.\n"
                                  "Usage: d [OPTIONS]\n"
                                  "\n"
                                  "Options:\n"
                                  "  -h,--help                   Print it\n"
                                  "  --a-very-long-option-name PATH\n"
                                  "                              text on a line\n"
                                  "                              and one more\n"
                                  "  --flag");
  EXPECT_EQ(model.about, "What it does.");
  ASSERT_EQ(model.options.size(), 3u);
  EXPECT_EQ(model.options[0].names, (std::vector<std::string>{"-h", "--help"}));
  EXPECT_EQ(model.options[0].about, "Print it");
  EXPECT_EQ(model.options[0].value, "");
  EXPECT_EQ(model.options[1].value, "PATH");
  EXPECT_EQ(model.options[1].about, "text on a line and one more");
  EXPECT_EQ(model.options[2].names, std::vector<std::string>{"--flag"});
  EXPECT_TRUE(ReadHelp("d", "1", std::string(100'000, '-')).options.empty());
}

TEST(Completion, OfAnUnknownShellThereIsNone) {
  EXPECT_EQ(CompletionScript({.program = "p"}, "tcsh"), "");
}

// Help texts stand between quotes in the scripts.
TEST(Completion, QuotesEndNothing) {
  CliModel model{.program = "ckptctl"};
  model.commands.push_back({.name = "c", .about = "the rank's: [x]; $(reboot)"});
  EXPECT_THAT(CompletionScript(model, "fish"), HasSubstr("-d 'the rank'\\''s: [x]; $(reboot)'"));
  EXPECT_THAT(CompletionScript(model, "zsh"),
              HasSubstr("'c:the rank'\\''s\\: \\[x\\]; $(reboot)'"));
  EXPECT_THAT(CompletionScript(model, "bash"), Not(HasSubstr("reboot")));
}

}  // namespace
}  // namespace holdfast
