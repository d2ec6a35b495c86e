// What a rank saves and restores: tensors (whole, or a part of a larger one) and objects.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace holdfast {

// safetensors' types.
enum class Type : uint8_t {
  kBool = 1,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
};
// Bytes of one element; "BF16" and so on.
uint32_t TypeBytes(Type type);
const char* TypeName(Type type);

// A tensor in this process's memory, or on a CUDA device of its: contiguous, row-major. `data` is
// read by Save and written by Restore; it stays the caller's.
//
//   Whole tensor:          {"layers.0.w", Type::kF32, {4096, 1024}, data}
//   Rows 0 to 511 of it:   Tensor::Box("layers.0.w", Type::kF32, {4096, 1024}, {0, 0}, {512, 1024},
//   data) Elements 100 to 199 of its row-major flattening: Tensor::Flat("layers.0.w", Type::kF32,
//   {4096, 1024}, 100, 100, data)
struct Tensor {
  enum class Place : uint8_t { kWhole, kBox, kFlat };

  std::string name;
  Type type = Type::kF32;
  std::vector<uint64_t> global_shape;  // empty: 0-dim
  void* data = nullptr;
  uint64_t bytes = 0;  // of data; must be what shape and type say. 0: computed from them
  Place place = Place::kWhole;
  std::vector<uint64_t> box_offset;
  std::vector<uint64_t> box_shape;
  uint64_t flat_start = 0;
  uint64_t flat_length = 0;
  int32_t device = -1;  // CUDA ordinal of the device that `data` lies on; -1: host memory

  Tensor() = default;
  Tensor(std::string tensor_name, Type element_type, std::vector<uint64_t> shape, void* memory)
      : name(std::move(tensor_name)),
        type(element_type),
        global_shape(std::move(shape)),
        data(memory) {}
  static Tensor Box(std::string name, Type type, std::vector<uint64_t> global_shape,
                    std::vector<uint64_t> offset, std::vector<uint64_t> shape, void* data);
  static Tensor Flat(std::string name, Type type, std::vector<uint64_t> global_shape,
                     uint64_t start, uint64_t length, void* data);
};

// Anything that is not a tensor: JSON text, or bytes whose meaning `codec` names
// ("numpy.random.state/1").
struct Object {
  std::string name;
  std::string bytes;  // JSON: UTF-8 text
  bool json = true;
  std::string codec;  // required when not JSON
};

struct State {
  std::vector<Tensor> tensors;
  std::vector<Object> objects;  // Restore fills in the bytes of those named; an empty list means:
                                // all that were saved
};

}  // namespace holdfast
