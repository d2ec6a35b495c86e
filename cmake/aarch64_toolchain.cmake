# Compiles for 64-bit ARM with the distribution's cross compiler and its libraries for arm64 (scripts/arm64-root).
#
#   cmake --preset release -B build/arm64 --toolchain cmake/aarch64_toolchain.cmake "-DHOLDFAST_SYSROOT=$PWD/build/arm64-root"
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HOLDFAST_SYSROOT)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_SYSROOT ${HOLDFAST_SYSROOT})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER) # (protoc runs here)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${HOLDFAST_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${HOLDFAST_SYSROOT}/usr/share/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${HOLDFAST_SYSROOT})
