// Small things that every way of moving pieces needs. Internal to tiers/transfer/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>

#include "absl/status/status.h"
#include "base/env.h"

namespace holdfast {

// Reads `out`; where the file ends within it, `bytes_min` are enough (0: all of it). For the last
// block of a file that is open for direct I/O, whose length must not be asked for exactly.
absl::Status ReadAtLeast(File& file, uint64_t offset, std::span<std::byte> out, size_t bytes_min);

// Page-aligned memory of its own, present after the first use, given back when destroyed.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t bytes);
  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    size_t alignment;
    void operator()(std::byte* data) const;
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Of the calling thread, so far.
double ThreadCpuSeconds();

// A thread that no signal from outside reaches, named for people; ResourceExhausted when there can
// be none.
absl::Status StartThread(const char* name, std::function<void()> run, std::thread& thread);

}  // namespace holdfast
