#include "client-lib/src/slot_copies.h"

#include <sys/mman.h>

#include <cerrno>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/fault_guard.h"
#include "client-lib/src/errors.h"
#include "client-lib/src/fork_guard.h"

namespace holdfast::client {
namespace {

class SlotCopies : public StagedTensors {
 public:
  SlotCopies(std::byte* memory, size_t size) : memory_(memory), size_(size) {
    guard_.emplace(memory, size);
  }
  ~SlotCopies() override {
    guard_.reset();          // before something else is mapped there
    if (!owner_.forked()) {  // there it was never mapped
      ::munmap(memory_, size_);
    }
  }
  SlotCopies(const SlotCopies&) = delete;
  SlotCopies& operator=(const SlotCopies&) = delete;

  const std::vector<std::span<const std::byte>>& bytes() const override { return bytes_; }
  bool guarded() const { return guard_->ok(); }
  void Add(size_t offset, size_t bytes) { bytes_.push_back({memory_ + offset, bytes}); }

 private:
  const ForkOwner owner_;
  std::byte* const memory_;
  const size_t size_;
  std::optional<FaultGuard> guard_;
  std::vector<std::span<const std::byte>> bytes_;
};

}  // namespace

Result<std::shared_ptr<const StagedTensors>> MapCopies(
    const SlotMapping& slot, const std::vector<std::span<const std::byte>>& copies) {
  // Length 0: not moved but made once more, of the same pages; as little inherited by children.
  void* const memory = ::mremap(slot.data(), 0, slot.bytes(), MREMAP_MAYMOVE);
  if (memory == MAP_FAILED) {
    return SystemError(Code::kInternal, errno, "map a slot once more");
  }
  const auto mapped = std::make_shared<SlotCopies>(static_cast<std::byte*>(memory), slot.bytes());
  if (!mapped->guarded()) {
    return Status(Code::kInternal,
                  absl::StrCat("map a slot once more: more than ", kFaultGuardsMax,
                               " slots and files of copies are mapped in this process"));
  }
  if (::mprotect(memory, slot.bytes(), PROT_READ) != 0) {
    return SystemError(Code::kInternal, errno, "map a slot once more");
  }
  for (const std::span<const std::byte> copy : copies) {
    mapped->Add(static_cast<size_t>(copy.data() - slot.data()), copy.size());
  }
  return std::shared_ptr<const StagedTensors>(mapped);
}

}  // namespace holdfast::client
