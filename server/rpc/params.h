// Between the API's messages and what families and patcher work with.
#ifndef LATENTD_SERVER_RPC_PARAMS_H_
#define LATENTD_SERVER_RPC_PARAMS_H_

#include "absl/status/statusor.h"
#include "families/family.h"
#include "families/generate_params.h"
#include "latentd/v1/common.pb.h"
#include "latentd/v1/denoise.pb.h"
#include "patcher/layer_patcher.h"
#include "server/config.h"
#include "server/media/image_codec.h"

namespace latentd {

// Checks what does not depend on the model (text and picture sizes, count, seed range), decodes
// pictures, and draws a seed where none is given. The rest is Pipeline::Validate's. Takes time for an image:
// not on an RPC thread. Errors: INVALID_ARGUMENT INVALID_FIELD.
absl::StatusOr<GenerateParams> ParamsFromProto(const v1::GenerateParams& proto, const Config& config);

// Bytes of the picture and latents files in a request; those files taken out; and bytes of the pictures
// decoded.
int64_t PictureFileBytes(const v1::GenerateParams& params);
void ClearPictureFiles(v1::GenerateParams& params);
int64_t PictureBytes(const GenerateParams& params);

// How the VAE is tiled in one phase: the tile to begin with (0: the whole picture at once), and whether
// smaller ones are tried where memory is short.
struct TileChoice {
  int64_t first = 0;
  bool may_shrink = false;
};
// REQUIRES: params passed Validate. Errors: INVALID_ARGUMENT INVALID_FIELD for a tile that the VAE cannot
// have.
absl::StatusOr<TileChoice> EncodeTiles(const v1::GenerateParams& request, const Run& run);
absl::StatusOr<TileChoice> DecodeTiles(const v1::GenerateParams& request, const Run& run);

// Whether the job's pictures are to say how they were made.
bool WantsMetadata(const v1::GenerateParams& request, const Config& config);

// width × height against the server's limit. REQUIRES: params passed Validate.
absl::Status CheckPixels(const GenerateParams& params, const Config& config);

// The request with everything filled in that was used, without the init image's data.
v1::GenerateParams EchoParams(const v1::GenerateParams& request, const GenerateParams& used);

v1::LoraReport ReportToProto(const PatchReport& report);

// uint8 [H, W, 3], contiguous or not.
RgbImage ImageFromTensor(const at::Tensor& picture);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_PARAMS_H_
