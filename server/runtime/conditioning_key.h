// The name under which the cache keeps what a text encoder made of a prompt.
#ifndef LATENTD_SERVER_RUNTIME_CONDITIONING_KEY_H_
#define LATENTD_SERVER_RUNTIME_CONDITIONING_KEY_H_

#include <string>
#include <vector>

#include "cache/model_key.h"
#include "families/compute_type.h"
#include "families/run.h"
#include "patcher/layer_patcher.h"
#include "server/catalog/catalog.h"

namespace latentd {

// A LoRA that changes the encoder.
struct ConditioningSource {
  std::string name;
  ModelKey lora;
  std::string strength;  // StrengthText
};

// All that the conditioning depends on goes into it: model, encoder, prompts, the kind of device and what it
// computes in, and the LoRAs on the encoder, in order of name. As a hash: names of records are shown, prompts
// are not.
ModelKey ConditioningKey(const OpenModel& model, const Run& run, size_t phase,
                         std::vector<ConditioningSource> sources, PatchMode mode, const Device& device,
                         ComputeType compute);

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_CONDITIONING_KEY_H_
