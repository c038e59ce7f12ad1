// Reading a component's weights against the plainest ways to read the same file.
#ifndef LATENTD_TESTS_BENCH_LOAD_BENCH_H_
#define LATENTD_TESTS_BENCH_LOAD_BENCH_H_

#include <cstdint>
#include <string>

namespace latentd::bench {

// Milliseconds for all bytes of the transformer's file of a model folder, none of it in this process before.
struct LoadTimes {
  double load;   // WeightFiles and LoadWeights, then every byte of every tensor is read
  double mmap;   // mapped, then every byte is read
  double pread;  // read into one buffer of 8 MiB, again and again
  int64_t bytes;
};
LoadTimes MeasureLoad(const std::string& folder);

}  // namespace latentd::bench

#endif  // LATENTD_TESTS_BENCH_LOAD_BENCH_H_
