// A slot's bytes, lent in small parts so that they can be taken back at once: whoever copies holds
// them only while bytes move from memory to memory, never in a call that may hang.
//
//   auto memory = std::make_shared<RevocableMemory>(std::move(mapping), image_bytes);
//   … others: if (auto access = memory->Enter()) { memcpy(bounce, access.data() + at, n); }
//   memory->Revoke();       // from here on nobody touches the slot
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/env.h"
#include "base/mutex.h"

namespace holdfast {

class RevocableMemory {
 public:
  // Unmapped when it was revoked, or with the last user.
  RevocableMemory(std::unique_ptr<Mapping> mapping, uint64_t bytes);
  // Memory that somebody else keeps until it was revoked or everybody has let go of this object.
  RevocableMemory(std::byte* data, uint64_t bytes);
  ~RevocableMemory();
  RevocableMemory(const RevocableMemory&) = delete;
  RevocableMemory& operator=(const RevocableMemory&) = delete;

  uint64_t bytes() const { return bytes_; }

  // Waits for copies under way (milliseconds), never for I/O. Again: nothing.
  void Revoke() EXCLUDES(mutex_);
  bool revoked() const EXCLUDES(mutex_);

  // The right to touch the bytes, until destroyed; empty when it was revoked.
  class Access {
   public:
    Access(Access&& other) noexcept : memory_(other.memory_) { other.memory_ = nullptr; }
    Access& operator=(Access&&) = delete;
    ~Access();
    explicit operator bool() const { return memory_ != nullptr; }
    std::byte* data() const { return memory_->data_; }

   private:
    friend class RevocableMemory;
    explicit Access(RevocableMemory* memory) : memory_(memory) {}
    RevocableMemory* memory_;
  };
  Access Enter() EXCLUDES(mutex_);

 private:
  void Leave() EXCLUDES(mutex_);

  std::byte* const data_;
  const uint64_t bytes_;
  mutable Mutex mutex_;
  CondVar left_cv_;
  std::unique_ptr<Mapping> mapping_ GUARDED_BY(mutex_);
  uint64_t inside_ GUARDED_BY(mutex_) = 0;
  bool revoked_ GUARDED_BY(mutex_) = false;
};

}  // namespace holdfast
