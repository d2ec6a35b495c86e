// What can only be known by trying.
#include <liburing.h>
#include <rdma/fabric.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <set>

#include "base/unique_fd.h"
#include "ckptctl/doctor.h"

namespace holdfast {
namespace {

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // from Linux 5.14's interface; older headers lack it
#endif

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

std::vector<std::string> FabricProviders() {
  fi_info* all = nullptr;
  if (fi_getinfo(FI_VERSION(1, 11), nullptr, nullptr, 0, nullptr, &all) != 0) {
    return {};
  }
  std::set<std::string> names;
  for (const fi_info* info = all; info != nullptr; info = info->next) {
    if (info->fabric_attr != nullptr && info->fabric_attr->prov_name != nullptr) {
      names.insert(info->fabric_attr->prov_name);
    }
  }
  fi_freeinfo(all);
  return {names.begin(), names.end()};
}

}  // namespace holdfast
