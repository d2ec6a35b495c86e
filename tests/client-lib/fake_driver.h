// A device driver for tests: devices that complete late and out of order, and that notice misuse.
//
//   auto driver = std::make_shared<FakeDriver>(seed);
//   SetDeviceDriverForTesting(driver);
//   uint8_t* const w = driver->Allocate(0, 1 << 20);        // "device" memory
//   void* const stream = driver->NewStream(0);              // the training program's
//   driver->Fill(stream, w, 1 << 20, 7);                    // enqueued: nothing happens yet
//   driver->Run();                                          // from now on work goes on
//   …
//   EXPECT_EQ(driver->Misuse(), ""); EXPECT_EQ(driver->Leaks(), "");
//
// Streams are queues. Nothing in them is done but by a step, which takes any stream whose first
// piece of work may go on and does a part of it: which one is drawn from the seed. While the driver
// runs, each query does some steps first; otherwise only Finish and the steps of a test do.
//
// Misuse is what a real device would answer with silence or garbage: a copy of memory that was
// freed, or not pinned, or unpinned too early; a call in the wrong context; a call that spoils a
// capture; a handle used after it was destroyed.
//
// Thread-safe. In a forked child only CallsOfThisProcess may be asked.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "client-lib/src/device_driver.h"

namespace holdfast {

class FakeDriver : public client::DeviceDriver {
 public:
  using Error = client::DriverError;
  static constexpr int32_t kDevices = 2;
  static constexpr Error kIllegalAddress = 700;  // what no context recovers from

  explicit FakeDriver(uint64_t seed);
  ~FakeDriver() override;

  // The training program's side.
  uint8_t* Allocate(int32_t device, size_t bytes) EXCLUDES(mutex_);
  void Free(uint8_t* memory) EXCLUDES(mutex_);
  void* NewStream(int32_t device) EXCLUDES(mutex_);
  void Launch(void* stream, std::function<void()> work) EXCLUDES(mutex_);
  void Fill(void* stream, uint8_t* memory, size_t bytes, uint8_t value) EXCLUDES(mutex_);
  void BeginCapture(void* stream) EXCLUDES(mutex_);
  bool EndCapture(void* stream) EXCLUDES(mutex_);  // false: it was spoilt
  // A capture on another stream, which the legacy default stream would wait for.
  void SetCaptureImplicit(bool on) EXCLUDES(mutex_);

  // Time.
  void Run() EXCLUDES(mutex_);
  void Pause() EXCLUDES(mutex_);
  void Hold(void* stream, bool held) EXCLUDES(mutex_);  // it does not go on while held
  void Finish() EXCLUDES(mutex_);                       // all that can be done

  // Faults. The nth call from now fails once; those that release something have released it.
  void FailCall(int nth, Error error) EXCLUDES(mutex_);
  bool failed() EXCLUDES(mutex_);             // that call has come
  void LoseDevice(int nth) EXCLUDES(mutex_);  // from that call on every one fails
  // Every call of that name, from now on; kDriverOk: none.
  void Refuse(const std::string& call, Error error) EXCLUDES(mutex_);

  // What was seen.
  int calls() const { return calls_.load(); }
  int CallsOfThisProcess() const;  // also in a child
  int Count(const std::string& call) EXCLUDES(mutex_);
  std::string Misuse() EXCLUDES(mutex_);
  std::string Leaks() EXCLUDES(mutex_);
  size_t Registered() EXCLUDES(mutex_);
  size_t Enqueued(void* stream) EXCLUDES(mutex_);
  void* Current() EXCLUDES(mutex_);  // of the calling thread

  Error RetainContext(int32_t device, void** context) override;
  Error ReleaseContext(int32_t device) override;
  Error PushContext(void* context) override;
  Error PopContext() override;
  Error ExchangeCaptureMode(int* mode) override;
  Error CreateStream(void** stream) override;
  Error DestroyStream(void* stream) override;
  Error QueryStream(void* stream) override;
  Error IsCapturing(void* stream, bool* capturing) override;
  Error WaitEvent(void* stream, void* event) override;
  Error CreateEvent(void** event) override;
  Error DestroyEvent(void* event) override;
  Error RecordEvent(void* event, void* stream) override;
  Error QueryEvent(void* event) override;
  Error CopyToHost(void* to, const void* from, size_t bytes, void* stream) override;
  Error CopyToDevice(void* to, const void* from, size_t bytes, void* stream) override;
  Error RegisterHost(void* begin, size_t bytes) override;
  Error UnregisterHost(void* begin) override;
  Error AllocateHost(void** begin, size_t bytes) override;
  Error FreeHost(void* begin) override;
  std::string ErrorName(Error error) override;

 private:
  struct Context {
    int32_t device = 0;
    int retained = 0;
  };
  struct Event {
    int32_t device = 0;
    uint64_t recorded = 0;
    uint64_t reached = 0;
    bool destroyed = false;
  };
  struct Operation {
    enum class Kind { kWork, kRecord, kWait, kToHost, kToDevice };
    Kind kind = Kind::kWork;
    std::function<void()> work;
    Event* event = nullptr;
    uint64_t version = 0;
    uint8_t* to = nullptr;
    const uint8_t* from = nullptr;
    size_t bytes = 0;
    size_t done = 0;
  };
  struct Stream {
    int32_t device = 0;
    bool held = false;
    bool capturing = false;
    bool ours = false;
    bool destroyed = false;
    std::deque<Operation> operations;
  };
  struct Block {
    int32_t device = 0;
    size_t bytes = 0;
    bool freed = false;
    std::unique_ptr<uint8_t[]> memory;
  };
  struct Thread {
    std::vector<Context*> contexts;
    int capture_mode = 0;
  };

  // Counts the call; not kDriverOk: it fails.
  Error Enter(const char* call, bool may_spoil = false) REQUIRES(mutex_);
  Thread& Here() REQUIRES(mutex_) { return threads_[std::this_thread::get_id()]; }
  void Note(const std::string& what) REQUIRES(mutex_);
  Stream* Find(void* stream, const char* call) REQUIRES(mutex_);
  Event* FindEvent(void* event, const char* call) REQUIRES(mutex_);
  bool Runnable(const Stream& stream) const REQUIRES(mutex_);
  bool Step() REQUIRES(mutex_);
  void StepsWhileRunning() REQUIRES(mutex_);
  void DoPart(Stream& stream) REQUIRES(mutex_);
  bool Pinned(const void* begin, size_t bytes) const REQUIRES(mutex_);
  void CheckCopy(const Operation& operation, int32_t device, const char* when) REQUIRES(mutex_);
  void CheckUnused(const uint8_t* begin, size_t bytes) REQUIRES(mutex_);
  Error EnqueueCopy(const char* call, Operation operation, void* stream) REQUIRES(mutex_);

  std::atomic<int> calls_{0};
  std::atomic<int> calls_of_children_{0};
  const int pid_;
  Mutex mutex_;
  std::mt19937_64 random_ GUARDED_BY(mutex_);
  bool running_ GUARDED_BY(mutex_) = false;
  bool lost_ GUARDED_BY(mutex_) = false;
  bool capture_implicit_ GUARDED_BY(mutex_) = false;
  std::map<std::string, Error> refused_ GUARDED_BY(mutex_);
  int fail_at_ GUARDED_BY(mutex_) = 0;
  int lose_at_ GUARDED_BY(mutex_) = 0;
  Error fail_with_ GUARDED_BY(mutex_) = 0;
  bool failed_ GUARDED_BY(mutex_) = false;
  bool spoilt_ GUARDED_BY(mutex_) = false;
  Context contexts_[kDevices] GUARDED_BY(mutex_);
  Stream legacy_[kDevices] GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Stream>> streams_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Event>> events_ GUARDED_BY(mutex_);
  std::map<const uint8_t*, Block> blocks_ GUARDED_BY(mutex_);
  std::map<const uint8_t*, size_t> registered_ GUARDED_BY(mutex_);
  std::map<const uint8_t*, size_t> allocated_ GUARDED_BY(mutex_);
  std::map<std::thread::id, Thread> threads_ GUARDED_BY(mutex_);
  std::map<std::string, int> counts_ GUARDED_BY(mutex_);
  std::vector<std::string> misuse_ GUARDED_BY(mutex_);
};

}  // namespace holdfast
