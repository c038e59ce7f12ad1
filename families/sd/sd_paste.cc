#include "families/sd/sd_paste.h"

#include "ATen/ATen.h"
#include "families/sd/sd_masks.h"
#include "families/vae/picture_codec.h"

namespace latentd {

at::Tensor PasteBack(const at::Tensor& picture, const GenerateParams& params) {
  const at::Tensor kept = ResizePicture(params.picture(MediaRole::kInit), *params.width, *params.height);
  const bool binary = !params.gradient_mask.value_or(false);
  const at::Tensor painted = PixelMask(params, binary).squeeze(0).permute({1, 2, 0});  // [H, W, 1]
  if (binary) return at::where(painted > 0, picture, kept).contiguous();
  const at::Tensor mixed = at::lerp(kept.to(at::kFloat), picture.to(at::kFloat), painted);
  return mixed.round_().clamp_(0, 255).to(at::kByte).contiguous();
}

}  // namespace latentd
