// SD 1.5 and 2: the last hidden state of CLIP-L or OpenCLIP-H, and nothing else beside the picture.
//
// Immutable; any thread.
#ifndef LATENTD_FAMILIES_SD15_SD15_PIPELINE_H_
#define LATENTD_FAMILIES_SD15_SD15_PIPELINE_H_

#include "families/sd/sd_pipeline.h"

namespace latentd {

class Sd15Pipeline : public SdPipeline {
 public:
  using SdPipeline::SdPipeline;
  absl::string_view family() const override {
    return parts_.unet->config().context_dim == kSd2ContextDim ? "sd2" : "sd15";
  }

 protected:
  absl::Status ValidateOwn(GenerateParams&) const override { return absl::OkStatus(); }
  // The final norm is applied to whichever layer is read.
  ClipTap Tap(const SdEncoder&, int64_t skip) const override {
    return {.skip = skip, .final_norm = true, .pooled = false};
  }
  int64_t usual_skip() const override { return 0; }
  AysTable ays_table() const override { return AysTable::kSd15; }
  absl::Status AddToRow(const GenerateParams&, bool, SdPromptRow&) const override { return absl::OkStatus(); }
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD15_SD15_PIPELINE_H_
