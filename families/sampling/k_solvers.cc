// Solvers of x = picture + σ·noise: Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based
// Generative Models". dx/dσ = (x − picture)/σ is the slope all of them follow.
#include <algorithm>
#include <array>
#include <cmath>

#include "ATen/ATen.h"
#include "families/sampling/solver.h"

namespace latentd {
namespace {

template <typename Derived>
class KSolver : public Solver<Derived> {
 public:
  explicit KSolver(const SolverInputs& inputs) : Solver<Derived>(inputs.plan, inputs.noise) {}

 protected:
  // σ of this user's step, and of the next one.
  double sigma_from() const { return this->plan().sigmas[static_cast<size_t>(this->index())]; }
  double sigma_to() const { return this->plan().sigmas[static_cast<size_t>(this->index()) + 1]; }

  // The slope at `sigma`, where this evaluation is. Remembers the picture for previews.
  at::Tensor Slope(const at::Tensor& output, const at::Tensor& x, double sigma) {
    this->set_prediction(this->Picture(output, x));
    return (x - this->prediction()).div_(sigma);
  }
};

class Euler final : public KSolver<Euler> {
 public:
  using KSolver::KSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    return at::add(x, Slope(output, x, sigma_from()), sigma_to() - sigma_from());
  }
};

class EulerAncestral final : public KSolver<EulerAncestral> {
 public:
  using KSolver::KSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    const AncestralSplit split = SplitAncestral(sigma_from(), sigma_to());
    at::Tensor next = at::add(x, Slope(output, x, sigma_from()), split.down - sigma_from());
    return next.add_(Draw(x), split.up);  // drawn in the last step, too: the order of draws is diffusers'
  }
};

// Algorithm 1: the mean of the slopes at both ends.
class Heun final : public KSolver<Heun> {
 public:
  using KSolver::KSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    const double from = sigma_from(), to = sigma_to();
    if (!second()) {
      start_ = x;
      slope_ = Slope(output, x, from);
      return at::add(x, slope_, to - from);
    }
    return at::add(start_, (slope_ + Slope(output, x, to)).div_(2), to - from);
  }

  at::Tensor start_, slope_;
};

// The slope at the middle of the step in log σ, for the whole step. Ancestral: down to the rest of the level
// only, the other part is noise.
class Kdpm2 final : public KSolver<Kdpm2> {
 public:
  Kdpm2(const SolverInputs& inputs, bool ancestral) : KSolver(inputs), ancestral_(ancestral) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    const double from = sigma_from();
    const AncestralSplit split =
        ancestral_ ? SplitAncestral(from, sigma_to()) : AncestralSplit{sigma_to(), 0};
    const double middle = LogMiddle(from, split.down);
    if (!second()) {
      start_ = x;
      return at::add(x, Slope(output, x, from), middle - from);
    }
    at::Tensor next = at::add(start_, Slope(output, x, middle), split.down - from);
    return ancestral_ ? next.add_(Draw(x), split.up) : next;
  }

  bool ancestral_;
  at::Tensor start_;
};

// Linear multistep: the polynomial through the last four slopes, integrated over the step (Adams–Bashforth
// for uneven steps). As by diffusers, a run that enters the list takes the slopes of levels before to be 0.
class Lms final : public KSolver<Lms> {
 public:
  using KSolver::KSolver;

 private:
  static constexpr size_t kOrder = 4;

  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    slopes_.Push(Slope(output, x, sigma_from()));
    const int64_t order = std::min<int64_t>(index() + 1, kOrder);
    at::Tensor next = x;
    for (int64_t i = 0; i < slopes_.size(); ++i) {
      next = at::add(next, slopes_[static_cast<size_t>(i)], Coefficient(order, i));
    }
    return next;
  }

  // ∫ of the i-th Lagrange polynomial of the last `order` levels. Two Gauss points are exact up to degree 3.
  double Coefficient(int64_t order, int64_t i) const {
    const double* now = plan().sigmas.data() + index();
    const double half = (sigma_to() - sigma_from()) / 2, middle = (sigma_to() + sigma_from()) / 2;
    double sum = 0;
    for (const double point : {-1 / std::sqrt(3.0), 1 / std::sqrt(3.0)}) {
      const double sigma = middle + half * point;
      double product = 1;
      for (int64_t k = 0; k < order; ++k) {
        if (k != i) product *= (sigma - now[-k]) / (now[-i] - now[-k]);
      }
      sum += product * half;
    }
    return sum;
  }

  History slopes_{kOrder};
};

// DPM-Solver++ (2S) with the noise of its SDE: Lu et al. 2022, "DPM-Solver++", with k-diffusion's ancestral
// split. The noise of both parts of a step belongs to one Brownian motion over σ: it is drawn for each half,
// and that of the whole step is made of both. So the distribution is that of a Brownian tree, single pictures
// are not those of one.
class DpmSde final : public KSolver<DpmSde> {
 public:
  using KSolver::KSolver;

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    const double from = sigma_from(), to = sigma_to();
    set_prediction(Picture(output, x));
    if (to == 0) return prediction();
    const double middle = LogMiddle(from, to);
    if (!second()) {
      start_ = x;
      first_noise_ = Draw(x);
      return Towards(x, from, middle, first_noise_);
    }
    const at::Tensor noise = (first_noise_ * std::sqrt((from - middle) / (from - to)))
                                 .add_(Draw(x), std::sqrt((middle - to) / (from - to)));
    return Towards(start_, from, to, noise);
  }

  at::Tensor Towards(const at::Tensor& start, double from, double to, const at::Tensor& noise) const {
    const AncestralSplit split = SplitAncestral(from, to);
    const double kept = split.down / from;
    return (start * kept).add_(prediction(), 1 - kept).add_(noise, split.up);
  }

  at::Tensor start_, first_noise_;
};

}  // namespace

std::unique_ptr<Sampler> MakeEuler(const SolverInputs& inputs) { return std::make_unique<Euler>(inputs); }
std::unique_ptr<Sampler> MakeEulerAncestral(const SolverInputs& inputs) {
  return std::make_unique<EulerAncestral>(inputs);
}
std::unique_ptr<Sampler> MakeHeun(const SolverInputs& inputs) { return std::make_unique<Heun>(inputs); }
std::unique_ptr<Sampler> MakeKdpm2(const SolverInputs& inputs) {
  return std::make_unique<Kdpm2>(inputs, false);
}
std::unique_ptr<Sampler> MakeKdpm2Ancestral(const SolverInputs& inputs) {
  return std::make_unique<Kdpm2>(inputs, true);
}
std::unique_ptr<Sampler> MakeLms(const SolverInputs& inputs) { return std::make_unique<Lms>(inputs); }
std::unique_ptr<Sampler> MakeDpmSde(const SolverInputs& inputs) { return std::make_unique<DpmSde>(inputs); }

}  // namespace latentd
