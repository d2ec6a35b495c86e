// Open files on their way to a client, by SCM_RIGHTS. Whoever made them says, by the shared_ptr's
// deleter, where they are closed: on a file system that hangs, close may hang, too.
//
//   auto files = std::make_shared<PassedFiles>();
//   files->descriptors.push_back(std::move(image));
//
// A plain value; one user at a time.
#pragma once

#include <vector>

#include "base/unique_fd.h"

namespace holdfast {

struct PassedFiles {
  std::vector<UniqueFd> descriptors;  // in the order in which the client gets them
};

}  // namespace holdfast
