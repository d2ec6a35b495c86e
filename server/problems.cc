#include "server/problems.h"

#include <algorithm>
#include <utility>

namespace holdfast {
namespace {

bool Has(const std::vector<std::string>& problems, const std::string& problem) {
  return std::find(problems.begin(), problems.end(), problem) != problems.end();
}

}  // namespace

void Problems::Add(std::string problem) {
  if (kept_.size() <= kProblemsMax && !Has(kept_, problem)) {
    kept_.push_back(std::move(problem));
  }
}

std::vector<std::string> Problems::Now(const std::string& source,
                                       const std::vector<std::string>& problems) {
  std::vector<std::string> fresh;
  const auto before = now_.find(source);
  for (const std::string& problem : problems) {
    const bool told = before != now_.end() && Has(before->second, problem);
    if (!told && !Has(fresh, problem)) {
      fresh.push_back(problem);
    }
  }
  if (problems.empty()) {
    now_.erase(source);
  } else {
    now_[source] = problems;
  }
  return fresh;
}

std::vector<std::string> Problems::All() const {
  std::vector<std::string> all = kept_;
  for (const auto& [source, problems] : now_) {
    for (const std::string& problem : problems) {
      if (all.size() <= kProblemsMax && !Has(all, problem)) {
        all.push_back(problem);
      }
    }
  }
  if (all.size() > kProblemsMax) {
    all.resize(kProblemsMax);
    all.back() = "there are more problems than are shown";
  }
  return all;
}

}  // namespace holdfast
