// Text of which nobody knows the encoding: names of files are bytes, and messages hold UTF-8 only
// (a protobuf string field that is none cannot be read by who gets it).
//
//   reply.add_unknown_files(Utf8Text(path));     // "notes-\xe4" becomes notes-\xe4, six bytes more
//
// Pure and thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace holdfast {

// Bytes of the UTF-8 sequence at the front of `text`; 0 if there is none (RFC 3629: no overlong
// forms, no surrogates, nothing above U+10FFFF).
size_t Utf8SequenceBytes(std::string_view text);

bool IsUtf8(std::string_view text);

// What is UTF-8 stays as it is; each byte that belongs to no sequence becomes \xNN.
std::string Utf8Text(std::string_view text);

// So do control characters: a line for a terminal, that C's functions show to its end.
std::string PrintableText(std::string_view text);

}  // namespace holdfast
