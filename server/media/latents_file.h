// Unfinished pictures on their way between two jobs: a safetensors file with one tensor, `latents` [channels,
// height, width] in fp32. Any thread.
#ifndef LATENTD_SERVER_MEDIA_LATENTS_FILE_H_
#define LATENTD_SERVER_MEDIA_LATENTS_FILE_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace latentd {

// `latents`: [1, C, h, w] in host memory.
std::string LatentsToFile(const at::Tensor& latents);

// [1, C, h, w], a copy. What strangers send: errors are INVALID_ARGUMENT INVALID_FIELD on `field`, for a file
// that is none, another tensor, another type, values that are not finite.
absl::StatusOr<at::Tensor> LatentsFromFile(const std::string& file, absl::string_view field);

}  // namespace latentd

#endif  // LATENTD_SERVER_MEDIA_LATENTS_FILE_H_
