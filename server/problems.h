// What is wrong on this node, for people: told by `ckptctl status` until it is over, where that can
// be seen, and else until the daemon is started again. Pure.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace holdfast {

inline constexpr size_t kProblemsMax = 256;  // that are shown

class Problems {
 public:
  // Stays until the next start.
  void Add(std::string problem);
  // What `source` says is wrong now: what it said before is over. Returns what is new.
  std::vector<std::string> Now(const std::string& source, const std::vector<std::string>& problems);
  void Over(const std::string& source) { now_.erase(source); }
  // None twice; if there are too many the last one says so.
  std::vector<std::string> All() const;

 private:
  std::vector<std::string> kept_;
  std::map<std::string, std::vector<std::string>> now_;  // by source
};

}  // namespace holdfast
