#include "tests/client-lib/fake_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace holdfast {
namespace {

constexpr size_t kPartBytes = 256 << 10;  // of a copy, in one step
constexpr size_t kMisusesKept = 20;
constexpr uint8_t kFreedByte = 0xdd;
// CUDA's numbers for them.
constexpr FakeDriver::Error kInvalidValue = 1;
constexpr FakeDriver::Error kInvalidContext = 201;
constexpr FakeDriver::Error kAlreadyRegistered = 712;
constexpr FakeDriver::Error kNotRegistered = 713;
constexpr FakeDriver::Error kCaptureUnsupported = 900;
constexpr FakeDriver::Error kOk = client::kDriverOk;

template <typename Map>
bool Holds(const Map& ranges, const void* begin, size_t bytes) {
  const auto* const at = static_cast<const uint8_t*>(begin);
  auto range = ranges.upper_bound(at);
  if (range == ranges.begin()) {
    return false;
  }
  --range;
  return at + bytes <= range->first + range->second;
}

}  // namespace

FakeDriver::FakeDriver(uint64_t seed) : pid_(::getpid()), random_(seed) {
  for (int32_t device = 0; device < kDevices; ++device) {
    contexts_[device].device = device;
    legacy_[device].device = device;
  }
}

FakeDriver::~FakeDriver() {
  for (const auto& [begin, bytes] : allocated_) {
    std::free(const_cast<uint8_t*>(begin));
  }
}

uint8_t* FakeDriver::Allocate(int32_t device, size_t bytes) {
  const MutexLock lock(mutex_);
  auto memory = std::make_unique<uint8_t[]>(bytes + 1);
  uint8_t* const begin = memory.get();
  blocks_[begin] = {device, bytes, false, std::move(memory)};
  return begin;
}

void FakeDriver::Free(uint8_t* memory) {
  const MutexLock lock(mutex_);
  Block& block = blocks_.at(memory);
  block.freed = true;
  std::memset(memory, kFreedByte, block.bytes);
}

void* FakeDriver::NewStream(int32_t device) {
  const MutexLock lock(mutex_);
  streams_.push_back(std::make_unique<Stream>());
  streams_.back()->device = device;
  return streams_.back().get();
}

void FakeDriver::Launch(void* stream, std::function<void()> work) {
  const MutexLock lock(mutex_);
  Operation operation;
  operation.work = std::move(work);
  (stream == nullptr ? &legacy_[0] : static_cast<Stream*>(stream))
      ->operations.push_back(std::move(operation));
}

void FakeDriver::Fill(void* stream, uint8_t* memory, size_t bytes, uint8_t value) {
  Launch(stream, [=] { std::memset(memory, value, bytes); });
}

void FakeDriver::BeginCapture(void* stream) {
  const MutexLock lock(mutex_);
  static_cast<Stream*>(stream)->capturing = true;
  spoilt_ = false;
}

bool FakeDriver::EndCapture(void* stream) {
  const MutexLock lock(mutex_);
  static_cast<Stream*>(stream)->capturing = false;
  return !spoilt_;
}

void FakeDriver::SetCaptureImplicit(bool on) {
  const MutexLock lock(mutex_);
  capture_implicit_ = on;
}

void FakeDriver::Run() {
  const MutexLock lock(mutex_);
  running_ = true;
}

void FakeDriver::Pause() {
  const MutexLock lock(mutex_);
  running_ = false;
}

void FakeDriver::Hold(void* stream, bool held) {
  const MutexLock lock(mutex_);
  static_cast<Stream*>(stream)->held = held;
}

void FakeDriver::Finish() {
  const MutexLock lock(mutex_);
  while (Step()) {
  }
}

void FakeDriver::FailCall(int nth, Error error) {
  const MutexLock lock(mutex_);
  fail_at_ = nth == 0 ? 0 : calls_.load() + nth;
  fail_with_ = error;
  failed_ = false;
}

bool FakeDriver::failed() {
  const MutexLock lock(mutex_);
  return failed_ || lost_;
}

void FakeDriver::LoseDevice(int nth) {
  const MutexLock lock(mutex_);
  lose_at_ = calls_.load() + nth;
}

void FakeDriver::Refuse(const std::string& call, Error error) {
  const MutexLock lock(mutex_);
  refused_[call] = error;
}

int FakeDriver::CallsOfThisProcess() const {
  return ::getpid() == pid_ ? calls_.load() : calls_of_children_.load();
}

int FakeDriver::Count(const std::string& call) {
  const MutexLock lock(mutex_);
  return counts_[call];
}

std::string FakeDriver::Misuse() {
  const MutexLock lock(mutex_);
  std::string all;
  for (const std::string& what : misuse_) {
    all += what + "\n";
  }
  return all;
}

std::string FakeDriver::Leaks() {
  const MutexLock lock(mutex_);
  std::string leaks;
  const auto note = [&leaks](const char* what, size_t count) {
    if (count != 0) {
      leaks += std::string(what) + ": " + std::to_string(count) + "\n";
    }
  };
  note("streams",
       static_cast<size_t>(std::count_if(streams_.begin(), streams_.end(), [](const auto& stream) {
         return stream->ours && !stream->destroyed;
       })));
  note("events",
       static_cast<size_t>(std::count_if(events_.begin(), events_.end(),
                                         [](const auto& event) { return !event->destroyed; })));
  for (const Context& context : contexts_) {
    note("retained contexts", static_cast<size_t>(context.retained));
  }
  note("registered ranges", registered_.size());
  note("pinned buffers", allocated_.size());
  for (const auto& [id, thread] : threads_) {
    note("contexts left current", thread.contexts.size());
    note("threads in another capture mode", thread.capture_mode == 0 ? 0 : 1);
  }
  return leaks;
}

size_t FakeDriver::Registered() {
  const MutexLock lock(mutex_);
  return registered_.size();
}

size_t FakeDriver::Enqueued(void* stream) {
  const MutexLock lock(mutex_);
  return static_cast<Stream*>(stream)->operations.size();
}

void* FakeDriver::Current() {
  const MutexLock lock(mutex_);
  const Thread& here = Here();
  return here.contexts.empty() ? nullptr : here.contexts.back();
}

void FakeDriver::Note(const std::string& what) {
  if (misuse_.size() < kMisusesKept) {
    misuse_.push_back(what);
  }
}

FakeDriver::Error FakeDriver::Enter(const char* call, bool may_spoil) {
  const int number = calls_.fetch_add(1) + 1;
  if (::getpid() != pid_) {
    calls_of_children_.fetch_add(1);
  }
  ++counts_[call];
  if (lose_at_ != 0 && number >= lose_at_) {
    lost_ = true;
    return kIllegalAddress;
  }
  if (fail_at_ != 0 && number == fail_at_) {
    failed_ = true;
    return fail_with_;
  }
  if (const auto refused = refused_.find(call);
      refused != refused_.end() && refused->second != kOk) {
    return refused->second;
  }
  const bool capturing = std::any_of(streams_.begin(), streams_.end(),
                                     [](const auto& stream) { return stream->capturing; });
  if (may_spoil && capturing && Here().capture_mode != client::kCaptureModeRelaxed) {
    spoilt_ = true;
    Note(std::string(call) + " spoils a capture");
    return kCaptureUnsupported;
  }
  return kOk;
}

FakeDriver::Stream* FakeDriver::Find(void* stream, const char* call) {
  const Thread& here = Here();
  if (here.contexts.empty()) {
    Note(std::string(call) + " without a current context");
    return nullptr;
  }
  const int32_t current = here.contexts.back()->device;
  auto* const found = stream == nullptr ? &legacy_[current] : static_cast<Stream*>(stream);
  if (found->destroyed || found->device != current) {
    Note(std::string(call) +
         (found->destroyed ? " on a destroyed stream" : " in the wrong context"));
    return nullptr;
  }
  return found;
}

FakeDriver::Event* FakeDriver::FindEvent(void* event, const char* call) {
  auto* const found = static_cast<Event*>(event);
  if (found->destroyed) {
    Note(std::string(call) + " of a destroyed event");
    return nullptr;
  }
  return found;
}

bool FakeDriver::Runnable(const Stream& stream) const {
  if (stream.held || stream.operations.empty()) {
    return false;
  }
  const Operation& first = stream.operations.front();
  return first.kind != Operation::Kind::kWait || first.event->reached >= first.version;
}

bool FakeDriver::Step() {
  if (lost_) {
    return false;
  }
  std::vector<Stream*> runnable;
  for (Stream& stream : legacy_) {
    if (Runnable(stream)) {
      runnable.push_back(&stream);
    }
  }
  for (const auto& stream : streams_) {
    if (Runnable(*stream)) {
      runnable.push_back(stream.get());
    }
  }
  if (runnable.empty()) {
    return false;
  }
  DoPart(*runnable[random_() % runnable.size()]);
  return true;
}

void FakeDriver::StepsWhileRunning() {
  if (running_) {
    for (uint64_t steps = random_() % 48; steps != 0 && Step(); --steps) {
    }
  }
}

void FakeDriver::DoPart(Stream& stream) {
  Operation& operation = stream.operations.front();
  switch (operation.kind) {
    case Operation::Kind::kWork:
      operation.work();
      break;
    case Operation::Kind::kRecord:
      operation.event->reached = std::max(operation.event->reached, operation.version);
      break;
    case Operation::Kind::kWait:
      break;
    case Operation::Kind::kToHost:
    case Operation::Kind::kToDevice: {
      CheckCopy(operation, stream.device, "runs");
      const size_t part = std::min(kPartBytes, operation.bytes - operation.done);
      std::memcpy(operation.to + operation.done, operation.from + operation.done, part);
      operation.done += part;
      if (operation.done < operation.bytes) {
        return;
      }
      break;
    }
  }
  stream.operations.pop_front();
}

bool FakeDriver::Pinned(const void* begin, size_t bytes) const {
  return Holds(registered_, begin, bytes) || Holds(allocated_, begin, bytes);
}

void FakeDriver::CheckCopy(const Operation& operation, int32_t device, const char* when) {
  const bool to_host = operation.kind == Operation::Kind::kToHost;
  const uint8_t* const on_device = to_host ? operation.from : operation.to;
  const uint8_t* const on_host = to_host ? operation.to : operation.from;
  if (!Pinned(on_host, operation.bytes)) {
    Note(std::string("a copy ") + when + " with host memory that is not pinned");
  }
  auto block = blocks_.upper_bound(on_device);
  if (block == blocks_.begin()) {
    Note(std::string("a copy ") + when + " with memory that is not a device's");
    return;
  }
  --block;
  if (on_device + operation.bytes > block->first + block->second.bytes ||
      block->second.device != device) {
    Note(std::string("a copy ") + when + " with memory that is not that device's");
  } else if (block->second.freed) {
    Note(std::string("a copy ") + when + " with device memory that was freed");
  }
}

void FakeDriver::CheckUnused(const uint8_t* begin, size_t bytes) {
  for (const auto& stream : streams_) {
    for (const Operation& operation : stream->operations) {
      const uint8_t* const host =
          operation.kind == Operation::Kind::kToHost ? operation.to : operation.from;
      if (!lost_ && host >= begin && host < begin + bytes) {
        Note("pinned memory is let go while a copy uses it");
      }
    }
  }
}

FakeDriver::Error FakeDriver::EnqueueCopy(const char* call, Operation operation, void* stream) {
  if (const Error error = Enter(call); error != kOk) {
    return error;
  }
  Stream* const found = Find(stream, call);
  if (found == nullptr) {
    return kInvalidContext;
  }
  if (found->capturing) {
    spoilt_ = true;
    Note(std::string(call) + " on a captured stream");
    return kCaptureUnsupported;
  }
  CheckCopy(operation, found->device, "is enqueued");
  found->operations.push_back(std::move(operation));
  return kOk;
}

FakeDriver::Error FakeDriver::RetainContext(int32_t device, void** context) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("RetainContext"); error != kOk) {
    return error;
  }
  if (device < 0 || device >= kDevices) {
    return client::kDriverInvalidDevice;
  }
  ++contexts_[device].retained;
  *context = &contexts_[device];
  return kOk;
}

FakeDriver::Error FakeDriver::ReleaseContext(int32_t device) {
  const MutexLock lock(mutex_);
  const Error error = Enter("ReleaseContext");
  if (--contexts_[device].retained < 0) {
    Note("a context is released more often than retained");
  }
  return error;
}

FakeDriver::Error FakeDriver::PushContext(void* context) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("PushContext"); error != kOk) {
    return error;
  }
  auto* const pushed = static_cast<Context*>(context);
  if (pushed == nullptr || pushed->retained == 0) {
    Note("a context is used that is not retained");
    return kInvalidContext;
  }
  Here().contexts.push_back(pushed);
  return kOk;
}

FakeDriver::Error FakeDriver::PopContext() {
  const MutexLock lock(mutex_);
  const Error error = Enter("PopContext");
  if (Here().contexts.empty()) {
    Note("PopContext without a current context");
    return kInvalidContext;
  }
  Here().contexts.pop_back();
  return error;
}

FakeDriver::Error FakeDriver::ExchangeCaptureMode(int* mode) {
  const MutexLock lock(mutex_);
  const Error error = Enter("ExchangeCaptureMode");
  const bool puts_back = *mode == client::kCaptureModeGlobal;
  if (error == kOk || puts_back) {
    std::swap(Here().capture_mode, *mode);
  }
  return error;
}

FakeDriver::Error FakeDriver::CreateStream(void** stream) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("CreateStream", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  if (Here().contexts.empty()) {
    Note("CreateStream without a current context");
    return kInvalidContext;
  }
  streams_.push_back(std::make_unique<Stream>());
  streams_.back()->device = Here().contexts.back()->device;
  streams_.back()->ours = true;
  *stream = streams_.back().get();
  return kOk;
}

FakeDriver::Error FakeDriver::DestroyStream(void* stream) {
  const MutexLock lock(mutex_);
  const Error error = Enter("DestroyStream", /*may_spoil=*/true);
  static_cast<Stream*>(stream)->destroyed = true;
  return error;
}

FakeDriver::Error FakeDriver::QueryStream(void* stream) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("QueryStream", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  StepsWhileRunning();
  const Stream* const found = Find(stream, "QueryStream");
  if (found == nullptr) {
    return kInvalidContext;
  }
  return found->operations.empty() ? kOk : client::kDriverNotReady;
}

FakeDriver::Error FakeDriver::IsCapturing(void* stream, bool* capturing) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("IsCapturing"); error != kOk) {
    return error;
  }
  const Stream* const found = Find(stream, "IsCapturing");
  if (found == nullptr) {
    return kInvalidContext;
  }
  if (stream == nullptr && capture_implicit_) {
    return client::kDriverCaptureImplicit;
  }
  *capturing = found->capturing;
  return kOk;
}

FakeDriver::Error FakeDriver::WaitEvent(void* stream, void* event) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("WaitEvent"); error != kOk) {
    return error;
  }
  Stream* const found = Find(stream, "WaitEvent");
  Event* const waited = FindEvent(event, "WaitEvent");
  if (found == nullptr || waited == nullptr) {
    return kInvalidValue;
  }
  if (found->capturing) {
    spoilt_ = true;
    Note("WaitEvent on a captured stream");
    return kCaptureUnsupported;
  }
  Operation operation;
  operation.kind = Operation::Kind::kWait;
  operation.event = waited;
  operation.version = waited->recorded;
  found->operations.push_back(std::move(operation));
  return kOk;
}

FakeDriver::Error FakeDriver::CreateEvent(void** event) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("CreateEvent", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  if (Here().contexts.empty()) {
    Note("CreateEvent without a current context");
    return kInvalidContext;
  }
  events_.push_back(std::make_unique<Event>());
  events_.back()->device = Here().contexts.back()->device;
  *event = events_.back().get();
  return kOk;
}

FakeDriver::Error FakeDriver::DestroyEvent(void* event) {
  const MutexLock lock(mutex_);
  const Error error = Enter("DestroyEvent", /*may_spoil=*/true);
  if (Event* const found = FindEvent(event, "DestroyEvent"); found != nullptr) {
    found->destroyed = true;
  }
  return error;
}

FakeDriver::Error FakeDriver::RecordEvent(void* event, void* stream) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("RecordEvent"); error != kOk) {
    return error;
  }
  Stream* const found = Find(stream, "RecordEvent");
  Event* const recorded = FindEvent(event, "RecordEvent");
  if (found == nullptr || recorded == nullptr) {
    return kInvalidValue;
  }
  if (found->capturing) {
    spoilt_ = true;
    Note("RecordEvent on a captured stream");
    return kCaptureUnsupported;
  }
  if (recorded->device != found->device) {
    Note("an event is recorded on another device's stream");
  }
  Operation operation;
  operation.kind = Operation::Kind::kRecord;
  operation.event = recorded;
  operation.version = ++recorded->recorded;
  found->operations.push_back(std::move(operation));
  return kOk;
}

FakeDriver::Error FakeDriver::QueryEvent(void* event) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("QueryEvent", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  StepsWhileRunning();
  const Event* const found = FindEvent(event, "QueryEvent");
  if (found == nullptr) {
    return kInvalidValue;
  }
  return found->reached >= found->recorded ? kOk : client::kDriverNotReady;
}

FakeDriver::Error FakeDriver::CopyToHost(void* to, const void* from, size_t bytes, void* stream) {
  const MutexLock lock(mutex_);
  Operation operation;
  operation.kind = Operation::Kind::kToHost;
  operation.to = static_cast<uint8_t*>(to);
  operation.from = static_cast<const uint8_t*>(from);
  operation.bytes = bytes;
  return EnqueueCopy("CopyToHost", std::move(operation), stream);
}

FakeDriver::Error FakeDriver::CopyToDevice(void* to, const void* from, size_t bytes, void* stream) {
  const MutexLock lock(mutex_);
  Operation operation;
  operation.kind = Operation::Kind::kToDevice;
  operation.to = static_cast<uint8_t*>(to);
  operation.from = static_cast<const uint8_t*>(from);
  operation.bytes = bytes;
  return EnqueueCopy("CopyToDevice", std::move(operation), stream);
}

FakeDriver::Error FakeDriver::RegisterHost(void* begin, size_t bytes) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("RegisterHost", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  if (Here().contexts.empty()) {
    Note("RegisterHost without a current context");
    return kInvalidContext;
  }
  const auto* const at = static_cast<const uint8_t*>(begin);
  for (const auto& [other, length] : registered_) {
    if (at < other + length && other < at + bytes) {
      Note("memory is registered that is registered already");
      return kAlreadyRegistered;
    }
  }
  registered_[at] = bytes;
  return kOk;
}

FakeDriver::Error FakeDriver::UnregisterHost(void* begin) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("UnregisterHost", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  const auto found = registered_.find(static_cast<uint8_t*>(begin));
  if (Here().contexts.empty() || found == registered_.end()) {
    Note("memory is unregistered that is not registered, or without a context");
    return kNotRegistered;
  }
  std::vector<unsigned char> pages(found->second / 4096 + 1);
  if (::mincore(begin, found->second, pages.data()) != 0) {
    Note("memory is unregistered after it was unmapped");
  }
  CheckUnused(found->first, found->second);
  registered_.erase(found);
  return kOk;
}

FakeDriver::Error FakeDriver::AllocateHost(void** begin, size_t bytes) {
  const MutexLock lock(mutex_);
  if (const Error error = Enter("AllocateHost", /*may_spoil=*/true); error != kOk) {
    return error;
  }
  if (Here().contexts.empty()) {
    Note("AllocateHost without a current context");
    return kInvalidContext;
  }
  *begin = std::malloc(bytes);
  allocated_[static_cast<uint8_t*>(*begin)] = bytes;
  return kOk;
}

FakeDriver::Error FakeDriver::FreeHost(void* begin) {
  const MutexLock lock(mutex_);
  const Error error = Enter("FreeHost", /*may_spoil=*/true);
  const auto found = allocated_.find(static_cast<uint8_t*>(begin));
  if (found == allocated_.end()) {
    Note("a pinned buffer is freed that is none");
    return kInvalidValue;
  }
  CheckUnused(found->first, found->second);
  allocated_.erase(found);
  std::free(begin);
  return error;
}

std::string FakeDriver::ErrorName(Error error) {
  return "FAKE_ERROR_" + std::to_string(error);
}

}  // namespace holdfast
