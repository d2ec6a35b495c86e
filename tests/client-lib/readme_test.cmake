# The README's C++ example is examples/hello.cc, which is built: all of it but the comment at its top.
file(READ ${README} readme)
file(READ ${EXAMPLE} example)
string(REGEX REPLACE "^(//[^\n]*\n)+" "" example "${example}")
string(FIND "${readme}" "```cpp\n${example}```\n" at)
if(example STREQUAL "" OR at EQUAL -1)
  message(FATAL_ERROR "the C++ example in ${README} is not that of ${EXAMPLE}: copy it over")
endif()
