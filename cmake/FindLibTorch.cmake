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
    INTERFACE_LINK_OPTIONS "-Wl,--allow-shlib-undefined")
endif()

# LibTorch::cuda, for the plug-in with the cuda devices: the CPU part, the CUDA part and the CUDA runtime, all of
# the wheel; and LibTorch::cuda_headers, headers alone. Not there when headers are missing;
# LIBTORCH_CUDA_MISSING then says what.
#
# Headers are those of the wheel's own CUDA (nvidia/cu13), so that they fit its libraries and no CUDA toolkit is
# needed. The folder crt/ is a package of its own there (nvidia-cuda-crt) and may be missing; it is then taken from
# an installed toolkit, or from triton, which torch brings along. Host code only reads host_defines.h of it: names
# of attributes.
set(LIBTORCH_CUDA_MISSING "")
get_filename_component(_site "${LIBTORCH_DIR}" DIRECTORY)
file(GLOB _cuda_dirs "${_site}/nvidia/cu[0-9]*")
set(_cuda_dir "")
foreach(_d ${_cuda_dirs})
  file(GLOB _cudart "${_d}/lib/libcudart.so.*")
  if(_cudart)
    set(_cuda_dir "${_d}")
    list(GET _cudart 0 _cudart)
    string(REGEX REPLACE ".*\\.so\\.([0-9]+).*" "\\1" _cuda_major "${_cudart}")
    break()
  endif()
endforeach()

if(NOT EXISTS "${LIBTORCH_LIB_DIR}/libtorch_cuda.so")
  set(LIBTORCH_CUDA_MISSING "the torch wheel is one without CUDA")
elseif(NOT _cuda_dir)
  set(LIBTORCH_CUDA_MISSING "no CUDA runtime in the wheel's nvidia folder")
else()
  set(_cuda_inc "")
  set(_toolkit_inc "")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_VERSION_MAJOR EQUAL _cuda_major)
    set(_toolkit_inc ${CUDAToolkit_INCLUDE_DIRS})
  endif()
  if(EXISTS "${_cuda_dir}/include/cuda_runtime_api.h")
    list(APPEND _cuda_inc "${_cuda_dir}/include")
    if(NOT EXISTS "${_cuda_dir}/include/crt/host_defines.h")
      find_path(LIBTORCH_CUDA_CRT crt/host_defines.h
        PATHS ${_toolkit_inc} "${_site}/triton/backends/nvidia/include"
        NO_DEFAULT_PATH)
      mark_as_advanced(LIBTORCH_CUDA_CRT)
      if(LIBTORCH_CUDA_CRT)
        # crt alone: the rest of that folder may be of another version.
        file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/libtorch_cuda_include")
        file(CREATE_LINK "${LIBTORCH_CUDA_CRT}/crt" "${CMAKE_BINARY_DIR}/libtorch_cuda_include/crt" SYMBOLIC)
        list(APPEND _cuda_inc "${CMAKE_BINARY_DIR}/libtorch_cuda_include")
      else()
        set(_cuda_inc "")
      endif()
    endif()
  endif()
  if(NOT _cuda_inc)
    set(_cuda_inc ${_toolkit_inc})
  endif()
  if(NOT _cuda_inc)
    set(LIBTORCH_CUDA_MISSING
      "no headers of CUDA ${_cuda_major} (python packages nvidia-cuda-runtime and nvidia-cuda-crt, or a toolkit)")
  elseif(NOT TARGET LibTorch::cuda)
    add_library(LibTorch::cuda_headers INTERFACE IMPORTED)
    set_target_properties(LibTorch::cuda_headers PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${_cuda_inc}"
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_cuda_inc}")
    # libtorch_cuda.so registers what it has when it is loaded; few of its symbols are named by anybody.
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    target_link_libraries(LibTorch::cuda INTERFACE
      LibTorch::cuda_headers LibTorch::cpu -Wl,--no-as-needed
      "${LIBTORCH_LIB_DIR}/libtorch_cuda.so" "${LIBTORCH_LIB_DIR}/libc10_cuda.so" "${_cudart}")
  endif()
endif()
