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
#include "server/rpc/field_messages.h"
#include "server/rpc/request_bounds.h"

namespace latentd {
namespace {

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

// Decodes the request's pictures, each under what errors call it.
class Pictures {
 public:
  Pictures(const Config& config, GenerateParams& params) : config_(config), params_(params) {}

  absl::Status Add(MediaRole role, const std::string& file, const std::string& field,
                   const std::string& data_field) {
    const AlphaUse alpha = role == MediaRole::kMask ? AlphaUse::kMask : AlphaUse::kDrop;
    ASSIGN_OR_RETURN(at::Tensor pixels, PictureOf(file, data_field, config_, alpha));
    params_.inputs.push_back({role, std::move(pixels), field});
    return absl::OkStatus();
  }

 private:
  const Config& config_;
  GenerateParams& params_;
};

absl::Status PicturesFromProto(const v1::GenerateParams& proto, const Config& config,
                               GenerateParams& params) {
  Pictures pictures(config, params);
  if (!proto.init_latents().empty()) {
    ASSIGN_OR_RETURN(params.init_latents, LatentsFromFile(proto.init_latents(), "params.init_latents"));
  }
  if (proto.has_init_image()) {
    const std::string& data = proto.init_image().data();
    if (!params.init_latents.defined()) {  // which only want the strength
      RETURN_IF_ERROR(pictures.Add(MediaRole::kInit, data, "params.init_image", "params.init_image.data"));
    } else if (!data.empty()) {
      return FieldError("params.init_latents", "stand in place of an init image; both are given");
    }
  }
  if (proto.has_mask_image()) {
    RETURN_IF_ERROR(pictures.Add(MediaRole::kMask, proto.mask_image().data(), "params.mask_image",
                                 "params.mask_image.data"));
  }
  if (proto.has_control_image()) {
    RETURN_IF_ERROR(pictures.Add(MediaRole::kControl, proto.control_image().data(), "params.control_image",
                                 "params.control_image.data"));
  }
  for (int i = 0; i < proto.inputs_size(); ++i) {
    const std::string field = absl::StrCat("params.inputs[", i, "]");
    RETURN_IF_ERROR(pictures.Add(RoleOf(proto.inputs(i).role()), proto.inputs(i).data(), field,
                                 absl::StrCat(field, ".data")));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GenerateParams> ParamsFromProto(const v1::GenerateParams& proto, const Config& config) {
  GenerateParams params;
  RETURN_IF_ERROR(ReadScalars(proto, params));
  const int count = proto.has_count() ? proto.count() : 1;
  if (count < 1 || count > kMaxPictures)
    return FieldError("params.count", absl::StrCat("must be 1 to ", kMaxPictures));
  const uint64_t first = proto.has_seed() ? proto.seed() : DrawSeed();
  for (int i = 0; i < count; ++i) params.seeds.push_back(first + static_cast<uint64_t>(i));

  if (proto.preview_every() < 0) return FieldError("params.preview_every", "must not be negative");
  if (!v1::ImageFormat_IsValid(proto.image_format()))
    return FieldError("params.image_format", "unknown value");

  RETURN_IF_ERROR(PicturesFromProto(proto, config, params));
  return params;
}

namespace {

absl::StatusOr<TileChoice> TilesOf(absl::string_view field, bool given, int64_t tile, v1::VaeTiling tiling,
                                   const Run& run) {
  const int64_t largest = run.SmallerTile(0);
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
  for (int64_t size = largest; size != 0; size = run.SmallerTile(size)) sizes.push_back(size);
  if (std::find(sizes.begin(), sizes.end(), tile) != sizes.end()) return TileChoice{.first = tile};
  return FieldError(
      field, absl::StrCat(tile, " is no tile of this model's for a picture of ", *run.params().width, "×",
                          *run.params().height, "; there are ", absl::StrJoin(sizes, ", ")));
}

}  // namespace

absl::StatusOr<TileChoice> EncodeTiles(const v1::GenerateParams& request, const Run& run) {
  return TilesOf("params.encode_tile", request.has_encode_tile(), request.encode_tile(), request.vae_tiling(),
                 run);
}

absl::StatusOr<TileChoice> DecodeTiles(const v1::GenerateParams& request, const Run& run) {
  return TilesOf("params.decode_tile", request.has_decode_tile(), request.decode_tile(), request.vae_tiling(),
                 run);
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
  WriteScalars(used, echo);
  echo.set_seed(used.seeds.front());
  echo.set_count(static_cast<int>(used.seeds.size()));
  ClearPictureFiles(echo);
  return echo;
}

int64_t PictureFileBytes(const v1::GenerateParams& params) {
  size_t bytes = params.init_image().data().size() + params.control_image().data().size() +
                 params.mask_image().data().size() + params.init_latents().size();
  for (const v1::Input& input : params.inputs()) bytes += input.data().size();
  return static_cast<int64_t>(bytes);
}

void ClearPictureFiles(v1::GenerateParams& params) {
  if (params.has_init_image()) params.mutable_init_image()->clear_data();
  if (params.has_control_image()) params.mutable_control_image()->clear_data();
  if (params.has_mask_image()) params.mutable_mask_image()->clear_data();
  params.clear_init_latents();
  for (v1::Input& input : *params.mutable_inputs()) input.clear_data();
}

int64_t PictureBytes(const GenerateParams& params) {
  int64_t bytes = params.init_latents.defined() ? static_cast<int64_t>(params.init_latents.nbytes()) : 0;
  for (const MediaInput& input : params.inputs) bytes += static_cast<int64_t>(input.pixels.nbytes());
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
