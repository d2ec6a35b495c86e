// plan-capacity's options: a table, from which main.cc makes the command line, and what their texts
// mean.
//
//   CapacityArguments arguments;
//   for (const CapacityOption& option : CapacityOptions()) { … option.set(text, arguments) … }
//   HF_ASSIGN_OR_RETURN(const CapacityInput input, CompleteCapacity(arguments));
//
// Pure and thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ckptctl/capacity.h"

namespace holdfast {

struct CapacityArguments {
  CapacityInput input;
  std::optional<uint64_t> params;
  std::optional<uint64_t> state_bytes;
  std::string profile;  // one of CapacityProfiles(); empty: the first
  std::optional<uint64_t> thousandths_of_byte_a_param;  // instead of a profile
};

// Bytes that are saved for each parameter.
struct CapacityProfile {
  std::string name;
  uint64_t bytes_per_param;
  std::string about;
};
std::span<const CapacityProfile> CapacityProfiles();

struct CapacityOption {
  std::string name;
  std::string type_name;
  std::string group;
  std::string about;
  std::vector<std::string> values;  // the only ones that it takes; empty: set says
  // InvalidArgument: what is wrong with the text.
  absl::Status (*set)(const std::string& text, CapacityArguments& arguments);
};
std::span<const CapacityOption> CapacityOptions();

// InvalidArgument: what is missing, or contradicts itself.
absl::StatusOr<CapacityInput> CompleteCapacity(const CapacityArguments& arguments);

}  // namespace holdfast
