# The C++ example in docs/cpp.md is client-lib/examples/hello.cc, which is built: all of it but the comment at its top.
file(READ ${PAGE} page)
file(READ ${EXAMPLE} example)
string(REGEX REPLACE "^(//[^\n]*\n)+" "" example "${example}")
string(FIND "${page}" "```cpp\n${example}```\n" at)
if(example STREQUAL "" OR at EQUAL -1)
  message(FATAL_ERROR "${PAGE}: the C++ example is not that of ${EXAMPLE}. Copy that over.")
endif()
