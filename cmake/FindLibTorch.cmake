# LibTorch out of the PyPI wheel in LATENTD_VENV, CPU part only.
#
# The wheel's include folder also holds headers of google/protobuf and fmt, which break gRPC and spdlog.
# So only ATen, c10, torch and caffe2 are exposed, through a folder of symlinks. TorchConfig.cmake is not
# used: it would pull in CUDA and those headers.
#
# Provides LibTorch::cpu and LIBTORCH_LIB_DIR.
file(GLOB _torch_dirs "${LATENTD_VENV}/lib/python3*/site-packages/torch")
list(LENGTH _torch_dirs _n)
if(_n EQUAL 0)
  message(FATAL_ERROR "No torch wheel in ${LATENTD_VENV}: run deploy/bootstrap.sh first, or set LATENTD_VENV")
endif()
list(GET _torch_dirs 0 LIBTORCH_DIR)
set(LIBTORCH_LIB_DIR "${LIBTORCH_DIR}/lib")

set(_inc "${CMAKE_BINARY_DIR}/libtorch_include")
file(MAKE_DIRECTORY "${_inc}")
foreach(_d ATen c10 torch caffe2)
  if(NOT EXISTS "${_inc}/${_d}")
    file(CREATE_LINK "${LIBTORCH_DIR}/include/${_d}" "${_inc}/${_d}" SYMBOLIC)
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LIBTORCH_DIR)

if(NOT TARGET LibTorch::cpu)
  add_library(LibTorch::cpu INTERFACE IMPORTED)
  set_target_properties(LibTorch::cpu PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_inc}"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_inc}"
    INTERFACE_LINK_LIBRARIES "${LIBTORCH_LIB_DIR}/libtorch_cpu.so;${LIBTORCH_LIB_DIR}/libc10.so"
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined;-Wl,-rpath,${LIBTORCH_LIB_DIR}")
endif()
