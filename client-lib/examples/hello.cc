// The example in docs/cpp.md, word for word (client_docs_test compares them): one rank that counts,
// and continues to count when it is started again.
#include <holdfast/holdfast.h>

#include <cstdio>
#include <vector>

int main() {
  std::vector<float> w(1 << 20);
  auto job = holdfast::Job::Open({.job = "my-run", .rank = 0, .world_size = 1});
  if (!job.ok()) {
    return std::puts(job.status().message().c_str()), 1;
  }
  holdfast::State state{.tensors = {{"w", holdfast::Type::kF32, {w.size()}, w.data()}}};
  auto last = (*job)->Restore(state);  // newest step that every rank can load
  if (!last.ok() && last.status().code() != holdfast::Code::kNothingToRestore) {
    return std::puts(last.status().message().c_str()), 1;  // never "start from scratch"
  }
  for (uint64_t step = last.ok() ? last->step + 1 : 0; step < 1000; ++step) {
    for (float& x : w) {
      x += 1;  // your training
    }
    if (auto saved = (*job)->Save(step, state); !saved.ok()) {  // one memory copy
      std::puts(saved.message().c_str());                       // the loop continues anyway
    }
  }
}
