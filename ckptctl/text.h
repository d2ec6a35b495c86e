// Text from elsewhere, made fit for a terminal. Names of tensors and jobs, and whatever the daemon
// says, were chosen by others: a name may hold escape sequences, newlines or marks that turn the
// line around.
//
//   out << EscapeText(slice.name);     // "lm\x1b[2Jhead" becomes lm\x1b[2Jhead, six visible
//   characters
//
// Pure and thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace holdfast {

inline constexpr size_t kTextColumnsMax = 4096;  // of one escaped text; what is cut away is counted

// Valid, printable UTF-8 stays; a backslash becomes two; everything else becomes \n, \t, \r, \xNN
// (a byte) or \u{N} (a character that is invisible or changes how its neighbours are shown).
// Unambiguous, one line. A text wider than `columns_max` is cut, and ends with "…(N bytes)".
std::string EscapeText(std::string_view text, size_t columns_max = kTextColumnsMax);

// Columns that an escaped text takes on a terminal: wide characters count two, combining marks
// none.
size_t DisplayWidth(std::string_view text);

// An escaped text for a terminal that has no UTF-8: every character beyond ASCII as \u{N}.
std::string AsciiText(std::string_view text);

// An escaped text in at most so many columns; one that is cut ends with `mark`.
std::string CutText(std::string_view text, size_t columns_max, std::string_view mark);

}  // namespace holdfast
