// T5's encoder. Architecture: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
// Text-to-Text Transformer", section 2.1 (relative position buckets, no attention scale, RMS norm); gated
// feed-forward: Shazeer 2020, "GLU Variants Improve Transformer". Names and numerics are those of
// transformers' T5EncoderModel.
//
// Immutable after the constructor; any thread, each with a view of its own.
#ifndef LATENTD_FAMILIES_ENCODERS_T5_ENCODER_H_
#define LATENTD_FAMILIES_ENCODERS_T5_ENCODER_H_

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

struct T5Config {
  int64_t vocabulary = 32128;
  int64_t dim = 512, head_dim = 64, heads = 8, hidden = 2048, layers = 6;
  int64_t buckets = 32, max_distance = 128;
  bool gated = false;
  Activation activation = Activation::kRelu;
  double eps = 1e-6;

  // Of a config.json. Errors: those of JsonConfig; UNSUPPORTED_MODEL for another feed-forward.
  static absl::StatusOr<T5Config> Load(const std::string& path);
};

class T5Encoder {
 public:
  explicit T5Encoder(const T5Config& config);

  const std::shared_ptr<const ComponentLayout>& layout() const { return layout_; }

  // The last hidden state, [1, tokens, dim]. No padding mask: pads are attended to, as FLUX and SD3 do.
  // REQUIRES: every id is in the vocabulary.
  at::Tensor operator()(const WeightView& w, const std::vector<int64_t>& ids) const;

  // Upper estimate of activation bytes of one call, in fp32.
  int64_t WorkingBytes(int64_t length, const WeightUse& use) const;

  const T5Config& config() const { return config_; }

 private:
  struct Layer {
    RmsNorm attention_norm, ff_norm;
    Linear q, k, v, out;
    Linear wi_0, wi_1, wo;  // wi_1 is empty unless gated
  };
  // [1, heads, length, length], added to the scores of every layer.
  at::Tensor PositionBias(const WeightView& w, int64_t length) const;

  T5Config config_;
  std::shared_ptr<const ComponentLayout> layout_;
  Embedding tokens_;
  Embedding relative_bias_;
  std::vector<Layer> layers_;
  RmsNorm final_norm_;
};

}  // namespace latentd

#endif  // LATENTD_FAMILIES_ENCODERS_T5_ENCODER_H_
