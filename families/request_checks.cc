#include "families/request_checks.h"

#include <algorithm>
#include <random>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr int64_t kMaxSide = 4096;
constexpr int64_t kMaxPixels = 2048 * 4096;
constexpr int64_t kMaxPictureSide = 16384;
constexpr size_t kMaxPictures = 64;
constexpr size_t kMaxPromptBytes = 64 << 10;

absl::Status CheckSide(absl::string_view field, int64_t value, int64_t multiple) {
  if (value >= multiple && value <= kMaxSide && value % multiple == 0) return absl::OkStatus();
  return FieldError(field, absl::StrCat("must be a multiple of ", multiple, " from ", multiple, " to ",
                                        kMaxSide, "; it is ", value));
}

struct OptionalField {
  absl::string_view name;
  bool (*set)(const GenerateParams&);
};
constexpr OptionalField kOptionalFields[] = {
    {"params.control_image", [](const GenerateParams& p) { return p.control_image.defined(); }},
    {"params.prompt_2", [](const GenerateParams& p) { return p.prompt_2.has_value(); }},
    {"params.negative_prompt_2", [](const GenerateParams& p) { return p.negative_prompt_2.has_value(); }},
    {"params.prompt_syntax", [](const GenerateParams& p) { return p.prompt_syntax.has_value(); }},
    {"params.clip_skip", [](const GenerateParams& p) { return p.clip_skip.has_value(); }},
    {"params.schedule", [](const GenerateParams& p) { return p.schedule.has_value(); }},
    {"params.eta", [](const GenerateParams& p) { return p.eta.has_value(); }},
    {"params.guidance_rescale", [](const GenerateParams& p) { return p.guidance_rescale.has_value(); }},
    {"params.guidance_list", [](const GenerateParams& p) { return !p.guidance_list.empty(); }},
    {"params.denoising_start", [](const GenerateParams& p) { return p.denoising_start.has_value(); }},
    {"params.denoising_end", [](const GenerateParams& p) { return p.denoising_end.has_value(); }},
    {"params.mask_image", [](const GenerateParams& p) { return p.mask_image.defined(); }},
    {"params.gradient_mask", [](const GenerateParams& p) { return p.gradient_mask.has_value(); }},
    {"params.init_latents", [](const GenerateParams& p) { return p.init_latents.defined(); }},
    {"params.original_size", [](const GenerateParams& p) { return p.original_size.has_value(); }},
    {"params.target_size", [](const GenerateParams& p) { return p.target_size.has_value(); }},
    {"params.crop", [](const GenerateParams& p) { return p.crop.has_value(); }},
    {"params.aesthetic_score", [](const GenerateParams& p) { return p.aesthetic_score.has_value(); }},
    {"params.negative_aesthetic_score",
     [](const GenerateParams& p) { return p.negative_aesthetic_score.has_value(); }},
    {"params.denoise_tiles", [](const GenerateParams& p) { return p.tiles.has_value(); }},
};

}  // namespace

absl::Status CheckRange(absl::string_view field, double value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return FieldError(field, absl::StrCat("must be from ", min, " to ", max, "; it is ", value));
}

absl::Status CheckShare(absl::string_view field, double value) {
  if (value > 0 && value <= 1) return absl::OkStatus();
  return FieldError(field, "must be above 0 and at most 1");
}

absl::Status CheckPrompt(absl::string_view field, const std::string& text) {
  if (text.size() <= kMaxPromptBytes) return absl::OkStatus();
  return FieldError(field,
                    absl::StrCat("is ", text.size(), " bytes; at most ", kMaxPromptBytes, " are taken"));
}

void FillSize(const PixelSize& usual, int64_t multiple, GenerateParams& params) {
  const at::Tensor& init = params.init_image;
  if (!params.width && !params.height && init.defined() && init.dim() == 3) {
    const auto cut = [&](int64_t side) { return std::max(multiple, side / multiple * multiple); };
    params.height = cut(init.size(0));
    params.width = cut(init.size(1));
  }
  if (!params.width) params.width = usual.width;
  if (!params.height) params.height = usual.height;
}

absl::Status CheckSize(const GenerateParams& params, int64_t multiple) {
  if (absl::Status status = CheckSide("params.width", *params.width, multiple); !status.ok()) return status;
  if (absl::Status status = CheckSide("params.height", *params.height, multiple); !status.ok()) return status;
  if (*params.width * *params.height <= kMaxPixels) return absl::OkStatus();
  return FieldError("params.height", absl::StrCat(*params.width, "×", *params.height, " is more than ",
                                                  kMaxPixels, " pixels"));
}

absl::Status CheckPicture(absl::string_view field, const at::Tensor& picture) {
  if (picture.dim() != 3 || picture.size(2) != 3 || picture.scalar_type() != at::kByte) {
    return FieldError(field, "must be 8-bit RGB");
  }
  for (int64_t side : {picture.size(0), picture.size(1)}) {
    if (side < 1 || side > kMaxPictureSide) {
      return FieldError(field, absl::StrCat("is ", picture.size(1), "×", picture.size(0),
                                            " pixels; a side must be from 1 to ", kMaxPictureSide));
    }
  }
  return absl::OkStatus();
}

std::vector<PromptNotice> LoraTagNotices(const GenerateParams& params) {
  constexpr size_t kMostOfAPrompt = 4, kMostShown = 128;
  std::vector<PromptNotice> notices;
  if (params.prompt_syntax.value_or("") == "a1111") return notices;  // where they are errors
  const auto look = [&](absl::string_view field, absl::string_view text) {
    size_t at = 0;
    for (size_t n = 0; n < kMostOfAPrompt; ++n) {
      at = text.find("<lora:", at);
      const size_t end = text.find('>', at == absl::string_view::npos ? text.size() : at);
      if (at == absl::string_view::npos || end == absl::string_view::npos) return;
      const absl::string_view tag = text.substr(at, end + 1 - at);
      at = end + 1;
      if (tag.size() > kMostShown) continue;
      notices.push_back({"LORA_TAG_IN_PROMPT", std::string(field),
                         absl::StrCat(tag, " was read as text: LoRAs go into the request's field `loras`")});
    }
  };
  look("params.prompt", params.prompt);
  look("params.negative_prompt", params.negative_prompt.value_or(""));
  look("params.prompt_2", params.prompt_2.value_or(""));
  look("params.negative_prompt_2", params.negative_prompt_2.value_or(""));
  return notices;
}

absl::Status FillSeeds(GenerateParams& params) {
  if (params.seeds.empty()) {
    std::random_device device;
    params.seeds = {device()};
  }
  return CheckRange("params.count", static_cast<double>(params.seeds.size()), 1, kMaxPictures);
}

absl::string_view MessageWithoutField(const absl::Status& status) {
  absl::string_view message = status.message();
  const ErrorDetails details = GetErrorDetails(status);
  const auto field = details.find("field");
  if (field != details.end() && absl::ConsumePrefix(&message, field->second))
    absl::ConsumePrefix(&message, ": ");
  return message;
}

absl::Status AtField(const absl::Status& status, absl::string_view field) {
  if (status.ok()) return status;
  ErrorDetails details = GetErrorDetails(status);
  details["field"] = std::string(field);
  return MakeError(status.code(), ErrorReason(status), absl::StrCat(field, ": ", MessageWithoutField(status)),
                   details);
}

absl::Status CheckKnownFields(const GenerateParams& params, absl::Span<const absl::string_view> known,
                              absl::string_view family) {
  for (const OptionalField& field : kOptionalFields) {
    if (!field.set(params) || std::find(known.begin(), known.end(), field.name) != known.end()) continue;
    return FieldError(field.name, absl::StrCat("is not known to ", family, " models"));
  }
  return absl::OkStatus();
}

}  // namespace latentd
