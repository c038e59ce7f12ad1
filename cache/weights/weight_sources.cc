#include "cache/weights/weight_sources.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

using Shape = std::vector<int64_t>;

constexpr char kMark[] = ".comfy_quant";
constexpr char kMarksOfFile[] = "_quantization_metadata";  // the same in the header, by module
constexpr int64_t kMaxMarkBytes = 64 << 10;

// -------------------------------------------------------------------------------------------------------
// names

// Names that checkpoints carry and no network uses.
bool IsKnown(absl::string_view name, const ComponentLayout& layout) {
  if (absl::EndsWith(name, ".position_ids") || absl::EndsWith(name, ".num_batches_tracked")) return true;
  if (name == "position_ids" || name == "logit_scale" || name == "spiece_model" || name == "scaled_fp8")
    return true;
  // T5 files name the tied embedding once or twice.
  return name == "encoder.embed_tokens.weight" && layout.Find("shared.weight");
}

// What stands first in names of what is beside a network: what trainers keep, other towers of the model that
// a network was taken from, marks that others read.
constexpr absl::string_view kBeside[] = {
    "loss", "model_ema", "ema", "optimizer", "lr_scheduler", "discriminator", "perceptual_loss", "logvar",
    // of the process that a network was trained in
    "betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod",
    "log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod",
    "posterior_variance", "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2",
    "denoiser", "scale_factor", "global_step", "epoch", "v_pred", "ztsnr", "edm_mean", "edm_std", "edm_vpred",
    // of other components in the same file
    "text_encoders", "text_encoder", "text_encoder_2", "vae", "first_stage_model", "cond_stage_model",
    "conditioner",
    // of CLIP, and of T5
    "text_projection", "vision_model", "visual", "visual_projection", "vision_tower", "logit_scale",
    "logit_bias", "decoder", "lm_head"};

// A layer of OpenCLIP's text encoder behind those that the network has: Stable Diffusion 2 reads all but the
// last one, and its checkpoints have them all.
bool IsLayerBehind(absl::string_view name, const ComponentLayout& layout) {
  int64_t layer = 0;
  return absl::ConsumePrefix(&name, "transformer.resblocks.") &&
         absl::SimpleAtoi(name.substr(0, name.find('.')), &layer) &&
         layout.Find("encoder.layers.0.layer_norm1.weight") &&
         !layout.Find(absl::StrCat("encoder.layers.", layer, ".layer_norm1.weight"));
}

bool IsBeside(absl::string_view name, const ComponentLayout& layout) {
  if (IsLayerBehind(name, layout)) return true;
  const absl::string_view head = name.substr(0, name.find('.'));
  if (std::find(std::begin(kBeside), std::end(kBeside), head) == std::end(kBeside)) return false;
  // "decoder" is a part of a VAE.
  return std::none_of(layout.tensors().begin(), layout.tensors().end(), [&](const TensorDecl& tensor) {
    absl::string_view rest = tensor.name;
    return absl::ConsumePrefix(&rest, head) && absl::StartsWith(rest, ".");
  });
}

// "a.b.weight" → {"a.b", ".weight"}; ".scale" is a weight by another name. Parameters that hang on no module
// of their own are taken as if they did: "a.in_proj_bias" → {"a.in_proj", ".bias"}, "b" → {"b", ".weight"}.
std::pair<absl::string_view, std::string> SplitSuffix(absl::string_view name) {
  if (absl::EndsWith(name, ".in_proj_weight")) return {absl::StripSuffix(name, "_weight"), ".weight"};
  if (absl::EndsWith(name, ".in_proj_bias")) return {absl::StripSuffix(name, "_bias"), ".bias"};
  const size_t dot = name.rfind('.');
  if (dot == absl::string_view::npos) return {name, ".weight"};
  std::string suffix(name.substr(dot));
  return {name.substr(0, dot), suffix == ".scale" ? ".weight" : suffix};
}

// Scales of 8-bit weights, as ComfyUI writes them: "X.scale_weight" or "X.weight_scale" belongs to
// "X.weight". Sets `module` to X; empty for what is there for other programs' arithmetic.
bool IsScale(absl::string_view source, std::string* module) {
  module->clear();
  for (absl::string_view suffix : {".scale_weight", ".weight_scale"}) {
    if (!absl::EndsWith(source, suffix)) continue;
    *module = std::string(absl::StripSuffix(source, suffix));
    return true;
  }
  return absl::EndsWith(source, ".scale_input") || absl::EndsWith(source, ".input_scale") ||
         absl::EndsWith(source, "scaled_fp8");
}

// Whether `name` is a weight, or several, of the layout.
bool AddSources(absl::string_view tensor, absl::string_view name, const ComponentLayout& layout,
                const KeyMap* key_map, WeightSources& sources) {
  const auto add = [&](Slot slot, const KeyPart& part) {
    sources.by_slot[static_cast<size_t>(slot.index)].push_back(
        {slot, std::string(tensor), part.row_begin, part.rows, part.transform});
  };
  const KeyPart whole{.canonical = {}, .row_begin = 0, .rows = -1};
  if (Slot slot = layout.Find(name)) return add(slot, whole), true;
  if (Slot slot = layout.Find("shared.weight"); slot && name == "encoder.embed_tokens.weight") {
    return add(slot, whole), true;
  }
  if (key_map == nullptr) return false;
  auto [module, suffix] = SplitSuffix(name);
  bool any = false;
  for (const KeyPart& part : key_map->Resolve(module, layout)) {
    if (Slot slot = layout.Find(part.canonical + suffix)) {
      any = true;
      add(slot, part);
    }
  }
  return any;
}

// ------------------------------------------------------------------------------------------------
// quantisations

absl::Status NotRead(absl::string_view quantisation) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
      absl::StrCat("the weights are quantised as ", quantisation,
                   ", which is not read; use the model in bf16, fp16, or fp8 with one scale per tensor"),
      {{"quantisation", std::string(quantisation)}});
}

// Formats of 8-bit floats with one scale are read as any fp8 file is.
bool IsReadFormat(absl::string_view format) { return format == "float8_e4m3fn" || format == "float8_e5m2"; }

// What a mark says: {"format": "nvfp4", …}.
absl::Status CheckMark(const nlohmann::json& mark) {
  const auto format = mark.is_object() ? mark.find("format") : mark.end();
  if (!mark.is_object() || format == mark.end() || !format->is_string()) {
    return NotRead("a comfy_quant mark without a format says");
  }
  const auto name = format->get<std::string>();
  return IsReadFormat(name) ? absl::OkStatus() : NotRead(absl::StrCat("ComfyUI's ", name.substr(0, 64)));
}

absl::Status CheckMarks(const WeightFiles& files, const WeightSources& sources, absl::string_view prefix) {
  for (const std::string& tensor : sources.marks) {
    const TensorInfo& info = *files.tensors().at(tensor).info;
    if (info.dtype != DType::kU8 || info.bytes > kMaxMarkBytes)
      return NotRead("an unreadable comfy_quant mark says");
    ASSIGN_OR_RETURN(const at::Tensor bytes, files.Read(tensor));
    const auto mark = ParseBoundedJson(
        absl::string_view(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(info.bytes)));
    RETURN_IF_ERROR(CheckMark(mark.ok() ? *mark : nlohmann::json()));
  }
  const auto text = files.metadata().find(kMarksOfFile);
  if (text == files.metadata().end()) return absl::OkStatus();
  const auto json = ParseBoundedJson(text->second);
  const auto layers =
      json.ok() && json->is_object() ? json->find("layers") : nlohmann::json::const_iterator();
  if (!json.ok() || !json->is_object() || layers == json->end() || !layers->is_object())
    return absl::OkStatus();
  for (const auto& [module, mark] : layers->items()) {
    const bool own = files.tensors().count(absl::StrCat(prefix, module, ".weight")) != 0 ||
                     (absl::StartsWith(module, prefix) && files.tensors().count(module + ".weight") != 0);
    if (own) RETURN_IF_ERROR(CheckMark(mark));
  }
  return absl::OkStatus();
}

// What is read of others' formats is their names alone.
struct Quantisation {
  absl::string_view ending, beside;  // of two tensors; the second may be empty
  absl::string_view name;
};
constexpr Quantisation kQuantisations[] = {
    {".quant_state.bitsandbytes__nf4", "", "bitsandbytes' NF4"},
    {".quant_state.bitsandbytes__fp4", "", "bitsandbytes' FP4"},
    {".weight.SCB", "", "bitsandbytes' INT8"},
    {".SCB", "", "bitsandbytes' INT8"},
    {".qweight", ".wscales", "SVDQuant (Nunchaku)"},
    {".qweight", ".qzeros", "GPTQ or AWQ"},
    {".qweight", "", "a format with packed weights (.qweight)"},
    {".weight._data", "", "optimum-quanto"},
    {":qdata", "", "torchao"},
    {"._weight_qdata", "", "torchao"},
    {".weight_scale_2", "", "NVFP4"},
};

// Only where something is missing: a file may have such tensors for more programs than one.
absl::Status NameQuantisation(const WeightFiles& files, absl::string_view prefix) {
  const auto has = [&](absl::string_view ending) {
    return std::any_of(files.tensors().begin(), files.tensors().end(), [&](const auto& tensor) {
      return absl::StartsWith(tensor.first, prefix) && absl::EndsWith(tensor.first, ending);
    });
  };
  for (const Quantisation& row : kQuantisations) {
    if (has(row.ending) && (row.beside.empty() || has(row.beside))) return NotRead(row.name);
  }
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------------------------------
// shapes

std::string Text(const Shape& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

// A 1×1 convolution and a linear layer have the same numbers: [out, in, 1, 1] and [out, in].
bool DiffersByOnes(const Shape& a, const Shape& b) {
  if (a.size() > b.size()) return DiffersByOnes(b, a);
  return a.size() == 2 && b.size() == 4 && b[0] == a[0] && b[1] == a[1] && b[2] == 1 && b[3] == 1;
}

absl::Status Mismatch(absl::string_view what, const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 5);
  std::string sample = absl::StrJoin(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), ", ");
  return MakeError(absl::StatusCode::kFailedPrecondition, "WEIGHTS_MISMATCH",
                   absl::StrCat(names.size(), " ", what, ": ", sample, names.size() > shown ? ", …" : ""),
                   {{"count", absl::StrCat(names.size())}, {"sample", sample}});
}

absl::Status CheckShape(const WeightSource& from, const TensorInfo& info, const TensorDecl& decl) {
  Shape shape = info.shape;
  if (from.transform == KeyTransform::kSqueezeConv && shape.size() == 4)
    shape = {shape[0], shape[1] * shape[2] * shape[3]};
  if (from.transform == KeyTransform::kTranspose && shape.size() == 2) std::swap(shape[0], shape[1]);
  if (from.rows >= 0 && !shape.empty()) {
    if (from.row_begin + from.rows > shape[0]) {
      return Mismatch("tensors have too few rows", {absl::StrCat(from.tensor, " ", Text(shape))});
    }
    shape[0] = from.rows;
  }
  const Shape wanted(decl.shape.begin(), decl.shape.end());
  if (shape == wanted || DiffersByOnes(shape, wanted)) return absl::OkStatus();
  return Mismatch("tensors have another shape", {absl::StrCat(from.tensor, " ", Text(info.shape), " where ",
                                                              decl.name, " is ", Text(wanted))});
}

// Bytes of a weight that comes from there.
int64_t BytesOf(const WeightSource& from, const TensorInfo& info) {
  const int64_t all = info.dtype == DType::kF64 ? info.bytes / 2 : info.bytes;
  if (from.rows < 0 || info.shape.empty() || info.shape[0] <= 0) return all;
  return std::min(all, all / info.shape[0] * from.rows);
}

// Whether a weight lies where the file has it. What does not is a copy of its own.
bool IsAlias(const WeightSource& from, const TensorInfo& info) {
  return info.dtype != DType::kF64 && info.offset % static_cast<int64_t>(ElementSize(info.dtype)) == 0 &&
         (from.transform == KeyTransform::kNone || from.transform == KeyTransform::kSqueezeConv);
}

}  // namespace

absl::StatusOr<double> ReadScale(const WeightFiles& files, const std::string& tensor) {
  ASSIGN_OR_RETURN(const at::Tensor scale, files.Read(tensor));
  if (scale.numel() == 1 && at::isFloatingType(scale.scalar_type())) {
    const double value = scale.to(at::kDouble).item<double>();
    if (std::isfinite(value)) return value;
  }
  return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_DTYPE",
                   absl::StrCat("tensor ", tensor,
                                " is no finite number: weights with a scale per block or row are not read"),
                   {{"tensor", tensor}});
}

WeightSources FindWeightSources(const WeightFiles& files, const ComponentLayout& layout,
                                const KeyMap* key_map, absl::string_view prefix) {
  WeightSources sources;
  sources.by_slot.resize(layout.tensors().size());
  for (const auto& [tensor, entry] : files.tensors()) {
    absl::string_view name = tensor;
    if (!prefix.empty() && !absl::ConsumePrefix(&name, prefix)) continue;
    if (std::string module; IsScale(tensor, &module)) {
      if (module.empty()) {
        sources.known.push_back(tensor);
      } else {
        sources.scales[module] = tensor;
      }
    } else if (absl::EndsWith(tensor, kMark)) {
      sources.marks.push_back(tensor);
    } else if (AddSources(tensor, name, layout, key_map, sources)) {
      continue;
    } else if (IsKnown(name, layout)) {
      sources.known.push_back(tensor);
    } else {
      const bool extra = !IsFloatingPoint(entry.info->dtype) || IsBeside(name, layout);
      (extra ? sources.extra : sources.unknown).push_back(tensor);
    }
  }
  return sources;
}

absl::Status CheckWeightSources(const WeightFiles& files, const ComponentLayout& layout,
                                const WeightSources& sources, absl::string_view prefix) {
  RETURN_IF_ERROR(CheckMarks(files, sources, prefix));
  const auto& decls = layout.tensors();
  std::vector<std::string> missing;
  bool odd = !sources.unknown.empty();
  for (size_t i = 0; i < decls.size(); ++i) {
    const auto& from = sources.by_slot[i];
    if (from.empty()) missing.push_back(decls[i].name);
    odd = odd || from.empty() || !IsFloatingPoint(files.tensors().at(from.front().tensor).info->dtype);
  }
  if (odd) RETURN_IF_ERROR(NameQuantisation(files, prefix));
  if (!missing.empty()) return Mismatch("tensors are missing", missing);
  if (!sources.unknown.empty())
    return Mismatch("tensors are not known to this architecture", sources.unknown);
  for (size_t i = 0; i < decls.size(); ++i) {
    const WeightSource& from = sources.by_slot[i].front();
    const TensorInfo& info = *files.tensors().at(from.tensor).info;
    if (!IsFloatingPoint(info.dtype)) {
      return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_DTYPE",
                       absl::StrCat("tensor ", from.tensor, " is ", DTypeName(info.dtype),
                                    "; weights are read in fp64, fp32, fp16, bf16 or fp8"),
                       {{"tensor", from.tensor}});
    }
    RETURN_IF_ERROR(CheckShape(from, info, decls[i]));
  }
  for (const auto& [module, tensor] : sources.scales) {
    RETURN_IF_ERROR(ReadScale(files, tensor).status());
  }
  return absl::OkStatus();
}

std::map<DType, int64_t> BytesByType(const WeightFiles& files, const WeightSources& sources) {
  std::map<DType, int64_t> bytes;
  std::map<std::pair<int, int64_t>, int64_t> aliases;  // file and offset → bytes: tied weights are there once
  for (const std::vector<WeightSource>& assigned : sources.by_slot) {
    if (assigned.empty()) continue;
    const WeightSource& from = assigned.front();
    const WeightFiles::Entry& entry = files.tensors().at(from.tensor);
    const TensorInfo& info = *entry.info;
    const int64_t own = BytesOf(from, info);
    if (!IsAlias(from, info)) {
      bytes[info.dtype] += own;
      continue;
    }
    const int64_t row = from.rows > 0 ? own / from.rows : 0;
    int64_t& there = aliases[{entry.file, info.offset + row * from.row_begin}];
    bytes[info.dtype] += std::max<int64_t>(0, own - there);
    there = std::max(there, own);
  }
  return bytes;
}

}  // namespace latentd
