// What tests do on a real device: memory, streams, late work and captures, through the CUDA driver
// API, opened at run time as the library does. No kernels: fills and long queues of copies make
// work that runs late.
//
//   if (!Cuda::Get().present()) GTEST_SKIP() << kNoDevice;
//   const Cuda::Current current(0);                         // for the calling thread
//   uint8_t* const w = Cuda::Get().Allocate(1 << 20);
//   Cuda::Get().Fill(stream, w, 1 << 20, 7);                // enqueued
//
// A call that fails ends the test program with the driver's words. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace holdfast {

inline constexpr char kNoDevice[] = "no CUDA device here: tests/gpu is skipped";

class Cuda {
 public:
  static Cuda& Get();

  bool present() const { return devices_ > 0; }
  int devices() const { return devices_; }

  // The device's primary context is the thread's current one as long as this lives.
  class Current {
   public:
    explicit Current(int device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const int device_;
  };

  // Of the current context.
  uint8_t* Allocate(size_t bytes);
  void Free(uint8_t* memory);
  void* NewStream();
  void EndStream(void* stream);
  void Fill(void* stream, uint8_t* memory, size_t bytes, uint8_t value);
  void Copy(void* stream, uint8_t* to, const uint8_t* from, size_t bytes);
  bool Done(void* stream);
  void Wait(void* stream);
  std::string Read(const uint8_t* memory, size_t bytes);
  void Write(uint8_t* memory, const std::string& bytes);
  // In the mode that other threads' calls can spoil, as PyTorch captures.
  void BeginCapture(void* stream);
  bool EndCapture(void* stream);  // whether the graph came out whole

 private:
  Cuda();
  void Check(int result, const char* call);

  int devices_ = 0;
  struct Calls;
  Calls* calls_ = nullptr;
};

}  // namespace holdfast
