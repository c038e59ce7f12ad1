// Finds SDXL models among files and describes them.
#ifndef LATENTD_FAMILIES_SDXL_SDXL_FAMILY_H_
#define LATENTD_FAMILIES_SDXL_SDXL_FAMILY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "families/family.h"

namespace latentd {

// Immutable; any thread. Reads diffusers folders (text to image, image to image, inpainting; base, refiner,
// turbo) and checkpoints in one file with a base folder.
class SdxlFamily : public Family {
 public:
  absl::string_view name() const override { return "sdxl"; }
  bool Detect(const ModelFiles& files) const override;
  absl::StatusOr<std::unique_ptr<Pipeline>> Open(const ModelFiles& files) const override;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SDXL_SDXL_FAMILY_H_
