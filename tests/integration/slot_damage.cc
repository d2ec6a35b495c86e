#include "tests/integration/slot_damage.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/unique_fd.h"
#include "tiers/image/record.h"

namespace holdfast {

std::string DamageSlot(const std::string& memory_dir, uint32_t rank, uint64_t step) {
  for (const auto& entry : std::filesystem::directory_iterator(memory_dir)) {
    const std::string path = entry.path().string();
    if (entry.path().extension() != ".record") {
      continue;
    }
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    const auto record = DecodeRecordAndLayout(bytes);
    if (!record.ok()) {
      return path + ": " + std::string(record.status().message());
    }
    if (record->record.id.rank != rank || record->record.id.step != step) {
      continue;
    }
    const std::string image = path.substr(0, path.size() - (sizeof(".record") - 1));
    const auto offset = static_cast<off_t>(record->layout.slices[0].image_offset);
    const UniqueFd fd(::open(image.c_str(), O_RDWR | O_CLOEXEC));
    char byte = 0;
    if (!fd.valid() || ::pread(fd.get(), &byte, 1, offset) != 1) {
      return image + " cannot be read";
    }
    byte = static_cast<char>(byte ^ 1);
    return ::pwrite(fd.get(), &byte, 1, offset) == 1 ? "" : image + " cannot be written";
  }
  return memory_dir + " has no copy of rank " + std::to_string(rank);
}

}  // namespace holdfast
