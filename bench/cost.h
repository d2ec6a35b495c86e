// What a computation takes, for cases that are judged by that and have no ceiling.
#pragma once

#include <string>
#include <vector>

#include "bench/report.h"

namespace holdfast::bench {

double CpuMs();   // of this thread
double HeapMb();  // of the process

// The median, of which less is better; `bar`: 0 if it is only reported.
Row CostRow(const std::string& name, const std::string& unit, const std::vector<double>& values,
            double bar = 0);

}  // namespace holdfast::bench
