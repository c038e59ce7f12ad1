#include "families/sampling/beta_quantile.h"

#include <cmath>

namespace latentd {
namespace {

// The continued fraction of I_x(a, b), by the modified Lentz method. Converges fast for x < (a + 1)/(a + b +
// 2).
double ContinuedFraction(double x, double a, double b) {
  constexpr double kTiny = 1e-300;
  auto guarded = [](double v) { return std::fabs(v) < kTiny ? kTiny : v; };
  double c = 1;
  double d = 1 / guarded(1 - (a + b) * x / (a + 1));
  double value = d;
  for (int m = 1; m <= 500; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    d = 1 / guarded(1 + even * d);
    c = guarded(1 + even / c);
    value *= d * c;
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 / guarded(1 + odd * d);
    c = guarded(1 + odd / c);
    value *= d * c;
    if (std::fabs(d * c - 1) < 1e-16) break;
  }
  return value;
}

double IncompleteBeta(double x, double a, double b) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  if (x > (a + 1) / (a + b + 2)) return 1 - IncompleteBeta(1 - x, b, a);
  const double log_beta = std::lgamma(a) + std::lgamma(b) - std::lgamma(a + b);
  return std::exp(a * std::log(x) + b * std::log1p(-x) - log_beta) * ContinuedFraction(x, a, b) / a;
}

}  // namespace

double BetaQuantile(double p, double a, double b) {
  if (p <= 0) return 0;
  if (p >= 1) return 1;
  double low = 0, high = 1;
  for (int i = 0; i < 200 && high - low > 1e-17; ++i) {
    const double middle = (low + high) / 2;
    (IncompleteBeta(middle, a, b) < p ? low : high) = middle;
  }
  return (low + high) / 2;
}

}  // namespace latentd
