# Installs the client library into an empty directory, then configures, builds and runs a program that knows nothing of this
# tree but find_package(Holdfast).
execute_process(COMMAND mktemp -d /tmp/holdfast-install-XXXXXX OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(flags "${CXX_FLAGS}")
if(SANITIZER STREQUAL "address")
  string(APPEND flags " -fsanitize=address,undefined")
elseif(SANITIZER STREQUAL "thread")
  string(APPEND flags " -fsanitize=thread")
endif()
set(failed "")
foreach(step
    "${CMAKE_COMMAND};--install;${BUILD_DIR};--component;client;--prefix;${root}/prefix"
    "${CMAKE_COMMAND};--install;${BUILD_DIR};--component;development;--prefix;${root}/prefix"
    "${CMAKE_COMMAND};-S;${SOURCE_DIR};-B;${root}/build;-DCMAKE_PREFIX_PATH=${root}/prefix;-DCMAKE_CXX_COMPILER=${CXX};-DCMAKE_CXX_FLAGS=${flags}"
    "${CMAKE_COMMAND};--build;${root}/build"
    "${root}/build/outside")
  execute_process(COMMAND ${step} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message(STATUS "${output}")
  if(NOT result EQUAL 0)
    set(failed "${step}: ${result}\n${output}")
    break()
  endif()
endforeach()
file(REMOVE_RECURSE ${root})
if(failed)
  message(FATAL_ERROR "${failed}")
endif()
