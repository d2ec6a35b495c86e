// Pages on an address of loopback and the browsers of this machine.
//
//   if (IsLoopbackHost(address) && !IsLoopbackHost(request.host)) { … 421 … }
//
// A plain function, thread-safe.
#pragma once

#include <string_view>

namespace holdfast {

// What a browser of this machine sends as Host for an address of loopback, whatever port it went
// through: another name is one that somebody else's page made to point here.
bool IsLoopbackHost(std::string_view host);

}  // namespace holdfast
