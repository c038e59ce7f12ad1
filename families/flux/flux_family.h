// Finds FLUX.1 models among files and describes them.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_FAMILY_H_
#define LATENTD_FAMILIES_FLUX_FLUX_FAMILY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "families/family.h"

namespace latentd {

// Immutable; any thread. Reads diffusers folders (model_index.json names FluxPipeline or its img2img or
// inpainting twin, or a control pipeline) and single-file transformers, native or with diffusers' names,
// which take text encoders, VAE and scheduler from a base folder. Fill and Kontext models are recognised and
// refused.
class FluxFamily : public Family {
 public:
  absl::string_view name() const override { return "flux"; }
  bool Detect(const ModelFiles& files) const override;
  absl::StatusOr<std::unique_ptr<Pipeline>> Open(const ModelFiles& files) const override;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_FAMILY_H_
