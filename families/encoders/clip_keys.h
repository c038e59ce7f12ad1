// How files name the tensors of CLIP's text encoder, beside the canonical names of ClipTextModel.
#ifndef LATENTD_FAMILIES_ENCODERS_CLIP_KEYS_H_
#define LATENTD_FAMILIES_ENCODERS_CLIP_KEYS_H_

#include <string>

#include "cache/weights/key_map.h"
#include "cache/weights/weight_files.h"

namespace latentd {

// transformers up to 4, and models with a projection in every version: "text_model." before all but that.
const KeyMap* TransformersClipKeys();

// OpenCLIP, in which q, k and v are one tensor and the projection is the other way round.
const KeyMap* OpenClipKeys();

// Which of the layouts a file has, and where in it.
struct ClipFileLayout {
  bool known = false;
  const KeyMap* key_map = nullptr;  // null: canonical names
  std::string prefix;
  bool projection = false;  // the pooled row's projection is there
};

// Looks below `prefix` ("cond_stage_model.transformer.", "" for a file of its own).
ClipFileLayout DetectClipFileLayout(const WeightFiles& files, const std::string& prefix);

}  // namespace latentd

#endif  // LATENTD_FAMILIES_ENCODERS_CLIP_KEYS_H_
