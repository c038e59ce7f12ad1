#include "server/params.h"

#include <cstring>
#include <random>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {
namespace {

constexpr size_t kMaxPromptBytes = 64 << 10;
constexpr int kMaxCount = 64;

absl::Status CheckText(const std::string& text, absl::string_view field) {
  if (text.size() <= kMaxPromptBytes) return absl::OkStatus();
  return FieldError(field, absl::StrCat("has ", text.size(), " bytes, at most ", kMaxPromptBytes, " are taken"));
}

// uint8 [H, W, 3] of a picture file.
absl::StatusOr<at::Tensor> PictureOf(const std::string& file, absl::string_view field, const Config& config) {
  if (file.empty()) return FieldError(field, "is empty");
  ASSIGN_OR_RETURN(RgbImage image,
                   DecodeImage(file, {.max_bytes = config.max_image_bytes, .max_pixels = config.max_pixels}, field));
  at::Tensor picture = at::empty({image.height, image.width, 3}, at::kByte);
  std::memcpy(picture.data_ptr(), image.pixels.data(), image.pixels.size());
  return picture;
}

uint64_t DrawSeed() {
  std::random_device device;
  return device();  // 32 bits: short enough to type
}

}  // namespace

absl::StatusOr<GenerateParams> ParamsFromProto(const v1::GenerateParams& proto, const Config& config) {
  RETURN_IF_ERROR(CheckText(proto.prompt(), "params.prompt"));
  RETURN_IF_ERROR(CheckText(proto.negative_prompt(), "params.negative_prompt"));
  GenerateParams params;
  params.prompt = proto.prompt();
  if (proto.has_negative_prompt()) params.negative_prompt = proto.negative_prompt();
  if (proto.has_width()) params.width = proto.width();
  if (proto.has_height()) params.height = proto.height();
  if (proto.has_steps()) params.steps = proto.steps();
  if (proto.has_guidance()) params.guidance = proto.guidance();
  if (proto.has_true_cfg_scale()) params.true_cfg_scale = proto.true_cfg_scale();
  if (proto.has_sampler()) params.sampler = proto.sampler();
  if (proto.has_shift()) params.shift = proto.shift();
  if (proto.has_max_sequence_length()) params.max_sequence_length = proto.max_sequence_length();

  const int count = proto.has_count() ? proto.count() : 1;
  if (count < 1 || count > kMaxCount) return FieldError("params.count", absl::StrCat("must be 1 to ", kMaxCount));
  const uint64_t first = proto.has_seed() ? proto.seed() : DrawSeed();
  for (int i = 0; i < count; ++i) params.seeds.push_back(first + static_cast<uint64_t>(i));

  if (proto.preview_every() < 0) return FieldError("params.preview_every", "must not be negative");
  if (!v1::ImageFormat_IsValid(proto.image_format())) return FieldError("params.image_format", "unknown value");

  if (proto.has_init_image()) {
    const v1::InitImage& init = proto.init_image();
    ASSIGN_OR_RETURN(params.init_image, PictureOf(init.data(), "params.init_image.data", config));
    if (init.has_strength()) params.strength = init.strength();
  }
  if (proto.has_control_image()) {
    ASSIGN_OR_RETURN(params.control_image,
                     PictureOf(proto.control_image().data(), "params.control_image.data", config));
  }
  return params;
}

absl::Status CheckPixels(const GenerateParams& params, const Config& config) {
  if (*params.width * *params.height <= config.max_pixels) return absl::OkStatus();
  return FieldError("params.width", absl::StrCat("width × height is ", *params.width * *params.height,
                                                 " pixels, this server allows ", config.max_pixels));
}

v1::GenerateParams EchoParams(const v1::GenerateParams& request, const GenerateParams& used) {
  v1::GenerateParams echo = request;
  if (used.negative_prompt) echo.set_negative_prompt(*used.negative_prompt);
  if (used.width) echo.set_width(static_cast<int>(*used.width));
  if (used.height) echo.set_height(static_cast<int>(*used.height));
  if (used.steps) echo.set_steps(static_cast<int>(*used.steps));
  if (used.guidance) echo.set_guidance(*used.guidance);
  if (used.true_cfg_scale) echo.set_true_cfg_scale(*used.true_cfg_scale);
  if (used.sampler) echo.set_sampler(*used.sampler);
  if (used.shift) echo.set_shift(*used.shift);
  if (used.max_sequence_length) echo.set_max_sequence_length(static_cast<int>(*used.max_sequence_length));
  echo.set_seed(used.seeds.front());
  echo.set_count(static_cast<int>(used.seeds.size()));
  ClearPictureFiles(echo);
  if (echo.has_init_image() && used.strength) echo.mutable_init_image()->set_strength(*used.strength);
  return echo;
}

int64_t PictureFileBytes(const v1::GenerateParams& params) {
  return static_cast<int64_t>(params.init_image().data().size() + params.control_image().data().size());
}

void ClearPictureFiles(v1::GenerateParams& params) {
  if (params.has_init_image()) params.mutable_init_image()->clear_data();
  if (params.has_control_image()) params.mutable_control_image()->clear_data();
}

int64_t PictureBytes(const GenerateParams& params) {
  int64_t bytes = 0;
  for (const at::Tensor& picture : {params.init_image, params.control_image}) {
    if (picture.defined()) bytes += static_cast<int64_t>(picture.nbytes());
  }
  return bytes;
}

v1::LoraReport ReportToProto(const PatchReport& report) {
  v1::LoraReport proto;
  proto.set_name(report.name);
  proto.set_format(report.format);
  proto.set_weight(report.weight);
  proto.set_layers_in_file(report.layers_in_file);
  for (const auto& [component, layers] : report.matched) (*proto.mutable_matched())[component] = layers;
  for (const std::string& name : report.unmatched) proto.add_unmatched_samples(name);
  proto.set_unmatched_count(report.unmatched_count);
  proto.set_direct_tensors(report.direct_tensors);
  proto.set_sidecar_tensors(report.sidecar_tensors);
  return proto;
}

RgbImage ImageFromTensor(const at::Tensor& picture) {
  const at::Tensor flat = picture.contiguous();
  RgbImage image;
  image.height = static_cast<int>(flat.size(0));
  image.width = static_cast<int>(flat.size(1));
  const auto* data = static_cast<const uint8_t*>(flat.const_data_ptr());
  image.pixels.assign(data, data + flat.nbytes());
  return image;
}

}  // namespace latentd
