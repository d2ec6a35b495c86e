# Compiles with zig (PyPI's `ziglang`) for glibc 2.28, with libc++ and the unwinder linked in: scripts/package client.
#
#   cmake --toolchain cmake/zig_toolchain.cmake -DHOLDFAST_ZIG=DIR -DHOLDFAST_ZIG_ARCH=x86_64|aarch64
#
# DIR has the programs cc, c++, ar and ranlib, which call zig with its target.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${HOLDFAST_ZIG_ARCH})
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HOLDFAST_ZIG HOLDFAST_ZIG_ARCH)
set(CMAKE_C_COMPILER ${HOLDFAST_ZIG}/cc)
set(CMAKE_CXX_COMPILER ${HOLDFAST_ZIG}/c++)
set(CMAKE_AR ${HOLDFAST_ZIG}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${HOLDFAST_ZIG}/ranlib CACHE FILEPATH "")
# Constant initialisation of a table is longer than clang allows by itself (base/fault_guard.cc). Zig checks for undefined
# behaviour unless it is told not to.
set(CMAKE_C_FLAGS_INIT "-fno-sanitize=undefined")
set(CMAKE_CXX_FLAGS_INIT "-fno-sanitize=undefined -fconstexpr-steps=16777216")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s -Wl,-z,now -Wl,-z,noexecstack")
# Nothing of this machine's system but the headers that the build names.
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY NEVER)
