// The CUDA driver API without its headers: types and names as <cuda.h> has declared them since CUDA
// 11. A name with _v2 is the one that today's headers mean by the name without.
#include <dlfcn.h>

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "client-lib/src/device_driver.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/fork_guard.h"

namespace holdfast::client {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr unsigned kStreamNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
constexpr unsigned kHostRegisterPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE
constexpr unsigned kHostAllocatePortable = 1;  // CU_MEMHOSTALLOC_PORTABLE
constexpr int kCaptureStatusNone = 0;          // CU_STREAM_CAPTURE_STATUS_NONE
using CudaAddress = unsigned long long;        // NOLINT: CUdeviceptr
using CudaDevice = int;

CudaAddress ToAddress(const void* pointer) {
  return static_cast<CudaAddress>(reinterpret_cast<uintptr_t>(pointer));
}

struct CudaCalls {
  DriverError (*init)(unsigned) = nullptr;
  DriverError (*device_get)(CudaDevice*, int) = nullptr;
  DriverError (*context_retain)(void**, CudaDevice) = nullptr;
  DriverError (*context_release)(CudaDevice) = nullptr;
  DriverError (*context_push)(void*) = nullptr;
  DriverError (*context_pop)(void**) = nullptr;
  DriverError (*exchange_capture_mode)(int*) = nullptr;
  DriverError (*stream_create)(void**, unsigned) = nullptr;
  DriverError (*stream_destroy)(void*) = nullptr;
  DriverError (*stream_query)(void*) = nullptr;
  DriverError (*stream_is_capturing)(void*, int*) = nullptr;
  DriverError (*stream_wait_event)(void*, void*, unsigned) = nullptr;
  DriverError (*event_create)(void**, unsigned) = nullptr;
  DriverError (*event_destroy)(void*) = nullptr;
  DriverError (*event_record)(void*, void*) = nullptr;
  DriverError (*event_query)(void*) = nullptr;
  DriverError (*copy_to_host)(void*, CudaAddress, size_t, void*) = nullptr;
  DriverError (*copy_to_device)(CudaAddress, const void*, size_t, void*) = nullptr;
  DriverError (*host_register)(void*, size_t, unsigned) = nullptr;
  DriverError (*host_unregister)(void*) = nullptr;
  DriverError (*host_allocate)(void**, size_t, unsigned) = nullptr;
  DriverError (*host_free)(void*) = nullptr;
  DriverError (*error_name)(DriverError, const char**) = nullptr;
  DriverError (*error_text)(DriverError, const char**) = nullptr;
};

template <typename Function>
void Find(void* library, const char* name, Function*& function, const char*& missing) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  if (function == nullptr) {
    missing = name;
  }
}

// The name of a function that is not there, or null.
const char* FindCalls(void* library, CudaCalls& calls) {
  const char* missing = nullptr;
  Find(library, "cuInit", calls.init, missing);
  Find(library, "cuDeviceGet", calls.device_get, missing);
  Find(library, "cuDevicePrimaryCtxRetain", calls.context_retain, missing);
  Find(library, "cuDevicePrimaryCtxRelease_v2", calls.context_release, missing);
  Find(library, "cuCtxPushCurrent_v2", calls.context_push, missing);
  Find(library, "cuCtxPopCurrent_v2", calls.context_pop, missing);
  Find(library, "cuThreadExchangeStreamCaptureMode", calls.exchange_capture_mode, missing);
  Find(library, "cuStreamCreate", calls.stream_create, missing);
  Find(library, "cuStreamDestroy_v2", calls.stream_destroy, missing);
  Find(library, "cuStreamQuery", calls.stream_query, missing);
  Find(library, "cuStreamIsCapturing", calls.stream_is_capturing, missing);
  Find(library, "cuStreamWaitEvent", calls.stream_wait_event, missing);
  Find(library, "cuEventCreate", calls.event_create, missing);
  Find(library, "cuEventDestroy_v2", calls.event_destroy, missing);
  Find(library, "cuEventRecord", calls.event_record, missing);
  Find(library, "cuEventQuery", calls.event_query, missing);
  Find(library, "cuMemcpyDtoHAsync_v2", calls.copy_to_host, missing);
  Find(library, "cuMemcpyHtoDAsync_v2", calls.copy_to_device, missing);
  Find(library, "cuMemHostRegister_v2", calls.host_register, missing);
  Find(library, "cuMemHostUnregister", calls.host_unregister, missing);
  Find(library, "cuMemHostAlloc", calls.host_allocate, missing);
  Find(library, "cuMemFreeHost", calls.host_free, missing);
  Find(library, "cuGetErrorName", calls.error_name, missing);
  Find(library, "cuGetErrorString", calls.error_text, missing);
  return missing;
}

std::string NameOfError(const CudaCalls& calls, DriverError error) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (calls.error_name(error, &name) != kDriverOk || name == nullptr) {
    return absl::StrCat("CUDA error ", error);
  }
  if (calls.error_text(error, &text) != kDriverOk || text == nullptr) {
    return name;
  }
  return absl::StrCat(name, ": ", text);
}

class CudaDriver : public DeviceDriver {
 public:
  explicit CudaDriver(const CudaCalls& calls) : calls_(calls) {}

  DriverError RetainContext(int32_t device, void** context) override {
    CudaDevice handle = 0;
    const DriverError error = calls_.device_get(&handle, device);
    return error != kDriverOk ? error : calls_.context_retain(context, handle);
  }
  DriverError ReleaseContext(int32_t device) override {
    CudaDevice handle = 0;
    const DriverError error = calls_.device_get(&handle, device);
    return error != kDriverOk ? error : calls_.context_release(handle);
  }
  DriverError PushContext(void* context) override { return calls_.context_push(context); }
  DriverError PopContext() override {
    void* popped = nullptr;
    return calls_.context_pop(&popped);
  }
  DriverError ExchangeCaptureMode(int* mode) override { return calls_.exchange_capture_mode(mode); }

  DriverError CreateStream(void** stream) override {
    return calls_.stream_create(stream, kStreamNonBlocking);
  }
  DriverError DestroyStream(void* stream) override { return calls_.stream_destroy(stream); }
  DriverError QueryStream(void* stream) override { return calls_.stream_query(stream); }
  DriverError IsCapturing(void* stream, bool* capturing) override {
    int status = kCaptureStatusNone;
    const DriverError error = calls_.stream_is_capturing(stream, &status);
    *capturing = status != kCaptureStatusNone;  // also one that is spoilt already
    return error;
  }
  DriverError WaitEvent(void* stream, void* event) override {
    return calls_.stream_wait_event(stream, event, 0);
  }

  DriverError CreateEvent(void** event) override {
    return calls_.event_create(event, kEventDisableTiming);
  }
  DriverError DestroyEvent(void* event) override { return calls_.event_destroy(event); }
  DriverError RecordEvent(void* event, void* stream) override {
    return calls_.event_record(event, stream);
  }
  DriverError QueryEvent(void* event) override { return calls_.event_query(event); }

  DriverError CopyToHost(void* to, const void* from, size_t bytes, void* stream) override {
    return calls_.copy_to_host(to, ToAddress(from), bytes, stream);
  }
  DriverError CopyToDevice(void* to, const void* from, size_t bytes, void* stream) override {
    return calls_.copy_to_device(ToAddress(to), from, bytes, stream);
  }

  DriverError RegisterHost(void* begin, size_t bytes) override {
    return calls_.host_register(begin, bytes, kHostRegisterPortable);
  }
  DriverError UnregisterHost(void* begin) override { return calls_.host_unregister(begin); }
  DriverError AllocateHost(void** begin, size_t bytes) override {
    return calls_.host_allocate(begin, bytes, kHostAllocatePortable);
  }
  DriverError FreeHost(void* begin) override { return calls_.host_free(begin); }

  std::string ErrorName(DriverError error) override { return NameOfError(calls_, error); }

 private:
  const CudaCalls calls_;
};

// The library stays open: what it starts cannot be stopped.
Result<std::shared_ptr<DeviceDriver>> OpenCuda() {
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = ::dlerror();
    return Status(Code::kInternal,
                  absl::StrCat("a tensor is on a device and the CUDA driver cannot be loaded: ",
                               why != nullptr ? why : kLibrary,
                               "; install the driver, or pass tensors in host memory"),
                  Reason::kNoDriver);
  }
  CudaCalls calls;
  if (const char* const missing = FindCalls(library, calls); missing != nullptr) {
    return Status(
        Code::kInternal,
        absl::StrCat("the CUDA driver has no ", missing, ": it must be of CUDA 11 or later"),
        Reason::kNoDriver);
  }
  if (const DriverError error = calls.init(0); error != kDriverOk) {
    return Status(Code::kInternal,
                  absl::StrCat("start the CUDA driver (cuInit): ", NameOfError(calls, error)),
                  Reason::kNoDriver);
  }
  return std::shared_ptr<DeviceDriver>(std::make_shared<CudaDriver>(calls));
}

// Never destroyed: jobs may outlive static destructors.
struct ProcessDriver {
  Mutex mutex;
  std::shared_ptr<DeviceDriver> for_testing GUARDED_BY(mutex);
  std::shared_ptr<DeviceDriver> cuda GUARDED_BY(mutex);
};
ProcessDriver& GetProcessDriver() {
  static ProcessDriver* const driver = new ProcessDriver();
  return *driver;
}

}  // namespace

Result<std::shared_ptr<DeviceDriver>> LoadDeviceDriver() {
  static const ForkOwner owner;  // of the process that came first
  if (owner.forked()) {
    return Status(Code::kForked,
                  "CUDA cannot be used in a process that was forked from one that used it: start "
                  "processes that save device memory with spawn, not fork");
  }
  ProcessDriver& process = GetProcessDriver();
  const MutexLock lock(process.mutex);
  if (process.for_testing != nullptr) {
    return process.for_testing;
  }
  if (process.cuda == nullptr) {
    HF_TRY_ASSIGN(process.cuda, OpenCuda());
  }
  return process.cuda;
}

void SetDeviceDriverForTesting(std::shared_ptr<DeviceDriver> driver) {
  ProcessDriver& process = GetProcessDriver();
  const MutexLock lock(process.mutex);
  process.for_testing = std::move(driver);
}

}  // namespace holdfast::client
