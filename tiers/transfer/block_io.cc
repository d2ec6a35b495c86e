#include "tiers/transfer/block_io.h"

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/env_checks.h"
#include "base/status.h"
#include "tiers/transfer/block_io_impl.h"

namespace holdfast {

void BlockIo::Drain() {
  while (in_flight() > 0) {
    Wait();
  }
}

std::string_view BlockOpName(BlockOp op) {
  return op == BlockOp::kWrite ? "write" : "read";
}

absl::Status FileEndsTooSoon(const BlockRequest& request, size_t got) {
  const size_t wanted = request.bytes_min != 0 ? request.bytes_min : request.bytes;
  return absl::OutOfRangeError(absl::StrCat("read '", request.file->path(), "': wanted ", wanted,
                                            " bytes at offset ", request.offset,
                                            ", the file ends after ", got));
}

absl::Status CheckBlockRequest(const BlockRequest& request) {
  if (request.file == nullptr || request.memory == nullptr || request.bytes == 0) {
    return absl::InvalidArgumentError("block request without file, memory or length");
  }
  // The kernel moves at most 2 GiB less a page in one call; nobody wants pieces of that size.
  if (request.bytes > (size_t{1} << 30) || request.bytes_min > request.bytes ||
      (request.op == BlockOp::kWrite && request.bytes_min != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("block request on '", request.file->path(),
                                                   "': ", request.bytes, " bytes, of them ",
                                                   request.bytes_min, " at least: not to be had"));
  }
  return CheckRange(BlockOpName(request.op), request.file->path(), request.offset, request.bytes);
}

absl::StatusOr<std::unique_ptr<BlockIo>> CreateBlockIo(const BlockIoOptions& options) {
  if (options.depth == 0 || options.depth > kBlockIoDepthMax) {
    return absl::InvalidArgumentError(absl::StrCat("block I/O: a depth of ", options.depth,
                                                   " is not within 1 to ", kBlockIoDepthMax));
  }
  if (options.mode == BlockIoMode::kThreads) {
    return CreateThreadBlockIo(options, "");
  }
  absl::StatusOr<std::unique_ptr<BlockIo>> ring = CreateUringBlockIo(options);
  if (ring.ok() || options.mode == BlockIoMode::kIoUring) {
    return ring;
  }
  return CreateThreadBlockIo(options, Message(ring.status()));
}

}  // namespace holdfast
