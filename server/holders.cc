#include "server/holders.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/units.h"

namespace holdfast {
namespace {

constexpr size_t kNamedMax = 3;

}  // namespace

std::string HoldersText(std::vector<Holder> holders) {
  std::sort(holders.begin(), holders.end(),
            [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  std::string text;
  size_t named = 0;
  uint64_t of_others = 0;
  for (const Holder& holder : holders) {
    if (!holder.own) {
      of_others += holder.bytes;
    } else if (holder.bytes > 0 && named < kNamedMax) {
      absl::StrAppend(&text, named++ == 0 ? "; of your jobs '" : ", '", holder.job, "' holds ",
                      FormatBytes(holder.bytes));
    }
  }
  if (of_others > 0) {
    absl::StrAppend(&text,
                    named == 0 ? "; jobs of other users hold " : ", jobs of other users hold ",
                    FormatBytes(of_others));
  }
  return text;
}

}  // namespace holdfast
