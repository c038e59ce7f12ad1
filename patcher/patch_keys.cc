#include "patcher/patch_keys.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "patcher/magnitude_names.h"

namespace latentd {
namespace {

// No real patch comes near it.
constexpr size_t kMaxKeys = 200'000;

struct Suffix {
  absl::string_view text;
  PatchKey kind;
};
// Longer ones before those that end them.
constexpr Suffix kSuffixes[] = {
    {".lora_down.weight", PatchKey::kDown},
    {".lora_up.weight", PatchKey::kUp},
    {".lora_A.weight", PatchKey::kDown},
    {".lora_B.weight", PatchKey::kUp},
    {".lora.down.weight", PatchKey::kDown},
    {".lora_linear_layer.down.weight", PatchKey::kDown},
    {".lora_linear_layer.up.weight", PatchKey::kUp},
    {".lora.up.weight", PatchKey::kUp},
    {".lora_mid.weight", PatchKey::kMid},
    {".lora_B.bias", PatchKey::kUpBias},
    {".lora_up.bias", PatchKey::kUpBias},
    {".lora.up.bias", PatchKey::kUpBias},
    {".lora_linear_layer.up.bias", PatchKey::kUpBias},
    {".bias_indices", PatchKey::kSparseIndices},
    {".bias_values", PatchKey::kSparseValues},
    {".bias_size", PatchKey::kSparseSize},
    {".alpha", PatchKey::kAlpha},
    {".dora_scale", PatchKey::kDoraScale},
    {".lora_magnitude_vector", PatchKey::kMagnitude},
    {".magnitude", PatchKey::kMagnitude},
    {".diff", PatchKey::kDiff},
    {".diff_b", PatchKey::kDiffBias},
    {".w_norm", PatchKey::kNormWeight},
    {".b_norm", PatchKey::kNormBias},
    {".scale", PatchKey::kScale},
    {".hada_w1_a", PatchKey::kHadaW1A},
    {".hada_w1_b", PatchKey::kHadaW1B},
    {".hada_w2_a", PatchKey::kHadaW2A},
    {".hada_w2_b", PatchKey::kHadaW2B},
    {".hada_t1", PatchKey::kHadaT1},
    {".hada_t2", PatchKey::kHadaT2},
    {".lokr_w1", PatchKey::kLokrW1},
    {".lokr_w1_a", PatchKey::kLokrW1A},
    {".lokr_w1_b", PatchKey::kLokrW1B},
    {".lokr_w2", PatchKey::kLokrW2},
    {".lokr_w2_a", PatchKey::kLokrW2A},
    {".lokr_w2_b", PatchKey::kLokrW2B},
    {".lokr_t2", PatchKey::kLokrT2},
    {".on_input", PatchKey::kOnInput},
    {".a1.weight", PatchKey::kGloraA1},
    {".a2.weight", PatchKey::kGloraA2},
    {".b1.weight", PatchKey::kGloraB1},
    {".b2.weight", PatchKey::kGloraB2},
    {".oft_blocks", PatchKey::kOftBlocks},
    {".rescale", PatchKey::kRescale},
};
constexpr absl::string_view kNumberedBlocks = ".oft_blocks.";
constexpr absl::string_view kIa3Suffix = ".weight";

// Kinds that are recognised, to be named in the refusal.
struct Foreign {
  absl::string_view mark;
  absl::string_view type;
};
constexpr Foreign kForeign[] = {
    {".diff_m", "modulation diff"},
    {".bm.weight", "GLoRA with a Tucker core"},
    {".lora_embedding_", "LoRA of an embedding"},
    {"unet:", "LoRA by index"},
    {"text_encoder:", "LoRA by index"},
};

// Textual inversions that some trainers put beside the layers: "bundle_emb.NAME.clip_l".
constexpr absl::string_view kBundled = "bundle_emb.";

// "x.lora_A.default.weight" → "x.lora_A.weight": PEFT writes the adapter's name when it is not left out.
std::string DropAdapterName(absl::string_view key) {
  for (absl::string_view mark : {".lora_A.", ".lora_B."}) {
    const size_t at = key.find(mark);
    if (at == absl::string_view::npos) continue;
    absl::string_view rest = key.substr(at + mark.size());
    const size_t dot = rest.find('.');
    if (dot == absl::string_view::npos || dot != rest.rfind('.')) continue;
    const absl::string_view last = rest.substr(dot + 1);
    if (last == "weight" || last == "bias") return absl::StrCat(key.substr(0, at + mark.size()), last);
  }
  constexpr absl::string_view kMagnitude = ".lora_magnitude_vector";
  if (const size_t at = key.find(absl::StrCat(kMagnitude, ".")); at != absl::string_view::npos) {
    return std::string(key.substr(0, at + kMagnitude.size()));
  }
  return std::string(key);
}

// "x.to_q_lora.down.weight", "x.qkv_lora1.up.weight": attention processors keep their LoRA in modules of
// their own.
bool IsProcessorLora(absl::string_view key, absl::string_view* name, PatchKey* kind) {
  absl::string_view rest = key;
  if (absl::ConsumeSuffix(&rest, ".down.weight")) {
    *kind = PatchKey::kDown;
  } else if (absl::ConsumeSuffix(&rest, ".up.weight")) {
    *kind = PatchKey::kUp;
  } else {
    return false;
  }
  *name = rest;
  return absl::EndsWith(rest, "_lora") || absl::EndsWith(rest, "_lora1") || absl::EndsWith(rest, "_lora2");
}

const std::vector<int64_t>& ShapeOf(const LayerKeys& keys, PatchKey kind, const NamedShapes& tensors) {
  return tensors.find(keys.by_kind.at(kind))->second;
}

// The tensors of a layer under construction.
class Parts {
 public:
  Parts(const std::string& name, const LayerKeys& keys,
        const std::function<absl::StatusOr<at::Tensor>(const std::string&)>& read)
      : name_(name), keys_(keys), read_(read) {}

  bool has(PatchKey kind) const { return keys_.has(kind); }

  // Undefined when there is none.
  absl::StatusOr<at::Tensor> Get(PatchKey kind) const {
    const auto it = keys_.by_kind.find(kind);
    if (it == keys_.by_kind.end()) return at::Tensor();
    return Read(it->second);
  }

  // In a type that formulas are computed from: 8-bit floats as bf16, which holds them all, doubles as fp32.
  absl::StatusOr<at::Tensor> Read(const std::string& key) const {
    ASSIGN_OR_RETURN(at::Tensor tensor, read_(key));
    switch (tensor.scalar_type()) {
      case at::kFloat:
      case at::kHalf:
      case at::kBFloat16:
        return tensor;
      case at::kDouble:
        return tensor.to(at::kFloat);
      case at::kFloat8_e4m3fn:
      case at::kFloat8_e5m2:
        return tensor.to(at::kBFloat16);
      default:
        return InvalidLayer(name_, absl::StrCat("is stored as ", at::toString(tensor.scalar_type()),
                                                ", which is no type of floating point"));
    }
  }

  absl::StatusOr<at::Tensor> Integers(PatchKey kind, absl::string_view what) const {
    ASSIGN_OR_RETURN(at::Tensor tensor, read_(keys_.by_kind.at(kind)));
    if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) return tensor;
    return InvalidLayer(name_, absl::StrCat(what, " is not of whole numbers"));
  }

  absl::StatusOr<double> Number(PatchKey kind, absl::string_view what) const {
    ASSIGN_OR_RETURN(const at::Tensor tensor, read_(keys_.by_kind.at(kind)));
    if (tensor.numel() != 1) return InvalidLayer(name_, absl::StrCat(what, " is no scalar"));
    const double value = tensor.to(at::kDouble).item<double>();
    if (!std::isfinite(value)) return InvalidLayer(name_, absl::StrCat(what, " is not finite"));
    return value;
  }

 private:
  const std::string& name_;
  const LayerKeys& keys_;
  const std::function<absl::StatusOr<at::Tensor>(const std::string&)>& read_;
};

#define GET_PART(out, kind) ASSIGN_OR_RETURN(out, parts.Get(PatchKey::kind))

absl::StatusOr<LowRank> MakeLowRank(const std::string& name, const Parts& parts) {
  LowRank layer;
  if (!parts.has(PatchKey::kDown)) return InvalidLayer(name, "has no down part");
  if (!parts.has(PatchKey::kUp)) return InvalidLayer(name, "has no up part");
  GET_PART(layer.down, kDown);
  GET_PART(layer.up, kUp);
  GET_PART(layer.mid, kMid);
  return layer;
}

absl::StatusOr<SparseLowRank> MakeSparse(const std::string& name, const Parts& parts, LowRank low_rank) {
  for (PatchKey kind : {PatchKey::kSparseIndices, PatchKey::kSparseValues, PatchKey::kSparseSize}) {
    if (!parts.has(kind)) return InvalidLayer(name, "lacks one of bias_indices, bias_values and bias_size");
  }
  ASSIGN_OR_RETURN(const at::Tensor size, parts.Integers(PatchKey::kSparseSize, "bias_size"));
  ASSIGN_OR_RETURN(const at::Tensor places, parts.Integers(PatchKey::kSparseIndices, "bias_indices"));
  GET_PART(const at::Tensor values, kSparseValues);
  if (size.dim() != 1 || size.numel() != 2) return InvalidLayer(name, "bias_size is not that of a matrix");
  return SparseLowRank{std::move(low_rank), places, values, size[0].item<int64_t>(), size[1].item<int64_t>()};
}

absl::StatusOr<Hadamard> MakeHadamard(const std::string& name, const Parts& parts) {
  Hadamard layer;
  for (PatchKey kind : {PatchKey::kHadaW1A, PatchKey::kHadaW1B, PatchKey::kHadaW2A, PatchKey::kHadaW2B}) {
    if (!parts.has(kind))
      return InvalidLayer(name, "lacks one of hada_w1_a, hada_w1_b, hada_w2_a and hada_w2_b");
  }
  GET_PART(layer.w1_a, kHadaW1A);
  GET_PART(layer.w1_b, kHadaW1B);
  GET_PART(layer.w2_a, kHadaW2A);
  GET_PART(layer.w2_b, kHadaW2B);
  GET_PART(layer.t1, kHadaT1);
  GET_PART(layer.t2, kHadaT2);
  return layer;
}

absl::StatusOr<Kronecker> MakeKronecker(const Parts& parts) {
  Kronecker layer;
  GET_PART(layer.w1, kLokrW1);
  GET_PART(layer.w1_a, kLokrW1A);
  GET_PART(layer.w1_b, kLokrW1B);
  GET_PART(layer.w2, kLokrW2);
  GET_PART(layer.w2_a, kLokrW2A);
  GET_PART(layer.w2_b, kLokrW2B);
  GET_PART(layer.t2, kLokrT2);
  return layer;
}

absl::StatusOr<Glora> MakeGlora(const std::string& name, const Parts& parts) {
  Glora layer;
  for (PatchKey kind : {PatchKey::kGloraA1, PatchKey::kGloraA2, PatchKey::kGloraB1, PatchKey::kGloraB2}) {
    if (!parts.has(kind)) return InvalidLayer(name, "lacks one of a1, a2, b1 and b2");
  }
  GET_PART(layer.a1, kGloraA1);
  GET_PART(layer.a2, kGloraA2);
  GET_PART(layer.b1, kGloraB1);
  GET_PART(layer.b2, kGloraB2);
  layer.Arrange();
  return layer;
}

// Which formula a layer's tensors are for.
enum class Formula { kNone, kLowRank, kHadamard, kKronecker, kDifference, kReplacement, kIa3, kGlora, kOft };

bool HasAny(const LayerKeys& keys, PatchKey first, PatchKey last) {
  const auto it = keys.by_kind.lower_bound(first);
  return it != keys.by_kind.end() && it->first <= last;
}

// All formulas that the layer has tensors of; a sound layer has one at most.
std::vector<Formula> FormulasOf(const LayerKeys& keys) {
  std::vector<Formula> found;
  if (HasAny(keys, PatchKey::kDown, PatchKey::kMid)) found.push_back(Formula::kLowRank);
  if (HasAny(keys, PatchKey::kHadaW1A, PatchKey::kHadaT2)) found.push_back(Formula::kHadamard);
  if (HasAny(keys, PatchKey::kLokrW1, PatchKey::kLokrT2)) found.push_back(Formula::kKronecker);
  if (keys.has(PatchKey::kDiff) || keys.has(PatchKey::kNormWeight)) found.push_back(Formula::kDifference);
  if (keys.has(PatchKey::kScale)) found.push_back(Formula::kReplacement);
  if (HasAny(keys, PatchKey::kIa3Weight, PatchKey::kOnInput)) found.push_back(Formula::kIa3);
  if (HasAny(keys, PatchKey::kGloraA1, PatchKey::kGloraB2)) found.push_back(Formula::kGlora);
  if (HasAny(keys, PatchKey::kOftBlocks, PatchKey::kRescale) || !keys.numbered_blocks.empty()) {
    found.push_back(Formula::kOft);
  }
  return found;
}

// alpha / rank; 1 for what has no rank, whose factors are full.
double ScaleOf(const PatchLayer& layer, double alpha) {
  return layer.has_alpha && layer.rank() > 0 ? alpha / static_cast<double>(layer.rank()) : 1;
}

absl::StatusOr<LayerMath> MakeOft(const std::string& name, const LayerKeys& keys, const Parts& parts,
                                  double alpha) {
  GET_PART(const at::Tensor rescale, kRescale);
  GET_PART(const at::Tensor whole, kOftBlocks);
  if (whole.defined() && !keys.numbered_blocks.empty()) return InvalidLayer(name, "has oft_blocks twice");
  if (whole.defined() && whole.dim() == 4) return Boft{whole, rescale, alpha};
  Oft layer{{}, rescale, alpha};
  if (whole.defined()) layer.blocks.push_back(whole);
  for (const auto& [number, key] : keys.numbered_blocks) {
    if (number != static_cast<int64_t>(layer.blocks.size()))
      return InvalidLayer(name, "lacks some of its oft_blocks");
    ASSIGN_OR_RETURN(at::Tensor blocks, parts.Read(key));
    layer.blocks.push_back(std::move(blocks));
  }
  return layer;
}

}  // namespace

absl::Status InvalidLayer(absl::string_view layer, absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA",
                   absl::StrCat("layer ", layer, ": ", what), {{"layer", std::string(layer)}});
}

absl::StatusOr<PatchKeys> PatchKeys::GroupAll(const NamedShapes& tensors) {
  if (tensors.size() > kMaxKeys) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA",
                     absl::StrCat("more than ", kMaxKeys, " tensors: not a LoRA"));
  }
  PatchKeys result;
  auto& foreign = result.unsupported;
  for (const auto& [raw, shape] : tensors) {
    if (absl::StartsWith(raw, kBundled)) {
      ++result.ignored;
      const absl::string_view rest = absl::StripPrefix(raw, kBundled);
      result.embeddings.emplace(rest.substr(0, rest.find('.')));
      continue;
    }
    const auto* other = std::find_if(std::begin(kForeign), std::end(kForeign),
                                     [&](const Foreign& f) { return absl::StrContains(raw, f.mark); });
    if (other != std::end(kForeign)) {
      foreign[std::string(other->type)].push_back(raw);
      continue;
    }
    const std::string key = DropAdapterName(raw);
    absl::string_view name;
    PatchKey kind = PatchKey::kDown;
    const auto* suffix = std::find_if(std::begin(kSuffixes), std::end(kSuffixes),
                                      [&](const Suffix& s) { return absl::EndsWith(key, s.text); });
    if (suffix != std::end(kSuffixes)) {
      name = absl::StripSuffix(key, suffix->text);
      kind = suffix->kind;
      result.peft_suffix |=
          absl::StrContains(suffix->text, "lora_A") || absl::StrContains(suffix->text, "lora_B");
    } else if (const size_t at = absl::string_view(key).rfind(kNumberedBlocks);
               at != absl::string_view::npos) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(key.substr(at + kNumberedBlocks.size()), &number)) {
        foreign["unknown"].push_back(raw);
        continue;
      }
      result.layers[key.substr(0, at)].numbered_blocks.emplace(number, raw);
      continue;
    } else if (absl::EndsWith(key, kIa3Suffix) &&
               tensors.count(absl::StrCat(absl::StripSuffix(key, kIa3Suffix), ".on_input")) != 0) {
      name = absl::StripSuffix(key, kIa3Suffix);
      kind = PatchKey::kIa3Weight;
    } else if (!IsProcessorLora(key, &name, &kind)) {
      foreign["unknown"].push_back(raw);
      continue;
    }
    if (!result.layers[std::string(name)].by_kind.emplace(kind, raw).second) {
      return InvalidLayer(raw, "is there twice, under two names; export one adapter");
    }
  }
  JoinMagnitudes(result.layers);
  return result;
}

absl::StatusOr<PatchKeys> PatchKeys::Group(const NamedShapes& tensors) {
  ASSIGN_OR_RETURN(PatchKeys result, GroupAll(tensors));
  if (!result.unsupported.empty()) {
    const auto& [type, keys] = *result.unsupported.begin();
    const std::string sample = absl::StrJoin(
        keys.begin(), keys.begin() + static_cast<ptrdiff_t>(std::min<size_t>(keys.size(), 3)), ", ");
    if (result.layers.empty() && type == "unknown") {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA",
                       absl::StrCat("the file holds no LoRA layer; its tensors are named like ", sample),
                       {{"sample", sample}});
    }
    return MakeError(
        absl::StatusCode::kUnimplemented, "UNSUPPORTED_LORA",
        absl::StrCat(keys.size(), " tensors are of type ", type, " (", sample, "), which is not supported"),
        {{"layer_type", type}, {"sample", sample}});
  }
  if (result.layers.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA", "the file holds no LoRA layer");
  }
  return result;
}

std::string PatchKeys::Format() const {
  auto has = [&](absl::string_view text) {
    return std::any_of(layers.begin(), layers.end(),
                       [&](const auto& l) { return absl::StrContains(l.first, text); });
  };
  if (layers.empty()) return "";
  const std::string& name = layers.begin()->first;
  if (has(".processor.")) return "attention processors";
  if (name.find('.') == std::string::npos) return absl::StartsWith(name, "lycoris_") ? "LyCORIS" : "kohya";
  if (has("double_blocks.") || has("single_blocks."))
    return peft_suffix ? "BFL names, PEFT suffixes" : "BFL names";
  if (absl::StartsWith(name, "base_model.model.")) return "PEFT";
  return "diffusers/PEFT";
}

std::string LayerType(const LayerKeys& keys, const NamedShapes& tensors) {
  const std::vector<Formula> formulas = FormulasOf(keys);
  const bool bias = keys.has(PatchKey::kUpBias), bias_diff = keys.has(PatchKey::kDiffBias);
  if (formulas.empty()) return bias_diff ? "bias diff only" : keys.has(PatchKey::kNormBias) ? "norm" : "";
  std::string type;
  switch (formulas[0]) {
    case Formula::kNone:
      break;
    case Formula::kLowRank:
      type = "LoRA";
      if (keys.has(PatchKey::kDown) && ShapeOf(keys, PatchKey::kDown, tensors).size() > 2) type = "LoCon";
      if (keys.has(PatchKey::kMid)) type = "LoCon-Tucker";
      break;
    case Formula::kHadamard:
      type = "LoHa";
      break;
    case Formula::kKronecker:
      type = "LoKr";
      break;
    case Formula::kDifference:
      return keys.has(PatchKey::kDiff) ? "full diff" : "norm";
    case Formula::kReplacement:
      return "set scale";
    case Formula::kIa3:
      return "IA3";
    case Formula::kGlora:
      return "GLoRA";
    case Formula::kOft:
      return keys.has(PatchKey::kOftBlocks) && ShapeOf(keys, PatchKey::kOftBlocks, tensors).size() == 4
                 ? "BOFT"
                 : "OFT";
  }
  if (keys.has(PatchKey::kSparseIndices)) type += "+sparse";
  if (keys.has(PatchKey::kDoraScale) || keys.has(PatchKey::kMagnitude)) type += "+DoRA";
  if (bias) type += "+bias";
  if (bias_diff) type += "+bias diff";
  return type;
}

absl::StatusOr<PatchLayer> MakeLayer(
    const std::string& name, const LayerKeys& keys, const NamedShapes& tensors,
    const std::function<absl::StatusOr<at::Tensor>(const std::string&)>& read) {
  const Parts parts(name, keys, read);
  const std::vector<Formula> formulas = FormulasOf(keys);
  if (formulas.size() > 1) return InvalidLayer(name, "mixes the tensors of two layer types");
  const bool sparse = HasAny(keys, PatchKey::kSparseIndices, PatchKey::kSparseSize);
  if (sparse && (formulas.empty() || formulas[0] != Formula::kLowRank)) {
    return InvalidLayer(name, "has bias_indices, bias_values or bias_size beside what is no low-rank part");
  }
  PatchLayer layer;
  layer.name = name;
  layer.type = LayerType(keys, tensors);
  layer.has_alpha = keys.has(PatchKey::kAlpha);
  double alpha = 0;
  if (layer.has_alpha) {
    ASSIGN_OR_RETURN(alpha, parts.Number(PatchKey::kAlpha, "alpha"));
  }
  switch (formulas.empty() ? Formula::kNone : formulas[0]) {
    case Formula::kNone:
      break;
    case Formula::kLowRank: {
      ASSIGN_OR_RETURN(LowRank low_rank, MakeLowRank(name, parts));
      if (!sparse) {
        layer.math = std::move(low_rank);
        break;
      }
      ASSIGN_OR_RETURN(layer.math, MakeSparse(name, parts, std::move(low_rank)));
      break;
    }
    case Formula::kHadamard: {
      ASSIGN_OR_RETURN(layer.math, MakeHadamard(name, parts));
      break;
    }
    case Formula::kKronecker: {
      ASSIGN_OR_RETURN(layer.math, MakeKronecker(parts));
      break;
    }
    case Formula::kDifference: {
      if (keys.has(PatchKey::kDiff) && keys.has(PatchKey::kNormWeight))
        return InvalidLayer(name, "has two differences");
      Difference math;
      ASSIGN_OR_RETURN(math.diff,
                       parts.Get(keys.has(PatchKey::kDiff) ? PatchKey::kDiff : PatchKey::kNormWeight));
      layer.math = std::move(math);
      break;
    }
    case Formula::kReplacement: {
      Replacement math;
      GET_PART(math.value, kScale);
      layer.math = std::move(math);
      break;
    }
    case Formula::kIa3: {
      if (!keys.has(PatchKey::kIa3Weight)) return InvalidLayer(name, "has on_input but no weight");
      Ia3 math;
      GET_PART(math.vector, kIa3Weight);
      ASSIGN_OR_RETURN(const double on_input, parts.Number(PatchKey::kOnInput, "on_input"));
      math.on_input = on_input != 0;
      layer.math = std::move(math);
      break;
    }
    case Formula::kGlora: {
      ASSIGN_OR_RETURN(layer.math, MakeGlora(name, parts));
      break;
    }
    case Formula::kOft: {
      ASSIGN_OR_RETURN(layer.math, MakeOft(name, keys, parts, alpha));
      break;
    }
  }
  GET_PART(at::Tensor magnitude, kMagnitude);
  GET_PART(at::Tensor dora_scale, kDoraScale);
  if (magnitude.defined() && dora_scale.defined()) return InvalidLayer(name, "has magnitudes twice");
  if (!magnitude.defined()) magnitude = dora_scale;
  if (magnitude.defined()) {
    if (absl::Status status = layer.Check(); !status.ok()) return InvalidLayer(name, status.message());
    Dora dora;
    // peft's is of the outputs, in whatever shape: [out] of a linear layer, [1, out, 1, 1] of a convolution.
    const bool by_output = keys.has(PatchKey::kMagnitude) && magnitude.numel() == layer.extent().rows;
    dora.magnitude = by_output ? magnitude.flatten() : magnitude;
    if (auto* m = std::get_if<LowRank>(&layer.math)) {
      dora.inner = std::move(*m);
    } else if (auto* h = std::get_if<Hadamard>(&layer.math)) {
      dora.inner = std::move(*h);
    } else if (auto* k = std::get_if<Kronecker>(&layer.math)) {
      dora.inner = std::move(*k);
    } else {
      return InvalidLayer(name, "has magnitudes but no low-rank part");
    }
    layer.math = std::move(dora);
  }
  for (PatchKey kind : {PatchKey::kUpBias, PatchKey::kDiffBias, PatchKey::kNormBias}) {
    if (!keys.has(kind)) continue;
    if (layer.bias.defined()) return InvalidLayer(name, "has two differences of its bias");
    ASSIGN_OR_RETURN(layer.bias, parts.Get(kind));
    layer.bias_of_up = kind == PatchKey::kUpBias;
  }
  if (!layer.has_weight() && !layer.bias.defined()) return InvalidLayer(name, "holds nothing but an alpha");
  if (absl::Status status = layer.Check(); !status.ok()) return InvalidLayer(name, status.message());
  layer.SetScale(ScaleOf(layer, alpha));
  return layer;
}

#undef GET_PART

}  // namespace latentd
