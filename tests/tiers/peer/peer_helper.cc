// The other node of the tests: `peer_helper serve BYTES` registers the file on its standard input
// and says where it is; `peer_helper pull BYTES SOURCE` reads a source for ever. Both until killed,
// and no longer than their parent lives.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/tiers/peer/peer_harness.h"

namespace {

using namespace holdfast;

std::unique_ptr<Fabric> OpenOrDie(const FabricOptions& options) {
  auto fabric = Fabric::Open(options);
  if (!fabric.ok()) {
    std::fprintf(stderr, "peer_helper: %s\n", ToString(fabric.status()).c_str());
    std::exit(1);
  }
  return *std::move(fabric);
}

std::span<std::byte> MapOrDie(size_t bytes, int fd) {
  const int flags = MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) {
    std::perror("peer_helper: mmap");
    std::exit(1);
  }
  return {static_cast<std::byte*>(memory), bytes};
}

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

[[noreturn]] void Serve(size_t bytes) {
  const auto fabric = OpenOrDie(SourceOptions());
  const auto slot = fabric->Register(MapOrDie(bytes, STDIN_FILENO), MemoryAccess::kReadByPeers);
  if (!slot.ok()) {
    std::exit(1);
  }
  Say(ToLine({.name = "n1", .address = fabric->address(), .regions = (*slot)->regions()}));
  while (true) {
    ::pause();
  }
}

[[noreturn]] void Pull(size_t bytes, const PullSource& source) {
  const auto fabric = OpenOrDie(LoopbackOptions());
  const auto into = MapOrDie(bytes, -1);
  for (bool said = false; true;) {
    const absl::Status status = ReadRemote(*fabric, source, 0, into, {});
    if (!status.ok()) {
      std::fprintf(stderr, "peer_helper: %s\n", ToString(status).c_str());
      std::exit(1);
    }
    if (!said) {
      Say("reading");
      said = true;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const size_t bytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (argc == 3 && std::strcmp(argv[1], "serve") == 0) {
    Serve(bytes);
  }
  if (argc == 4 && std::strcmp(argv[1], "pull") == 0) {
    Pull(bytes, holdfast::SourceFromLine(argv[3]));
  }
  return 2;
}
