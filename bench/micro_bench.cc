// The inner loops alone, for whoever tunes them: holdfast_micro_bench [--benchmark_filter=…].
// Absolute figures drift with the machine; what Holdfast is judged by are the ratios of
// scripts/bench.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "base/copy.h"
#include "base/digest.h"
#include "tiers/image/layout.h"
#include "tiers/image/record.h"

namespace holdfast {
namespace {

void BytesPerSecond(benchmark::State& state, size_t bytes) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(bytes));
}

void BM_Crc64(benchmark::State& state) {
  const std::string data(static_cast<size_t>(state.range(0)), 'x');
  for (auto _ : state) {
    benchmark::DoNotOptimize(Crc64(data));
  }
  BytesPerSecond(state, data.size());
}
BENCHMARK(BM_Crc64)->Arg(64)->Arg(4096)->Arg(1 << 20);

void BM_Crc64Combine(benchmark::State& state) {
  uint64_t crc = 1;
  for (auto _ : state) {
    benchmark::DoNotOptimize(crc = Crc64Combine(crc, 42, kDigestBlockBytes));
  }
}
BENCHMARK(BM_Crc64Combine);

// Source and target larger than the caches, walked block by block.
void BM_CopyAndDigest(benchmark::State& state) {
  const auto block = static_cast<size_t>(state.range(0));
  constexpr size_t kArena = size_t{256} << 20;
  static std::vector<char> from(kArena, 'a');
  static std::vector<char> to(kArena, 'b');
  size_t offset = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(CopyAndDigest(to.data() + offset, from.data() + offset, block));
    offset = offset + 2 * block <= kArena ? offset + block : 0;
  }
  BytesPerSecond(state, block);
  state.SetLabel(std::string(CopyKernelName()));
}
BENCHMARK(BM_CopyAndDigest)->Arg(4096)->Arg(64 << 10)->Arg(1 << 20);

std::vector<Slice> NamedSlices(int64_t count) {
  std::vector<Slice> slices(static_cast<size_t>(count));
  for (size_t i = 0; i < slices.size(); ++i) {
    slices[i].name = "model.layers." + std::to_string(i) + ".weight";
    slices[i].dtype = DType::kBF16;
    slices[i].global_shape = {1024, 64};
  }
  return slices;
}

void BM_PlanImage(benchmark::State& state) {
  const std::vector<Slice> slices = NamedSlices(state.range(0));
  for (auto _ : state) {
    benchmark::DoNotOptimize(PlanImage(slices, 0).ok());
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
}
BENCHMARK(BM_PlanImage)->Arg(100)->Arg(10'000)->Arg(100'000)->Unit(benchmark::kMillisecond);

// What a restore or a view does before it touches the image.
void BM_DecodeRecord(benchmark::State& state) {
  const ImagePlan plan = *PlanImage(NamedSlices(state.range(0)), 0);
  ShardRecord record;
  record.id = {*JobUuid::FromBytes("0123456789abcdef"), 1, 1, 0};
  record.job_name = "bench";
  record.world_size = 1;
  record.generation = 1;
  record.image_bytes = plan.layout.image_bytes;
  record.header_bytes = plan.layout.header_bytes;
  record.layout_hash = plan.layout_hash;
  record.layout_bytes = plan.layout_bytes;
  record.digests.resize(DigestCount(plan.layout));
  const std::string file = EncodeRecord(record);
  for (auto _ : state) {
    benchmark::DoNotOptimize(DecodeRecordAndLayout(file).ok());
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * state.range(0));
}
BENCHMARK(BM_DecodeRecord)->Arg(100)->Arg(10'000)->Arg(100'000)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace holdfast

BENCHMARK_MAIN();
