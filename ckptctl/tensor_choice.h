// Which of a step's tensors a command is asked about, and their bytes, tensor by tensor.
//
//   HF_ASSIGN_OR_RETURN(const std::vector<size_t> chosen, ChooseTensors(items, {.only =
//   {"model"}})); TensorBytes bytes(items, readable); while (…) bytes.Give(window, [&](size_t
//   tensor, std::span<const std::byte> some) { … });
//
// Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/checkpoint_reader.h"

namespace holdfast {

struct TensorChoice {
  std::vector<std::string> only;  // keys of the state; empty: everything
  std::string pattern;            // of whole names (FitsPattern); empty: any
};

// Indices of items, ascending. NotFound: there is nothing of that name.
absl::StatusOr<std::vector<size_t>> ChooseTensors(const std::vector<SavedItem>& items,
                                                  const TensorChoice& choice);

// "extra.rng (rank 3)" of what is a rank's own; escaped.
std::string ShownName(const SavedItem& item);
// "[4096,1024]".
std::string ShapeText(const std::vector<uint64_t>& shape);

// Windows of tensors that come one behind the other, as a stream has them.
class TensorBytes {
 public:
  // `tensors`: those that have elements are taken from the windows, in this order.
  TensorBytes(const std::vector<SavedItem>& items, const std::vector<size_t>& tensors)
      : items_(items), tensors_(tensors) {}
  std::vector<ElementRange> Ranges() const;

  // take(n, bytes): of the n-th tensor.
  template <typename Take>
  void Give(std::span<const std::byte> window, const Take& take) {
    while (!window.empty() && next_ < tensors_.size()) {
      const uint64_t left = items_[tensors_[next_]].bytes - done_;
      const auto some = window.first(std::min<uint64_t>(left, window.size()));
      if (!some.empty()) {
        take(next_, some);
      }
      window = window.subspan(some.size());
      done_ += some.size();
      if (done_ == items_[tensors_[next_]].bytes) {
        ++next_;
        done_ = 0;
      }
    }
  }

 private:
  const std::vector<SavedItem>& items_;
  const std::vector<size_t>& tensors_;
  size_t next_ = 0;
  uint64_t done_ = 0;  // bytes of that one
};

}  // namespace holdfast
