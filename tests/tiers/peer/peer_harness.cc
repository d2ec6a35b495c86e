#include "tests/tiers/peer/peer_harness.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

extern char** environ;

namespace holdfast {

namespace {

FabricOptions OptionsOf(size_t end) {
  const char* const wanted = std::getenv("HOLDFAST_TEST_FABRIC");
  std::istringstream words(wanted == nullptr ? "tcp 127.0.0.1 127.0.0.1" : wanted);
  FabricOptions options;
  std::array<std::string, 2> addresses;
  words >> options.provider >> addresses[0] >> addresses[1];
  options.bind_address = addresses[end];
  if (options.provider == "verbs") {  // where no devices are named it takes all
    options.devices = {addresses[end]};
  }
  return options;
}

}  // namespace

FabricOptions LoopbackOptions() {
  return OptionsOf(0);
}

FabricOptions SourceOptions() {
  return OptionsOf(1);
}

std::unique_ptr<Fabric> OpenLoopback() {
  return ValueOf(Fabric::Open(LoopbackOptions()));
}

LocalSource::LocalSource(TestSlot& slot, FabricOptions options)
    : fabric(ValueOf(Fabric::Open(options))),
      registration(ValueOf(fabric->Register(slot.span(), MemoryAccess::kReadByPeers))),
      source{.name = "n1", .address = fabric->address(), .regions = registration->regions()} {}

std::string ToLine(const PullSource& source) {
  std::string line = absl::BytesToHexString(source.address);
  for (const RemoteRegion& region : source.regions) {
    absl::StrAppend(&line, " ", region.device, " ", region.base, " ", region.key, " ",
                    region.bytes);
  }
  return line;
}

PullSource SourceFromLine(const std::string& line) {
  PullSource source{.name = "n1"};
  std::istringstream in(line);
  std::string address;
  in >> address;
  source.address = absl::HexStringToBytes(address);
  RemoteRegion region;
  while (in >> region.device >> region.base >> region.key >> region.bytes) {
    source.regions.push_back(region);
  }
  return source;
}

PeerProcess::PeerProcess(const std::vector<std::string>& arguments, int inherited_fd) {
  // Beside the test.
  const std::string helper =
      (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "peer_helper").string();
  std::vector<char*> argv = {const_cast<char*>(helper.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  int output[2];
  EXPECT_EQ(::pipe2(output, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  if (inherited_fd >= 0) {
    posix_spawn_file_actions_adddup2(&actions, inherited_fd, STDIN_FILENO);
  }
  EXPECT_EQ(::posix_spawn(&pid_, helper.c_str(), &actions, nullptr, argv.data(), environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  ::close(output[1]);
  output_ = output[0];
}

std::string PeerProcess::ReadLine() const {
  std::string line;
  char c = 0;
  while (::read(output_, &c, 1) == 1 && c != '\n') {
    line.push_back(c);
  }
  EXPECT_EQ(c, '\n') << "peer_helper ended";
  return line;
}

std::unique_ptr<PeerProcess> PeerProcess::Serve(TestSlot& slot) {
  std::unique_ptr<PeerProcess> process(
      new PeerProcess({"serve", std::to_string(slot.span().size())}, slot.file().fd()));
  process->source_ = SourceFromLine(process->ReadLine());
  return process;
}

std::unique_ptr<PeerProcess> PeerProcess::PullForEver(const PullSource& source, uint64_t bytes) {
  std::unique_ptr<PeerProcess> process(
      new PeerProcess({"pull", std::to_string(bytes), ToLine(source)}, -1));
  process->ReadLine();
  return process;
}

PeerProcess::~PeerProcess() {
  Kill();
  ::close(output_);
}

void PeerProcess::Signal(int signal_number) const {
  EXPECT_EQ(::kill(pid_, signal_number), 0);
}

void PeerProcess::Kill() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
}

}  // namespace holdfast
