// ckptd's command line. Exit codes: 0 clean stop, 1 cannot start or did not stop cleanly, 2 bad
// command line or configuration.
#include <google/protobuf/stubs/logging.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/env.h"
#include "base/log.h"
#include "base/program.h"
#include "base/status.h"
#include "base/units.h"
#include "base/utf8.h"
#include "client-lib/include/holdfast/version.h"
#include "server/runtime/daemon.h"
#include "server/runtime/daemon_config.h"
#include "server/runtime/settings_reference.h"
#include "server/runtime/tier_config.h"

namespace holdfast {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitBadConfig = 2;
// What the daemon, RocksDB, gRPC and the metrics start, and what calls on the admin socket take.
constexpr int kThreadsNeeded = 32;
constexpr int kClusterThreadsNeeded = 12;  // and membership and the channels to other nodes
// For what lies at the tiers' places, all of them together: so much later a start is at most.
constexpr Duration kAskPlaces = std::chrono::seconds(2);
// As long as the last lines of the log may take.
constexpr Duration kLogStop = std::chrono::seconds(1);

// Nothing is flushed and no lock is taken on the way: _exit is not that bare under a sanitizer.
[[noreturn]] void ExitNow(int code) {
  for (;;) {
    ::syscall(SYS_exit_group, code);
  }
}

int Serve(const v1::DaemonConfig& config, const Daemon::ReadSettings& read) {
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = absl::UnknownError("not started");
  try {
    daemon = Daemon::Start(config, read);
  } catch (const std::system_error& error) {
    daemon = ThreadError(error, "of the daemon");
  } catch (const std::bad_alloc&) {
    daemon = absl::ResourceExhaustedError(
        "there is no memory to start with; raise the limit (ulimit -v, MemoryMax=)");
  }
  if (!daemon.ok()) {
    LogError("cannot start: " + Message(daemon.status()));
    return kExitFailure;
  }
  const absl::Status ran = (*daemon)->Run();
  if (absl::IsDeadlineExceeded(ran)) {
    LogError(Message(ran));
    StopLog(kLogStop);
    ExitNow(kExitFailure);  // a worker hangs in the kernel: waiting for it could take for ever
  }
  if (!ran.ok()) {
    LogError(Message(ran));
    return kExitFailure;
  }
  return 0;
}

// What it says may be anything that stands in a file.
int RefuseConfig(const absl::Status& why) {
  std::fprintf(stderr, "ckptd: %s\n", PrintableText(Message(why)).c_str());
  return kExitBadConfig;
}

// 0, unless it could not be written.
int Printed() {
  const absl::Status written = FinishStandardOutput();
  if (!written.ok()) {
    std::fprintf(stderr, "ckptd: %s\n", Message(written).c_str());
  }
  return written.ok() ? 0 : kExitFailure;
}

int RunDaemon(const v1::DaemonConfig& config, const Daemon::ReadSettings& read) {
  absl::Status logging = CheckLogFile(config.log().file());
  if (!logging.ok()) {
    return RefuseConfig(logging);
  }
  logging = StartLog(*ParseLogLevel(config.log().level()), config.log().file());
  if (!logging.ok()) {
    std::fprintf(stderr, "ckptd: log.file: %s\n", Message(logging).c_str());
    return kExitBadConfig;
  }
  // Now, while it can be told: gRPC aborts when it cannot have a thread.
  const absl::Status threads =
      CheckThreads(kThreadsNeeded + (config.has_cluster() ? kClusterThreadsNeeded : 0));
  logging = threads.ok() ? StartLogThreads() : threads;
  if (!logging.ok()) {
    LogError("cannot start: " + Message(logging));
    return kExitFailure;
  }
  // By itself it writes to stderr, at the pace of whoever sends what it cannot read, and waits for
  // whoever reads that.
  google::protobuf::SetLogHandler(
      [](google::protobuf::LogLevel level, const char*, int, const std::string& message) {
        LogFrom(level >= google::protobuf::LOGLEVEL_FATAL ? LogLevel::kError : LogLevel::kWarning,
                "Protobuf", absl::StrCat("Protobuf: ", message));
      });
  const int exit_code = Serve(config, read);
  if (!StopLog(kLogStop)) {
    ExitNow(exit_code);  // the log's reader hangs: exit() would wait for its lock
  }
  return exit_code;
}

// As strictly as --check-config: nobody looks on.
absl::StatusOr<v1::DaemonConfig> ReadAgain(const ConfigFlags& flags) {
  v1::DaemonConfig config;
  HF_RETURN_IF_ERROR(LoadConfig(flags, &config));
  std::vector<std::string> unanswered;
  HF_RETURN_IF_ERROR(CheckTierPlaces(*Env::System(), config, kAskPlaces, unanswered));
  HF_RETURN_IF_ERROR(CheckPlaces(config));
  return config;
}

int PrintReference() {
  const absl::StatusOr<std::string> reference = SettingsReference();
  if (!reference.ok()) {
    std::fprintf(stderr, "ckptd: %s\n", Message(reference.status()).c_str());
    return kExitFailure;
  }
  std::fputs(reference->c_str(), stdout);
  return Printed();
}

int Main(int argc, char** argv) {
  CLI::App app("Holdfast's daemon: keeps the checkpoints of the training processes on this node.",
               "ckptd");
  ConfigFlags flags;
  bool check_only = false;
  bool print_reference = false;
  app.add_option("--config", flags.file,
                 "settings (YAML); default /etc/holdfast/ckptd.yaml, for users "
                 "~/.config/holdfast/ckptd.yaml")
      ->type_name("FILE");
  app.add_option("--memory-dir", flags.memory_dir, "where slots lie, on tmpfs (memory.dir)")
      ->type_name("DIR");
  app.add_option("--state-dir", flags.state_dir, "catalog and lock (state_dir)")->type_name("DIR");
  app.add_option("--socket", flags.socket, "the clients' socket (socket.path)")->type_name("PATH");
  app.add_option("--admin", flags.admin, "ckptctl's socket (admin.path)")->type_name("PATH");
  app.add_option("--memory-bytes", flags.memory_bytes,
                 "budget for all slots, for example 64GiB (memory.bytes_max)")
      ->type_name("SIZE");
  app.add_flag("--check-config", check_only, "check the settings and exit");
  app.add_flag("--print-reference", print_reference,
               "print what all settings mean (docs/configuration.md) and exit");
  // `--config "$UNSET"` is none of "the default": another daemon would start than was meant.
  for (CLI::Option* const option : app.get_options()) {
    if (option->get_type_size() > 0) {
      option->check([](const std::string& text) {
        return std::string(text.empty() ? "is empty; give a value, or leave the option out" : "");
      });
    }
  }
  app.set_version_flag("--version", std::string("ckptd ") + HOLDFAST_VERSION_STRING);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const bool asked = error.get_exit_code() == 0;  // --help, --version
    app.exit(error);
    return asked ? Printed() : kExitBadConfig;
  }
  if (print_reference) {
    return PrintReference();
  }
  v1::DaemonConfig config;
  const absl::Status loaded = LoadConfig(flags, &config);
  if (!loaded.ok()) {
    return RefuseConfig(loaded);
  }
  std::vector<std::string> unanswered;
  absl::Status places = CheckTierPlaces(*Env::System(), config, kAskPlaces, unanswered);
  if (places.ok() && check_only) {
    places = CheckPlaces(config);
  }
  if (!places.ok()) {
    return RefuseConfig(places);
  }
  if (check_only) {
    for (const std::string& one : unanswered) {
      std::fprintf(stderr, "ckptd: not checked: %s\n", one.c_str());
    }
    std::printf("ok: memory.dir %s, budget %s, socket %s\n", config.memory().dir().c_str(),
                FormatBytes(config.memory().bytes_max()).c_str(), config.socket().path().c_str());
    return Printed();
  }
  return RunDaemon(config, [flags] { return ReadAgain(flags); });
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  holdfast::OpenStandardDescriptors();
  return holdfast::Main(argc, argv);
}
