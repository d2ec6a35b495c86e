#include "bench/plain_copy.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace holdfast::bench {
namespace {

void LibcCopy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

#if defined(__x86_64__)
constexpr size_t kPage = 4096;

// Streams `pages` neighbouring pages side by side: more DRAM rows open at a time than one long run
// keeps busy.
template <size_t pages>
__attribute__((target("avx512f"))) void StreamPagesAvx512(void* to, const void* from,
                                                          size_t bytes) {
  auto* d = static_cast<char*>(to);
  const auto* s = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (64 - reinterpret_cast<uintptr_t>(d) % 64) % 64);
  std::memcpy(d, s, head);
  d += head;
  s += head;
  bytes -= head;
  for (; bytes >= pages * kPage; d += pages * kPage, s += pages * kPage, bytes -= pages * kPage) {
    for (size_t i = 0; i < kPage; i += 64) {
      for (size_t p = 0; p < pages; ++p) {
        const __m512i v = _mm512_loadu_si512(s + p * kPage + i);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(d + p * kPage + i), v);
      }
    }
  }
  _mm_sfence();
  std::memcpy(d, s, bytes);
}

template <size_t pages>
__attribute__((target("avx2"))) void StreamPagesAvx2(void* to, const void* from, size_t bytes) {
  auto* d = static_cast<char*>(to);
  const auto* s = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (32 - reinterpret_cast<uintptr_t>(d) % 32) % 32);
  std::memcpy(d, s, head);
  d += head;
  s += head;
  bytes -= head;
  for (; bytes >= pages * kPage; d += pages * kPage, s += pages * kPage, bytes -= pages * kPage) {
    for (size_t i = 0; i < kPage; i += 64) {
      for (size_t p = 0; p < pages; ++p) {
        const char* source = s + p * kPage + i;
        char* target = d + p * kPage + i;
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), b);
      }
    }
  }
  _mm_sfence();
  std::memcpy(d, s, bytes);
}
#endif

// The pieces, cut so that every thread gets the same number of bytes.
std::vector<std::vector<Piece>> Shares(const std::vector<Piece>& pieces, int threads) {
  size_t total = 0;
  for (const Piece& piece : pieces) {
    total += piece.bytes;
  }
  const size_t share_bytes = (total / static_cast<size_t>(threads) + 4095) / 4096 * 4096;
  std::vector<std::vector<Piece>> shares(static_cast<size_t>(threads));
  size_t share = 0;
  size_t room = share_bytes;
  for (Piece piece : pieces) {
    while (piece.bytes > 0) {
      const bool last = share + 1 == shares.size();
      const size_t take = last ? piece.bytes : std::min(piece.bytes, room);
      shares[share].push_back({piece.to, piece.from, take});
      piece = {static_cast<char*>(piece.to) + take, static_cast<const char*>(piece.from) + take,
               piece.bytes - take};
      room -= last ? 0 : take;
      if (!last && room == 0) {
        ++share;
        room = share_bytes;
      }
    }
  }
  return shares;
}

}  // namespace

const std::vector<PlainCopy>& PlainCopies() {
  static const std::vector<PlainCopy> copies = [] {
    std::vector<PlainCopy> all = {{"libc", LibcCopy}};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
      all.push_back({"streaming avx512 x4 pages", StreamPagesAvx512<4>});
    }
    if (__builtin_cpu_supports("avx2")) {
      all.push_back({"streaming avx2 x4 pages", StreamPagesAvx2<4>});
      all.push_back({"streaming avx2 x2 pages", StreamPagesAvx2<2>});
    }
#endif
    return all;
  }();
  return copies;
}

double TimePlainCopy(const PlainCopy& copy, const std::vector<Piece>& pieces, int threads) {
  const std::vector<std::vector<Piece>> shares = Shares(pieces, threads);
  const auto run = [&copy](const std::vector<Piece>& share) {
    for (const Piece& piece : share) {
      copy.copy(piece.to, piece.from, piece.bytes);
    }
  };
  std::barrier start(threads);
  std::barrier finish(threads);
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) {
    others.emplace_back([&, t] {
      start.arrive_and_wait();
      run(shares[static_cast<size_t>(t)]);
      finish.arrive_and_wait();
    });
  }
  start.arrive_and_wait();
  const auto began = std::chrono::steady_clock::now();
  run(shares[0]);
  finish.arrive_and_wait();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  for (std::thread& other : others) {
    other.join();
  }
  return took.count();
}

}  // namespace holdfast::bench
