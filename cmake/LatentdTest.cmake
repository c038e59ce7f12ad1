# latentd_test(NAME SRCS... DEPS... [LABELS...]): one GoogleTest binary, registered with ctest. With the label
# `core` it is also built and run under the sanitizers (target core_tests of the asan and tsan presets), with
# `untrusted`, for what reads strangers' files, under AddressSanitizer alone (target untrusted_tests).
# Tests that compute run on one thread and do not spin while they wait.
add_custom_target(core_tests)
add_custom_target(untrusted_tests)

function(latentd_test NAME)
  cmake_parse_arguments(T "" "" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${NAME} ${T_SRCS})
  target_link_libraries(${NAME} PRIVATE ${T_DEPS} GTest::gmock GTest::gtest_main)
  set_target_properties(${NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  foreach(label core untrusted)
    if(label IN_LIST T_LABELS)
      add_dependencies(${label}_tests ${NAME})
    endif()
  endforeach()
  add_test(NAME ${NAME} COMMAND ${NAME} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${NAME} PROPERTIES
    LABELS "unit;${T_LABELS}" TIMEOUT 600
    ENVIRONMENT "OMP_NUM_THREADS=1;OMP_WAIT_POLICY=PASSIVE;TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp")
endfunction()

# latentd_kernel_test(NAME FILTER): runs the tests of a binary that FILTER names with the kernels for lesser processors.
function(latentd_kernel_test NAME FILTER)
  get_test_property(${NAME} ENVIRONMENT environment)
  foreach(set baseline avx2)
    add_test(NAME ${NAME}_${set} COMMAND ${NAME} --gtest_filter=${FILTER} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    set_tests_properties(${NAME}_${set} PROPERTIES
      LABELS unit TIMEOUT 600 ENVIRONMENT "${environment};LATENTD_INSTRUCTION_SET=${set}")
  endforeach()
endfunction()
