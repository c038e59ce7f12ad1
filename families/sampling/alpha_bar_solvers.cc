// Solvers whose levels are ᾱ at whole training timesteps.
#include <algorithm>
#include <array>
#include <cmath>

#include "ATen/ATen.h"
#include "families/sampling/solver.h"

namespace latentd {
namespace {

template <typename Derived>
class AlphaBarSolver : public Solver<Derived> {
 public:
  explicit AlphaBarSolver(const SolverInputs& inputs) : Solver<Derived>(inputs.plan, inputs.noise) {}

 protected:
  const NoiseSchedule& schedule() const { return *this->plan().schedule; }
  int64_t time() const { return static_cast<int64_t>(this->timestep()); }
  // The timestep of the next step in the list; −1 after the last.
  int64_t next_time() const {
    const int64_t i = this->index() + 1;
    return i < this->plan().steps() ? static_cast<int64_t>(this->plan().timesteps[static_cast<size_t>(i)])
                                    : -1;
  }
  bool last() const { return this->index() + 1 == this->plan().steps(); }
  // Timesteps of a step, had all of them the same number.
  int64_t stride() const { return schedule().config().train_steps / this->plan().steps(); }
  // ᾱ after a run's end is 1, or that of the first training step.
  double AlphaBar(int64_t t, bool ends_at_one) const {
    return t >= 0        ? schedule().AlphaBar(std::min(t, schedule().config().train_steps - 1))
           : ends_at_one ? 1.0
                         : schedule().AlphaBar(0);
  }
};

// Song et al. 2020, "Denoising Diffusion Implicit Models", eq. 12 and 16; η is the share of DDPM's noise.
class Ddim final : public AlphaBarSolver<Ddim> {
 public:
  explicit Ddim(const SolverInputs& inputs) : AlphaBarSolver(inputs), eta_(inputs.eta) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    const double bar = schedule().AlphaBar(time());
    const double next = AlphaBar(time() - stride(), schedule().config().set_alpha_to_one.value_or(true));
    const double deviation = eta_ * std::sqrt((1 - next) / (1 - bar) * (1 - bar / next));
    // What η leaves of the noise: at a level of nothing but noise, with η of 1, nothing, or less by rounding.
    const double kept = std::max(0.0, 1 - next - deviation * deviation);
    at::Tensor result = (prediction() * std::sqrt(next)).add_(Noise(output, x), std::sqrt(kept));
    if (eta_ > 0) result.add_(Draw(x), deviation);
    return result;
  }

  double eta_;
};

// Ho et al. 2020, "Denoising Diffusion Probabilistic Models", eq. 6 and 7, with either variance of §3.2.
class Ddpm final : public AlphaBarSolver<Ddpm> {
 public:
  using AlphaBarSolver::AlphaBarSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    const double bar = schedule().AlphaBar(time());
    const double next = AlphaBar(next_time(), true);
    const double alpha = bar / next, beta = 1 - alpha;
    at::Tensor result = (prediction() * (std::sqrt(next) * beta / (1 - bar)))
                            .add_(x, std::sqrt(alpha) * (1 - next) / (1 - bar));
    if (time() == 0) return result;
    const double variance =
        plan().solver.large_variance ? beta : std::max((1 - next) / (1 - bar) * beta, 1e-20);
    return result.add_(Draw(x), std::sqrt(variance));
  }
};

// Liu et al. 2022, "Pseudo Numerical Methods for Diffusion Models on Manifolds", linear multistep (PLMS). A
// run's first step is done twice, the second time with the mean of the outputs at both its ends. As by
// diffusers, whose list has its second level twice: a run that enters it there, and one level later, has its
// two evaluations at other levels than those that the formula takes them to be at.
class Pndm final : public AlphaBarSolver<Pndm> {
 public:
  using AlphaBarSolver::AlphaBarSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    if (second()) {
      // The step's end, seen from a whole stride before it: where diffusers takes it to have begun.
      return Transfer(start_, (output + outputs_[0]).div_(2), time() + stride(), time());
    }
    outputs_.Push(output);
    start_ = x;
    return Transfer(x, Combined(), time(), time() - stride());
  }

  // Adams–Bashforth of as many outputs as there are.
  at::Tensor Combined() const {
    static constexpr std::array<std::array<double, 4>, 4> kWeights = {{
        {1, 0, 0, 0},
        {3.0 / 2, -1.0 / 2, 0, 0},
        {23.0 / 12, -16.0 / 12, 5.0 / 12, 0},
        {55.0 / 24, -59.0 / 24, 37.0 / 24, -9.0 / 24},
    }};
    const auto count = static_cast<size_t>(outputs_.size());
    const auto& weights = kWeights[count - 1];
    at::Tensor sum = outputs_[0] * weights[0];
    for (size_t i = 1; i < count; ++i) sum.add_(outputs_[i], weights[i]);
    return sum;
  }

  // Eq. 9, from timestep `from` to `to`.
  at::Tensor Transfer(const at::Tensor& x, const at::Tensor& output, int64_t from, int64_t to) const {
    const bool one = schedule().config().set_alpha_to_one.value_or(false);
    const double bar = AlphaBar(from, one), next = AlphaBar(to, one);
    const at::Tensor noise = schedule().config().prediction == Prediction::kVelocity
                                 ? at::add(output * std::sqrt(bar), x, std::sqrt(1 - bar))
                                 : output;
    const double divisor = bar * std::sqrt(1 - next) + std::sqrt(bar * (1 - bar) * next);
    return (x * std::sqrt(next / bar)).sub_(noise, (next - bar) / divisor);
  }

  at::Tensor start_;
  History outputs_{4};
};

// Luo et al. 2023, "Latent Consistency Models", algorithm 3; the skip weights of Song et al. 2023.
class Lcm final : public AlphaBarSolver<Lcm> {
 public:
  using AlphaBarSolver::AlphaBarSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    constexpr double kDeviation = 0.5;
    const double t = this->timestep() * plan().solver.timestep_scaling;
    const double norm = t * t + kDeviation * kDeviation;
    set_prediction((Picture(output, x) * (t / std::sqrt(norm))).add_(x, kDeviation * kDeviation / norm));
    if (last()) return prediction();
    const double next = schedule().AlphaBar(next_time());
    return (prediction() * std::sqrt(next)).add_(Draw(x), std::sqrt(1 - next));
  }
};

// Zheng et al. 2024, "Trajectory Consistency Distillation", algorithm 4: down to s below the next timestep,
// then up to it with noise; η says how far below.
class Tcd final : public AlphaBarSolver<Tcd> {
 public:
  explicit Tcd(const SolverInputs& inputs) : AlphaBarSolver(inputs), eta_(inputs.eta) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    const int64_t to = std::max<int64_t>(next_time(), 0);
    const auto below =
        static_cast<int64_t>(std::floor(static_cast<float>(1 - eta_) * static_cast<float>(to)));
    const double bar = schedule().AlphaBar(below), next = schedule().AlphaBar(to);
    at::Tensor result = (prediction() * std::sqrt(bar)).add_(Noise(output, x), std::sqrt(1 - bar));
    if (eta_ == 0 || last()) return result;
    return result.mul_(std::sqrt(next / bar)).add_(Draw(x), std::sqrt(1 - next / bar));
  }

  double eta_;
};

}  // namespace

std::unique_ptr<Sampler> MakeDdim(const SolverInputs& inputs) { return std::make_unique<Ddim>(inputs); }
std::unique_ptr<Sampler> MakeDdpm(const SolverInputs& inputs) { return std::make_unique<Ddpm>(inputs); }
std::unique_ptr<Sampler> MakePndm(const SolverInputs& inputs) { return std::make_unique<Pndm>(inputs); }
std::unique_ptr<Sampler> MakeLcm(const SolverInputs& inputs) { return std::make_unique<Lcm>(inputs); }
std::unique_ptr<Sampler> MakeTcd(const SolverInputs& inputs) { return std::make_unique<Tcd>(inputs); }

}  // namespace latentd
