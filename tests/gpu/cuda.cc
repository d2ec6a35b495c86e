#include "tests/gpu/cuda.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace holdfast {

// As <cuda.h> declares them.
struct Cuda::Calls {
  int (*cuInit)(unsigned) = nullptr;
  int (*cuDeviceGetCount)(int*) = nullptr;
  int (*cuDeviceGet)(int*, int) = nullptr;
  int (*cuDevicePrimaryCtxRetain)(void**, int) = nullptr;
  int (*cuDevicePrimaryCtxRelease_v2)(int) = nullptr;
  int (*cuCtxPushCurrent_v2)(void*) = nullptr;
  int (*cuCtxPopCurrent_v2)(void**) = nullptr;
  int (*cuMemAlloc_v2)(unsigned long long*, size_t) = nullptr;
  int (*cuMemFree_v2)(unsigned long long) = nullptr;
  int (*cuStreamCreate)(void**, unsigned) = nullptr;
  int (*cuStreamDestroy_v2)(void*) = nullptr;
  int (*cuStreamQuery)(void*) = nullptr;
  int (*cuStreamSynchronize)(void*) = nullptr;
  int (*cuMemsetD8Async)(unsigned long long, unsigned char, size_t, void*) = nullptr;
  int (*cuMemcpyDtoDAsync_v2)(unsigned long long, unsigned long long, size_t, void*) = nullptr;
  int (*cuMemcpyDtoH_v2)(void*, unsigned long long, size_t) = nullptr;
  int (*cuMemcpyHtoD_v2)(unsigned long long, const void*, size_t) = nullptr;
  int (*cuStreamBeginCapture_v2)(void*, int) = nullptr;
  int (*cuStreamEndCapture)(void*, void**) = nullptr;
  int (*cuGraphDestroy)(void*) = nullptr;
  int (*cuGetErrorName)(int, const char**) = nullptr;
};

namespace {

constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1;
constexpr int kCaptureModeGlobal = 0;

unsigned long long ToAddress(const uint8_t* memory) {
  return static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(memory));
}

template <typename Function>
bool Find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

Cuda& Cuda::Get() {
  static Cuda* const cuda = new Cuda();
  return *cuda;
}

Cuda::Cuda() {
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return;
  }
  calls_ = new Calls();
  Calls& c = *calls_;
  const bool all = Find(library, "cuInit", c.cuInit) &&
                   Find(library, "cuDeviceGetCount", c.cuDeviceGetCount) &&
                   Find(library, "cuDeviceGet", c.cuDeviceGet) &&
                   Find(library, "cuDevicePrimaryCtxRetain", c.cuDevicePrimaryCtxRetain) &&
                   Find(library, "cuDevicePrimaryCtxRelease_v2", c.cuDevicePrimaryCtxRelease_v2) &&
                   Find(library, "cuCtxPushCurrent_v2", c.cuCtxPushCurrent_v2) &&
                   Find(library, "cuCtxPopCurrent_v2", c.cuCtxPopCurrent_v2) &&
                   Find(library, "cuMemAlloc_v2", c.cuMemAlloc_v2) &&
                   Find(library, "cuMemFree_v2", c.cuMemFree_v2) &&
                   Find(library, "cuStreamCreate", c.cuStreamCreate) &&
                   Find(library, "cuStreamDestroy_v2", c.cuStreamDestroy_v2) &&
                   Find(library, "cuStreamQuery", c.cuStreamQuery) &&
                   Find(library, "cuStreamSynchronize", c.cuStreamSynchronize) &&
                   Find(library, "cuMemsetD8Async", c.cuMemsetD8Async) &&
                   Find(library, "cuMemcpyDtoDAsync_v2", c.cuMemcpyDtoDAsync_v2) &&
                   Find(library, "cuMemcpyDtoH_v2", c.cuMemcpyDtoH_v2) &&
                   Find(library, "cuMemcpyHtoD_v2", c.cuMemcpyHtoD_v2) &&
                   Find(library, "cuStreamBeginCapture_v2", c.cuStreamBeginCapture_v2) &&
                   Find(library, "cuStreamEndCapture", c.cuStreamEndCapture) &&
                   Find(library, "cuGraphDestroy", c.cuGraphDestroy) &&
                   Find(library, "cuGetErrorName", c.cuGetErrorName);
  if (!all || c.cuInit(0) != 0 || c.cuDeviceGetCount(&devices_) != 0) {
    devices_ = 0;
  }
}

void Cuda::Check(int result, const char* call) {
  if (result != 0) {
    const char* name = nullptr;
    calls_->cuGetErrorName(result, &name);
    std::fprintf(stderr, "%s: %s\n", call, name != nullptr ? name : "an unknown error");
    std::abort();
  }
}

Cuda::Current::Current(int device) : device_(device) {
  Cuda& cuda = Get();
  int handle = 0;
  void* context = nullptr;
  cuda.Check(cuda.calls_->cuDeviceGet(&handle, device_), "cuDeviceGet");
  cuda.Check(cuda.calls_->cuDevicePrimaryCtxRetain(&context, handle), "cuDevicePrimaryCtxRetain");
  cuda.Check(cuda.calls_->cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
}

Cuda::Current::~Current() {
  Cuda& cuda = Get();
  int handle = 0;
  void* context = nullptr;
  cuda.Check(cuda.calls_->cuCtxPopCurrent_v2(&context), "cuCtxPopCurrent");
  cuda.Check(cuda.calls_->cuDeviceGet(&handle, device_), "cuDeviceGet");
  cuda.Check(cuda.calls_->cuDevicePrimaryCtxRelease_v2(handle), "cuDevicePrimaryCtxRelease");
}

uint8_t* Cuda::Allocate(size_t bytes) {
  unsigned long long address = 0;
  Check(calls_->cuMemAlloc_v2(&address, bytes), "cuMemAlloc");
  return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address));
}

void Cuda::Free(uint8_t* memory) {
  Check(calls_->cuMemFree_v2(ToAddress(memory)), "cuMemFree");
}

void* Cuda::NewStream() {
  void* stream = nullptr;
  Check(calls_->cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
  return stream;
}

void Cuda::EndStream(void* stream) {
  Check(calls_->cuStreamDestroy_v2(stream), "cuStreamDestroy");
}

void Cuda::Fill(void* stream, uint8_t* memory, size_t bytes, uint8_t value) {
  Check(calls_->cuMemsetD8Async(ToAddress(memory), value, bytes, stream), "cuMemsetD8Async");
}

void Cuda::Copy(void* stream, uint8_t* to, const uint8_t* from, size_t bytes) {
  Check(calls_->cuMemcpyDtoDAsync_v2(ToAddress(to), ToAddress(from), bytes, stream),
        "cuMemcpyDtoDAsync");
}

bool Cuda::Done(void* stream) {
  const int result = calls_->cuStreamQuery(stream);
  if (result == kNotReady) {
    return false;
  }
  Check(result, "cuStreamQuery");
  return true;
}

void Cuda::Wait(void* stream) {
  Check(calls_->cuStreamSynchronize(stream), "cuStreamSynchronize");
}

std::string Cuda::Read(const uint8_t* memory, size_t bytes) {
  std::string out(bytes, '\0');
  Check(calls_->cuMemcpyDtoH_v2(out.data(), ToAddress(memory), bytes), "cuMemcpyDtoH");
  return out;
}

void Cuda::Write(uint8_t* memory, const std::string& bytes) {
  Check(calls_->cuMemcpyHtoD_v2(ToAddress(memory), bytes.data(), bytes.size()), "cuMemcpyHtoD");
}

void Cuda::BeginCapture(void* stream) {
  Check(calls_->cuStreamBeginCapture_v2(stream, kCaptureModeGlobal), "cuStreamBeginCapture");
}

bool Cuda::EndCapture(void* stream) {
  void* graph = nullptr;
  const bool whole = calls_->cuStreamEndCapture(stream, &graph) == 0 && graph != nullptr;
  if (graph != nullptr) {
    Check(calls_->cuGraphDestroy(graph), "cuGraphDestroy");
  }
  return whole;
}

}  // namespace holdfast
