#include "tiers/peer/device_order.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <numeric>

namespace holdfast {

int NumaNodeOf(const void* at) {
  static_cast<void>(*static_cast<const volatile char*>(at));
  int node = -1;
  const int64_t failed =
      ::syscall(SYS_get_mempolicy, &node, nullptr, 0, at, MPOL_F_NODE | MPOL_F_ADDR);
  return failed != 0 ? -1 : node;
}

std::vector<size_t> NearestFirst(const std::vector<int>& device_nodes, int memory_node) {
  std::vector<size_t> order(device_nodes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto distance = [&](size_t device) {
    const int node = device_nodes[device];
    return node < 0 || memory_node < 0 ? 1 : node == memory_node ? 0 : 2;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return distance(a) < distance(b); });
  return order;
}

std::vector<int> PairDevices(const std::vector<std::string>& ours,
                             const std::vector<std::string>& theirs,
                             const std::vector<uint32_t>& with_memory) {
  std::vector<int> pairs(ours.size(), -1);
  std::deque<uint32_t> left(with_memory.begin(), with_memory.end());
  for (size_t i = 0; i < ours.size(); ++i) {
    const auto same = std::find_if(left.begin(), left.end(), [&](uint32_t device) {
      return theirs[device] == ours[i] && !ours[i].empty();
    });
    if (same != left.end()) {
      pairs[i] = static_cast<int>(*same);
      left.erase(same);
    }
  }
  for (int& pair : pairs) {
    if (pair < 0 && !left.empty()) {
      pair = static_cast<int>(left.front());
      left.pop_front();
    }
  }
  return pairs;
}

}  // namespace holdfast
