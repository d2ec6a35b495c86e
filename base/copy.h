// Copying memory to memory at the machine's speed, digesting on the way.
//
//   for each block of at most kDigestBlockBytes:
//     digests.push_back(CopyAndDigest(slot + offset, tensor + offset, block));
//
// The fused kernel loads each cache line once: it folds it into the CRC and streams it out
// (non-temporal stores), four lanes side by side; short ranges go through the cache. Chosen once at
// run time from what the CPU offers; every kernel gives the same bytes and digests. Thread-safe, no
// state; what was copied is visible to whoever sees a store that the caller makes afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace holdfast {

// Copies and returns CRC-64/XZ of the bytes. Ranges must not overlap; any alignment. Meant for one
// digest block (≤ 1 MiB) a call, correct for any length. If `from` changes meanwhile, the digest
// may be that of other bytes than were copied.
uint64_t CopyAndDigest(void* to, const void* from, size_t bytes);

// Copies only; streaming where that beats libc.
void StreamCopy(void* to, const void* from, size_t bytes);

// The kernels that this CPU can run, fastest first ("avx512", "avx2", "portable"), the one in use
// (the fastest), and another choice for tests and benchmarks, process-wide: false if unknown or
// unsupported here.
std::vector<std::string_view> CopyKernelNames();
std::string_view CopyKernelName();
bool SelectCopyKernelForTesting(std::string_view name);

}  // namespace holdfast
