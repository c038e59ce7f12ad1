#include "families/request_checks.h"

#include <algorithm>
#include <random>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

constexpr int64_t kMaxPixels = 2048 * 4096;
constexpr int64_t kMaxPictureSide = 16384;

absl::Status CheckSide(absl::string_view field, int64_t value, int64_t multiple) {
  if (value >= multiple && value <= kMaxSide && value % multiple == 0) return absl::OkStatus();
  return FieldError(field, absl::StrCat("must be a multiple of ", multiple, " from ", multiple, " to ",
                                        kMaxSide, "; it is ", value));
}

}  // namespace

absl::Status CheckRange(absl::string_view field, double value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return FieldError(field, absl::StrCat("must be from ", min, " to ", max, "; it is ", value));
}

absl::Status CheckShare(absl::string_view field, double value) {
  if (value > 0 && value <= 1) return absl::OkStatus();
  return FieldError(field, "must be above 0 and at most 1");
}

void FillSize(const PixelSize& usual, int64_t multiple, GenerateParams& params) {
  const at::Tensor& init = params.picture(MediaRole::kInit);
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

}  // namespace latentd
