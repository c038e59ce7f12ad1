// Quantiles of the beta distribution.
#ifndef LATENTD_FAMILIES_SAMPLING_BETA_QUANTILE_H_
#define LATENTD_FAMILIES_SAMPLING_BETA_QUANTILE_H_

namespace latentd {

// The x in [0, 1] with I_x(a, b) = p, to about 1e-14; I is the regularised incomplete beta function
// (Abramowitz and Stegun, 26.5). REQUIRES: a, b > 0; 0 <= p <= 1. Pure; any thread.
double BetaQuantile(double p, double a, double b);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SAMPLING_BETA_QUANTILE_H_
