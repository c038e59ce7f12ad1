// CLIP's text encoder. Architecture: Radford et al. 2021, "Learning Transferable Visual Models From Natural
// Language Supervision"; names and numerics are those of transformers' CLIPTextModel, and of
// CLIPTextModelWithProjection for OpenCLIP's bigG.
//
// Immutable after the constructor; any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_ENCODERS_CLIP_TEXT_MODEL_H_
#define LATENTD_FAMILIES_ENCODERS_CLIP_TEXT_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "cache/weights/component_layout.h"
#include "families/nn/layers.h"
#include "families/nn/live_floats.h"
#include "patcher/weight_view.h"

namespace latentd {

struct ClipTextConfig {
  int64_t vocabulary = 49408, positions = 77;
  int64_t dim = 512, hidden = 2048, layers = 12, heads = 8;
  Activation activation = Activation::kQuickGelu;
  double eps = 1e-5;
  // The pooled row is the first one of this token; 2 is an old config's way to say "the largest id".
  int64_t eos = 49407;
  // Columns that the pooled row is projected to, without a bias; 0: it is not. Config files give a number
  // even for models without a projection: it is Load's caller who knows which one this is.
  int64_t projection = 0;

  // Of a config.json. Errors: those of JsonConfig.
  static absl::StatusOr<ClipTextConfig> Load(const std::string& path, bool with_projection = false);

  // The published models.
  static ClipTextConfig ClipL();
  static ClipTextConfig ClipG();
};

// Which hidden states are wanted.
struct ClipTap {
  int64_t skip = 0;        // layers at the end to leave out
  bool final_norm = true;  // after them
  bool pooled = true;      // the pooled row, too, for which every layer is run
};

class ClipTextModel {
 public:
  explicit ClipTextModel(const ClipTextConfig& config);

  // Names as transformers 5 has them ("encoder.layers.0…"); older files put "text_model." before them.
  const std::shared_ptr<const ComponentLayout>& layout() const { return layout_; }

  struct Output {
    at::Tensor hidden;  // [1, tokens, dim], as the tap says
    at::Tensor pooled;  // [1, dim or projection], of the last layer's; undefined where the tap leaves it out
  };
  // `mask`, where there is one, has a 0 for every token that no other may attend to; the first one is always
  // seen. Ids from kFirstRowId on (embedding_triggers.h) have a row of `rows` [n, dim], in host memory, in
  // place of a word's. REQUIRES: ids.size() <= positions, every id in the vocabulary or a row, 0 <= tap.skip
  // < layers.
  Output operator()(const WeightView& w, const std::vector<int64_t>& ids, const ClipTap& tap = {},
                    const std::vector<int64_t>& mask = {}, const at::Tensor& rows = {}) const;

  // Upper estimate of activation bytes of one call, in fp32.
  int64_t WorkingBytes(const WeightUse& use) const;

  const ClipTextConfig& config() const { return config_; }

 private:
  struct Layer {
    LayerNorm norm1, norm2;
    Linear q, k, v, out;
    FeedForward mlp;
  };
  ClipTextConfig config_;
  std::shared_ptr<const ComponentLayout> layout_;
  Embedding tokens_, positions_;
  std::vector<Layer> layers_;
  LayerNorm final_norm_;
  Linear projection_;  // where the config has one
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_ENCODERS_CLIP_TEXT_MODEL_H_
