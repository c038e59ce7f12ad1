# Compiler, linker and ccache settings that every target shares. Few flag sets: each one costs a
# precompiled header of its own.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1 -fno-omit-frame-pointer")

# Checked forms of the C library's functions on buffers, in all that is built: precompiled headers are shared between
# libraries and tests, so flags are, too. They need optimisation, and sanitizers look for themselves.
if(NOT LATENTD_SANITIZE)
  string(APPEND CMAKE_CXX_FLAGS_RELEASE " -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2")
endif()

add_compile_options(-Wall -Wextra -Wno-unused-parameter -Wvla -fstack-protector-strong)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_compile_options(-Wthread-safety)
endif()

# Programs can be put anywhere in memory, and what the linker fills in is resolved and read-only before main.
include(CheckPIESupported)
check_pie_supported()
add_link_options(-Wl,-z,relro,-z,now)

if(LATENTD_SANITIZE)
  add_compile_options(-fsanitize=${LATENTD_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${LATENTD_SANITIZE})
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # A precompiled header changes its time stamps on each configure; without the sloppiness nothing hits.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endif()

find_program(MOLD mold)
find_program(LLD ld.lld)
if(MOLD)
  add_link_options(-fuse-ld=mold)
elseif(LLD)
  add_link_options(-fuse-ld=lld)
endif()
