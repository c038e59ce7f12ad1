#include "server/runtime/job_record.h"

#include "cache/base/sha256.h"
#include "server/media/picture_record.h"
#include "server/rpc/params.h"

namespace latentd {
namespace {

v1::PatchMode ProtoOf(PatchMode mode) {
  switch (mode) {
    case PatchMode::kAuto:
      return v1::PATCH_MODE_AUTO;
    case PatchMode::kDirect:
      return v1::PATCH_MODE_DIRECT;
    case PatchMode::kSidecar:
      return v1::PATCH_MODE_SIDECAR;
  }
  return v1::PATCH_MODE_AUTO;
}

v1::LoraRef RefOf(const LoraUse& use) {
  v1::LoraRef ref;
  ref.set_name(use.name);
  ref.set_weight(use.weight);
  for (const auto& [path, factor] : use.blocks) (*ref.mutable_block_weights())[path] = factor;
  if (use.start != 0) ref.set_start(use.start);
  if (use.end != 1) ref.set_end(use.end);
  ref.mutable_only()->Assign(use.only.begin(), use.only.end());
  return ref;
}

std::string HashOf(const std::string& file) { return file.empty() ? "" : Sha256Hex(file); }

}  // namespace

v1::PictureRecord RecordOfJob(const OpenModel& model, const std::vector<HeldLora>& loras, PatchMode mode,
                              const v1::GenerateParams& request, const GenerateParams& used) {
  v1::PictureRecord record;
  record.set_version(kRecordVersion);
  record.set_model(model.name);
  record.set_model_id(model.id);
  for (const HeldLora& lora : loras) {
    v1::PictureRecord::RecordedLora& recorded = *record.add_loras();
    *recorded.mutable_lora() = RefOf(lora);
    recorded.set_id(lora.handle.key().id);
  }
  if (!loras.empty()) record.set_patch_mode(ProtoOf(mode));
  for (const PromptEmbedding& embedding : used.embeddings) {
    v1::PictureRecord::RecordedEmbedding& recorded = *record.add_embeddings();
    recorded.set_name(embedding.name);
    recorded.set_id(embedding.id);
  }
  record.set_init_image_sha256(HashOf(request.init_image().data()));
  record.set_mask_image_sha256(HashOf(request.mask_image().data()));
  record.set_control_image_sha256(HashOf(request.control_image().data()));
  record.set_init_latents_sha256(HashOf(request.init_latents()));
  return record;
}

void SetRecordParams(const v1::GenerateParams& request, const GenerateParams& used, const PictureFacts& facts,
                     v1::PictureRecord& record) {
  v1::GenerateParams& params = *record.mutable_params();
  params = EchoParams(request, used);
  params.set_seed(facts.seed);
  params.set_count(1);
  params.clear_preview_every();
  params.clear_picture_metadata();
  const bool whole = !request.has_encode_tile() && !request.has_decode_tile() &&
                     request.vae_tiling() != v1::VAE_TILING_ALWAYS &&
                     request.vae_tiling() != v1::VAE_TILING_WHEN_NEEDED;
  params.clear_vae_tiling();
  params.clear_encode_tile();
  params.clear_decode_tile();
  if (whole) return;
  params.set_decode_tile(static_cast<int>(facts.decode_tile));
  if (used.has_pictures()) params.set_encode_tile(static_cast<int>(facts.encode_tile));
}

int64_t MaxMetadataBytes(const v1::PlanRequest& request) {
  // A byte of text is at most six of JSON, and there is UTF-16 besides.
  constexpr int64_t kFixed = 8 << 10, kPerByte = 10;
  const auto request_bytes =
      static_cast<int64_t>(request.ByteSizeLong()) - PictureFileBytes(request.params());
  return kFixed + kPerByte * std::max<int64_t>(0, request_bytes);
}

}  // namespace latentd
