#include "base/private_place.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace holdfast {

std::string PrivatePlace() {
  const char* set = std::getenv("HOLDFAST_PRIVATE_DIR");
  return set != nullptr && *set != '\0' ? std::string(set)
                                        : absl::StrCat("/dev/shm/holdfast-private-", ::geteuid());
}

std::string PrivateSocket(std::string_view name) {
  const std::string place = PrivatePlace();
  struct stat info = {};
  if (::lstat(place.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() ||
      (info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return "";
  }
  std::string path = absl::StrCat(place, "/", ToAbsl(name));
  return ::lstat(path.c_str(), &info) == 0 ? path : "";
}

}  // namespace holdfast
