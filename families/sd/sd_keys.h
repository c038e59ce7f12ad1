// How files other than diffusers' name the tensors of a Stable Diffusion UNet.
#ifndef LATENTD_FAMILIES_SD_SD_KEYS_H_
#define LATENTD_FAMILIES_SD_SD_KEYS_H_

#include <string>

#include "cache/weights/key_map.h"
#include "cache/weights/weight_files.h"
#include "families/sd/unet.h"

namespace latentd {

// The layout of CompVis' and Stability's code ("input_blocks.4.1.transformer_blocks.0…"), in which
// checkpoints in one file are, and many LoRAs. Lives as long as the program; any thread.
const KeyMap* LdmUNetKeys(const UNet2DCondition& unet);

// Old diffusers LoRAs, which keep theirs in the attention's processor ("….attn1.processor.to_q_lora").
const KeyMap* ProcessorUNetKeys(const UNet2DCondition& unet);

// Which layout a UNet file has, and what stands before its names.
struct UNetFileLayout {
  bool known = false;
  bool ldm = false;
  std::string prefix;
  bool added_embedding = false;  // SDXL's pooled text and numbers
  int64_t in_channels = 0;       // of the first convolution
  int64_t context_dim = 0;       // of the text; 0 where no cross-attention was found
};
UNetFileLayout DetectUNetFileLayout(const WeightFiles& files);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_SD_SD_KEYS_H_
