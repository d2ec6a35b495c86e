#include "server/runtime/tiers/compression_choice.h"

#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/fault_guard.h"
#include "base/status.h"
#include "base/units.h"
#include "recovery/policy.h"
#include "tiers/compressed/sample.h"

namespace holdfast {
namespace {

absl::Status FromMemory(RevocableMemory& memory, uint64_t offset, std::span<std::byte> into) {
  const RevocableMemory::Access access = memory.Enter();
  if (!access) {
    return absl::CancelledError("its slot was taken back");
  }
  std::byte* const from = access.data() + offset;
  const FaultGuard guard(from, into.size());
  if (!guard.ok()) {
    return absl::ResourceExhaustedError("too many guarded mappings");
  }
  std::memcpy(into.data(), from, into.size());
  return guard.faulted() ? absl::DataLossError("its slot was cut short") : absl::OkStatus();
}

// Of an image that is gathered: what of it lies where.
absl::Status Gathered(RevocableMemory& memory, const ImageMap& map, uint64_t offset,
                      std::span<std::byte> into) {
  absl::Status status;
  map.ForEach(offset, into.size(),
              [&](uint64_t at, uint64_t bytes, std::optional<uint32_t> source, uint64_t from) {
                const std::span<std::byte> to =
                    into.subspan(static_cast<size_t>(at - offset), static_cast<size_t>(bytes));
                if (source) {
                  status = FromMemory(memory, from, to);
                } else {
                  std::memcpy(to.data(), map.header.data() + from, to.size());
                }
                return status.ok();
              });
  return status;
}

// Of a file that may be open for direct I/O: stretches are aligned for that, but in tiny images.
absl::Status FromFile(File& file, size_t alignment, uint64_t offset, std::span<std::byte> into) {
  if (into.size() % alignment != 0) {
    return absl::OutOfRangeError("less than a block of direct I/O");
  }
  size_t room = into.size() + alignment;
  const std::unique_ptr<std::byte[]> buffer(new std::byte[room]);
  void* at = buffer.get();
  at = std::align(alignment, into.size(), at, room);
  const std::span<std::byte> aligned(static_cast<std::byte*>(at), into.size());
  HF_RETURN_IF_ERROR(file.ReadAt(offset, aligned));
  std::memcpy(into.data(), aligned.data(), into.size());
  return absl::OkStatus();
}

}  // namespace

std::optional<int> ZstdLevelOf(const FlushShard& action, const SampledSource& source,
                               uint64_t image_bytes, Operation& operation) {
  if (action.zstd_level == 0 || action.zstd_level > kZstdLevelMax) {
    return std::nullopt;
  }
  const auto level = static_cast<int>(action.zstd_level);
  std::optional<Operation::SourceCall> call;
  if (source.file != nullptr) {
    call.emplace(operation, absl::StrCat("read '", source.file->path(), "'"));
  }
  const absl::StatusOr<CompressionSample> sample =
      SampleCompression(image_bytes, level, [&](uint64_t offset, std::span<std::byte> into) {
        return source.memory == nullptr   ? FromFile(*source.file, source.alignment, offset, into)
               : source.gather == nullptr ? FromMemory(*source.memory, offset, into)
                                          : Gathered(*source.memory, *source.gather, offset, into);
      });
  return sample.ok() && sample->worth_it() ? std::optional(level) : std::nullopt;
}

}  // namespace holdfast
