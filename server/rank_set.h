// A set of ranks as a bitmap: a job of thousands of ranks inserts and erases each of them in every
// step.
//
//   RankSet writing; writing.insert(7); writing.count(7) == 1; writing.empty();
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace holdfast {

class RankSet {
 public:
  // Whether it was not there.
  bool insert(Rank rank) {
    const size_t word = rank / 64;
    if (word >= words_.size()) {
      words_.resize(word + 1);
    }
    const bool fresh = (words_[word] & Bit(rank)) == 0;
    words_[word] |= Bit(rank);
    size_ += fresh ? 1 : 0;
    return fresh;
  }
  size_t erase(Rank rank) {
    if (count(rank) == 0) {
      return 0;
    }
    words_[rank / 64] &= ~Bit(rank);
    --size_;
    return 1;
  }
  size_t count(Rank rank) const {
    const size_t word = rank / 64;
    return word < words_.size() && (words_[word] & Bit(rank)) != 0 ? 1 : 0;
  }
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  void clear() {
    words_.clear();
    size_ = 0;
  }

 private:
  static uint64_t Bit(Rank rank) { return uint64_t{1} << (rank % 64); }

  std::vector<uint64_t> words_;
  size_t size_ = 0;
};

}  // namespace holdfast
