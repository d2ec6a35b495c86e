// Saves one step of a job of two ranks whose tensors are boxes of larger ones, waits until it is
// whole on the drives and in the remote directory, and ends: what the readers in Python open. In a
// larger world each of the two is there several times, and only the first have objects.
//
//   holdfast_test_save_sharded <socket> <job> <rank> <step> [world size]
//
// Element i of the whole tensor, in row-major order, is (seed * 31 + i) % 251, whatever its type.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "holdfast/holdfast.h"

namespace {

using holdfast::Milliseconds;
using holdfast::Tensor;
using holdfast::Type;

constexpr Milliseconds kDeadline{60'000};

void PutElement(Type type, uint64_t value, std::vector<char>& out) {
  const auto put = [&out](auto number) {
    const char* bytes = reinterpret_cast<const char*>(&number);
    out.insert(out.end(), bytes, bytes + sizeof(number));
  };
  const auto number = static_cast<float>(value);
  switch (type) {
    case Type::kF32:
      return put(number);
    case Type::kF64:
      return put(static_cast<double>(value));
    case Type::kI64:
      return put(static_cast<int64_t>(value));
    case Type::kI32:
      return put(static_cast<int32_t>(value));
    case Type::kU8:
      return put(static_cast<uint8_t>(value));
    default: {  // BF16: the upper half of a float; numbers up to 250 fit exactly
      uint32_t bits = 0;
      std::memcpy(&bits, &number, sizeof(bits));
      return put(static_cast<uint16_t>(bits >> 16));
    }
  }
}

struct Shards {
  std::vector<std::vector<char>> memory;  // of the tensors
  holdfast::State state;

  // Rows [row, row + rows) and columns [column, column + columns) of a matrix.
  void AddBox(const std::string& name, Type type, uint64_t seed, std::vector<uint64_t> shape,
              std::vector<uint64_t> offset, std::vector<uint64_t> part) {
    std::vector<char> bytes;
    for (uint64_t r = offset[0]; r < offset[0] + part[0]; ++r) {
      for (uint64_t c = offset[1]; c < offset[1] + part[1]; ++c) {
        PutElement(type, (seed * 31 + r * shape[1] + c) % 251, bytes);
      }
    }
    memory.push_back(std::move(bytes));
    state.tensors.push_back(Tensor::Box(name, type, shape, offset, part, memory.back().data()));
  }
  void AddWhole(const std::string& name, Type type, uint64_t seed, std::vector<uint64_t> shape) {
    uint64_t elements = 1;
    for (const uint64_t extent : shape) {
      elements *= extent;
    }
    std::vector<char> bytes;
    for (uint64_t i = 0; i < elements; ++i) {
      PutElement(type, (seed * 31 + i) % 251, bytes);
    }
    memory.push_back(std::move(bytes));
    state.tensors.emplace_back(name, type, shape, memory.back().data());
  }
};

int Failed(const char* what, const holdfast::Status& status) {
  std::fprintf(stderr, "%s: %s: %s\n", what, holdfast::CodeName(status.code()),
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) {
    std::fprintf(stderr, "usage: %s <socket> <job> <rank> <step> [world size]\n", argv[0]);
    return 2;
  }
  const auto own_rank = static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10));
  const auto world_size =
      argc == 6 ? static_cast<uint32_t>(std::strtoul(argv[5], nullptr, 10)) : 2u;
  const uint32_t rank = own_rank % 2;  // whose part it has
  Shards shards;
  shards.AddBox("model.rows", Type::kF32, 1, {10, 6}, {rank * 5, 0}, {5, 6});
  shards.AddBox("model.columns", Type::kBF16, 2, {4, 9}, {0, rank == 0 ? 0u : 4u},
                {4, rank == 0 ? 4u : 5u});
  shards.AddBox("optimizer.moment", Type::kF64, 3, {700, 300}, {rank == 0 ? 0u : 300u, 0},
                {rank == 0 ? 300u : 400u, 300});
  shards.AddBox("ids", Type::kI64, 4, {6, 2}, {rank * 3, 0}, {3, 2});
  // What one rank has alone, as a whole.
  shards.AddWhole(rank == 0 ? "embedding" : "head", rank == 0 ? Type::kI32 : Type::kU8, 5 + rank,
                  rank == 0 ? std::vector<uint64_t>{3, 2, 4} : std::vector<uint64_t>{17});
  if (own_rank < 2) {
    shards.state.objects.push_back({.name = "progress", .bytes = "{\"step\": 1}"});
  }

  auto job = holdfast::Job::Open({.job = argv[2],
                                  .rank = own_rank,
                                  .world_size = world_size,
                                  .socket = argv[1],
                                  .copy_threads = 1,
                                  .open_deadline = kDeadline});
  if (!job.ok()) {
    return Failed("open", job.status());
  }
  const auto restored = (*job)->Restore(shards.state, {.deadline = kDeadline});
  if (!restored.ok() && restored.status().code() != holdfast::Code::kNothingToRestore) {
    return Failed("restore", restored.status());
  }
  const auto handle = (*job)->SaveAsync(std::strtoull(argv[4], nullptr, 10), shards.state);
  for (const holdfast::Stage stage : {holdfast::Stage::kNvme, holdfast::Stage::kRemote}) {
    const holdfast::Status whole = handle->Wait(stage, kDeadline);
    if (!whole.ok()) {
      return Failed(holdfast::StageName(stage), whole);
    }
  }
  std::puts("ok");
  return 0;
}
