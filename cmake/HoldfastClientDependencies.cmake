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

include(HoldfastIsal)
