// In which order devices are used: those near the memory first.
//
//   for (const size_t device : NearestFirst(numa_nodes, NumaNodeOf(into.data()))) …
#pragma once

#include <cstddef>
#include <vector>

namespace holdfast {

// Where the page lies; -1: nobody can say. It is touched before.
int NumaNodeOf(const void* at);

// The numbers of the devices on that node, then those of which it is not known, then the others;
// each in their own order.
std::vector<size_t> NearestFirst(const std::vector<int>& device_nodes, int memory_node);

}  // namespace holdfast
