# HOLDFAST_CLIENT_ONLY: what the training process loads, and nothing of the daemon's dependencies.
#
# With HOLDFAST_CLIENT_SOURCES (scripts/client-sources makes the folder), Abseil and ISA-L's CRC are compiled from source and
# linked in: Debian's static Abseil is not position-independent, and its shared one is not on other machines. The targets have
# the names that the system's packages give them.
set(HOLDFAST_CLIENT_SOURCES "" CACHE PATH "Sources to compile into the client; empty: the system's libraries")
find_package(Threads REQUIRED)

if(NOT HOLDFAST_CLIENT_SOURCES)
  find_package(PkgConfig REQUIRED)
  find_package(absl CONFIG REQUIRED)
  find_package(nlohmann_json CONFIG REQUIRED)
  pkg_check_modules(ISAL REQUIRED IMPORTED_TARGET libisal)
  pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
  return()
endif()

cmake_minimum_required(VERSION 3.25) # (add_subdirectory's SYSTEM)
set(ABSL_PROPAGATE_CXX_STD ON)
set(ABSL_ENABLE_INSTALL OFF)
set(BUILD_TESTING OFF)
add_subdirectory(${HOLDFAST_CLIENT_SOURCES}/abseil ${CMAKE_BINARY_DIR}/abseil EXCLUDE_FROM_ALL SYSTEM)

# Headers without a library: protozero, nlohmann_json, xxHash.
include_directories(SYSTEM ${HOLDFAST_CLIENT_SOURCES}/include)
add_library(holdfast_header_only INTERFACE)
add_library(nlohmann_json::nlohmann_json ALIAS holdfast_header_only)
add_library(PkgConfig::XXHASH ALIAS holdfast_header_only)

# The CRCs of ISA-L, with its own choice among them at run time.
set(crc ${HOLDFAST_CLIENT_SOURCES}/isa-l/crc)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  set(CMAKE_ASM_NASM_FLAGS "-I ${HOLDFAST_CLIENT_SOURCES}/isa-l/include/")
  enable_language(ASM_NASM)
  file(GLOB crc_sources ${crc}/crc64_*_by*.asm)
  list(APPEND crc_sources ${crc}/crc64_multibinary.asm ${crc}/crc64_base.c)
else()
  enable_language(ASM)
  file(GLOB crc_sources ${crc}/aarch64/*.S)
  list(APPEND crc_sources ${crc}/aarch64/crc_aarch64_dispatcher.c ${crc}/crc_base.c ${crc}/crc64_base.c)
endif()
add_library(holdfast_isal STATIC ${crc_sources})
target_include_directories(holdfast_isal SYSTEM PRIVATE ${HOLDFAST_CLIENT_SOURCES}/isa-l/include ${crc} ${crc}/aarch64)
target_compile_definitions(holdfast_isal PRIVATE $<$<COMPILE_LANGUAGE:ASM>:__ASSEMBLY__>)
add_library(PkgConfig::ISAL ALIAS holdfast_isal)
