#include "patcher/model_patch.h"

#include <algorithm>
#include <cmath>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/types/optional.h"
#include "cache/error.h"

namespace latentd {
namespace {

// No real LoRA comes near it; what does is an attack or a broken file.
constexpr int64_t kMaxRank = 1 << 14;
constexpr size_t kMaxKeys = 200'000;

enum class Part { kDown, kUp, kAlpha };

struct Suffix {
  absl::string_view text;
  Part part;
};
constexpr Suffix kSuffixes[] = {
    {".lora_down.weight", Part::kDown}, {".lora_up.weight", Part::kUp},   {".lora_A.weight", Part::kDown},
    {".lora_B.weight", Part::kUp},      {".lora.down.weight", Part::kDown}, {".lora.up.weight", Part::kUp},
    {".alpha", Part::kAlpha},
};

// Layer types that are recognised, to be named in the refusal.
struct Foreign {
  absl::string_view mark;
  absl::string_view type;
};
constexpr Foreign kForeign[] = {
    {".hada_", "LoHa"},         {".lokr_", "LoKr"},         {".dora_scale", "DoRA"}, {".lora_magnitude_vector", "DoRA"},
    {".lora_mid.", "LoCon"},    {".diff", "full difference"}, {".on_input", "IA3"},  {".w_norm", "norm"},
    {".b_norm", "norm"},        {".oft_", "OFT"},           {".a1.weight", "GLoRA"}, {".a2.weight", "GLoRA"},
    {".b1.weight", "GLoRA"},    {".b2.weight", "GLoRA"},    {".lora_B.bias", "LoRA with bias"},
    {"_norm.scale", "norm scale"}, {"bundle_emb", "embedded textual inversion"},
};

// "x.lora_A.default.weight" → "x.lora_A.weight": PEFT writes the adapter's name when it is not left out.
std::string DropAdapterName(absl::string_view key) {
  for (absl::string_view mark : {".lora_A.", ".lora_B."}) {
    const size_t at = key.find(mark);
    if (at == absl::string_view::npos) continue;
    absl::string_view rest = key.substr(at + mark.size());
    if (rest != "weight" && absl::EndsWith(rest, ".weight") && rest.find('.') == rest.rfind('.')) {
      return absl::StrCat(key.substr(0, at + mark.size()), "weight");
    }
  }
  return std::string(key);
}

absl::Status Invalid(absl::string_view layer, absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA", absl::StrCat("layer ", layer, ": ", what),
                   {{"layer", std::string(layer)}});
}

struct Parts {
  absl::optional<std::string> down, up, alpha;
};

// A file's tensors as layers, by their names alone.
struct Layers {
  std::map<std::string, Parts> by_name;
  bool peft_suffix = false;  // lora_A/lora_B
};

// REQUIRES: there is a layer.
std::string FormatOf(const Layers& layers) {
  const std::string& name = layers.by_name.begin()->first;
  const bool peft_suffix = layers.peft_suffix;
  auto has = [&](absl::string_view text) {
    return std::any_of(layers.by_name.begin(), layers.by_name.end(),
                       [&](const auto& l) { return absl::StrContains(l.first, text); });
  };
  if (name.find('.') == std::string::npos) return absl::StartsWith(name, "lycoris_") ? "LyCORIS" : "kohya";
  if (has("double_blocks.") || has("single_blocks.")) return peft_suffix ? "BFL names, PEFT suffixes" : "BFL names";
  if (absl::StartsWith(name, "base_model.model.")) return "PEFT";
  return "diffusers/PEFT";
}

// Errors: as for ModelPatch::Load, as far as names show them.
absl::StatusOr<Layers> GroupByLayer(const WeightFiles& files) {
  if (files.tensors().size() > kMaxKeys) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA",
                     absl::StrCat("more than ", kMaxKeys, " tensors: not a LoRA"));
  }
  Layers layers;
  std::map<std::string, Parts>& by_layer = layers.by_name;
  std::map<std::string, std::vector<std::string>> foreign;  // type → keys
  for (const auto& [raw, entry] : files.tensors()) {
    const std::string key = DropAdapterName(raw);
    const auto* suffix = std::find_if(std::begin(kSuffixes), std::end(kSuffixes),
                                      [&](const Suffix& s) { return absl::EndsWith(key, s.text); });
    const auto* other = std::find_if(std::begin(kForeign), std::end(kForeign),
                                     [&](const Foreign& f) { return absl::StrContains(key, f.mark); });
    if (suffix == std::end(kSuffixes) || other != std::end(kForeign)) {
      foreign[other == std::end(kForeign) ? "unknown" : std::string(other->type)].push_back(raw);
      continue;
    }
    layers.peft_suffix |= absl::StrContains(suffix->text, "lora_A") || absl::StrContains(suffix->text, "lora_B");
    Parts& parts = by_layer[std::string(absl::StripSuffix(key, suffix->text))];
    absl::optional<std::string>& part = suffix->part == Part::kDown ? parts.down
                                        : suffix->part == Part::kUp ? parts.up
                                                                    : parts.alpha;
    if (part.has_value()) return Invalid(raw, "appears under two adapter names; export one adapter");
    part = raw;
  }
  if (!foreign.empty()) {
    const auto& [type, keys] = *foreign.begin();
    const std::string sample =
        absl::StrJoin(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(std::min<size_t>(keys.size(), 3)), ", ");
    if (by_layer.empty() && type == "unknown") {
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA",
                       absl::StrCat("the file holds no LoRA layer; its tensors are named like ", sample),
                       {{"sample", sample}});
    }
    return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_LORA",
                     absl::StrCat(keys.size(), " tensors are of type ", type, " (", sample,
                                  "); linear LoRA layers with lora_down/lora_up or lora_A/lora_B are supported"),
                     {{"layer_type", type}, {"sample", sample}});
  }
  if (by_layer.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LORA", "the file holds no LoRA layer");
  }
  return layers;
}

}  // namespace

absl::StatusOr<PatchSummary> ModelPatch::Summarize(const WeightFiles& files) {
  ASSIGN_OR_RETURN(const Layers layers, GroupByLayer(files));
  return PatchSummary{FormatOf(layers), static_cast<int64_t>(layers.by_name.size())};
}

absl::StatusOr<std::shared_ptr<const ModelPatch>> ModelPatch::Load(std::shared_ptr<const WeightFiles> files,
                                                                   const LoadContext& context) {
  ASSIGN_OR_RETURN(const Layers layers, GroupByLayer(*files));
  auto patch = std::make_shared<ModelPatch>();
  const int64_t total = files->tensor_bytes();
  for (const auto& [name, parts] : layers.by_name) {
    if (context.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
    if (!parts.down || !parts.up) return Invalid(name, parts.up ? "has no down part" : "has no up part");
    LoraLayer layer;
    layer.name = name;
    ASSIGN_OR_RETURN(layer.down, files->Read(*parts.down));
    ASSIGN_OR_RETURN(layer.up, files->Read(*parts.up));
    for (const at::Tensor* t : {&layer.down, &layer.up}) {
      const auto type = t->scalar_type();
      if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) {
        return Invalid(name, absl::StrCat("is stored as ", at::toString(type), "; fp32, fp16 and bf16 are read"));
      }
    }
    if (layer.down.dim() == 4 || layer.up.dim() == 4) {
      return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_LORA",
                       absl::StrCat("layer ", name, " is a convolution; linear LoRA layers are supported"),
                       {{"layer_type", "LoCon"}, {"sample", name}});
    }
    if (layer.down.dim() != 2 || layer.up.dim() != 2) return Invalid(name, "down and up must be matrices");
    const int64_t rank = layer.down.size(0);
    if (rank < 1 || rank > kMaxRank) return Invalid(name, absl::StrCat("rank ", rank, " is out of range"));
    if (layer.up.size(1) != rank) {
      return Invalid(name, absl::StrCat("down has rank ", rank, ", up has ", layer.up.size(1)));
    }
    if (parts.alpha) {
      ASSIGN_OR_RETURN(at::Tensor alpha, files->Read(*parts.alpha));
      if (alpha.numel() != 1) return Invalid(name, "alpha is no scalar");
      const double value = alpha.to(at::kDouble).item<double>();
      if (!std::isfinite(value)) return Invalid(name, "alpha is not finite");
      layer.scale = value / static_cast<double>(rank);
      layer.has_alpha = true;
    }
    for (const at::Tensor* t : {&layer.down, &layer.up}) {
      if (t->numel() > 0 && !std::isfinite(t->abs().amax().to(at::kDouble).item<double>())) {
        return Invalid(name, "holds a value that is not finite");
      }
      patch->bytes_ += static_cast<int64_t>(t->nbytes());
    }
    context.Progress(patch->bytes_, total);
    for (const at::Tensor& t : {layer.down, layer.up}) {
      patch->device_bytes_ += PaddedBytes(static_cast<int64_t>(t.nbytes()));
    }
    patch->layers_.push_back(std::move(layer));
  }
  RETURN_IF_ERROR(files->Check());
  patch->format_ = FormatOf(layers);
  patch->metadata_ = files->metadata();
  patch->files_ = std::move(files);
  return patch;
}

absl::StatusOr<std::shared_ptr<const Resource>> ModelPatch::CopyTo(Device& device, const std::vector<bool>&,
                                                                   const Resource*, std::stop_token stop) const {
  auto copy = std::make_shared<ModelPatch>(*this);
  copy->files_ = nullptr;
  for (LoraLayer& layer : copy->layers_) {
    if (stop.stop_requested()) {
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while moving a LoRA to a device");
    }
    ASSIGN_OR_RETURN(layer.down, CopyTensorTo(layer.down, device));
    ASSIGN_OR_RETURN(layer.up, CopyTensorTo(layer.up, device));
  }
  RETURN_IF_ERROR(Check());
  return copy;
}

}  // namespace latentd
