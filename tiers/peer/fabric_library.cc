#include "tiers/peer/fabric_library.h"

#include <dlfcn.h>
#include <rdma/fi_errno.h>

#include <cstdlib>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status.h"

namespace holdfast {
namespace {

struct Setting {
  const char* name;
  const char* value;
};

// What libfabric's defaults would cost us. All of it can be set otherwise by the environment.
constexpr Setting kSettings[] = {
    // Memory is registered once, by us, for as long as it is used. A cache would keep registrations
    // of memory that was given back since, and watches every munmap of the process to avoid that.
    {"FI_MR_CACHE_MAX_COUNT", "0"},
    {"FI_MR_CACHE_MONITOR", "disabled"},
    // The tcp provider copies what is left of a short answer in our memory, by a plain memcpy, into
    // a buffer of its own: of memory that may have been unmapped since. Without the buffer only the
    // kernel reads our memory, for which that is an error and no signal.
    {"FI_TCP_STAGING_SBUF_SIZE", "0"},
    // The libraries of two providers install handlers of SIGSEGV, SIGBUS and others when they are
    // loaded, which print a backtrace and end the process: in place of base/fault_guard.h's.
    {"HFI_NO_BACKTRACE", "1"},
    {"IPATH_NO_BACKTRACE", "1"},
};

// Before main, when there is one thread: another one may be in getenv, which setenv breaks.
__attribute__((constructor)) void SetFabricDefaults() {
  for (const Setting& setting : kSettings) {
    ::setenv(setting.name, setting.value, 0);
  }
}

absl::Status NotUsable(const std::string& name, const std::string& why) {
  return absl::NotFoundError(
      absl::StrCat("load '", name, "': ", why,
                   ": without libfabric nodes cannot read each other's memory; it is Debian's "
                   "libfabric1 (sudo apt install libfabric1)"));
}

template <typename F>
bool Find(void* handle, const char* symbol, F& function) {
  function = reinterpret_cast<F>(::dlsym(handle, symbol));
  return function != nullptr;
}

absl::StatusOr<FabricLibrary> Load(const std::string& name) {
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const error = ::dlerror();
    return NotUsable(name, error == nullptr ? "not found" : error);
  }
  FabricLibrary library{};
  decltype(&::fi_version) version = nullptr;
  if (!Find(handle, "fi_getinfo", library.getinfo) ||
      !Find(handle, "fi_freeinfo", library.freeinfo) ||
      !Find(handle, "fi_dupinfo", library.dupinfo) || !Find(handle, "fi_fabric", library.fabric) ||
      !Find(handle, "fi_strerror", library.strerror) || !Find(handle, "fi_version", version)) {
    ::dlclose(handle);
    return NotUsable(name, "it is no libfabric");
  }
  library.version = version();
  return library;
}

}  // namespace

absl::StatusOr<const FabricLibrary*> LoadFabricLibrary(const std::string& name) {
  static Mutex mutex;
  static std::map<std::string, FabricLibrary>& loaded =
      *new std::map<std::string, FabricLibrary>();  // never destroyed: threads may still use it
  MutexLock lock(mutex);
  const auto found = loaded.find(name);
  if (found != loaded.end()) {
    return &found->second;
  }
  HF_ASSIGN_OR_RETURN(const FabricLibrary library, Load(name));
  return &loaded.emplace(name, library).first->second;
}

absl::Status FabricError(const FabricLibrary& library, int64_t result, std::string_view operation,
                         std::string_view thing) {
  const int error = static_cast<int>(result < 0 ? -result : result);
  const std::string message = absl::StrCat(ToAbsl(operation), " '", ToAbsl(thing),
                                           "': ", library.strerror(error), " (", error, ")");
  switch (error) {
    case FI_ENODATA:
    case FI_ENODEV:
    case FI_ENOENT:
      return absl::NotFoundError(message);
    case FI_ENOMEM:
    case FI_EMFILE:
    case FI_ENOSPC:
      return absl::ResourceExhaustedError(message);
    case FI_EINVAL:
    case FI_EADDRNOTAVAIL:
      return absl::InvalidArgumentError(message);
    case FI_EACCES:
    case FI_EPERM:
      return absl::PermissionDeniedError(message);
    case FI_ENOSYS:
    case FI_EOPNOTSUPP:
      return absl::UnimplementedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

}  // namespace holdfast
