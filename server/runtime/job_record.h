// What a job's pictures say of how they were made.
#ifndef LATENTD_SERVER_RUNTIME_JOB_RECORD_H_
#define LATENTD_SERVER_RUNTIME_JOB_RECORD_H_

#include <cstdint>
#include <vector>

#include "latentd/v1/denoise.pb.h"
#include "patcher/layer_patcher.h"
#include "server/catalog/catalog.h"
#include "server/catalog/lora_set.h"

namespace latentd {

// The part that is known once a request was checked: model, LoRAs, embeddings and the hashes of the pictures
// that `request` brings. `params` are for whoever makes the pictures, see SetRecordParams.
v1::PictureRecord RecordOfJob(const OpenModel& model, const std::vector<HeldLora>& loras, PatchMode mode,
                              const v1::GenerateParams& request, const GenerateParams& used);

// How one picture came out.
struct PictureFacts {
  uint64_t seed = 0;
  // Tiles of the VAE, where the request lets them depend on the memory: then the record has what was done.
  int64_t encode_tile = 0, decode_tile = 0;
};

// `request` has lost its pictures. What does not change the picture is left out.
void SetRecordParams(const v1::GenerateParams& request, const GenerateParams& used, const PictureFacts& facts,
                     v1::PictureRecord& record);

// Upper bound of the bytes that a record makes a file longer, by the request alone.
int64_t MaxMetadataBytes(const v1::PlanRequest& request);

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_JOB_RECORD_H_
