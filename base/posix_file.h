// What Env::System is made of: files, and the odds and ends of system calls. For base/ only.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <memory>
#include <string>
#include <string_view>

#include "base/env.h"
#include "base/unique_fd.h"

namespace holdfast {

template <typename Call>
auto RetryInterrupted(Call call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

FileInfo ToFileInfo(const struct statx& st);
// Of what is already open, or of the last name of a path, which is not followed.
int AskInfo(int fd, const char* path, struct statx& st);
std::unique_ptr<File> NewPosixFile(UniqueFd fd, std::string path, bool direct);

}  // namespace holdfast
