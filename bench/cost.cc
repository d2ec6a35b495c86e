#include "bench/cost.h"

#include <malloc.h>
#include <time.h>

#include <algorithm>

namespace holdfast::bench {

double CpuMs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

double HeapMb() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<double>(info.uordblks + info.hblkhd) / 1e6;
}

Row CostRow(const std::string& name, const std::string& unit, const std::vector<double>& values,
            double bar) {
  Row row{name, unit};
  row.value = row.ratio = Median(values);
  row.ratio_low = *std::min_element(values.begin(), values.end());
  row.ratio_high = *std::max_element(values.begin(), values.end());
  row.bar = bar;
  return row;
}

}  // namespace holdfast::bench
