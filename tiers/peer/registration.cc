#include "tiers/peer/registration.h"

#include <rdma/fi_errno.h>
#include <sys/random.h>
#include <sys/resource.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/units.h"
#include "tiers/peer/fabric_device.h"

namespace holdfast {
namespace {

// Not split further when the device refuses it.
constexpr uint64_t kPieceBytesMin = 16 * kMiB;
constexpr int kKeyTries = 8;

uint64_t RandomKey(size_t key_bytes) {
  uint64_t key = 0;
  static_cast<void>(::getrandom(&key, sizeof key, 0));
  return key_bytes >= sizeof key ? key : key & ((uint64_t{1} << (8 * key_bytes)) - 1);
}

uint64_t AccessBits(MemoryAccess access) {
  const auto has = [access](MemoryAccess bit) {
    return (static_cast<unsigned>(access) & static_cast<unsigned>(bit)) != 0;
  };
  return (has(MemoryAccess::kReadByPeers) ? FI_REMOTE_READ : 0) |
         (has(MemoryAccess::kFilledByReads) ? FI_READ : 0);
}

std::string MemlockLimit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : FormatBytes(limit.rlim_cur);
}

}  // namespace

struct Registration::Piece {
  uint64_t offset;
  uint64_t bytes;
  FabricObject<fid_mr> handle;
};

Registration::Registration(const std::vector<std::shared_ptr<FabricDevice>>& devices,
                           std::span<std::byte> memory)
    : devices_(devices), memory_(memory), pieces_(devices.size()) {}

Registration::~Registration() = default;

absl::StatusOr<std::shared_ptr<Registration>> Registration::Make(
    const std::vector<std::shared_ptr<FabricDevice>>& devices, std::span<std::byte> memory,
    MemoryAccess access, uint64_t piece_bytes_max) {
  if (memory.empty() || piece_bytes_max == 0 ||
      memory.size() / piece_bytes_max >= kRemoteRegionsMax / devices.size()) {
    return absl::InvalidArgumentError(absl::StrCat("register ", memory.size(),
                                                   " bytes in pieces of ", piece_bytes_max,
                                                   ": nothing, or too many"));
  }
  std::shared_ptr<Registration> made(new Registration(devices, memory));
  if ((static_cast<unsigned>(access) & static_cast<unsigned>(MemoryAccess::kReadByPeers)) != 0) {
    made->guard_.emplace(memory.data(), memory.size());
    if (!made->guard_->ok()) {
      return absl::ResourceExhaustedError("register: too many guarded mappings");
    }
  }
  for (size_t device = 0; device < devices.size(); ++device) {
    absl::Status added;
    for (size_t at = 0; at < memory.size() && added.ok(); at += piece_bytes_max) {
      const size_t bytes = std::min<uint64_t>(piece_bytes_max, memory.size() - at);
      added = made->Add(device, memory.subspan(at, bytes), access);
    }
    if (!added.ok()) {
      made->LeaveOut(device);
      made->left_out_ = std::move(added);
    }
  }
  if (made->regions_.empty()) {
    return made->left_out_;
  }
  return made;
}

void Registration::LeaveOut(size_t device) {
  pieces_[device].clear();
  std::erase_if(regions_, [device](const RemoteRegion& region) { return region.device == device; });
}

absl::Status Registration::Add(size_t device_index, std::span<std::byte> piece,
                               MemoryAccess access) {
  FabricDevice& device = *devices_[device_index];
  const bool key_is_providers = (device.mr_mode() & FI_MR_PROV_KEY) != 0;
  fid_mr* handle = nullptr;
  int result = -FI_ENOKEY;
  for (int tries = 0; result == -FI_ENOKEY && tries < kKeyTries; ++tries) {
    const uint64_t key = key_is_providers ? 0 : RandomKey(device.info().domain_attr->mr_key_size);
    result = ::fi_mr_reg(device.domain(), piece.data(), piece.size(), AccessBits(access), 0, key, 0,
                         &handle, nullptr);
  }
  if (result == -FI_EINVAL && piece.size() >= 2 * kPieceBytesMin) {
    const size_t half = RoundUp(piece.size() / 2, kMiB);
    HF_RETURN_IF_ERROR(Add(device_index, piece.first(half), access));
    return Add(device_index, piece.subspan(half), access);
  }
  if (result == -FI_ENOMEM || result == -FI_EAGAIN) {
    return absl::ResourceExhaustedError(
        absl::StrCat("fi_mr_reg '", device.name(), "': ", FormatBytes(piece.size()),
                     " cannot be pinned; this process may pin ", MemlockLimit(),
                     " (ulimit -l): raise it (LimitMEMLOCK=infinity in ckptd's unit, or memlock in "
                     "/etc/security/limits.conf; in Kubernetes the capability IPC_LOCK, to which "
                     "no limit applies, or LimitMEMLOCK of the container runtime's own unit)"));
  }
  if (result != 0) {
    return device.Error(result, "fi_mr_reg");
  }
  const auto offset = static_cast<uint64_t>(piece.data() - memory_.data());
  pieces_[device_index].push_back({offset, piece.size(), FabricObject<fid_mr>(handle)});
  regions_.push_back({.device = static_cast<uint32_t>(device_index),
                      .base = (device.mr_mode() & FI_MR_VIRT_ADDR) != 0
                                  ? static_cast<uint64_t>(reinterpret_cast<uintptr_t>(piece.data()))
                                  : 0,
                      .key = ::fi_mr_key(handle),
                      .bytes = piece.size()});
  return absl::OkStatus();
}

Registration::Local Registration::At(size_t device, const std::byte* at) const {
  const auto offset = static_cast<uint64_t>(at - memory_.data());
  const std::vector<Piece>& pieces = pieces_[device];
  const auto after =
      std::upper_bound(pieces.begin(), pieces.end(), offset,
                       [](uint64_t wanted, const Piece& piece) { return wanted < piece.offset; });
  const Piece& piece = *(after - 1);
  return {::fi_mr_desc(piece.handle.get()),
          static_cast<size_t>(piece.offset + piece.bytes - offset)};
}

}  // namespace holdfast
