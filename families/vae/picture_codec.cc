#include "families/vae/picture_codec.h"

#include <algorithm>
#include <utility>
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

// [1, 3, H, W] in [-1, 1], where the view's weights are. Copied there as bytes.
at::Tensor ToInput(const WeightView& w, const VaePicture& picture) {
  const at::Tensor scaled = picture.pixels.to(w.device()).to(w.compute_type()).div_(255).mul_(2).sub_(1);
  const at::Tensor input = scaled.permute({2, 0, 1}).unsqueeze(0).contiguous();
  if (!picture.kept.defined()) return input;
  return input * picture.kept.to(w.device()).to(w.compute_type());
}

}  // namespace

at::Tensor ToHost(const at::Tensor& tensor) { return tensor.contiguous().to(at::kCPU); }

at::Tensor ResizePicture(const at::Tensor& picture, int64_t width, int64_t height) {
  const at::Tensor source = picture.contiguous();
  std::vector<uint8_t> pixels =
      ResizeLanczos(source.const_data_ptr<uint8_t>(), source.size(1), source.size(0), width, height);
  return at::from_blob(pixels.data(), {height, width, 3}, at::kByte).clone();
}

PictureEncoder::PictureEncoder(const AutoencoderKl& vae, std::vector<VaePicture> pictures)
    : vae_(vae), pictures_(std::move(pictures)) {}

bool PictureEncoder::Slice(const WeightView& w, int64_t tile) {
  if (posteriors_.size() == pictures_.size()) return true;
  if (!pass_ || tile_ != tile) {
    pass_.emplace(vae_.BeginEncode(ToInput(w, pictures_[posteriors_.size()]), tile));
    tile_ = tile;
  }
  AutoencoderKl::Pass pass = *std::exchange(pass_, std::nullopt);  // comes back if nothing throws
  if (!pass.Slice(w)) {
    pass_.emplace(std::move(pass));
    return false;
  }
  const AutoencoderKl::Posterior posterior = AutoencoderKl::PosteriorOf(pass.Take());
  posteriors_.push_back({ToHost(posterior.mean), ToHost(posterior.std)});
  return posteriors_.size() == pictures_.size();
}

PictureDecoder::PictureDecoder(const AutoencoderKl& vae, at::Tensor latents)
    : vae_(vae), latents_(std::move(latents)) {}

absl::StatusOr<at::Tensor> PictureDecoder::Slice(const WeightView& w, int64_t tile) {
  if (!pass_ || tile_ != tile) {
    const at::Tensor z = latents_.narrow(0, next_, 1).to(w.device(), w.compute_type());
    pass_.emplace(vae_.BeginDecode(vae_.FromModel(z), tile));
    tile_ = tile;
  }
  AutoencoderKl::Pass pass = *std::exchange(pass_, std::nullopt);
  if (!pass.Slice(w)) {
    pass_.emplace(std::move(pass));
    return at::Tensor();
  }
  const at::Tensor x = pass.Take();
  const at::Tensor finite = FiniteFlag(x);  // bytes no longer show it; read once the picture was waited for
  at::Tensor picture = ToHost(ToBytes(x).squeeze(0).permute({1, 2, 0}));
  if (!finite.item<bool>()) return NonFinite("decode");
  ++next_;
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
