// The page in which a training process says that its network is busy (docs/protocol.md §21): made
// by ckptd, one for each connection that asks for one, written by the client, read by ckptd. Both
// map it; at its begin is one word.
//
//   flag->store(NetworkFlag{.stretch = 7, .open = 2}.Word());
//   const NetworkFlag said = NetworkFlag::Of(flag->load());
//
// A plain value.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace holdfast {

inline constexpr size_t kNetworkFlagPageBytes = 4096;

struct NetworkFlag {
  uint32_t stretch = 0;  // one more whenever `open` comes to be more than 0; it may wrap
  uint32_t open = 0;     // windows, of all threads; 0: not busy

  static NetworkFlag Of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
  }
  uint64_t Word() const { return uint64_t{stretch} << 32 | open; }
};

using NetworkFlagWord = std::atomic<uint64_t>;
static_assert(NetworkFlagWord::is_always_lock_free && sizeof(NetworkFlagWord) == 8);

}  // namespace holdfast
