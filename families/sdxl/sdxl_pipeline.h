// SDXL: the last hidden state but one of both CLIPs side by side (of the second alone for the refiner), the
// second one's pooled text, and numbers about the picture: its original size, where it was cut, and the size
// that it was cut to, or for the refiner how it was rated. Podell et al. 2023, "SDXL", section 2.2.
//
// Immutable; any thread.
#ifndef LATENTD_FAMILIES_SDXL_SDXL_PIPELINE_H_
#define LATENTD_FAMILIES_SDXL_SDXL_PIPELINE_H_

#include "families/sd/sd_pipeline.h"

namespace latentd {

class SdxlPipeline : public SdPipeline {
 public:
  using SdPipeline::SdPipeline;
  absl::string_view family() const override { return "sdxl"; }

 protected:
  RequestUses MakeUses() const override;
  absl::Span<const absl::string_view> OwnFields() const override;
  absl::Status ValidateOwn(GenerateParams& params) const override;
  ClipTap Tap(const SdEncoder& encoder, int64_t skip) const override {
    return {.skip = skip + 1, .final_norm = false, .pooled = encoder.model->config().projection > 0};
  }
  int64_t usual_skip() const override { return 1; }
  AysTable ays_table() const override { return AysTable::kSdxl; }
  absl::Status AddToRow(const GenerateParams& params, bool negative, SdPromptRow& row) const override;

 private:
  bool takes_score() const;  // in place of the size that the picture was cut to
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SDXL_SDXL_PIPELINE_H_
