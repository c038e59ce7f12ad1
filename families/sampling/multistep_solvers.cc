// Multistep solvers of other kinds than DPM++: DEIS, UniPC and ER-SDE.
#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "families/sampling/solver.h"

namespace latentd {
namespace {

constexpr int64_t kFewSteps = 15;  // below, DEIS ends at order 1

double SigmaOf(const SamplerPlan& plan, int64_t i) { return plan.sigmas[static_cast<size_t>(i)]; }

// Zhang and Chen 2022, "Fast Sampling of Diffusion Models with Exponential Integrator": the noise as a
// polynomial in log σ through the last two evaluations, integrated over σ.
class Deis final : public Solver<Deis> {
 public:
  explicit Deis(const SolverInputs& inputs) : Solver(inputs.plan, inputs.noise) {}

 private:
  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    noises_.Push(Noise(output, x));
    const int64_t i = index();
    const double from = SigmaOf(plan(), i), to = SigmaOf(plan(), i + 1);
    const double alpha = PreservingLevel(to).alpha;
    at::Tensor next = x * (alpha / PreservingLevel(from).alpha);
    const bool last = i + 1 == plan().steps() && plan().steps() < kFewSteps;
    if (last || noises_.size() < 2) return next.add_(noises_[0], alpha * (to - from));
    const double before = SigmaOf(plan(), i - 1);
    return next.add_(noises_[0], alpha * Integral(from, to, before))
        .add_(noises_[1], alpha * IntegralOfOther(from, to, before));
  }

  // ∫ from..to of the line in log σ that is 1 at `one` and 0 at `zero`.
  static double Line(double from, double to, double one, double zero) {
    auto antiderivative = [&](double s) {
      return s * (std::log(s) - 1 - std::log(zero)) / std::log(one / zero);
    };
    return antiderivative(to) - antiderivative(from);
  }
  static double Integral(double from, double to, double before) { return Line(from, to, from, before); }
  static double IntegralOfOther(double from, double to, double before) {
    return Line(from, to, before, from);
  }

  History noises_{2};
};

// Zhao et al. 2023, "UniPC", order 2 with B₂(h): a predictor, and a corrector that does the previous step
// again once its end was evaluated. Names follow the paper; hh is −h.
class UniPc final : public Solver<UniPc> {
 public:
  explicit UniPc(const SolverInputs& inputs) : Solver(inputs.plan, inputs.noise) {}

 private:
  static constexpr int64_t kOrder = 2;

  // The part that both share: from level `from` to `to`, with picture `m0` of the first.
  struct Base {
    at::Tensor x;
    double weight = 0;  // α·B, of what is taken off
    double hh = 0, b = 0, lambda = 0;
  };
  Base Start(const at::Tensor& x, const at::Tensor& m0, int64_t from, int64_t to) const {
    const double a = SigmaOf(plan(), from), b = SigmaOf(plan(), to);
    const Level level = PreservingLevel(b);
    Base base;
    base.lambda = std::log(a) - std::log(b);
    base.hh = -base.lambda;
    base.b = b / a - 1;  // e^hh − 1
    base.weight = level.alpha * base.b;
    base.x = (x * (level.sigma / PreservingLevel(a).sigma)).sub_(m0, base.weight);
    return base;
  }
  // Position of the point before `from`, in strides from `from`; negative.
  double Ratio(int64_t from, double stride) const {
    return (std::log(SigmaOf(plan(), from)) - std::log(SigmaOf(plan(), from - 1))) / stride;
  }

  at::Tensor Correct(const at::Tensor& now) const {
    const int64_t i = index();
    Base base = Start(corrected_, pictures_[0], i - 1, i);
    const at::Tensor change = now - pictures_[0];
    if (last_order_ == 1) return base.x.sub_(change, base.weight * 0.5);
    const double phi1 = base.b / base.hh - 1;
    const double phi2 = phi1 / base.hh - 0.5;
    const double b1 = phi1 / base.b, b2 = 2 * phi2 / base.b;
    const double r = Ratio(i - 1, base.lambda);
    const double older = (b1 - b2) / (1 - r);
    return base.x.sub_(pictures_[1] - pictures_[0], base.weight * older / r)
        .sub_(change, base.weight * (b1 - older));
  }

  at::Tensor Advance(const at::Tensor& output, const at::Tensor& x) override {
    set_prediction(Picture(output, x));
    const int64_t i = index();
    corrected_ = pictures_.size() > 0 ? Correct(prediction()) : x;
    pictures_.Push(prediction());
    last_order_ = std::min({kOrder, plan().steps() - i, pictures_.size()});
    Base base = Start(corrected_, pictures_[0], i, i + 1);
    if (last_order_ == 1) return base.x;
    return base.x.sub_(pictures_[1] - pictures_[0], base.weight * 0.5 / Ratio(i, base.lambda));
  }

  at::Tensor corrected_;  // where the last predictor began
  int64_t last_order_ = 0;
  History pictures_{kOrder};
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
