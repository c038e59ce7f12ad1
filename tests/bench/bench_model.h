// A model as the server runs it, without the server: its transformer's steps and its changes of LoRAs, timed.
//
// Weights, LoRAs and overlays go through the same calls as a job's: WeightFiles and LoadWeights, a ModelCache
// that holds the LoRAs, LayerPatcher and Pipeline. One thread.
//
//   BenchHost host;
//   BenchModel model(&host, "build/bench/mid", "build/bench/mid-inputs.safetensors");
//   model.Begin(/*side=*/256, /*steps=*/20);
//   double ms = model.Step().cpu;
#ifndef LATENTD_TESTS_BENCH_BENCH_MODEL_H_
#define LATENTD_TESTS_BENCH_BENCH_MODEL_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/device.h"
#include "cache/model_cache.h"
#include "cache/weights/weight_stream.h"
#include "families/family.h"
#include "patcher/layer_patcher.h"
#include "patcher/overlay.h"

namespace latentd::bench {

// An error ends the benchmark: there is nothing to measure then.
template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "latentd_bench: %s\n", value.status().ToString().c_str());
  std::exit(2);
}

// Milliseconds on the wall, and of this process's CPU time: the two are the same on one thread of an idle
// machine.
struct Elapsed {
  double wall = 0, cpu = 0;
};

class Stopwatch {
 public:
  Elapsed elapsed() const {
    return {Milliseconds(CLOCK_MONOTONIC) - wall_, Milliseconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_};
  }
  double ms() const { return elapsed().wall; }

 private:
  static double Milliseconds(clockid_t clock) {
    timespec t = {};
    clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
  }
  double wall_ = Milliseconds(CLOCK_MONOTONIC), cpu_ = Milliseconds(CLOCK_PROCESS_CPUTIME_ID);
};

// What loads happen in where nobody cancels them.
LoadContext PlainLoad();

// Finds the family of a diffusers folder and opens it.
std::unique_ptr<Pipeline> OpenPipeline(const std::string& folder);

struct BenchHost {
  RamBudget ram{int64_t{16} << 30};
  CpuDevice device{&ram};
  ModelCache cache{&ram, {&device}};
};

class BenchModel {
 public:
  // `inputs`: a safetensors file with `noise` [1, C, h, w], `t5` [1, tokens, dim] and `pooled` [1, dim].
  BenchModel(BenchHost* host, const std::string& folder, const std::string& inputs);

  // Starts a run of square pictures with the LoRA that is set. REQUIRES: `noise` is of that size.
  void Begin(int64_t side, int64_t steps);
  Elapsed Step();
  // Of the run, [C · h · w].
  std::vector<float> Latents() const;

  // What a session and its next job pay when `files` replace the LoRAs they had: the look-up of resident
  // records, the match against all components, an overlay for each, and the end of the old ones. With
  // `keep_merged`, merged weights are records of the cache, which a second switch to the same set finds
  // again.
  Elapsed SwitchLoras(const std::vector<std::string>& files, PatchMode mode, bool keep_merged);
  void DropLoras();

  // Copies all linear weights of the denoiser to new memory of the kind that merged ones get, once: what
  // merging cannot do without.
  Elapsed CopyWeights() const;

  // Moves the denoiser to a pretended device whose copies have that bandwidth (bytes per second): all of it,
  // or streamed through a ring of two blocks. Returns the bytes that each pass copies. Ends a LoRA.
  int64_t MoveToDevice(bool stream, double bandwidth);

 private:
  LockRequest RequestFor(const std::string& file);

  BenchHost* const host_;
  const std::unique_ptr<Pipeline> pipeline_;
  std::map<std::string, std::shared_ptr<const WeightSet>> weights_;
  std::vector<PatchTarget> targets_;
  std::map<std::string, LockRequest> loras_;  // by file, headers read
  std::vector<LockHandle> resident_;          // keep the records of `loras_`
  std::map<std::string, at::Tensor> inputs_;
  // Declared so that what borrows goes first.
  std::vector<LockHandle> session_;
  std::map<std::string, std::shared_ptr<const Overlay>> overlays_;
  std::unique_ptr<SimDevice> sim_;
  std::shared_ptr<const Resource> on_sim_;
  std::unique_ptr<WeightStream> stream_;
  std::map<std::string, std::unique_ptr<WeightView>> views_;
  std::shared_ptr<const Run> run_;
  RunState state_;
  std::unique_ptr<PhaseWork> work_;  // of one picture: a slice is a step
};

}  // namespace latentd::bench

#endif  // LATENTD_TESTS_BENCH_BENCH_MODEL_H_
