// What an HTTP/2 server says to whoever is not let in: that the connection ends, and why.
//
//   ::send(fd, frames.data(), frames.size(), …);   // frames = Http2Farewell("too many
//   connections")
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// The settings with which a server begins, and GOAWAY (ENHANCE_YOUR_CALM) with the reason as its
// debug data, cut at kFarewellTextMax bytes.
inline constexpr size_t kFarewellTextMax = 1000;
std::string Http2Farewell(std::string_view why);

}  // namespace holdfast
