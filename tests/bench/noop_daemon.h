// The daemon with a network that does nothing: what a step costs beside the network.
#ifndef LATENTD_TESTS_BENCH_NOOP_DAEMON_H_
#define LATENTD_TESTS_BENCH_NOOP_DAEMON_H_

#include <string>

namespace latentd::bench {

inline constexpr char kNoopModel[] = "noop";

// Serves the model kNoopModel on `address` until the standard input ends. `weights` is a safetensors file
// with one fp32 tensor `weight` [16].
void ServeNoop(const std::string& address, const std::string& weights);

// Runs one job on that model and reads all its events. Returns the milliseconds from the call to its end.
double RunNoopJob(const std::string& address, int steps);

}  // namespace latentd::bench

#endif  // LATENTD_TESTS_BENCH_NOOP_DAEMON_H_
