// Describes a Stable Diffusion model out of its files: a diffusers folder, or a checkpoint in one file with a
// folder that lends what the file lacks.
//
// A checkpoint has the UNet, and usually VAE and text encoders in CompVis' and OpenCLIP's layouts; it never
// has a tokenizer, settings or a noise schedule. Those, and the parts that are missing, come from the base
// folder, whose settings describe the parts in the file, too.
#ifndef LATENTD_FAMILIES_SD_SD_OPEN_H_
#define LATENTD_FAMILIES_SD_SD_OPEN_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cache/weights/weight_files.h"
#include "families/family.h"
#include "families/sampling/scheduler_config.h"
#include "families/sd/sd_pipeline.h"

namespace latentd {

// What the files seem to be, by names and shapes alone.
// SD 2 and latent consistency models are opened as SD 1.5 is.
enum class SdKind { kNone, kSd15, kSdxl };
SdKind DetectSdKind(const ModelFiles& files);

// Errors: those of WeightFiles::Open and JsonConfig; UNSUPPORTED_MODEL for other tasks and parts that
// do not fit each other, by name. The variant is "base" or "inpaint"; what is special about SDXL is the
// caller's.
absl::StatusOr<SdParts> OpenSdModel(const ModelFiles& files, SdKind kind);

// Changes the family's own defaults, which are set, by what is known of the model, each before the next: its
// network and scheduler, which may say that it was distilled to need few steps and little guidance (a network
// that embeds the guidance is given `embedded_guidance`); the settings of its folder; its checkpoint's name;
// the checkpoint's settings. Errors: those of ReadSettings.
absl::Status SetModelDefaults(const ModelFiles& files, double embedded_guidance, SdParts& parts);

// The folder whose settings describe the model.
const std::string& BaseFolder(const ModelFiles& files);

// The scheduler of a model in `base`, and what marks in its checkpoint (null: a folder) say of it;
// `trailing`: SchedulerSource has it. Its class is that of model_index.json. Errors: those of
// SchedulerConfig::Load; UNSUPPORTED_MODEL for marks of EDM that the folder's scheduler does not fit.
absl::StatusOr<std::shared_ptr<const SchedulerConfig>> ReadScheduler(
    const std::shared_ptr<const WeightFiles>& checkpoint, const std::string& base, SdKind kind,
    bool trailing = false);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_OPEN_H_
