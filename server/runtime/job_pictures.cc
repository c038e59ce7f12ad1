// A job's pictures on their way out: previews between steps, files as the client reads them, and what they
// take meanwhile.
#include <algorithm>

#include "absl/types/span.h"
#include "cache/base/error.h"
#include "cache/base/sha256.h"
#include "server/media/image_codec.h"
#include "server/media/latents_file.h"
#include "server/media/picture_memory.h"
#include "server/media/picture_record.h"
#include "server/runtime/job.h"
#include "server/runtime/job_record.h"
#include "server/server_core.h"

namespace latentd {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;
constexpr int kPreviewQuality = 80;
constexpr int kQuality = 95;  // of JPEG and WebP

const char* MimeOf(v1::ImageFormat format) {
  switch (format) {
    case v1::IMAGE_FORMAT_LATENTS:
      return "application/x-safetensors";
    case v1::IMAGE_FORMAT_JPEG:
      return "image/jpeg";
    case v1::IMAGE_FORMAT_WEBP:
      return "image/webp";
    default:
      return "image/png";
  }
}

}  // namespace

absl::Status Job::PromisePictures(int64_t file_bytes) {
  if (picture_memory_.bytes() > 0) return absl::OkStatus();
  file_bytes_ = file_bytes;
  // A file is no smaller than its pixels can be, so each picture takes the place of one file, before and
  // after it is made; and one more while it is.
  ASSIGN_OR_RETURN(picture_memory_,
                   core_->ram->Reserve({.bytes = PicturesBytes(file_bytes, run_->params()),
                                        .use = MemoryUse::kImages,
                                        .owner = setup_.owner,
                                        .what = "pictures",
                                        .deadline = absl::Now() + core_->config.memory_wait_timeout,
                                        .stop = stop_.get_token()}));
  return absl::OkStatus();
}

absl::Status Job::SendPreviews(int64_t step) {
  const int64_t every = setup_.request.preview_every();
  if (every <= 0 || step % every != 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckFiles());
  const std::vector<at::Tensor> previews = work_->Previews();
  for (size_t i = 0; i < previews.size(); ++i) {
    const at::Tensor& small = previews[i];
    if (!small.defined()) return absl::OkStatus();
    const RgbImage image = ShrinkTo(ImageFromTensor(small), static_cast<int>(core_->config.preview_max_px));
    ASSIGN_OR_RETURN(std::string jpeg, EncodeJpeg(image.pixels, image.width, image.height, kPreviewQuality));
    // Without memory to keep it until it is read, there is none.
    auto memory = core_->ram->TryReserve({.bytes = static_cast<int64_t>(jpeg.size()),
                                          .use = MemoryUse::kImages,
                                          .owner = Reader(),
                                          .what = "a preview"});
    if (!memory.ok()) continue;
    v1::JobEvent event;
    auto& preview = *event.mutable_preview();
    preview.set_index(static_cast<int>(i));
    preview.set_mime("image/jpeg");
    preview.set_width(image.width);
    preview.set_height(image.height);
    preview.set_data(std::move(jpeg));
    setup_.on_event(std::move(event), *std::move(memory));
  }
  return absl::OkStatus();
}

void Job::SendFile(size_t index, const std::string& file, Reservation memory) {
  const v1::ImageFormat format = setup_.request.image_format();
  v1::JobEvent event;
  auto& header = *event.mutable_image_header();
  header.set_index(static_cast<int>(index));
  header.set_mime(MimeOf(format));
  header.set_size(static_cast<int64_t>(file.size()));
  header.set_width(static_cast<int>(*run_->params().width));
  header.set_height(static_cast<int>(*run_->params().height));
  header.set_sha256(Sha256Hex(file));
  header.set_seed(run_->params().seeds[index]);
  Send(std::move(event));
  for (size_t at = 0; at < file.size(); at += kChunkBytes) {
    v1::JobEvent chunk_event;
    auto& chunk = *chunk_event.mutable_image_chunk();
    chunk.set_index(static_cast<int>(index));
    chunk.set_offset(static_cast<int64_t>(at));
    chunk.set_data(file.substr(at, kChunkBytes));
    Reservation share = memory.Split(std::min(memory.bytes(), static_cast<int64_t>(chunk.data().size())));
    setup_.on_event(std::move(chunk_event), std::move(share));
  }
}

bool Job::PauseForReader() {
  const int64_t most = core_->config.max_unread_bytes;
  if (setup_.unread_bytes() <= most) return false;
  {
    MutexLock lock(&mu_);
    if (!cancel_status_.ok()) return false;
    paused_ = true;
  }
  setup_.when_read(most, [job = weak_from_this()] {
    if (const auto self = job.lock()) self->Resume();
  });
  return true;
}

void Job::Resume() {
  {
    MutexLock lock(&mu_);
    if (!std::exchange(paused_, false)) return;
  }
  OnWorker(&Job::EncodePictures);
}

absl::StatusOr<std::string> Job::MakeFile(size_t index) const {
  if (setup_.request.image_format() == v1::IMAGE_FORMAT_LATENTS) {
    return LatentsToFile(state_.latents.narrow(0, static_cast<int64_t>(index), 1));
  }
  const at::Tensor picture = state_.pictures[index].contiguous();
  const absl::Span<const uint8_t> pixels(picture.const_data_ptr<uint8_t>(),
                                         static_cast<size_t>(picture.numel()));
  const auto height = static_cast<int>(picture.size(0)), width = static_cast<int>(picture.size(1));
  const PictureNotes notes = NotesOfPicture(index);
  switch (setup_.request.image_format()) {
    case v1::IMAGE_FORMAT_JPEG:
      return EncodeJpeg(pixels, width, height, kQuality, notes);
    case v1::IMAGE_FORMAT_WEBP:
      return EncodeWebp(pixels, width, height, kQuality, notes);
    default:
      return EncodePng(pixels, width, height, notes);
  }
}

PictureNotes Job::NotesOfPicture(size_t index) const {
  if (!record_) return {};
  v1::PictureRecord record = *record_;
  SetRecordParams(setup_.request, run_->params(),
                  {.seed = run_->params().seeds[index],
                   .encode_tile = encode_tile_,
                   .decode_tile = index < decode_tiles_used_.size() ? decode_tiles_used_[index] : 0},
                  record);
  return NotesOf(record);
}

absl::Status Job::EncodePictures() {
  RecordMeasurement();
  if (setup_.request.image_format() == v1::IMAGE_FORMAT_LATENTS) {
    RETURN_IF_ERROR(PromisePictures(MaxLatentsFileBytes(state_.latents.narrow(0, 0, 1))));
  }
  while (files_ < run_->params().seeds.size()) {
    RETURN_IF_ERROR(StopReason());
    if (PauseForReader()) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::string file, MakeFile(files_));
    if (!state_.pictures.empty()) state_.pictures[files_].reset();
    Reservation memory = picture_memory_.Split(std::min(static_cast<int64_t>(file.size()), file_bytes_));
    memory.PassTo(Reader());
    SendFile(files_, file, std::move(memory));
    ++files_;
    picture_memory_.ShrinkTo(file_bytes_ * (1 + static_cast<int64_t>(run_->params().seeds.size() - files_)));
  }
  SendDone();
  Finish(absl::OkStatus());
  return absl::OkStatus();
}

}  // namespace latentd
