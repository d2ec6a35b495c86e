// What the tests of transfers share: images that no block of is like another, slots for them, files
// that misbehave.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "tests/tiers/image/sample_image.h"
#include "tiers/transfer/block_io.h"
#include "tiers/transfer/direct_copy.h"

namespace holdfast {

// Big slices and tiny ones, an empty one, blocks that no piece's edge meets, an odd length.
SampleImage MakeTransferImage(uint64_t big_slice_bytes = (5u << 20) + 13);

// A slot: a file on tmpfs of a multiple of 2 MiB, mapped, gone with the object. `fill` is copied to
// its beginning; every byte behind it is 0xEE, what an earlier image left there.
class TestSlot {
 public:
  explicit TestSlot(uint64_t image_bytes, std::string_view fill = {});
  TestSlot(const TestSlot&) = delete;
  TestSlot& operator=(const TestSlot&) = delete;

  std::byte* data() { return mapping_->data(); }
  std::span<std::byte> span() { return {mapping_->data(), mapping_->bytes()}; }
  std::string_view text(uint64_t bytes) const;
  bool RestIsUntouched(uint64_t image_bytes) const;
  void Cut(uint64_t bytes);  // the file, under the mapping
  std::unique_ptr<Mapping> TakeMapping() { return std::move(mapping_); }
  File& file() { return *file_; }

 private:
  std::unique_ptr<File> file_;
  std::unique_ptr<Mapping> mapping_;
};

std::string ContentOf(const std::string& path);
void FlipBitIn(File& file, uint64_t byte);

// A file that passes all on to another; parts are overridden by what tests need.
class ForwardingFile : public File {
 public:
  explicit ForwardingFile(std::unique_ptr<File> file) : file_(std::move(file)) {}
  int fd() const override { return file_->fd(); }
  const std::string& path() const override { return file_->path(); }
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override {
    return file_->ReadAt(offset, out);
  }
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override {
    return file_->WriteAt(offset, data);
  }
  absl::Status Allocate(uint64_t offset, uint64_t bytes) override {
    return file_->Allocate(offset, bytes);
  }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }
  absl::Status SyncData() override { return file_->SyncData(); }
  absl::Status Sync() override { return file_->Sync(); }
  absl::StatusOr<FileInfo> Info() override { return file_->Info(); }
  absl::Status SetOwner(uint32_t uid, uint32_t gid) override { return file_->SetOwner(uid, gid); }
  absl::Status SetMode(uint32_t mode) override { return file_->SetMode(mode); }
  absl::StatusOr<DirectAlignment> Alignment() override { return file_->Alignment(); }
  absl::StatusOr<bool> NobodyElseHasIt() override { return file_->NobodyElseHasIt(); }

 protected:
  File& inner() { return *file_; }

 private:
  std::unique_ptr<File> file_;
};

// Opened once, for all who wait.
class Gate {
 public:
  void Open();
  void Pass();                     // waits until it is open
  void WaitForWaiting(int count);  // until so many are in Pass
  int waiting();

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  bool open_ = false;
  int waiting_ = 0;
};

// Its writes (and reads) from `hang_from` on never return before the gate is open: a mount that
// hangs.
class HangingFile : public ForwardingFile {
 public:
  HangingFile(std::unique_ptr<File> file, std::shared_ptr<Gate> gate, uint64_t hang_from = 0)
      : ForwardingFile(std::move(file)), gate_(std::move(gate)), hang_from_(hang_from) {}
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override;

 private:
  const std::shared_ptr<Gate> gate_;
  const uint64_t hang_from_;
};

// Calls `before` ahead of every read and write, with the call's number; an error is the call's.
class WatchedFile : public ForwardingFile {
 public:
  using Before = std::function<absl::Status(int)>;
  WatchedFile(std::unique_ptr<File> file, Before before)
      : ForwardingFile(std::move(file)), before_(std::move(before)) {}
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> out) override;
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> data) override;

 private:
  absl::Status Count();
  const Before before_;
  std::mutex mutex_;
  int calls_ = 0;
};

// Waits until `condition` holds; false after a minute.
bool Eventually(const std::function<bool()>& condition);
size_t CountThreads();
size_t CountDescriptors();

template <class T>
T ValueOf(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << ToString(value.status());
  return *std::move(value);
}

}  // namespace holdfast
