// How LoRA files name the layers of FLUX.1's components. From names and shapes alone.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_LORA_H_
#define LATENTD_FAMILIES_FLUX_FLUX_LORA_H_

#include <memory>

#include "cache/weights/component_layout.h"
#include "patcher/patch_target.h"

namespace latentd {

PatchTarget FluxTransformerTarget(std::shared_ptr<const ComponentLayout> layout);

// CLIP-L.
PatchTarget FluxClipTarget(std::shared_ptr<const ComponentLayout> layout);

// T5. Trainers number it 2 (OneTrainer) or 3 (kohya); its module names tell it from CLIP.
PatchTarget FluxT5Target(std::shared_ptr<const ComponentLayout> layout);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_LORA_H_
