// What solvers share, and where each is made. A solver is one formula: it takes its numbers from the plan,
// and keeps what its formula remembers between evaluations. Shapes, threads and errors: sampler.h.
#ifndef LATENTD_FAMILIES_SAMPLING_SOLVER_H_
#define LATENTD_FAMILIES_SAMPLING_SOLVER_H_

#include <memory>
#include <utility>
#include <vector>

#include "families/sampling/sampler.h"
#include "families/sampling/sampler_plan.h"

namespace latentd {

// A sampler that is cloned by its copy constructor.
template <typename Derived>
class Solver : public Sampler {
 public:
  using Sampler::Sampler;

  std::unique_ptr<Sampler> Clone(std::shared_ptr<NoiseSource> noise) const override {
    auto copy = std::make_unique<Derived>(static_cast<const Derived&>(*this));
    copy->TakeNoise(std::move(noise));
    return copy;
  }
};

// The last few tensors, newest first.
class History {
 public:
  explicit History(size_t size) : size_(size) {}
  void Push(const at::Tensor& value) {
    values_.insert(values_.begin(), value);
    if (values_.size() > size_) values_.pop_back();
  }
  const at::Tensor& operator[](size_t age) const { return values_[age]; }
  int64_t size() const { return static_cast<int64_t>(values_.size()); }

 private:
  size_t size_;
  std::vector<at::Tensor> values_;
};

struct SolverInputs {
  std::shared_ptr<const SamplerPlan> plan;
  std::shared_ptr<NoiseSource> noise;
  double eta = 0;
};
using MakeSolver = std::unique_ptr<Sampler> (*)(const SolverInputs& inputs);

// k_solvers.cc: x = picture + σ·noise.
std::unique_ptr<Sampler> MakeEuler(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeEulerAncestral(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeHeun(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeKdpm2(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeKdpm2Ancestral(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeLms(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeDpmSde(const SolverInputs& inputs);

// dpm_solvers.cc: exponential integrators in log σ.
std::unique_ptr<Sampler> MakeDpmMultistep(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeDpmSingleStep(const SolverInputs& inputs);

// multistep_solvers.cc
std::unique_ptr<Sampler> MakeDeis(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeUniPc(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeErSde(const SolverInputs& inputs);

// alpha_bar_solvers.cc: levels read at whole timesteps.
std::unique_ptr<Sampler> MakeDdim(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeDdpm(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakePndm(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeLcm(const SolverInputs& inputs);
std::unique_ptr<Sampler> MakeTcd(const SolverInputs& inputs);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_SOLVER_H_
