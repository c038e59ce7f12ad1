#include "families/vae/picture_codec.h"

#include <algorithm>
#include <vector>

#include "ATen/ATen.h"
#include "families/finite_watch.h"
#include "families/vae/resize.h"

namespace latentd {
namespace {

// [-1, 1] → [0, 255]. Overwrites x.
at::Tensor ToBytes(at::Tensor x) {
  return x.mul_(0.5).add_(0.5).clamp_(0, 1).mul_(255).round_().to(at::kByte);
}

}  // namespace

at::Tensor ToHost(const at::Tensor& tensor) { return tensor.contiguous().to(at::kCPU); }

at::Tensor ResizePicture(const at::Tensor& picture, int64_t width, int64_t height) {
  const at::Tensor source = picture.contiguous();
  std::vector<uint8_t> pixels =
      ResizeLanczos(source.const_data_ptr<uint8_t>(), source.size(1), source.size(0), width, height);
  return at::from_blob(pixels.data(), {height, width, 3}, at::kByte).clone();
}

at::Tensor PictureToInput(const WeightView& w, const at::Tensor& picture) {
  const at::Tensor input = picture.to(w.device()).to(w.compute_type()).div_(255).mul_(2).sub_(1);
  return input.permute({2, 0, 1}).unsqueeze(0).contiguous();
}

AutoencoderKl::Posterior EncodePicture(const AutoencoderKl& vae, const WeightView& w, const at::Tensor& input,
                                       int64_t tile) {
  const AutoencoderKl::Posterior posterior = vae.Encode(w, input, tile);
  return {ToHost(posterior.mean), ToHost(posterior.std)};
}

absl::StatusOr<at::Tensor> DecodePicture(const AutoencoderKl& vae, const WeightView& w,
                                         const at::Tensor& latents, int64_t tile) {
  const at::Tensor z = vae.FromModel(latents.to(w.device(), w.compute_type()));
  const at::Tensor x = vae.Decode(w, z, tile);
  const at::Tensor finite = FiniteFlag(x);  // bytes no longer show it; read once the picture was waited for
  at::Tensor picture = ToHost(ToBytes(x).squeeze(0).permute({1, 2, 0}));
  if (!finite.item<bool>()) return NonFinite("decode");
  return picture;
}

int64_t SmallerVaeTile(const AutoencoderKl& vae, int64_t width, int64_t height, int64_t tile) {
  // Powers of two from the largest below the picture down to what can still be cut and blended.
  const int64_t smallest = 4 * vae.config().scale();
  const int64_t below = tile == 0 ? std::max(width, height) : tile;
  int64_t next = smallest;
  while (next * 2 < below) next *= 2;
  return next < below ? next : 0;
}

at::Tensor LatentPreview::Render(const at::Tensor& latents) const {
  if (!factors.defined()) return {};
  const at::Tensor places = latents.squeeze(0).permute({1, 2, 0}).to(at::kFloat);
  return ToBytes(at::matmul(places, factors).add_(bias)).contiguous();
}

}  // namespace latentd
