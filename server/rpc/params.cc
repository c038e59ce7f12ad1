#include "server/rpc/params.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "server/media/latents_file.h"
#include "server/rpc/request_bounds.h"

namespace latentd {
namespace {

constexpr int kMaxCount = 64;
constexpr int kMaxGuidanceList = 1000;

absl::Status CheckText(const std::string& text, absl::string_view field) {
  if (text.size() <= kMaxPromptBytes) return absl::OkStatus();
  return FieldError(field,
                    absl::StrCat("has ", text.size(), " bytes, at most ", kMaxPromptBytes, " are taken"));
}

// uint8 [H, W, 3] of a picture file.
absl::StatusOr<at::Tensor> PictureOf(const std::string& file, absl::string_view field, const Config& config,
                                     AlphaUse alpha = AlphaUse::kDrop) {
  if (file.empty()) return FieldError(field, "is empty");
  ASSIGN_OR_RETURN(RgbImage image,
                   DecodeImage(file, {.max_bytes = config.max_image_bytes, .max_pixels = config.max_pixels},
                               field, alpha));
  at::Tensor picture = at::empty({image.height, image.width, 3}, at::kByte);
  std::memcpy(picture.data_ptr(), image.pixels.data(), image.pixels.size());
  return picture;
}

uint64_t DrawSeed() {
  std::random_device device;
  return device();  // 32 bits: short enough to type
}

const char* SyntaxName(v1::PromptSyntax syntax) {
  switch (syntax) {
    case v1::PROMPT_SYNTAX_COMPEL:
      return "compel";
    case v1::PROMPT_SYNTAX_A1111:
      return "a1111";
    default:
      return "plain";
  }
}

// The fields that SD families alone know; a family that does not know one refuses it.
absl::Status SdParamsFromProto(const v1::GenerateParams& proto, const Config& config,
                               GenerateParams& params) {
  RETURN_IF_ERROR(CheckText(proto.prompt_2(), "params.prompt_2"));
  RETURN_IF_ERROR(CheckText(proto.negative_prompt_2(), "params.negative_prompt_2"));
  if (proto.has_prompt_2()) params.prompt_2 = proto.prompt_2();
  if (proto.has_negative_prompt_2()) params.negative_prompt_2 = proto.negative_prompt_2();
  if (!v1::PromptSyntax_IsValid(proto.prompt_syntax()))
    return FieldError("params.prompt_syntax", "unknown value");
  if (proto.prompt_syntax() != v1::PROMPT_SYNTAX_UNSPECIFIED)
    params.prompt_syntax = SyntaxName(proto.prompt_syntax());
  if (proto.has_clip_skip()) params.clip_skip = proto.clip_skip();
  if (proto.has_schedule()) params.schedule = proto.schedule();
  if (proto.has_eta()) params.eta = proto.eta();
  if (proto.has_guidance_rescale()) params.guidance_rescale = proto.guidance_rescale();
  if (proto.guidance_list_size() > kMaxGuidanceList) {
    return FieldError("params.guidance_list", absl::StrCat("has more than ", kMaxGuidanceList, " entries"));
  }
  params.guidance_list.assign(proto.guidance_list().begin(), proto.guidance_list().end());
  if (proto.has_denoising_start()) params.denoising_start = proto.denoising_start();
  if (proto.has_denoising_end()) params.denoising_end = proto.denoising_end();
  if (!proto.init_latents().empty()) {
    ASSIGN_OR_RETURN(params.init_latents, LatentsFromFile(proto.init_latents(), "params.init_latents"));
  }
  if (proto.has_mask_image()) {
    ASSIGN_OR_RETURN(params.mask_image,
                     PictureOf(proto.mask_image().data(), "params.mask_image.data", config, AlphaUse::kMask));
    if (proto.mask_image().has_gradient()) params.gradient_mask = proto.mask_image().gradient();
    params.paste_back = proto.mask_image().paste_back();
  }
  if (proto.has_original_size())
    params.original_size = PixelSize{proto.original_size().width(), proto.original_size().height()};
  if (proto.has_target_size())
    params.target_size = PixelSize{proto.target_size().width(), proto.target_size().height()};
  if (proto.has_crop()) params.crop = PixelPoint{proto.crop().left(), proto.crop().top()};
  if (proto.has_aesthetic_score()) params.aesthetic_score = proto.aesthetic_score();
  if (proto.has_negative_aesthetic_score())
    params.negative_aesthetic_score = proto.negative_aesthetic_score();
  if (proto.has_denoise_tiles()) {
    const v1::DenoiseTiles& tiles = proto.denoise_tiles();
    params.tiles.emplace();
    if (tiles.has_width()) params.tiles->width = tiles.width();
    if (tiles.has_height()) params.tiles->height = tiles.height();
    if (tiles.has_overlap()) params.tiles->overlap = tiles.overlap();
  }
  return absl::OkStatus();
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
  if (count < 1 || count > kMaxCount)
    return FieldError("params.count", absl::StrCat("must be 1 to ", kMaxCount));
  const uint64_t first = proto.has_seed() ? proto.seed() : DrawSeed();
  for (int i = 0; i < count; ++i) params.seeds.push_back(first + static_cast<uint64_t>(i));

  if (proto.preview_every() < 0) return FieldError("params.preview_every", "must not be negative");
  if (!v1::ImageFormat_IsValid(proto.image_format()))
    return FieldError("params.image_format", "unknown value");

  RETURN_IF_ERROR(SdParamsFromProto(proto, config, params));
  if (proto.has_init_image()) {
    const v1::InitImage& init = proto.init_image();
    if (!params.init_latents.defined()) {  // which only want the strength
      ASSIGN_OR_RETURN(params.init_image, PictureOf(init.data(), "params.init_image.data", config));
    } else if (!init.data().empty()) {
      return FieldError("params.init_latents", "stand in place of an init image; both are given");
    }
    if (init.has_strength()) params.strength = init.strength();
  }
  if (proto.has_control_image()) {
    ASSIGN_OR_RETURN(params.control_image,
                     PictureOf(proto.control_image().data(), "params.control_image.data", config));
  }
  return params;
}

namespace {

absl::StatusOr<TileChoice> TilesOf(absl::string_view field, bool given, int64_t tile, v1::VaeTiling tiling,
                                   const Pipeline& pipeline, const GenerateParams& params) {
  const int64_t largest = pipeline.SmallerTile(params, 0);
  if (!given) {
    switch (tiling) {
      case v1::VAE_TILING_ALWAYS:
        return TileChoice{.first = largest, .may_shrink = true};
      case v1::VAE_TILING_WHEN_NEEDED:
        return TileChoice{.first = 0, .may_shrink = true};
      default:
        return TileChoice{};
    }
  }
  std::vector<int64_t> sizes = {0};
  for (int64_t size = largest; size != 0; size = pipeline.SmallerTile(params, size)) sizes.push_back(size);
  if (std::find(sizes.begin(), sizes.end(), tile) != sizes.end()) return TileChoice{.first = tile};
  return FieldError(field, absl::StrCat(tile, " is no tile of this model's for a picture of ", *params.width,
                                        "×", *params.height, "; there are ", absl::StrJoin(sizes, ", ")));
}

}  // namespace

absl::StatusOr<TileChoice> EncodeTiles(const v1::GenerateParams& request, const Pipeline& pipeline,
                                       const GenerateParams& params) {
  return TilesOf("params.encode_tile", request.has_encode_tile(), request.encode_tile(), request.vae_tiling(),
                 pipeline, params);
}

absl::StatusOr<TileChoice> DecodeTiles(const v1::GenerateParams& request, const Pipeline& pipeline,
                                       const GenerateParams& params) {
  return TilesOf("params.decode_tile", request.has_decode_tile(), request.decode_tile(), request.vae_tiling(),
                 pipeline, params);
}

bool WantsMetadata(const v1::GenerateParams& request, const Config& config) {
  if (request.image_format() == v1::IMAGE_FORMAT_LATENTS) return false;
  return request.has_picture_metadata() ? request.picture_metadata() : config.picture_metadata;
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
  if (used.schedule) echo.set_schedule(*used.schedule);
  if (used.guidance_rescale) echo.set_guidance_rescale(*used.guidance_rescale);
  if (used.clip_skip) echo.set_clip_skip(static_cast<int>(*used.clip_skip));
  ClearPictureFiles(echo);
  if (echo.has_init_image() && used.strength) echo.mutable_init_image()->set_strength(*used.strength);
  return echo;
}

int64_t PictureFileBytes(const v1::GenerateParams& params) {
  return static_cast<int64_t>(params.init_image().data().size() + params.control_image().data().size() +
                              params.mask_image().data().size() + params.init_latents().size());
}

void ClearPictureFiles(v1::GenerateParams& params) {
  if (params.has_init_image()) params.mutable_init_image()->clear_data();
  if (params.has_control_image()) params.mutable_control_image()->clear_data();
  if (params.has_mask_image()) params.mutable_mask_image()->clear_data();
  params.clear_init_latents();
}

int64_t PictureBytes(const GenerateParams& params) {
  int64_t bytes = 0;
  for (const at::Tensor& picture :
       {params.init_image, params.control_image, params.mask_image, params.init_latents}) {
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
  for (const std::string& name : report.embeddings) proto.add_embeddings(name);
  for (const std::string& name : report.unused_embeddings) proto.add_unused_embeddings(name);
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
