// DPM-Solver++: Lu et al. 2022, "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic
// Models". Exact in the linear part of the equation, polynomial in what the network says, over λ = −log σ.
// Names follow the paper: h is a step in λ, r a quotient of steps, D a divided difference of pictures.
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
  return {PreservingLevel(a), PreservingLevel(b), std::log(a) - std::log(b), b / a};
}

class DpmMultistep final : public Solver<DpmMultistep> {
 public:
  DpmMultistep(const SolverInputs& inputs, int64_t order, bool noisy)
      : Solver(inputs.plan, inputs.noise),
        order_(order),
        noisy_(noisy),
        pictures_(static_cast<size_t>(order)) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    pictures_.Push(prediction());
    const at::Tensor noise = noisy_ ? Draw(x) : at::Tensor();
    const int64_t order = OrderNow();
    const Stride stride = StrideOf(plan(), index(), index() + 1);
    // α(1 − e^−h), squared e for the SDE: what the newest picture weighs.
    const double reach = stride.to.alpha * (1 - (noisy_ ? stride.decay * stride.decay : stride.decay));
    at::Tensor next =
        (x * (stride.to.sigma / stride.from.sigma * (noisy_ ? stride.decay : 1))).add_(pictures_[0], reach);
    if (order == 2) {
      next.add_(FirstDifference(0, stride.h), reach / 2);
    } else if (order == 3) {
      AddThird(stride, next);
    }
    if (noisy_) next.add_(noise, stride.to.sigma * std::sqrt(1 - stride.decay * stride.decay));
    return next;
  }

  int64_t OrderNow() const {
    const int64_t left = plan().steps() - index();
    int64_t order = std::min(order_, pictures_.size());
    if (left == 1) order = 1;
    if (left == 2 && plan().steps() < kFewSteps) order = std::min<int64_t>(order, 2);
    return order;
  }

  double PreviousStride(int64_t age) const { return StrideOf(plan(), index() - age - 1, index() - age).h; }

  // (m_age − m_age+1)/r.
  at::Tensor FirstDifference(int64_t age, double h) const {
    const auto i = static_cast<size_t>(age);
    return (pictures_[i] - pictures_[i + 1]).mul_(h / PreviousStride(age));
  }

  void AddThird(const Stride& stride, at::Tensor& next) const {
    const double h = stride.h, alpha = stride.to.alpha;
    const double r0 = PreviousStride(0) / h, r1 = PreviousStride(1) / h;
    const at::Tensor newer = FirstDifference(0, h), older = FirstDifference(1, h);
    const at::Tensor change = newer - older;
    const at::Tensor d1 = at::add(newer, change, r0 / (r0 + r1));
    const double phi = stride.decay - 1;  // e^−h − 1
    next.add_(d1, alpha * (phi / h + 1)).sub_(change, alpha * ((phi + h) / (h * h) - 0.5) / (r0 + r1));
  }

  int64_t order_;
  bool noisy_;
  History pictures_;
};

// Single step, order 2: every other evaluation is in the middle of a step that begins at the one before.
class Dpm2s final : public Solver<Dpm2s> {
 public:
  explicit Dpm2s(const SolverInputs& inputs) : Solver(inputs.plan, inputs.noise) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    pictures_.Push(prediction());
    const int64_t i = index();
    if (!InMiddle(i)) {
      start_ = x;
      const Stride stride = StrideOf(plan(), i, i + 1);
      return (x * (stride.to.sigma / stride.from.sigma))
          .add_(prediction(), stride.to.alpha * (1 - stride.decay));
    }
    const Stride whole = StrideOf(plan(), i - 1, i + 1);
    const double r = StrideOf(plan(), i - 1, i).h / whole.h;
    const double reach = whole.to.alpha * (1 - whole.decay);
    return (start_ * (whole.to.sigma / whole.from.sigma))
        .add_(pictures_[1], reach)
        .add_(pictures_[0] - pictures_[1], reach / (2 * r));
  }

  // The last step, and of an even number the one before, are of order 1. So is a run's first.
  bool InMiddle(int64_t i) const { return i % 2 == 1 && i + 1 < plan().steps() && pictures_.size() > 1; }

  at::Tensor start_;
  History pictures_{2};
};

}  // namespace

std::unique_ptr<Sampler> MakeDpm2m(const SolverInputs& inputs) {
  return std::make_unique<DpmMultistep>(inputs, 2, false);
}
std::unique_ptr<Sampler> MakeDpm3m(const SolverInputs& inputs) {
  return std::make_unique<DpmMultistep>(inputs, 3, false);
}
std::unique_ptr<Sampler> MakeDpm2mSde(const SolverInputs& inputs) {
  return std::make_unique<DpmMultistep>(inputs, 2, true);
}
std::unique_ptr<Sampler> MakeDpm2s(const SolverInputs& inputs) { return std::make_unique<Dpm2s>(inputs); }

}  // namespace latentd
