// In which order devices are used, those near the memory first, and with which of the peer's.
//
//   for (const size_t device : NearestFirst(numa_nodes, NumaNodeOf(into.data()))) …
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace holdfast {

// Where the page lies; -1: nobody can say. It is touched before.
int NumaNodeOf(const void* at);

// The numbers of the devices on that node, then those of which it is not known, then the others;
// each in their own order.
std::vector<size_t> NearestFirst(const std::vector<int>& device_nodes, int memory_node);

// For each of our devices, by the names that they have: which of the peer's that is read from, by
// its number there, where each is one that has the memory. The one of the same name, as rails are
// cabled; else those that are left over, in order. Ours that have none are -1.
std::vector<int> PairDevices(const std::vector<std::string>& ours,
                             const std::vector<std::string>& theirs,
                             const std::vector<uint32_t>& with_memory);

}  // namespace holdfast
