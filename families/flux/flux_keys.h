// Names of FLUX.1 tensors in Black Forest Labs' own files.
#ifndef LATENTD_FAMILIES_FLUX_FLUX_KEYS_H_
#define LATENTD_FAMILIES_FLUX_FLUX_KEYS_H_

#include "cache/weights/key_map.h"

namespace latentd {

// Native module → diffusers modules; for weight files and LoRA files alike. Lives as long as the program.
const KeyMap* FluxNativeKeys();

}  // namespace latentd

#endif  // LATENTD_FAMILIES_FLUX_FLUX_KEYS_H_
