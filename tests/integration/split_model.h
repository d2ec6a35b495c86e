// Tensors that are split among ranks in one way or another, every element of which says where it
// is, of which tensor, and of which step: what the tests of resharding save, and compare with a
// reference that knows whole tensors alone.
//
//   Parts parts = PartsOf(model, rank, ranks);
//   Fill(model, parts, step);                        // or StateOf(parts), to restore into
//   EXPECT_EQ(Differs(model, parts, step), "");
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "holdfast/holdfast.h"

namespace holdfast {

using Outcome = Result<holdfast::Restored>;

// A tensor as a whole: every element says where it is, of which tensor, and of which step.
struct Whole {
  std::string name;
  Type type = Type::kF32;
  std::vector<uint64_t> shape;

  uint64_t elements() const {
    return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
  }
  // Of so many bytes; floats that are exact in every type but BF16, which takes its own.
  void Put(uint64_t element, uint64_t step, std::byte* to) const {
    const uint64_t mixed = element * 2654435761u + step * 40503u + std::hash<std::string>{}(name);
    switch (type) {
      case Type::kF32: {
        const auto value = static_cast<float>(mixed % 4093) - 2000;
        std::memcpy(to, &value, sizeof(value));
        return;
      }
      case Type::kI64: {
        std::memcpy(to, &mixed, sizeof(mixed));
        return;
      }
      default: {
        const auto bits = static_cast<uint16_t>(0x3F00 + mixed % 127);
        std::memcpy(to, &bits, sizeof(bits));
      }
    }
  }
};

// Part of a tensor in memory of its own.
struct Held {
  Tensor tensor;
  std::vector<std::byte> bytes;
  std::vector<uint64_t> elements;  // of the whole, in the order in which they lie here
};

inline std::vector<uint64_t> ElementsOfBox(const std::vector<uint64_t>& shape,
                                           const std::vector<uint64_t>& offset,
                                           const std::vector<uint64_t>& extent) {
  std::vector<uint64_t> elements = {0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<uint64_t> next;
    for (const uint64_t before : elements) {
      for (uint64_t i = 0; i < extent[d]; ++i) {
        next.push_back(before * shape[d] + offset[d] + i);
      }
    }
    elements = std::move(next);
  }
  return elements;
}

using Parts = std::vector<std::unique_ptr<Held>>;

inline void Add(Parts& parts, const Whole& whole, Tensor tensor, std::vector<uint64_t> elements) {
  auto held = std::make_unique<Held>();
  held->bytes.resize(elements.size() * TypeBytes(whole.type) + 1);  // never null
  tensor.data = held->bytes.data();
  held->tensor = std::move(tensor);
  held->elements = std::move(elements);
  parts.push_back(std::move(held));
}
inline void AddBox(Parts& parts, const Whole& whole, const std::vector<uint64_t>& offset,
                   const std::vector<uint64_t>& extent) {
  Add(parts, whole, Tensor::Box(whole.name, whole.type, whole.shape, offset, extent, nullptr),
      ElementsOfBox(whole.shape, offset, extent));
}
inline void AddFlat(Parts& parts, const Whole& whole, uint64_t start, uint64_t length) {
  std::vector<uint64_t> elements(length);
  std::iota(elements.begin(), elements.end(), start);
  Add(parts, whole, Tensor::Flat(whole.name, whole.type, whole.shape, start, length, nullptr),
      std::move(elements));
}
inline void AddWhole(Parts& parts, const Whole& whole) {
  std::vector<uint64_t> elements(whole.elements());
  std::iota(elements.begin(), elements.end(), uint64_t{0});
  Add(parts, whole, Tensor(whole.name, whole.type, whole.shape, nullptr), std::move(elements));
}

// From the first to behind the last of what one of several ranks has of n.
inline std::pair<uint64_t, uint64_t> Share(uint64_t n, uint32_t rank, uint32_t ranks) {
  return {n * rank / ranks, n * (rank + 1) / ranks};
}

// How one tensor is split among ranks.
enum class Split { kRows, kColumns, kFlat, kReplicated };

struct Model {
  std::vector<Whole> wholes;
  std::vector<Split> splits;
};

inline Parts PartsOf(const Model& model, uint32_t rank, uint32_t ranks) {
  Parts parts;
  for (size_t i = 0; i < model.wholes.size(); ++i) {
    const Whole& whole = model.wholes[i];
    const Split split = whole.shape.empty() ? Split::kReplicated : model.splits[i];
    if (split == Split::kReplicated) {
      AddWhole(parts, whole);
      continue;
    }
    if (split == Split::kFlat) {
      const auto [begin, end] = Share(whole.elements(), rank, ranks);
      AddFlat(parts, whole, begin, end - begin);
      continue;
    }
    const size_t axis = split == Split::kRows ? 0 : whole.shape.size() - 1;
    const auto [begin, end] = Share(whole.shape[axis], rank, ranks);
    if (begin == end) {
      continue;  // more ranks than rows: this one has none
    }
    std::vector<uint64_t> offset(whole.shape.size(), 0);
    std::vector<uint64_t> extent = whole.shape;
    offset[axis] = begin;
    extent[axis] = end - begin;
    AddBox(parts, whole, offset, extent);
  }
  return parts;
}

inline const Whole& WholeOf(const Model& model, const std::string& name) {
  return *std::find_if(model.wholes.begin(), model.wholes.end(),
                       [&](const Whole& whole) { return whole.name == name; });
}

inline void Fill(const Model& model, Parts& parts, uint64_t step) {
  for (const auto& held : parts) {
    const Whole& whole = WholeOf(model, held->tensor.name);
    for (size_t i = 0; i < held->elements.size(); ++i) {
      whole.Put(held->elements[i], step, held->bytes.data() + i * TypeBytes(whole.type));
    }
  }
}

inline std::string Differs(const Model& model, const Parts& parts, uint64_t step) {
  for (const auto& held : parts) {
    const Whole& whole = WholeOf(model, held->tensor.name);
    std::byte expected[8];
    for (size_t i = 0; i < held->elements.size(); ++i) {
      whole.Put(held->elements[i], step, expected);
      const size_t size = TypeBytes(whole.type);
      if (std::memcmp(expected, held->bytes.data() + i * size, size) != 0) {
        return whole.name + " element " + std::to_string(held->elements[i]);
      }
    }
  }
  return "";
}

inline State StateOf(const Parts& parts) {
  State state;
  for (const auto& held : parts) {
    state.tensors.push_back(held->tensor);
  }
  return state;
}

inline Model SmallModel() {
  return {{{"embedding", Type::kF32, {23, 10}},
           {"layers.0.w", Type::kBF16, {16, 3, 5}},
           {"layers.0.bias", Type::kF32, {7}},
           {"optimizer.exp_avg", Type::kF32, {23, 10}},
           {"scale", Type::kI64, {}},
           {"empty", Type::kF32, {0, 4}}},
          {Split::kRows, Split::kColumns, Split::kReplicated, Split::kFlat, Split::kReplicated,
           Split::kReplicated}};
}

inline void ExpectAllOk(const std::vector<Outcome>& all, uint32_t from) {
  for (const Outcome& restored : all) {
    ASSERT_TRUE(restored.ok()) << restored.status().message();
    EXPECT_EQ(restored->resharded_from, from);
  }
}

// Random tensors, splits and numbers of ranks.
inline Model RandomModel(std::mt19937_64& random) {
  const auto below = [&](uint64_t n) { return random() % n; };
  Model model;
  for (uint64_t i = 0; i < 1 + below(6); ++i) {
    Whole whole{
        "t" + std::to_string(i), std::vector{Type::kF32, Type::kBF16, Type::kI64}[below(3)], {}};
    for (uint64_t d = below(4); d > 0; --d) {
      whole.shape.push_back(1 + below(19));
    }
    model.wholes.push_back(whole);
    model.splits.push_back(static_cast<Split>(below(4)));
  }
  return model;
}

// Runs it for each rank, each in a thread of its own.
inline void ForAllRanks(uint32_t ranks, const std::function<void(uint32_t rank)>& run) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&run, rank] { run(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Ranks of one job, in this process.
struct SplitRank {
  uint32_t rank = 0;
  uint32_t ranks = 1;
  int launch = 0;
  std::string socket;
};
inline std::unique_ptr<Job> OpenRank(const SplitRank& of) {
  auto job = Job::Open({.job = "elastic",
                        .rank = of.rank,
                        .world_size = of.ranks,
                        .launch = "launch-" + std::to_string(of.launch),
                        .socket = of.socket});
  EXPECT_TRUE(job.ok()) << job.status().message();
  return job.ok() ? *std::move(job) : nullptr;
}
// After the newest step was restored, into nothing.
inline void SaveRank(Job& job, const SplitRank& of, const Model& model, uint64_t step,
                     const std::vector<Object>& objects, const std::vector<Stage>& until,
                     Milliseconds deadline) {
  State nothing;
  RestoreOptions latest{.deadline = deadline};
  latest.merge = [](const std::string&, const std::vector<SavedObject>& saved) {
    return Result<std::string>(saved.front().object.bytes);
  };
  const auto restored = job.Restore(nothing, latest);
  ASSERT_TRUE(restored.ok() || restored.status().code() == Code::kNothingToRestore)
      << restored.status().message();
  Parts parts = PartsOf(model, of.rank, of.ranks);
  Fill(model, parts, step);
  State state = StateOf(parts);
  for (Object object : objects) {
    object.bytes = object.name == "of_rank" ? std::to_string(of.rank) : object.bytes;
    state.objects.push_back(object);
  }
  const std::unique_ptr<SaveHandle> handle = job.SaveAsync(step, state);
  for (const Stage stage : until) {
    const Status saved = handle->Wait(stage, deadline);
    ASSERT_TRUE(saved.ok()) << saved.message();
  }
}

}  // namespace holdfast
