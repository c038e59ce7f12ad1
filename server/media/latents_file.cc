#include "server/media/latents_file.h"

#include <cmath>
#include <cstring>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache/base/error.h"
#include "cache/weights/safetensors_header.h"

namespace latentd {
namespace {

constexpr char kName[] = "latents";

}  // namespace

std::string LatentsToFile(const at::Tensor& latents) {
  const at::Tensor data = latents.squeeze(0).to(at::kFloat).contiguous();
  std::string header = absl::StrFormat(R"({"%s":{"dtype":"F32","shape":[%d,%d,%d],"data_offsets":[0,%d]}})",
                                       kName, data.size(0), data.size(1), data.size(2), data.nbytes());
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::string file(sizeof length + header.size() + data.nbytes(), 0);
  std::memcpy(file.data(), &length, sizeof length);
  std::memcpy(file.data() + sizeof length, header.data(), header.size());
  std::memcpy(file.data() + sizeof length + header.size(), data.const_data_ptr(), data.nbytes());
  return file;
}

absl::StatusOr<at::Tensor> LatentsFromFile(const std::string& file, absl::string_view field) {
  const auto header = ParseSafetensorsHeader(file, static_cast<int64_t>(file.size()));
  if (!header.ok())
    return FieldError(field, absl::StrCat("is no safetensors file: ", header.status().message()));
  if (header->tensors.size() != 1 || header->tensors[0].name != kName) {
    return FieldError(field, absl::StrCat("must hold one tensor, \"", kName, "\""));
  }
  const TensorInfo& info = header->tensors[0];
  if (info.dtype != DType::kF32 || info.shape.size() != 3)
    return FieldError(field, "must be [C, h, w] in fp32");
  at::Tensor latents = at::empty({1, info.shape[0], info.shape[1], info.shape[2]}, at::kFloat);
  std::memcpy(latents.data_ptr(), file.data() + info.offset, latents.nbytes());
  if (latents.numel() == 0 || !std::isfinite(latents.abs().max().item<float>())) {
    return FieldError(field, "holds no numbers, or some that are not finite");
  }
  return latents;
}

}  // namespace latentd
