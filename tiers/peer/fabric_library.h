// libfabric, loaded when it is first wanted: a program that has this code runs where the library is
// not installed, and says so when somebody asks for a fabric.
//
//   HF_ASSIGN_OR_RETURN(const FabricLibrary* library, LoadFabricLibrary("libfabric.so.1"));
//   library->getinfo(FI_VERSION(1, 11), …);
//
// Only what libfabric exports is here; everything else of its API is inline functions of its
// headers, over tables that the library's objects carry. Thread-safe. A library that was loaded
// stays: some of its providers do not survive being unloaded.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_eq.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace holdfast {

struct FabricLibrary {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  uint32_t version;
};

// `name` as dlopen takes it. NotFound with the way out when there is none, or one that lacks what
// we need. libfabric reads its own settings from the environment only: every program that has this
// code sets some before main, unless the user has (fabric_library.cc lists them and says why).
absl::StatusOr<const FabricLibrary*> LoadFabricLibrary(const std::string& name);

// The error of a call of libfabric's: `result` is what it returned, negative or not.
absl::Status FabricError(const FabricLibrary& library, int64_t result, std::string_view operation,
                         std::string_view thing);

// Closes itself: FabricObject<fid_ep>.
struct FabricCloser {
  template <typename T>
  void operator()(T* object) const {
    ::fi_close(&object->fid);
  }
};
template <typename T>
using FabricObject = std::unique_ptr<T, FabricCloser>;

struct FabricInfoFreer {
  const FabricLibrary* library = nullptr;
  void operator()(fi_info* info) const { library->freeinfo(info); }
};
using FabricInfoList = std::unique_ptr<fi_info, FabricInfoFreer>;

}  // namespace holdfast
