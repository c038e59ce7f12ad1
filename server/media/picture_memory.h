// What a job's finished pictures take in memory, from pixels to files that a client has not read.
#ifndef LATENTD_SERVER_MEDIA_PICTURE_MEMORY_H_
#define LATENTD_SERVER_MEDIA_PICTURE_MEMORY_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "families/generate_params.h"
#include "server/media/image_codec.h"

namespace latentd {

// Upper bound of the file of one picture's latents.
inline int64_t MaxLatentsFileBytes(const at::Tensor& latents) {
  return static_cast<int64_t>(latents.nbytes()) + 4096;
}

// Of all pictures of a request, each of which takes the place of one file, and the one that becomes a file.
// REQUIRES: params passed Validate.
inline int64_t PicturesBytes(int64_t file_bytes, const GenerateParams& params) {
  return file_bytes * (static_cast<int64_t>(params.seeds.size()) + 1);
}

}  // namespace latentd

#endif  // LATENTD_SERVER_MEDIA_PICTURE_MEMORY_H_
