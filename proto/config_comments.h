// The schema of the settings with its comments: an encoded google.protobuf.FileDescriptorSet of
// holdfast/v1/config.proto and what it imports. Made by the build.
#pragma once

#include <string_view>

namespace holdfast {

std::string_view ConfigComments();

}  // namespace holdfast
