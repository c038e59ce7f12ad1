// Describes a Stable Diffusion model out of its files: a diffusers folder, or a checkpoint in one file with a
// folder that lends what the file lacks.
//
// A checkpoint has the UNet, and usually VAE and text encoders in CompVis' and OpenCLIP's layouts; it never
// has a tokenizer, settings or a noise schedule. Those, and the parts that are missing, come from the base
// folder, whose settings describe the parts in the file, too.
#ifndef LATENTD_FAMILIES_SD_SD_OPEN_H_
#define LATENTD_FAMILIES_SD_SD_OPEN_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "families/family.h"
#include "families/sd/sd_pipeline.h"

namespace latentd {

// What the files seem to be, by names and shapes alone.
enum class SdKind { kNone, kSd15, kSdxl };
SdKind DetectSdKind(const ModelFiles& files);

// Errors: those of WeightFiles::Open and JsonConfig; UNSUPPORTED_MODEL for SD 2, other tasks and parts that
// do not fit each other, by name. The variant is "base" or "inpaint"; what is special about SDXL is the
// caller's.
absl::StatusOr<SdParts> OpenSdModel(const ModelFiles& files, SdKind kind);

// The folder whose settings describe the model.
const std::string& BaseFolder(const ModelFiles& files);

// The sampler that a model's scheduler is one of ("euler_a").
std::string UsualSampler(const std::string& folder);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_OPEN_H_
