// Multistep solvers of other kinds than DPM++: DEIS, UniPC and ER-SDE.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "families/sampling/solver.h"

namespace latentd {
namespace {

constexpr int64_t kFewSteps = 15;  // below, DEIS ends at a low order

double SigmaOf(const SamplerPlan& plan, int64_t i) { return plan.sigmas[static_cast<size_t>(i)]; }

// Zhang and Chen 2022, "Fast Sampling of Diffusion Models with Exponential Integrator": the noise as a
// polynomial in log σ through the last evaluations, integrated over σ.
class Deis final : public Solver<Deis> {
 public:
  explicit Deis(const SolverInputs& inputs)
      : Solver(inputs.plan, inputs.noise), noises_(static_cast<size_t>(inputs.plan->solver.order)) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    noises_.Push(plan().solver.threshold ? NoiseBeside(prediction(), x) : Noise(output, x));
    const int64_t i = index();
    const double from = SigmaOf(plan(), i), to = SigmaOf(plan(), i + 1);
    const double alpha = PreservingLevel(to).alpha;
    at::Tensor next = x * (alpha / PreservingLevel(from).alpha);
    const int64_t order = OrderNow();
    if (order == 1) return next.add_(noises_[0], alpha * (to - from));
    for (int64_t k = 0; k < order; ++k) {
      const double integral =
          order == 2 ? Line(from, to, SigmaOf(plan(), i - k), SigmaOf(plan(), i - 1 + k))
                     : Parabola(from, to, SigmaOf(plan(), i - k), SigmaOf(plan(), i - (k + 1) % 3),
                                SigmaOf(plan(), i - (k + 2) % 3));
      next.add_(noises_[static_cast<size_t>(k)], alpha * integral);
    }
    return next;
  }

  int64_t OrderNow() const {
    const int64_t left = plan().steps() - index();
    int64_t order = std::min(plan().solver.order, noises_.size());
    if (!plan().solver.lower_order_final || plan().steps() >= kFewSteps) return order;
    return left <= 2 ? std::min(order, left) : order;
  }

  // ∫ from..to of the line in log σ that is 1 at `one` and 0 at `zero`.
  static double Line(double from, double to, double one, double zero) {
    auto antiderivative = [&](double s) {
      return s * (std::log(s) - 1 - std::log(zero)) / std::log(one / zero);
    };
    return antiderivative(to) - antiderivative(from);
  }
  // Of the parabola with two zeros.
  static double Parabola(double from, double to, double one, double zero, double other) {
    const double b = std::log(one), c = std::log(zero), d = std::log(other);
    auto antiderivative = [&](double s) {
      const double t = std::log(s);
      return s * ((t - c) * (t - d) - (2 * t - c - d) + 2) / ((b - c) * (b - d));
    };
    return antiderivative(to) - antiderivative(from);
  }

  History noises_;
};

// The ρ of Σ_k ρ_k·r_k^i = b_i, by elimination; few and well apart.
std::vector<double> SolvePowers(const std::vector<double>& r, std::vector<double> b) {
  const size_t n = r.size();
  std::vector<std::vector<double>> rows(n, std::vector<double>(n, 1));
  for (size_t i = 1; i < n; ++i) {
    for (size_t k = 0; k < n; ++k) rows[i][k] = rows[i - 1][k] * r[k];
  }
  for (size_t i = 0; i < n; ++i) {
    size_t best = i;
    for (size_t k = i + 1; k < n; ++k) {
      if (std::abs(rows[k][i]) > std::abs(rows[best][i])) best = k;
    }
    std::swap(rows[i], rows[best]);
    std::swap(b[i], b[best]);
    for (size_t k = i + 1; k < n; ++k) {
      const double factor = rows[k][i] / rows[i][i];
      for (size_t j = i; j < n; ++j) rows[k][j] -= factor * rows[i][j];
      b[k] -= factor * b[i];
    }
  }
  for (size_t i = n; i-- > 0;) {
    for (size_t k = i + 1; k < n; ++k) b[i] -= rows[i][k] * b[k];
    b[i] /= rows[i][i];
  }
  return b;
}

// Zhao et al. 2023, "UniPC", of any order with B₁(h) or B₂(h): a predictor, and a corrector that does the
// previous step again once its end was evaluated. Names follow the paper; hh is −h where the polynomial is in
// the picture, h where it is in the noise.
class UniPc final : public Solver<UniPc> {
 public:
  explicit UniPc(const SolverInputs& inputs)
      : Solver(inputs.plan, inputs.noise), outputs_(static_cast<size_t>(settings().order)) {}

 private:
  const SolverSettings& settings() const { return plan().solver; }

  // The part that both share: from level `from` to `to`, with output `m0` of the first.
  struct Base {
    at::Tensor x;
    double weight = 0;  // α·B or σ·B, of what is taken off
    double hh = 0, phi = 0, b = 0, lambda = 0;
  };
  Base Start(const at::Tensor& x, const at::Tensor& m0, int64_t from, int64_t to) const {
    const double a = SigmaOf(plan(), from), b = SigmaOf(plan(), to);
    const Level level = PreservingLevel(b);
    const bool on_noise = settings().on_noise;
    const double share = on_noise ? level.sigma : level.alpha;
    const double kept =
        on_noise ? level.alpha / PreservingLevel(a).alpha : level.sigma / PreservingLevel(a).sigma;
    Base base;
    base.lambda = std::log(a) - std::log(b);
    base.hh = on_noise ? base.lambda : -base.lambda;
    base.phi = on_noise ? a / b - 1 : b / a - 1;  // e^hh − 1
    base.b = settings().bh1 ? base.hh : base.phi;
    base.weight = share * base.b;
    base.x = (x * kept).sub_(m0, share * base.phi);
    return base;
  }
  // Position of the point `age` before `from`, in strides from `from`; negative.
  double Ratio(int64_t from, int64_t age, double stride) const {
    return (std::log(SigmaOf(plan(), from)) - std::log(SigmaOf(plan(), from - age))) / stride;
  }

  // b of the paper's equation: φ_k of the first `count` orders over B.
  static std::vector<double> Targets(const Base& base, int64_t count) {
    std::vector<double> targets;
    double phi = base.phi / base.hh - 1, factorial = 1;
    for (int64_t i = 1; i <= count; ++i) {
      targets.push_back(phi * factorial / base.b);
      factorial *= static_cast<double>(i + 1);
      phi = phi / base.hh - 1 / factorial;
    }
    return targets;
  }

  at::Tensor Correct(const at::Tensor& now) const {
    const int64_t i = index();
    const Base base = Start(corrected_, outputs_[0], i - 1, i);
    const at::Tensor change = now - outputs_[0];
    if (last_order_ == 1) return base.x.sub_(change, base.weight * 0.5);
    const std::vector<double> targets = Targets(base, last_order_);
    if (last_order_ == 2) {
      const double r = Ratio(i - 1, 1, base.lambda);
      const double older = (targets[0] - targets[1]) / (1 - r);
      return base.x.sub_(outputs_[1] - outputs_[0], base.weight * older / r)
          .sub_(change, base.weight * (targets[0] - older));
    }
    std::vector<double> r;
    for (int64_t age = 1; age < last_order_; ++age) r.push_back(Ratio(i - 1, age, base.lambda));
    r.push_back(1);
    const std::vector<double> rho = SolvePowers(r, targets);
    return TakeOff(base, r, rho).sub_(change, base.weight * rho.back());
  }

  at::Tensor Predict() const {
    const int64_t i = index();
    const Base base = Start(corrected_, outputs_[0], i, i + 1);
    if (last_order_ == 1) return base.x;
    if (last_order_ == 2) {
      return base.x.sub_(outputs_[1] - outputs_[0], base.weight * 0.5 / Ratio(i, 1, base.lambda));
    }
    std::vector<double> r;
    for (int64_t age = 1; age < last_order_; ++age) r.push_back(Ratio(i, age, base.lambda));
    return TakeOff(base, r, SolvePowers(r, Targets(base, last_order_ - 1)));
  }

  // The differences of older outputs to the newest, each by its ρ.
  at::Tensor TakeOff(const Base& base, const std::vector<double>& r, const std::vector<double>& rho) const {
    at::Tensor x = base.x;
    for (size_t k = 0; k + 1 < static_cast<size_t>(last_order_); ++k) {
      x.sub_(outputs_[k + 1] - outputs_[0], base.weight * rho[k] / r[k]);
    }
    return x;
  }

  bool Corrects() const {
    const std::vector<int64_t>& without = settings().uncorrected;
    return outputs_.size() > 0 && std::find(without.begin(), without.end(), index() - 1) == without.end();
  }

  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    const at::Tensor now = settings().on_noise ? Noise(output, x) : prediction();
    corrected_ = Corrects() ? Correct(now) : x;
    outputs_.Push(now);
    last_order_ = std::min(settings().order, outputs_.size());
    if (settings().lower_order_final) last_order_ = std::min(last_order_, plan().steps() - index());
    return Predict();
  }

  at::Tensor corrected_;  // where the last predictor began
  int64_t last_order_ = 0;
  History outputs_;
};

// Cui et al. 2023, "Elucidating the Solution Space of Extended Reverse-Time SDE for Diffusion Models", order
// 3 with the paper's noise scale f(λ) = λ·(e^(λ^0.3) + 10); λ is σ here.
class ErSde final : public Solver<ErSde> {
 public:
  explicit ErSde(const SolverInputs& inputs) : Solver(inputs.plan, inputs.noise) {}

 private:
  static constexpr int kPoints = 100;

  static double NoiseScale(double sigma) { return sigma * (std::exp(std::pow(sigma, 0.3)) + 10); }

  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    const int64_t i = index();
    const double from = SigmaOf(plan(), i), to = SigmaOf(plan(), i + 1);
    if (to == 0) return prediction();
    const double alpha = PreservingLevel(to).alpha;
    const double scale = NoiseScale(to), r = scale / NoiseScale(from);
    at::Tensor next = (x * (alpha / PreservingLevel(from).alpha * r)).add_(prediction(), alpha * (1 - r));
    if (picture_.defined()) {
      // Left sums of ∫ dλ/f and ∫ (λ − from) dλ/f.
      double first = 0, second = 0;
      const double width = (from - to) / kPoints;
      for (int k = 0; k < kPoints; ++k) {
        const double at = to + k * width;
        first += width / NoiseScale(at);
        second += width * (at - from) / NoiseScale(at);
      }
      const at::Tensor slope = (prediction() - picture_).div_(from - SigmaOf(plan(), i - 1));
      next.add_(slope, alpha * (to - from + first * scale));
      if (slope_.defined()) {
        const at::Tensor curve = (slope - slope_).div_((from - SigmaOf(plan(), i - 2)) / 2);
        next.add_(curve, alpha * ((to - from) * (to - from) / 2 + second * scale));
      }
      slope_ = slope;
    }
    picture_ = prediction();
    return next.add_(Draw(x), alpha * std::sqrt(std::max(to * to - from * from * r * r, 0.0)));
  }

  at::Tensor picture_, slope_;
};

}  // namespace

std::unique_ptr<Sampler> MakeDeis(const SolverInputs& inputs) { return std::make_unique<Deis>(inputs); }
std::unique_ptr<Sampler> MakeUniPc(const SolverInputs& inputs) { return std::make_unique<UniPc>(inputs); }
std::unique_ptr<Sampler> MakeErSde(const SolverInputs& inputs) { return std::make_unique<ErSde>(inputs); }

}  // namespace latentd
