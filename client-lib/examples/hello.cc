// The README's example: one rank that counts, and goes on counting when it is started again.
#include <holdfast/holdfast.h>

#include <cstdio>
#include <vector>

int main() {
  std::vector<float> weights(1 << 20);
  holdfast::State state{.tensors = {{"weights", holdfast::Type::kF32, {1 << 20}, weights.data()}}};
  auto job = holdfast::Job::Open({.job = "hello"});
  if (!job.ok())
    return std::fprintf(stderr, "%s\n", job.status().ToString().c_str()), 1;
  auto last = (*job)->Restore(state);
  if (!last.ok() && last.status().code() != holdfast::Code::kNothingToRestore) {
    return std::fprintf(stderr, "%s\n", last.status().ToString().c_str()), 1;
  }
  const uint64_t first = last.ok() ? last->step + 1 : 0;
  for (uint64_t step = first; step < first + 10; ++step) {
    for (float& weight : weights)
      weight += 1;  // training
    const holdfast::Status saved = (*job)->Save(step, state);
    std::printf("step %lu: weights[0] = %.0f, %s\n", static_cast<unsigned long>(step), weights[0],
                saved.ok() ? "saved" : saved.ToString().c_str());
  }
}
