// Finds Stable Diffusion 1.x models among files and describes them.
#ifndef LATENTD_FAMILIES_SD15_SD15_FAMILY_H_
#define LATENTD_FAMILIES_SD15_SD15_FAMILY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "families/family.h"

namespace latentd {

// Immutable; any thread. Reads diffusers folders (text to image, image to image, inpainting) and checkpoints
// in one file with a base folder. Of Stable Diffusion 1 and 2, and latent consistency
// models of them. UNets for other tasks are recognised and refused.
class Sd15Family : public Family {
 public:
  absl::string_view name() const override { return "sd15"; }
  bool Detect(const ModelFiles& files) const override;
  absl::StatusOr<std::unique_ptr<Pipeline>> Open(const ModelFiles& files) const override;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD15_SD15_FAMILY_H_
