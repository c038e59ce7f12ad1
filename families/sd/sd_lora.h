// How LoRA files name the layers of SD 1.5's and SDXL's components. From names and shapes alone.
#ifndef LATENTD_FAMILIES_SD_SD_LORA_H_
#define LATENTD_FAMILIES_SD_SD_LORA_H_

#include <memory>

#include "cache/weights/component_layout.h"
#include "families/sd/unet.h"
#include "patcher/patch_target.h"

namespace latentd {

PatchTarget UNetTarget(const UNet2DCondition& unet);

// CLIP-L, the first or only text encoder.
PatchTarget ClipLTarget(std::shared_ptr<const ComponentLayout> layout);

// CLIP-G, the second text encoder of SDXL and the refiner's only one.
PatchTarget ClipGTarget(std::shared_ptr<const ComponentLayout> layout);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_LORA_H_
