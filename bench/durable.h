// What the cases about durable tiers share: a shard in a slot on tmpfs, with its record, and a
// directory on the file system that is judged.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "bench/cases.h"
#include "tiers/image/record.h"

namespace holdfast::bench {

// Ends the program with a message unless `status` is OK.
void MustBeOk(const absl::Status& status, const char* doing);
template <typename T>
T MustBeOk(absl::StatusOr<T> value, const char* doing) {
  MustBeOk(value.status(), doing);
  return *std::move(value);
}

// Not zeros, and not alike: neither the drive nor the hypervisor should find anything to save.
void FillWithNoise(std::span<std::byte> bytes);

// An image of about `bytes` in tensors of 16 MiB, in a populated slot of its own.
class ShardInMemory {
 public:
  explicit ShardInMemory(uint64_t bytes,
                         const std::function<void(std::span<std::byte>)>& fill = FillWithNoise);
  ShardInMemory(const ShardInMemory&) = delete;
  ShardInMemory& operator=(const ShardInMemory&) = delete;

  std::span<std::byte> memory() const { return {mapping_->data(), mapping_->bytes()}; }
  const std::shared_ptr<const RecordAndLayout>& image() const { return image_; }
  uint64_t bytes() const { return image_->record.image_bytes; }

 private:
  std::unique_ptr<File> file_;
  std::unique_ptr<Mapping> mapping_;
  std::shared_ptr<const RecordAndLayout> image_;
};

// A new directory in `parent`, gone with all that is in it. Ends the program when `bytes` are not
// free there.
class ScratchDirectory {
 public:
  ScratchDirectory(const std::string& parent, uint64_t bytes);
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  std::string Path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Open for direct I/O, with what it wants to be aligned to.
struct DirectFile {
  std::unique_ptr<File> file;
  uint32_t alignment;
};
DirectFile OpenDirect(const std::string& path, OpenMode mode);

// Of this process, the kernel's workers for it included.
double ProcessCpuSeconds();
// What such seconds come to for as many bytes as the bar is about.
Row CpuRow(const std::string& name, uint64_t bytes, const std::vector<double>& seconds);
// Resident memory that belongs to no file and no tmpfs.
uint64_t PrivateBytes();

}  // namespace holdfast::bench
