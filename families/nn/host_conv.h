// 3×3 convolutions in host memory without the library's own: that one puts all weights into an order of its
// own in every call, which on small maps costs more than the arithmetic, and multiplies 9 times per place and
// pair of channels, where 2.25 times are enough (nn/conv_kernels.h).
//
// Any thread; threads of ATen's pool are used. The result depends on shapes and numbers alone, not on the
// number of threads.
#ifndef LATENTD_FAMILIES_NN_HOST_CONV_H_
#define LATENTD_FAMILIES_NN_HOST_CONV_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace latentd {

enum class HostConvWay {
  kLibrary,   // at::conv2d
  kWinograd,  // large maps; stride 1
  kWindows,   // small maps, with many channels: one product of matrices with the weights as they are
};

// A 3×3 convolution with padding 1.
struct HostConvShape {
  int64_t batch = 0, in = 0, out = 0, height = 0, width = 0;  // of the input
  int64_t stride = 1;
};

// The fastest way, by shape alone: one request takes the same in any state of memory.
HostConvWay ChooseHostConv(const HostConvShape& shape);

// Floats of workspace.
int64_t HostConvWorkspace(HostConvWay way, const HostConvShape& shape);

// x: [batch, in, h, w] → [batch, out, h', w'], both with channels last in memory (x is copied where it has
// not). bias: [out]. workspace: fp32, as large as HostConvWorkspace says; kept from call to call by who
// calls, since fresh memory costs a tenth of the time and more. REQUIRES: fp32, host memory, a contiguous
// weight, padding 1, in and out multiples of kConvLanes.
at::Tensor WinogradConv3x3(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           const at::Tensor& workspace);
at::Tensor WindowsConv3x3(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          int64_t stride, const at::Tensor& workspace);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_NN_HOST_CONV_H_
