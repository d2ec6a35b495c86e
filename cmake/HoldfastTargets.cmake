# How this tree declares its targets: one warning set, one sanitizer switch, one way to add a test.

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT HOLDFAST_ZIG) # (zig has a cache of its own)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

# A test leg links hundreds of programs, and no cache keeps those.
if(HOLDFAST_LINKER)
  find_program(HOLDFAST_LINKER_PROGRAM ${HOLDFAST_LINKER})
  if(HOLDFAST_LINKER_PROGRAM)
    add_link_options(-fuse-ld=${HOLDFAST_LINKER})
  else()
    message(STATUS "${HOLDFAST_LINKER} is not installed: linking takes longer")
  endif()
endif()

add_library(holdfast_options INTERFACE)
target_compile_options(holdfast_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers -Werror=return-type)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(holdfast_options INTERFACE -Wthread-safety -Werror=thread-safety)
endif()
if(HOLDFAST_SYNC_POINTS)
  target_compile_definitions(holdfast_options INTERFACE HOLDFAST_SYNC_POINTS=1)
endif()
# Everywhere, as some libraries ask for it: precompiled headers fit only what is compiled alike.
target_compile_options(holdfast_options INTERFACE -pthread)

# (Generated code: holdfast_generated_library.)
if(HOLDFAST_SANITIZER STREQUAL "address")
  # (UBSan's look at each dereference takes longest to compile; AddressSanitizer says what a null pointer does.)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=null,vptr -fno-sanitize-recover=undefined
    -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(HOLDFAST_SANITIZER STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(NOT HOLDFAST_SANITIZER STREQUAL "")
  message(FATAL_ERROR "HOLDFAST_SANITIZER must be address, thread or empty, not '${HOLDFAST_SANITIZER}'")
endif()

# The headers of others that most sources include, and the messages: parsed once for all that is compiled alike, which
# saves a third of the work. What a source needs it includes nevertheless: the preset debug does without.
set(HOLDFAST_COMMON_HEADERS
  <algorithm> <array> <chrono> <cstdint> <deque> <functional> <map> <memory> <mutex> <optional> <set> <string>
  <string_view> <thread> <tuple> <utility> <variant> <vector>
  <absl/container/btree_map.h> <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
  <absl/strings/str_join.h> <absl/strings/str_format.h>
  <holdfast/v1/admin.pb.h> <holdfast/v1/config.pb.h> <holdfast/v1/state.pb.h>)

function(_holdfast_precompile_for_ccache target)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  else()
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
endfunction()

# holdfast_common_headers(<name> header…): what targets share by holdfast_use_headers(<target> <name>).
function(holdfast_common_headers name)
  if(NOT HOLDFAST_PRECOMPILE)
    return()
  endif()
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/${name}.cc CONTENT "")
  add_library(${name} OBJECT ${CMAKE_BINARY_DIR}/${name}.cc)
  target_link_libraries(${name} PRIVATE holdfast_options holdfast_proto absl::btree absl::statusor absl::str_format)
  target_precompile_headers(${name} PRIVATE ${ARGN})
  set_target_properties(${name} PROPERTIES CXX_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/cmake/precompile;${CCACHE_PROGRAM}")
  _holdfast_precompile_for_ccache(${name})
endfunction()

function(holdfast_use_headers target name)
  if(NOT HOLDFAST_PRECOMPILE)
    return()
  endif()
  target_precompile_headers(${target} REUSE_FROM ${name})
  _holdfast_precompile_for_ccache(${target})
endfunction()

# holdfast_library(<name> SOURCES a.cc … DEPS x …): a static library with the project's options. UNITY: its sources do not mind
# being compiled several at a time, which all presets but debug do (HOLDFAST_UNITY): that is much faster where all is
# built. What is one source's own is then no longer so to the compiler: its warning about that says nothing.
function(holdfast_library name)
  cmake_parse_arguments(ARG "UNITY" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  if(ARG_UNITY AND HOLDFAST_UNITY)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${name} PRIVATE -Wno-subobject-linkage)
    endif()
  endif()
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE $<BUILD_INTERFACE:holdfast_options> ${ARG_PRIVATE_DEPS})
endfunction()

# holdfast_generated_library(<name> SOURCES a.cc … DEPS x …): what protoc wrote. Optimised where it is released; elsewhere the
# compiler would spend more on it than on the tree's own code. AddressSanitizer does without, as it does for the libraries that
# it calls; ThreadSanitizer must see it: a function of a header that is compiled here may serve the rest of the program too.
function(holdfast_generated_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_include_directories(${name} SYSTEM PUBLIC ${CMAKE_CURRENT_BINARY_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS})
  target_compile_options(${name} PRIVATE -g0)
  if(HOLDFAST_SANITIZER)
    target_compile_options(${name} PRIVATE -O0)
  endif()
  if(HOLDFAST_SANITIZER STREQUAL "address")
    target_compile_options(${name} PRIVATE -fno-sanitize=all)
  endif()
endfunction()

# holdfast_program(<name> SOURCES a.cc … DEPS x …): an executable in bin/.
function(holdfast_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} holdfast_options)
endfunction()

# What HOLDFAST_TESTS leaves out is built by `ninja slow_tests unit_tests`.
add_custom_target(slow_tests)
add_custom_target(unit_tests)

# holdfast_test(<name> SOURCES a_test.cc … DEPS x … LABELS unit|integration|slow TIMEOUT s):
# GoogleTest files, registered with ctest under one name. They are compiled into objects of that name, and linked with the
# folder's other ones into one program, which ctest asks for the tests of these files (tests/test_main.cc): linking each by
# itself would cost more than compiling them. The label decides which leg runs it.
#   ALONE               a program of its own: it cannot be linked with its neighbours, or has its tests in a header. So is what
#                       replaces a function of the process (extern "C", operator new)
#   OPTIMIZED           as the build type has it: it computes a lot
#   SINGLE_THREADED     what is tested has no threads: ThreadSanitizer's leg goes without
#   SHARDS n            ctest runs it in n parts, side by side
#   SANITIZED_SHARDS n  a matrix whose cases differ in when they strike more than in what they run: a sanitizer's leg runs every
#                       n-th of them, its slow tests the others
#   PLAIN               it computes for long: the leg without a sanitizer runs it, too, as it does what leaves something out under
#                       one (__SANITIZE_…__). All other unit tests are the sanitizers' alone (HOLDFAST_TESTS plain)
function(holdfast_test name)
  cmake_parse_arguments(ARG "ALONE;OPTIMIZED;SINGLE_THREADED;PLAIN" "TIMEOUT;SHARDS;SANITIZED_SHARDS" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  set(leaves_out FALSE)
  foreach(source ${ARG_SOURCES})
    # A function of the process that a test replaces, it would replace for its neighbours too.
    file(STRINGS ${source} replaces REGEX "^extern \"C\" |operator new\\(" LIMIT_COUNT 1)
    if(replaces)
      set(ARG_ALONE TRUE)
    endif()
    file(STRINGS ${source} asks REGEX "__SANITIZE_|tier_conformance" LIMIT_COUNT 1)
    if(asks)
      set(leaves_out TRUE)
      # (GCC says by this that a sanitizer is at work; clang says it otherwise.)
      if(HOLDFAST_SANITIZER AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
        string(TOUPPER ${HOLDFAST_SANITIZER} sanitizer)
        set_property(SOURCE ${source} APPEND PROPERTY COMPILE_DEFINITIONS __SANITIZE_${sanitizer}__=1)
      endif()
    endif()
  endforeach()
  if(HOLDFAST_TESTS STREQUAL "plain" AND unit IN_LIST ARG_LABELS
     AND NOT (leaves_out OR ARG_PLAIN OR ARG_OPTIMIZED OR ARG_SHARDS OR ARG_SANITIZED_SHARDS))
    list(APPEND ARG_LABELS sanitized)
  endif()
  set(runs TRUE)
  if(ARG_SINGLE_THREADED AND HOLDFAST_SANITIZER STREQUAL "thread")
    set(runs FALSE)
  endif()
  if(ARG_ALONE)
    add_executable(${name} ${ARG_SOURCES})
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    target_link_libraries(${name} PRIVATE GTest::gmock_main)
    set(program ${name})
    set(files "")
  else()
    add_library(${name} OBJECT ${ARG_SOURCES})
    _holdfast_compile_for_program(${name})
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest holdfast_options)
  _holdfast_compile_as_test(${name} "${ARG_OPTIMIZED}")
  if(NOT ARG_OPTIMIZED)
    holdfast_use_headers(${name} holdfast_test_headers)
  endif()
  set(paths "")
  foreach(source ${ARG_SOURCES})
    # Paths only where they are used, so that ccache can share the other objects between clones.
    file(STRINGS ${source} uses_paths REGEX "HOLDFAST_(SOURCE|BIN)_DIR" LIMIT_COUNT 1)
    if(uses_paths)
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_DEFINITIONS
        HOLDFAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}" HOLDFAST_BIN_DIR="${CMAKE_BINARY_DIR}/bin")
    endif()
    get_filename_component(path ${source} ABSOLUTE)
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${path})
    if(path MATCHES "_test\\.cc$") # (others help)
      list(APPEND paths ${path})
    endif()
    set_property(GLOBAL APPEND PROPERTY HOLDFAST_TEST_SOURCES ${path})
  endforeach()
  if(NOT runs)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE)
    return()
  endif()
  _holdfast_group_of_tests(group "${ARG_LABELS}")
  if(NOT ARG_ALONE)
    _holdfast_tests_program(program "${group}")
    target_link_libraries(${program} PRIVATE ${name})
    list(JOIN paths "," files)
    set(files "--files=${files}")
  endif()
  if(group)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE)
    set_target_properties(${program} PROPERTIES EXCLUDE_FROM_ALL TRUE)
    add_dependencies(${group}_tests ${program})
  endif()
  set(shards "${ARG_SHARDS}")
  set(later_labels "${ARG_LABELS}")
  if(ARG_SANITIZED_SHARDS AND NOT HOLDFAST_SANITIZER STREQUAL "")
    set(shards ${ARG_SANITIZED_SHARDS})
    set(later_labels slow)
  endif()
  _holdfast_add_shard(${name} "" 0 "${shards}" "${ARG_LABELS}" ${ARG_TIMEOUT} ${program} ${files})
  if(shards GREATER 1)
    math(EXPR last "${shards} - 1")
    foreach(shard RANGE 1 ${last})
      _holdfast_add_shard(${name} _${shard} ${shard} ${shards} "${later_labels}" ${ARG_TIMEOUT} ${program} ${files})
    endforeach()
  endif()
endfunction()

# The program of the folder's tests, of those that are built with everything or of those that one asks for.
function(_holdfast_tests_program result group)
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  string(REPLACE "/" "_" program ${folder})
  if(group)
    set(program ${program}_${group})
  endif()
  if(NOT TARGET ${program})
    add_executable(${program} $<TARGET_OBJECTS:holdfast_test_main>)
    set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    target_link_libraries(${program} PRIVATE holdfast_options)
  endif()
  set(${result} ${program} PARENT_SCOPE)
endfunction()

function(_holdfast_add_shard name suffix shard shards labels timeout)
  add_test(NAME ${name}${suffix} COMMAND ${ARGN})
  # (COST: those that may take longest start first, or the last of them runs alone.)
  set_tests_properties(${name}${suffix} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout} COST ${timeout})
  if(shards GREATER 1)
    set_tests_properties(${name}${suffix} PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${shard}")
  endif()
endfunction()

# Test code is compiled once and run once: optimising it costs more than it gives, but for simulations. Nor are its pointers'
# alignments checked by UBSan.
function(_holdfast_compile_as_test target optimized)
  if(NOT optimized)
    target_compile_options(${target} PRIVATE -O0)
  endif()
  if(HOLDFAST_SANITIZER STREQUAL "address")
    target_compile_options(${target} PRIVATE -fno-sanitize=alignment)
  endif()
endfunction()

# As a program's own sources are, whatever becomes of the objects first.
function(_holdfast_compile_for_program target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  get_property(options TARGET ${target} PROPERTY COMPILE_OPTIONS)
  set_property(TARGET ${target} PROPERTY COMPILE_OPTIONS -fPIE ${options})
endfunction()

# holdfast_test_library(<name> SOURCES a.cc … DEPS x …): a harness of several tests, which are compiled alike.
function(holdfast_test_library name)
  holdfast_library(${name} ${ARGN})
  _holdfast_compile_for_program(${name})
  _holdfast_compile_as_test(${name} FALSE)
  holdfast_use_headers(${name} holdfast_test_headers)
  set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE)
endfunction()

# What holdfast_test's programs share.
function(holdfast_common_test_headers)
  holdfast_common_headers(holdfast_test_headers ${HOLDFAST_COMMON_HEADERS} <gmock/gmock.h> <gtest/gtest.h>)
  if(TARGET holdfast_test_headers)
    _holdfast_compile_as_test(holdfast_test_headers FALSE)
    target_link_libraries(holdfast_test_headers PRIVATE GTest::gmock GTest::gtest)
    _holdfast_compile_for_program(holdfast_test_headers)
  endif()
endfunction()

# Which of the targets slow_tests and unit_tests builds a test: "" if it is built with everything (HOLDFAST_TESTS).
function(_holdfast_group_of_tests result labels)
  set(${result} "" PARENT_SCOPE)
  if(HOLDFAST_TESTS STREQUAL "all")
    return()
  elseif(slow IN_LIST labels)
    set(${result} slow PARENT_SCOPE)
  elseif(sanitized IN_LIST labels)
    set(${result} unit PARENT_SCOPE)
  endif()
endfunction()

# Writes the sources of all registered tests to <build>/registered_tests.txt, for scripts/check-tests.
function(holdfast_write_registered_tests)
  get_property(sources GLOBAL PROPERTY HOLDFAST_TEST_SOURCES)
  list(JOIN sources "\n" text)
  file(WRITE ${CMAKE_BINARY_DIR}/registered_tests.txt "${text}\n")
endfunction()
