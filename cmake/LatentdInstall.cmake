# cmake --install build/release --prefix PREFIX [--component NAME]: programs in bin, plug-ins and LibTorch's libraries in
# lib/latentd. Nothing that is installed looks for libraries at a path of the machine it was built on. Components:
#
#   programs        latentd, latentctl, plug-ins
#   libtorch        what LibTorch's CPU part needs of the wheel
#   libtorch_cuda   the rest of it, for cuda devices: some gigabytes
# Paths are set after copying, and not by install(TARGETS): for that CMake ends the path of the build tree's programs with a
# colon, which the loader takes for the current folder.
function(latentd_install_with_path TARGET FOLDER PATH)
  install(PROGRAMS $<TARGET_FILE:${TARGET}> DESTINATION ${FOLDER} COMPONENT programs)
  string(REPLACE "$" "\\$" _path "${PATH}")
  install(CODE "file(RPATH_SET FILE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${FOLDER}/$<TARGET_FILE_NAME:${TARGET}>\" NEW_RPATH \"${_path}\")"
          COMPONENT programs)
endfunction()

install(CODE "unset(ENV{CMAKE_INSTALL_MODE})" COMPONENT programs)  # a path is set in a copy, never through a link
latentd_install_with_path(latentd bin "$ORIGIN/../lib/latentd")
install(PROGRAMS $<TARGET_FILE:latentctl> DESTINATION bin COMPONENT programs)
install(PROGRAMS $<TARGET_FILE:latentd_sentencepiece> DESTINATION lib/latentd COMPONENT programs)
if(TARGET latentd_cuda)
  latentd_install_with_path(latentd_cuda lib/latentd "$ORIGIN")
endif()

# The libraries look for each other in the folder they are in ($ORIGIN).
file(GLOB _cpu "${LIBTORCH_LIB_DIR}/libtorch_cpu.so" "${LIBTORCH_LIB_DIR}/libc10.so" "${LIBTORCH_LIB_DIR}/libgomp*.so*")
if(NOT LIBTORCH_CUDA_MISSING)
  file(GLOB _cpu_too "${_cuda_dir}/lib/libcupti.so.*" "${_cuda_dir}/lib/libcudart.so.*")  # the CPU part links them
  file(GLOB _cuda "${LIBTORCH_LIB_DIR}/lib*_cuda.so" "${LIBTORCH_LIB_DIR}/libtorch_cuda_linalg.so"
       "${LIBTORCH_LIB_DIR}/libtorch_nvshmem.so" "${_site}/nvidia/*/lib/lib*.so.*")
  list(REMOVE_ITEM _cuda ${_cpu_too})
  list(APPEND _cpu ${_cpu_too})
  install(FILES ${_cuda} DESTINATION lib/latentd COMPONENT libtorch_cuda)
endif()
install(FILES ${_cpu} DESTINATION lib/latentd COMPONENT libtorch)
