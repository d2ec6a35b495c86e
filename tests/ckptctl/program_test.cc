// The program itself: its help, its arguments, its exit codes, and Ctrl-C.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ckptctl/watchdog.h"
#include "holdfast/v1/admin.pb.h"
#include "tests/ckptctl/console.h"
#include "tests/ckptctl/fake_admin.h"
#include "tests/ckptctl/program.h"

namespace holdfast {
namespace {

using testing::HasSubstr;

const std::vector<std::string> kCommands = {
    "status",         "jobs",          "nodes",      "fabric",
    "list",           "inspect",       "verify",     "scrub",
    "repair",         "restore",       "where",      "explain",
    "plan",           "timeline",      "top",        "events",
    "export",         "stats",         "diff",       "backup",
    "restore-backup", "import",        "gc",         "pin",
    "unpin",          "replace",       "drain",      "rm",
    "forget-drive",   "adopt-remote",  "rebuild",    "set",
    "doctor",         "plan-capacity", "completion", "man"};
// Those that read what was saved, through the client's socket.
const std::set<std::string> kReadingCommands = {"export", "stats", "diff", "backup"};
// Those that ask no daemon.
const std::set<std::string> kOwnCommands = {"restore-backup", "import", "plan-capacity",
                                            "completion", "man"};

std::string HelpOf(const std::string& command) {
  Program program(command.empty() ? std::vector<std::string>{"--help"}
                                  : std::vector<std::string>{command, "--help"});
  EXPECT_EQ(program.Wait(), 0) << program.err();
  EXPECT_EQ(program.err(), "");
  return program.out();
}

// The line after "Example:", without "ckptctl".
std::vector<std::string> ExampleOf(const std::string& command) {
  const std::vector<std::string> lines = absl::StrSplit(HelpOf(command), '\n');
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    if (lines[i] == "Example:") {
      std::vector<std::string> words = absl::StrSplit(lines[i + 1], ' ', absl::SkipEmpty());
      EXPECT_EQ(words[0], "ckptctl");
      words.erase(words.begin());
      return words;
    }
  }
  ADD_FAILURE() << command << " has no example";
  return {};
}

// A daemon that says yes to everything.
FakeAdmin::Answers Agreeable() {
  return {
      .get_status = [](const auto&, v1::GetStatusReply&) { return absl::OkStatus(); },
      .list = [](const auto&, v1::ListCheckpointsReply&) { return absl::OkStatus(); },
      .inspect = [](const auto&,
                    v1::InspectShardReply&) { return absl::NotFoundError("no such shard"); },
      .verify =
          [](const auto&, const FakeAdmin::SendProgress& send) {
            v1::VerifyProgress done;
            done.set_done(true);
            send(done);
            return absl::OkStatus();
          },
      .restore = [](const auto&, v1::SetRestorePointReply&) { return absl::OkStatus(); },
      .remove = [](const auto&, v1::RemoveJobReply&) { return absl::OkStatus(); },
      .where = [](const auto&, v1::WhereReply&) { return absl::OkStatus(); },
      .explain = [](const auto&, v1::ExplainReply&) { return absl::OkStatus(); },
      .timeline = [](const auto&, v1::TimelineReply&) { return absl::OkStatus(); },
      .collect_garbage = [](const auto&, v1::CollectGarbageReply&) { return absl::OkStatus(); },
      .pin = [](const auto&, v1::PinReply&) { return absl::OkStatus(); },
      .events = [](const auto&) { return v1::EventBatch(); },
      .replace = [](const auto&, v1::ReplaceReply&) { return absl::OkStatus(); },
      .repair = [](const auto&, v1::RepairReply&) { return absl::OkStatus(); },
      .drain =
          [](const auto&, v1::DrainReply& reply) {
            reply.set_draining(true);
            return absl::OkStatus();
          },
      .forget_drive = [](const auto&, v1::ForgetDriveReply&) { return absl::OkStatus(); },
      .show_fabric = [](const auto&, v1::ShowFabricReply&) { return absl::OkStatus(); },
      .measure_fabric = [](const auto&, v1::MeasureFabricReply&) { return absl::OkStatus(); },
      .remove_checkpoint = [](const auto&, v1::RemoveCheckpointReply&) { return absl::OkStatus(); },
      .adopt_remote = [](const auto&, v1::AdoptRemoteReply&) { return absl::OkStatus(); },
      .rebuild = [](const auto&, v1::RebuildReply&) { return absl::OkStatus(); },
      .set_options = [](const auto&, v1::SetOptionsReply&) { return absl::OkStatus(); },
      .nodes = [](const auto&, v1::GetNodesReply&) { return absl::OkStatus(); },
  };
}

TEST(Help, EveryExampleWorks) {
  FakeAdmin admin(Agreeable());
  const std::string trace = admin.directory() + "/saves.json";
  for (const std::string& command : kCommands) {
    std::vector<std::string> example = ExampleOf(command);
    ASSERT_FALSE(example.empty());
    EXPECT_EQ(example[0], command);
    std::replace(example.begin(), example.end(), std::string("saves.json"), trace);
    if (kOwnCommands.count(command) == 0) {
      example.insert(example.end(), {"--socket", admin.socket()});
    }
    Program program(example);
    const int exit_code = program.Wait();
    // The fake has no record to inspect, nobody has written a layout, a backup or weights, and
    // doctor judges this machine.
    const bool lacks = command == "inspect" || command == "plan" || command == "restore-backup" ||
                       command == "import";
    // Nor has it a client's socket.
    const bool reads = kReadingCommands.count(command) > 0;
    EXPECT_EQ(exit_code, lacks                 ? 4
                         : reads               ? 3
                         : command == "doctor" ? exit_code
                                               : 0)
        << program.err();
    EXPECT_NE(exit_code, 2) << program.err();
  }
  EXPECT_EQ(::unlink(trace.c_str()), 0) << "no trace was written";
}

TEST(Help, NamesEveryCommandAndExitCode) {
  const std::string help = HelpOf("");
  for (const std::string& command : kCommands) {
    EXPECT_THAT(help, HasSubstr("\n  " + command + " "));
  }
  for (const char* code : {"0", "1", "2", "3", "4", "130"}) {
    EXPECT_THAT(help, testing::ContainsRegex(std::string("\n  ") + code + " +[a-z]"));
  }
}

TEST(Help, TheManualNamesEveryCommandAndOption) {
  const std::string manual = Contents(HOLDFAST_SOURCE_DIR "/docs/ckptctl.md");
  for (const std::string& command : kCommands) {
    EXPECT_THAT(manual, HasSubstr("## " + command)) << command;
    EXPECT_THAT(manual, HasSubstr("ckptctl " + absl::StrJoin(ExampleOf(command), " ")));
    for (const std::string& word :
         std::vector<std::string>(absl::StrSplit(HelpOf(command), absl::ByAnyChar(" ,\n")))) {
      if (absl::StartsWith(word, "--") && word != "--help") {
        EXPECT_THAT(manual, HasSubstr(word)) << command;
      }
    }
  }
}

TEST(Arguments, WrongOnesAreUsageErrors) {
  const std::vector<std::vector<std::string>> wrong = {
      {},
      {"nonsense"},
      {"status", "--step", "5"},
      {"list"},
      {"list", "a/b"},
      {"list", ".."},
      {"list", "a", "b"},
      {"inspect", "j", "--step", "-3"},
      {"inspect", "j", "--step", "0x10"},
      {"inspect", "j", "--step", " 1"},
      {"inspect", "j", "--step", "18446744073709551616"},
      {"inspect", "j", "--step", "1", "--step", "2"},
      {"inspect", "j", "--attempt", "2"},
      {"inspect", "j", "--rank", "4294967296"},
      {"verify", "--step", "3"},
      {"verify", "j", "--step", "3", "--all"},
      {"restore", "j"},
      {"restore", "j", "--step", "1", "--clear"},
      {"restore", "j", "--from-scratch", "--clear"},
      {"restore", "j", "--step", "3", "--yes"},
      {"restore", "j", "--from-scratch", "--attempt", "3"},
      {"rm"},
      {"rm", "j", "--tier", "nvme"},
      {"rm", "j", "--force"},
      {"rm", "j", "--step", "1", "--tier", "disk"},
      {"verify", "j", "--tier", "NVMe"},
      {"where"},
      {"where", "j", "--attempt", "1"},
      {"explain"},
      {"plan", "j"},
      {"plan", "--layout", "x"},
      {"plan", "j", "--layout", "x", "--attempt", "1"},
      {"plan", "j", "--layout", "x", "--rate"},
      {"plan", "j", "--layout", "x", "--rate", "disk=1GB/s"},
      {"plan", "j", "--layout", "x", "--rate", "nvme=1GB/s", "--rate", "nvme=2GB/s"},
      {"plan", "j", "--layout", "x", "--ranks-per-node", "0"},
      {"plan", "j", "--layout", "x", "--ranks-per-node", "eight"},
      {"timeline", "j", "--steps", "-1"},
      {"timeline", "j", "--trace", ""},
      {"top", "a", "b"},
      {"top", "--every", "99ms"},
      {"top", "--every", "soon"},
      {"top", "--count", "0"},
      {"top", "--count", "2", "--once"},
      {"export"},
      {"export", "j"},
      {"export", "j", ""},
      {"export", "j", "d", "--attempt", "1"},
      {"export", "j", "d", "--only", ""},
      {"export", "j", "d", "--rank", "first"},
      {"export", "j", "d", "--max-file-bytes", "0"},
      {"export", "j", "d", "--max-file-bytes", "large"},
      {"export", "j", "d", "--client-socket", ""},
      {"export", "j", "d", "--address", "h:1", "--tls", "t"},
      {"backup"},
      {"backup", "j"},
      {"backup", "j", ""},
      {"backup", "j", "d", "--step", "all"},
      {"backup", "j", "d", "--step", "1", "2"},
      {"backup", "j", "d", "--client-socket", ""},
      {"backup", "j", "d", "--address", "h:1", "--tls", "t"},
      {"restore-backup"},
      {"restore-backup", "d", "j"},
      {"restore-backup", "d", "j", "--to", ""},
      {"restore-backup", "d", ".j", "--to", "r"},
      {"restore-backup", "d", "j", "--to", "r", "--step", "-1"},
      {"restore-backup", "d", "j", "--to", "r", "--owner", "ann"},
      {"restore-backup", "d", "j", "--to", "r", "--owner", "1001"},
      {"restore-backup", "d", "j", "--to", "r", "--owner", "1001:"},
      {"restore-backup", "d", "j", "--to", "r", "--owner", "1001:1:1"},
      {"restore-backup", "d", "j", "--to", "r", "--socket", "s"},
      {"import"},
      {"import", "j", "w.pt"},
      {"import", "j", "--step", "1"},
      {"import", "a/b", "w.pt", "--step", "1"},
      {"import", "j", "w.pt", "--step", "-1"},
      {"import", "j", "", "--step", "1"},
      {"import", "j", "w.pt", "--step", "1", "--key", ""},
      {"import", "j", "w.pt", "--step", "1", "--wait", "long"},
      {"import", "j", "w.pt", "--step", "1", "--socket", "s"},
      {"stats"},
      {"stats", "j", "--attempt", "1"},
      {"stats", "j", "--tensor", ""},
      {"diff", "j", "1"},
      {"diff", "j", "1", "two"},
      {"diff", "j", "1@", "2"},
      {"diff", "j", "1", "2@one"},
      {"diff", "j", "@1", "2"},
      {"gc", "a", "b"},
      {"pin", "j"},
      {"unpin", "--step", "1"},
      {"fabric", ""},
      {"fabric", "n1", "n2"},
      {"replace"},
      {"replace", "n3"},
      {"replace", "--with", "n9"},
      {"replace", "n3", "--with", ""},
      {"replace", "n3", "--with", "n9", "--forget"},
      {"replace", "n3", "--with", "n9", "--job", "a/b"},
      {"adopt-remote"},
      {"adopt-remote", "--yes"},
      {"adopt-remote", "prod"},
      {"adopt-remote", "0123456789ABCDEF0123456789ABCDEF"},
      {"rebuild", "--tier", "peer"},
      {"rebuild", "--tier", "memory"},
      {"rebuild", "j"},
      {"rebuild", "--owner", "0:0"},
      {"rebuild", "j", "--owner", "me"},
      {"rebuild", "j", "--owner", "0:4294967295"},
      {"rebuild", "j", "--owner", "0:0", "--tier", "nvme"},
      {"set"},
      {"set", "j"},
      {"set", "--clear"},
      {"set", "j", "k", "a=1"},
      {"set", "j", "a=1", "--clear"},
      {"set", "j", "a=1", "a=2"},
      {"drain", ""},
      {"forget-drive"},
      {"forget-drive", "3f2a91"},
      {"forget-drive", "/dev/nvme0"},
      {"replace", "", "--with", "n9"},
      {"status", "--socket", ""},
      {"--socket", "", "status"},
      {"doctor", "--config", ""},
      {"status", "--timeout", "0s"},
      {"status", "--timeout", "soon"},
      {"status", "--timeout", "1000h"},
      {"plan-capacity"},
      {"plan-capacity", "--params", "1B", "--ranks", "8"},
      {"plan-capacity", "--params", "1B", "--ranks", "8", "--step-time", "nan"},
      {"plan-capacity", "--params", "1B", "--ranks", "8", "--step-time", "9s", "--profile", "adam"},
      {"plan-capacity", "--params", "1B", "--ranks", "8", "--step-time", "9s", "--rate", "nvme=0"},
      {"plan-capacity", "--params", "1B", "--ranks", "8", "--step-time", "9s", "--socket", "x"},
      {"completion"},
      {"completion", "tcsh"},
      {"man", "bash"},
      {"complete-names"},
      {"complete-names", "secrets"},
  };
  for (const auto& arguments : wrong) {
    Program program(arguments);
    EXPECT_EQ(program.Wait(), 2) << absl::StrJoin(arguments, " ");
    EXPECT_EQ(program.out(), "") << absl::StrJoin(arguments, " ");
    EXPECT_THAT(program.err(), HasSubstr("--help")) << absl::StrJoin(arguments, " ");
  }
}

TEST(Arguments, WrongOnesAreOneJsonObjectWhereJsonIsAskedFor) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--json", "nonsense"},
        {"status", "--step", "5", "--json"},
        {"--json", "list", "a/b"},
        {"plan-capacity", "--json"},
        {"plan-capacity", "--params", "nan", "--json"},
        {"completion", "csh", "--json"},
        {"man", "ckptd", "--json"}}) {  // (nothing on standard input)
    Program program(arguments);
    EXPECT_EQ(program.Wait(), 2) << absl::StrJoin(arguments, " ");
    const auto json = nlohmann::json::parse(program.out(), nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << program.out();
    EXPECT_EQ(json["error"]["code"], "INVALID_ARGUMENT");
    EXPECT_EQ(json["error"]["exit_code"], 2);
    EXPECT_THAT(program.err(), HasSubstr(json["error"]["message"].get<std::string>()));
  }
}

TEST(Arguments, ReachTheDaemonAsMeant) {
  Kept<v1::VerifyRequest> verify;
  Kept<v1::SetRestorePointRequest> restore;
  FakeAdmin::Answers answers = Agreeable();
  answers.verify = [&](const v1::VerifyRequest& request, const auto&) {
    verify.Set(request);
    return absl::NotFoundError("nothing");
  };
  answers.restore = [&](const v1::SetRestorePointRequest& request, auto&) {
    restore.Set(request);
    return absl::OkStatus();
  };
  FakeAdmin admin(std::move(answers));
  // Decimal also with a leading zero; the socket before or after the command.
  EXPECT_EQ(Program({"--socket", admin.socket(), "verify", "j", "--step", "0010", "--attempt", "2"})
                .Wait(),
            4);
  EXPECT_EQ(verify.Get().step(), 10u);
  EXPECT_EQ(verify.Get().attempt(), 2u);
  EXPECT_EQ(Program({"restore", "j", "--step", "0", "--socket", admin.socket()}).Wait(), 0);
  EXPECT_EQ(restore.Get().step(), 0u);
  EXPECT_FALSE(restore.Get().from_scratch());
  Program asked({"restore", "--from-scratch", "j", "--socket", admin.socket()});
  EXPECT_EQ(asked.Wait(), 4);
  EXPECT_THAT(asked.err(), testing::HasSubstr("ckptctl restore j --from-scratch --yes"));
  EXPECT_FALSE(restore.Get().from_scratch());
  EXPECT_EQ(Program({"restore", "--from-scratch", "--yes", "j", "--socket", admin.socket()}).Wait(),
            0);
  EXPECT_TRUE(restore.Get().from_scratch());
}

TEST(Arguments, OfTiersReachTheDaemonAsMeant) {
  Kept<v1::RemoveCheckpointRequest> removed;
  Kept<v1::SetOptionsRequest> set;
  Kept<v1::PinRequest> pin;
  Kept<v1::ReplaceRequest> replace;
  Kept<v1::VerifyRequest> verify;
  FakeAdmin::Answers answers = Agreeable();
  answers.remove = [](const auto&, auto&) {
    ADD_FAILURE() << "the whole job was removed";
    return absl::OkStatus();
  };
  answers.remove_checkpoint = [&](const v1::RemoveCheckpointRequest& request, auto&) {
    removed.Set(request);
    return absl::OkStatus();
  };
  answers.set_options = [&](const v1::SetOptionsRequest& request, auto&) {
    set.Set(request);
    return absl::OkStatus();
  };
  answers.pin = [&](const v1::PinRequest& request, auto&) {
    pin.Set(request);
    return absl::OkStatus();
  };
  answers.replace = [&](const v1::ReplaceRequest& request, auto&) {
    replace.Set(request);
    return absl::OkStatus();
  };
  answers.verify = [&](const v1::VerifyRequest& request, const auto&) {
    verify.Set(request);
    return absl::NotFoundError("nothing");
  };
  FakeAdmin admin(std::move(answers));
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--socket", admin.socket()});
    return Program(arguments).Wait();
  };
  EXPECT_EQ(run({"rm", "j", "--step", "0", "--tier", "remote", "--force"}), 0);
  EXPECT_EQ(removed.Get().step(), 0u);
  EXPECT_EQ(removed.Get().tier(), "remote");
  EXPECT_TRUE(removed.Get().force());
  EXPECT_EQ(run({"set", "j", "--clear"}), 0);
  EXPECT_EQ(set.Get().job(), "j");
  EXPECT_TRUE(set.Get().clear());
  EXPECT_EQ(run({"set", "nvme.nice=19"}), 0);
  EXPECT_EQ(set.Get().job(), "");
  EXPECT_EQ(run({"unpin", "j", "--step", "5", "--attempt", "2"}), 0);
  EXPECT_TRUE(pin.Get().unpin());
  EXPECT_EQ(pin.Get().attempt(), 2u);
  EXPECT_EQ(run({"pin", "j", "--step", "5"}), 0);
  EXPECT_FALSE(pin.Get().unpin());
  EXPECT_EQ(run({"replace", "n3", "--with", "n9", "--job", "j"}), 0);
  EXPECT_EQ(replace.Get().job(), "j");
  EXPECT_EQ(replace.Get().node(), "n3");
  EXPECT_EQ(replace.Get().with(), "n9");
  EXPECT_EQ(run({"replace", "n3", "--forget", "--job", "j"}), 0);
  EXPECT_EQ(replace.Get().with(), "");
  EXPECT_EQ(run({"verify", "j", "--tier", "nvme"}), 4);
  EXPECT_EQ(verify.Get().tier(), "nvme");
}

TEST(Arguments, ATraceFileIsNamedFromWhereOneIs) {
  FakeAdmin admin(Agreeable());
  Program program("cd '" + admin.directory() + "' && exec \"$0\" \"$@\"",
                  {"timeline", "j", "--trace", "saves.json", "--socket", admin.socket()});
  EXPECT_EQ(program.Wait(), 0) << program.err();
  const std::string trace = admin.directory() + "/saves.json";
  EXPECT_THAT(Contents(trace), HasSubstr("traceEvents"));
  EXPECT_EQ(::unlink(trace.c_str()), 0);
}

// `python` answers for the interpreter, as a script of sh in a file.
class ImportBy {
 public:
  explicit ImportBy(const std::string& python) {
    EXPECT_NE(::mkdtemp(directory_), nullptr);
    std::ofstream(Path()) << "#!/bin/sh\n" << python << "\n";
    EXPECT_EQ(::chmod(Path().c_str(), 0755), 0);
  }
  ~ImportBy() {
    ::unlink(Path().c_str());
    ::rmdir(directory_);
  }
  std::string Path() const { return std::string(directory_) + "/python"; }
  // Its exit code, and what it said.
  std::tuple<int, std::string, std::string> Run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "import");
    Program program("HOLDFAST_PYTHON='" + Path() + "' exec \"$0\" \"$@\"", arguments);
    const int exit_code = program.Wait();
    return {exit_code, program.out(), program.err()};
  }

 private:
  char directory_[32] = "/tmp/holdfast-python-XXXXXX";
};

TEST(Import, BecomesThePackagesCommand) {
  const ImportBy python(R"(case "$1 $2" in
  "-c "*find_spec*) exit 0;;
  "-c "*"run_module('holdfast'"*) shift 2; printf '<%s>' "$@"; exit 3;;
esac)");
  using testing::FieldsAre;
  EXPECT_THAT(python.Run({"j", "$(rm -rf x) w.pt", "--step", "0010"}),
              FieldsAre(3, "<import><--step=10><--><j><$(rm -rf x) w.pt>", ""));
  EXPECT_THAT(python.Run({"--json", "--step=1", "--key", "k'", "--only=-o", "--client-socket", "/s",
                          "--wait", "1500ms", "--", "j", "--help"}),
              FieldsAre(3,
                        "<import><--step=1><--key=k'><--only=-o><--socket=/s>"
                        "<--timeout=1.500><--json><--><j><--help>",
                        ""));
}

TEST(Import, WithoutAPythonOrItsPackageTheWayOutIsSaid) {
  const auto refused = [](const std::string& why) {
    return testing::FieldsAre(
        4, "", testing::AllOf(HasSubstr(why), HasSubstr("set HOLDFAST_PYTHON to the python")));
  };
  const std::vector<std::string> words = {"j", "w.pt", "--step", "1"};
  EXPECT_THAT(ImportBy("exit 77").Run(words), refused("has no package holdfast: pip install"));
  EXPECT_THAT(ImportBy("exit 1").Run(words), refused("(exit code 1): is it a python?"));
  EXPECT_THAT(ImportBy("kill -9 $$").Run(words), refused("(signal 9): is it a python?"));
  Program none("HOLDFAST_PYTHON=/nonexistent/python exec \"$0\" \"$@\"",
               {"import", "j", "w.pt", "--step", "1", "--json"});
  EXPECT_EQ(none.Wait(), 4);
  EXPECT_THAT(none.err(), HasSubstr("'/nonexistent/python' cannot be run: No such file"));
  const auto json = nlohmann::json::parse(none.out(), nullptr, false);
  ASSERT_FALSE(json.is_discarded()) << none.out();
  EXPECT_EQ(json["error"]["code"], "NOT_FOUND");
  EXPECT_EQ(json["error"]["exit_code"], 4);
}

TEST(Program, Version) {
  Program program({"--version"});
  EXPECT_EQ(program.Wait(), 0);
  EXPECT_THAT(program.out(), testing::MatchesRegex("ckptctl [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST(Program, UnreachableDaemonGivesThreeAndPureJson) {
  Program program({"status", "--json", "--socket", "/nonexistent/admin.sock"});
  EXPECT_EQ(program.Wait(), 3);
  const auto json = nlohmann::json::parse(program.out(), nullptr, false);
  EXPECT_EQ(json["error"]["exit_code"], 3);
  // One line: gRPC's own log lines stay out of it.
  EXPECT_EQ(std::count(program.err().begin(), program.err().end(), '\n'), 1) << program.err();
}

// Where gRPC cannot have its threads it neither answers nor notices its deadlines. Whatever the
// limit, the program ends, in time, and has said why when it has no answer.
TEST(Program, NeverHangsWhenMemoryOrThreadsAreLimited) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more address space than there is";
#endif
  FakeAdmin admin(Agreeable());
  for (const int kib : {60'000, 100'000, 120'000, 150'000, 200'000, 250'000}) {
    Program program("ulimit -v " + std::to_string(kib) + "; exec \"$0\" \"$@\"",
                    {"status", "--timeout", "1s", "--socket", admin.socket()});
    const int exit_code = program.Wait();
    // Below some limit the loader, or a library, ends the program by itself.
    if (exit_code != 0 && exit_code != 127 && exit_code < 1000) {
      EXPECT_THAT(exit_code, testing::AnyOf(3, 4)) << kib << ": " << program.err();
      EXPECT_THAT(program.err(), HasSubstr("ulimit -v")) << kib;
    }
  }
}

TEST(Program, SaysThatTooFewFilesMayBeOpen) {
  FakeAdmin admin(Agreeable());
  Program program("ulimit -n 8; exec \"$0\" \"$@\"", {"status", "--socket", admin.socket()});
  EXPECT_EQ(program.Wait(), 4);
  EXPECT_EQ(program.err(),
            "ckptctl: only 8 files may be open, 32 are needed; raise the limit: ulimit -n 32\n");
}

TEST(Program, AClosedStdoutIsNoSuccess) {
  FakeAdmin admin(Agreeable());
  Program program("exec \"$0\" \"$@\" <&- >&-", {"status", "--socket", admin.socket()});
  EXPECT_EQ(program.Wait(), 4);
  EXPECT_EQ(program.err(),
            "ckptctl: write 'standard output': Bad file descriptor (EBADF); have it go "
            "to a file or a pipe that takes it\n");
}

TEST(Program, UnknownCommandsAreNamed) {
  for (const std::string word : {"help", "bogus"}) {
    Program program({word});
    EXPECT_EQ(program.Wait(), 2);
    EXPECT_THAT(program.err(), HasSubstr("no command '" + word +
                                         "'; commands: " + absl::StrJoin(kCommands, ", ")));
  }
}

// The kernel takes the number that is all ones for "leave it as it is".
TEST(Program, AnOwnerIsAUserAndAGroup) {
  for (const std::string owner : {"", "1:", ":1", "ann:ann", "4294967295:0", "0:4294967295"}) {
    Program program({"restore-backup", "d", "j", "--to", "r", "--owner", owner});
    EXPECT_EQ(program.Wait(), 2) << owner;
    EXPECT_THAT(program.err(), HasSubstr("--owner: '" + owner +
                                         "' is not UID:GID (1001:100), two "
                                         "numbers of at most 4294967294"));
  }
}

// Everything about a wait that ends by itself is tested elsewhere; this is the one that does not.
TEST(WatchdogDeathTest, EndsTheProgramSoonAfterTheTimeout) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto hang = [] {
    EnableWatchdog(false);
    const Watchdog watchdog(std::chrono::milliseconds(1), "/run/a.sock");
    for (;;) {
      ::pause();
    }
  };
  EXPECT_EXIT(hang(), testing::ExitedWithCode(3),
              "ckptctl: no answer from the daemon at /run/a.sock within 0.001 s.*ulimit");
}

TEST(Program, FullDiskIsNoSuccess) {
  FakeAdmin admin(Agreeable());
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"status", "--json", "--socket", admin.socket()}, {"man"}}) {
    Program program("exec \"$0\" \"$@\" >/dev/full", arguments);
    EXPECT_EQ(program.Wait(), 4);
    EXPECT_THAT(program.err(), HasSubstr("ckptctl: write 'standard output': "
                                         "No space left on device (ENOSPC); have it go "))
        << arguments[0];
  }
}

TEST(Program, CtrlCStopsVerifyCleanly) {
  std::atomic<pid_t> pid{0};
  std::atomic<bool> told{false};
  FakeAdmin::Answers answers = Agreeable();
  answers.verify = [&](const v1::VerifyRequest&, const FakeAdmin::SendProgress& send) {
    pid.wait(0);
    ::kill(pid, SIGINT);
    v1::VerifyProgress large;
    large.set_bytes_done(1);
    large.add_bad()->set_what(std::string(16'384, 'x'));
    while (send(large)) {
    }
    told = true;
    return absl::OkStatus();
  };
  {
    FakeAdmin admin(std::move(answers));
    Program program({"verify", "j", "--socket", admin.socket()});
    pid = program.pid();
    pid.notify_all();
    EXPECT_EQ(program.Wait(), 130);
    EXPECT_EQ(program.err(), "ckptctl: verify j: stopped\n");
  }
  EXPECT_TRUE(told);
}

// Where the daemon does not answer at all: no flag is looked at while a call waits for it.
TEST(Program, CtrlCEndsTheWaitForASilentDaemon) {
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"verify", "--all"}, {"drain", "n1"}, {"top"}, {"top", "--json"}}) {
    std::atomic<pid_t> pid{0};
    Gate ended;
    const auto silent = [&](const auto&, auto&) {
      pid.wait(0);
      ::kill(pid, SIGINT);
      ended.Wait();
      return absl::OkStatus();
    };
    FakeAdmin::Answers answers = Agreeable();
    answers.get_status = silent;
    answers.drain = silent;
    FakeAdmin admin(std::move(answers));
    std::vector<std::string> arguments = command;
    arguments.insert(arguments.end(), {"--timeout", "5s", "--socket", admin.socket()});
    Program program(arguments);
    pid = program.pid();
    pid.notify_all();
    EXPECT_EQ(program.Wait(), 130) << command[0];
    ended.Open();
    EXPECT_EQ(program.err(),
              "ckptctl: interrupted before the daemon at " + admin.socket() + " had answered\n");
    if (command.back() == "--json") {
      EXPECT_EQ(nlohmann::json::parse(program.out(), nullptr, false)["error"]["exit_code"], 130);
    } else {
      EXPECT_EQ(program.out(), "");
    }
  }
}

// libfabric's providers, which it loads to name them, put handlers of their own for signals.
TEST(Program, CtrlCEndsDoctorAsASignalDoes) {
  std::atomic<pid_t> pid{0};
  Gate ended;
  FakeAdmin::Answers answers = Agreeable();
  answers.get_status = [&](const auto&, auto&) {
    pid.wait(0);
    ::kill(pid, SIGINT);
    ended.Wait();
    return absl::OkStatus();
  };
  FakeAdmin admin(std::move(answers));
  Program program({"doctor", "--timeout", "5s", "--socket", admin.socket()});
  pid = program.pid();
  pid.notify_all();
  EXPECT_EQ(program.Wait(), 1000 + SIGINT) << "a shell says 130";
  ended.Open();
}

TEST(Program, DoctorTakesAFileByARelativePath) {
  FakeAdmin admin(Agreeable());
  const std::string file = admin.directory() + "/own.yaml";
  for (const auto& [settings, said] : std::vector<std::pair<std::string, std::string>>{
           {"", file + " is understood\n"}, {"x: 1", "mend: sudoedit " + file + "\n"}}) {
    std::ofstream(file) << settings;
    Program program("cd '" + admin.directory() + "' && exec \"$0\" \"$@\"",
                    {"doctor", "--config", "own.yaml", "--socket", admin.socket()});
    program.Wait();
    EXPECT_THAT(program.out(), HasSubstr(said));
  }
  EXPECT_EQ(::unlink(file.c_str()), 0);
}

}  // namespace
}  // namespace holdfast
