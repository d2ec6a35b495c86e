// What can only be known by trying.
#include <dlfcn.h>
#include <liburing.h>
#include <rdma/fabric.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <set>

#include "base/unique_fd.h"
#include "ckptctl/doctor.h"

namespace holdfast {
namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // from Linux 5.14's interface; older headers lack it
#endif

// What is to be done about each signal is the program's to say, not that of a library which it
// loads meanwhile: what comes while this lives is done afterwards, as it was before. The handlers
// of libfabric's psm3 end a program with exit code 1 at Ctrl-C, without a word.
class SignalsKept {
 public:
  SignalsKept() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &mask_);
    for (int signal = 1; signal < kSignals; ++signal) {
      ::sigaction(signal, nullptr, &actions_[static_cast<size_t>(signal)]);
    }
  }
  ~SignalsKept() {
    for (int signal = 1; signal < kSignals; ++signal) {
      ::sigaction(signal, &actions_[static_cast<size_t>(signal)], nullptr);
    }
    ::pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  SignalsKept(const SignalsKept&) = delete;
  SignalsKept& operator=(const SignalsKept&) = delete;

 private:
  static constexpr int kSignals = 32;  // those with names
  std::array<struct sigaction, kSignals> actions_ = {};
  sigset_t mask_;
};

}  // namespace

int TryIoUring() {
  io_uring ring;
  const int result = io_uring_queue_init(4, &ring, 0);
  if (result < 0) {
    return -result;
  }
  io_uring_queue_exit(&ring);
  return 0;
}

int TryPidfd() {
  const UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  return fd.valid() ? 0 : errno;
}

int TryPopulate() {
  const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return errno;
  }
  const int error = ::madvise(page, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  ::munmap(page, bytes);
  return error;
}

// Loaded for this question only: libfabric's providers take 0.2 s to load, which every other
// command would pay for.
std::vector<std::string> FabricProviders() {
  const SignalsKept kept;
  void* library = ::dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return {};
  }
  const auto get = reinterpret_cast<decltype(&fi_getinfo)>(::dlsym(library, "fi_getinfo"));
  const auto free = reinterpret_cast<decltype(&fi_freeinfo)>(::dlsym(library, "fi_freeinfo"));
  fi_info* all = nullptr;
  if (get == nullptr || free == nullptr ||
      get(FI_VERSION(1, 11), nullptr, nullptr, 0, nullptr, &all) != 0) {
    return {};
  }
  std::set<std::string> names;
  for (const fi_info* info = all; info != nullptr; info = info->next) {
    if (info->fabric_attr != nullptr && info->fabric_attr->prov_name != nullptr) {
      names.insert(info->fabric_attr->prov_name);
    }
  }
  free(all);
  return {names.begin(),
          names.end()};  // the library stays: some providers do not survive being unloaded
}

}  // namespace holdfast
