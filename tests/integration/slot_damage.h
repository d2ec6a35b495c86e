// Bits that flip in a node's memory.
#pragma once

#include <cstdint>
#include <string>

namespace holdfast {

// Flips one of the first tensor of what the slots in that directory have of a shard; "" or what
// kept it from that.
std::string DamageSlot(const std::string& memory_dir, uint32_t rank, uint64_t step);

}  // namespace holdfast
