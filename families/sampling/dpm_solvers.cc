// DPM-Solver and DPM-Solver++: Lu et al. 2022, "DPM-Solver: A Fast ODE Solver for Diffusion Probabilistic
// Model Sampling in Around 10 Steps" and "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion
// Probabilistic Models". Exact in the linear part of the equation, polynomial in what the network says, over
// λ = −log σ: in its noise the first, in its picture the second. Names follow the papers: h is a step in λ, r
// a quotient of steps, D a divided difference.
#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "families/sampling/solver.h"

namespace latentd {
namespace {

constexpr int64_t kFewSteps = 15;  // below, the end of a run is kept at a low order

// Between two levels of the list.
struct Stride {
  Level from, to;
  double h = 0;      // in λ; infinite when `to` is the picture
  double decay = 0;  // e^−h
};

Stride StrideOf(const SamplerPlan& plan, int64_t from, int64_t to) {
  const double a = plan.sigmas[static_cast<size_t>(from)], b = plan.sigmas[static_cast<size_t>(to)];
  return {plan.LevelAt(a), plan.LevelAt(b), std::log(a) - std::log(b), b / a};
}

// What the end of a stride is made of: x at its beginning, what the network said there (D0), its slope by the
// midpoint's formula or by Heun's (D1), its curvature (D2), and noise.
struct Weights {
  double x = 0, d0 = 0, midpoint = 0, heun = 0, d2 = 0, noise = 0;
};

Weights OfPictures(const Stride& s, bool noisy) {
  const double decay = noisy ? s.decay * s.decay : s.decay, h = noisy ? 2 * s.h : s.h;
  Weights w;
  w.x = s.to.sigma / s.from.sigma * (noisy ? s.decay : 1);
  w.d0 = s.to.alpha * (1 - decay);
  w.midpoint = w.d0 / 2;
  w.heun = s.to.alpha * ((decay - 1) / h + 1);
  // With noise diffusers has another sign before the half.
  w.d2 = noisy ? s.to.alpha * ((1 - decay - h) / (h * h) - 0.5)
               : -(s.to.alpha * ((decay - 1 + h) / (h * h) - 0.5));
  w.noise = s.to.sigma * std::sqrt(1 - s.decay * s.decay);
  return w;
}

Weights OfNoise(const Stride& s, bool noisy) {
  const double growth = 1 / s.decay - 1, twice = noisy ? 2 : 1;
  Weights w;
  w.x = s.to.alpha / s.from.alpha;
  w.d0 = -twice * s.to.sigma * growth;
  w.midpoint = w.d0 / 2;
  w.heun = -twice * s.to.sigma * (growth / s.h - 1);
  w.d2 = -(s.to.sigma * ((growth - s.h) / (s.h * s.h) - 0.5));
  w.noise = s.to.sigma * std::sqrt(1 / (s.decay * s.decay) - 1);
  return w;
}

template <typename Derived>
class DpmSolver : public Solver<Derived> {
 public:
  explicit DpmSolver(const SolverInputs& inputs)
      : Solver<Derived>(inputs.plan, inputs.noise), outputs_(static_cast<size_t>(settings().order)) {}

 protected:
  const SolverSettings& settings() const { return this->plan().solver; }
  const History& outputs() const { return outputs_; }

  // Keeps what the network said in the solver's terms, and draws this step's noise.
  void Take(const at::Tensor& output, const at::Tensor& x) {
    const at::Tensor picture = this->Picture(output, x);
    this->set_prediction(picture);
    if (!settings().on_noise) {
      outputs_.Push(picture);
    } else {
      outputs_.Push(settings().threshold ? this->NoiseBeside(picture, x) : this->Noise(output, x));
    }
    if (settings().noisy) noise_ = this->Draw(x);
  }

  double StepOf(int64_t from, int64_t to) const { return StrideOf(this->plan(), from, to).h; }
  Weights WeightsOf(const Stride& stride) const {
    return settings().on_noise ? OfNoise(stride, settings().noisy) : OfPictures(stride, settings().noisy);
  }
  double Slope(const Weights& weights) const { return settings().heun ? weights.heun : weights.midpoint; }
  at::Tensor WithNoise(at::Tensor next, const Weights& weights) const {
    return settings().noisy ? next.add_(noise_, weights.noise) : next;
  }

 private:
  History outputs_;
  at::Tensor noise_;
};

class DpmMultistep final : public DpmSolver<DpmMultistep> {
 public:
  using DpmSolver::DpmSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    Take(output, x);
    const int64_t order = OrderNow();
    const Stride stride = StrideOf(plan(), index(), index() + 1);
    const Weights weights = WeightsOf(stride);
    at::Tensor next = (x * weights.x).add_(outputs()[0], weights.d0);
    if (order == 2) {
      next.add_(FirstDifference(0, stride.h), Slope(weights));
    } else if (order == 3) {
      AddThird(stride, weights, next);
    }
    return WithNoise(next, weights);
  }

  int64_t OrderNow() const {
    const int64_t left = plan().steps() - index();
    const bool careful = settings().lower_order_final && plan().steps() < kFewSteps;
    const int64_t order = std::min(settings().order, outputs().size());
    if (StepOf(index(), index() + 1) == 0) return 1;  // the end of a list that ends at its last level
    if (left == 1 && (careful || settings().euler_at_final || plan().sigmas.back() == 0)) return 1;
    return left == 2 && careful ? std::min<int64_t>(order, 2) : order;
  }

  double PreviousStep(int64_t age) const { return StepOf(index() - age - 1, index() - age); }

  // (m_age − m_age+1)/r.
  at::Tensor FirstDifference(int64_t age, double h) const {
    const auto i = static_cast<size_t>(age);
    return (outputs()[i] - outputs()[i + 1]).mul_(h / PreviousStep(age));
  }

  void AddThird(const Stride& stride, const Weights& weights, at::Tensor& next) const {
    const double h = stride.h;
    const double r0 = PreviousStep(0) / h, r1 = PreviousStep(1) / h;
    const at::Tensor newer = FirstDifference(0, h), older = FirstDifference(1, h);
    const at::Tensor change = newer - older;
    const at::Tensor d1 = at::add(newer, change, r0 / (r0 + r1));
    next.add_(d1, weights.heun).add_(change, weights.d2 / (r0 + r1));
  }
};

// Single step: evaluations between those that begin a step of the whole order, each of which goes on from
// there.
class DpmSingleStep final : public DpmSolver<DpmSingleStep> {
 public:
  using DpmSolver::DpmSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    Take(output, x);
    const int64_t i = index();
    const int64_t order = std::min(OrderAt(i), outputs().size());
    if (order == 1) start_ = x;
    const Stride whole = StrideOf(plan(), i + 1 - order, i + 1);
    const Weights weights = WeightsOf(whole);
    const auto first = static_cast<size_t>(order) - 1;
    at::Tensor next = (start_ * weights.x).add_(outputs()[first], weights.d0);
    if (order == 2) {
      next.add_(outputs()[0] - outputs()[1], Slope(weights) / (StepOf(i - 1, i) / whole.h));
    } else if (order == 3) {
      AddThird(whole, weights, next);
    }
    return WithNoise(next, weights);
  }

  void AddThird(const Stride& whole, const Weights& weights, at::Tensor& next) const {
    const int64_t i = index();
    const double r0 = StepOf(i - 2, i) / whole.h, r1 = StepOf(i - 2, i - 1) / whole.h;
    const at::Tensor to_middle = (outputs()[1] - outputs()[2]).div_(r1);
    const at::Tensor to_end = (outputs()[0] - outputs()[2]).div_(r0);
    if (!settings().heun) {
      next.add_(to_end, weights.heun);
      return;
    }
    const at::Tensor d1 = (to_middle * r0).sub_(to_end, r1).div_(r0 - r1);
    next.add_(d1, weights.heun).add_(to_end - to_middle, 2 * weights.d2 / (r0 - r1));
  }

  // Steps of the whole order, but where they do not come out even and where a run ends at the picture.
  int64_t OrderAt(int64_t i) const {
    const int64_t order = settings().order, steps = plan().steps();
    const bool at_picture = plan().sigmas.back() == 0, even = steps % order == 0;
    const bool lower_final = settings().lower_order_final || !even || at_picture;
    if (i + 1 == steps && (at_picture || (lower_final && even))) return 1;
    return i % order + 1;
  }

  at::Tensor start_;
};

}  // namespace

std::unique_ptr<Sampler> MakeDpmMultistep(const SolverInputs& inputs) {
  return std::make_unique<DpmMultistep>(inputs);
}
std::unique_ptr<Sampler> MakeDpmSingleStep(const SolverInputs& inputs) {
  return std::make_unique<DpmSingleStep>(inputs);
}

}  // namespace latentd
