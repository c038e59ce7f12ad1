// Reading a component's weights against the plainest ways to read the same file.
#ifndef LATENTD_TESTS_BENCH_LOAD_BENCH_H_
#define LATENTD_TESTS_BENCH_LOAD_BENCH_H_

#include <cstdint>
#include <string>

namespace latentd::bench {

// Milliseconds until the program has looked at every byte of the transformer's file of a model folder, none
// of which it had before: each way ends with the sum of all bytes.
struct LoadTimes {
  double load;   // WeightFiles and LoadWeights, then the tensors' bytes
  double mmap;   // mapped
  double pread;  // read into one buffer of 8 MiB, again and again
  int64_t bytes;
};
LoadTimes MeasureLoad(const std::string& folder);

}  // namespace latentd::bench

#endif  // LATENTD_TESTS_BENCH_LOAD_BENCH_H_
