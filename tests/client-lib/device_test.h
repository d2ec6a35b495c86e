// What tests of device memory have in common: a fake daemon, fake devices, a job, and a look at
// what was saved.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/client-lib/fake_daemon.h"
#include "tests/client-lib/fake_driver.h"

namespace holdfast {

inline constexpr Milliseconds kLong{60'000};

class DeviceTest : public testing::Test {
 protected:
  DeviceTest() { UseSeed(1); }
  ~DeviceTest() override { client::SetDeviceDriverForTesting(nullptr); }

  // Everything anew.
  void UseSeed(uint64_t seed) {
    job_.reset();
    daemon_ = std::make_unique<FakeDaemon>();
    driver_ = std::make_shared<FakeDriver>(seed);
    client::SetDeviceDriverForTesting(driver_);
    stream_ = driver_->NewStream(0);
    other_stream_ = driver_->NewStream(1);
  }

  void Open(Milliseconds device_deadline = kLong) {
    JobOptions options = daemon_->Options();
    options.device_deadline = device_deadline;
    Result<std::unique_ptr<Job>> job = Job::Open(options);
    ASSERT_TRUE(job.ok()) << job.status().ToString();
    job_ = *std::move(job);
  }

  // A tensor of that many bytes on a device (-1: host), each `value`.
  uint8_t* Add(State& state, const std::string& name, int32_t device, size_t bytes,
               uint8_t value = 0) {
    uint8_t* memory = nullptr;
    if (device >= 0) {
      memory = driver_->Allocate(device, bytes);
    } else {
      memory = host_.emplace_back(std::make_unique<uint8_t[]>(bytes + 1)).get();
    }
    std::memset(memory, value, bytes);
    state.tensors.emplace_back(name, Type::kU8, std::vector<uint64_t>{bytes}, memory);
    state.tensors.back().device = device;
    return memory;
  }

  // What the sealed copy of that step holds, verified against its digests, which are those of the
  // same bytes wherever they came from.
  std::map<std::string, std::string> Saved(uint64_t step) {
    AttachOptions options;
    options.job = "test";
    options.socket = daemon_->socket();
    options.newest = false;
    options.step = step;
    Result<std::unique_ptr<View>> view = Attach(options);
    std::map<std::string, std::string> saved;
    EXPECT_TRUE(view.ok()) << view.status().ToString();
    if (view.ok()) {
      const Status verified = (*view)->Verify();
      EXPECT_TRUE(verified.ok()) << verified.ToString();
      for (const Tensor& tensor : (*view)->tensors()) {
        saved[tensor.name] = std::string(static_cast<const char*>(tensor.data), tensor.bytes);
      }
    }
    return saved;
  }

  std::vector<DeviceStream> Stream() const { return {{0, stream_}}; }
  std::vector<DeviceStream> BothStreams() const { return {{0, stream_}, {1, other_stream_}}; }

  // Ends the job; nothing may be left, and nothing have been done wrong.
  void CheckEnd() {
    job_.reset();
    EXPECT_EQ(driver_->Misuse(), "");
    EXPECT_EQ(driver_->Leaks(), "");
  }

  std::unique_ptr<FakeDaemon> daemon_;
  std::shared_ptr<FakeDriver> driver_;
  void* stream_ = nullptr;        // of device 0
  void* other_stream_ = nullptr;  // of device 1
  std::unique_ptr<Job> job_;
  std::vector<std::unique_ptr<uint8_t[]>> host_;
};

inline std::string Bytes(size_t bytes, uint8_t value) {
  return std::string(bytes, static_cast<char>(value));
}

}  // namespace holdfast
