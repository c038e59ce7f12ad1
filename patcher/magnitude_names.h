// Magnitudes of DoRA that a file names in another way than the layers they are for.
#ifndef LATENTD_PATCHER_MAGNITUDE_NAMES_H_
#define LATENTD_PATCHER_MAGNITUDE_NAMES_H_

#include <map>
#include <string>

#include "patcher/patch_keys.h"

namespace latentd {

// Some exporters turn the dots of a module's path into underscores in all names but the magnitude's:
// "unet.mid_block.attn.to_q.magnitude" beside "lora_unet_mid_block_attn_to_q.lora_down.weight". Gives the
// magnitude to its layer where exactly one can be meant; others stay layers of their own, which MakeLayer
// refuses.
void JoinMagnitudes(std::map<std::string, LayerKeys>& layers);

}  // namespace latentd

#endif  // LATENTD_PATCHER_MAGNITUDE_NAMES_H_
