#include "families/request_fields.h"

#include <algorithm>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace latentd {
namespace {

using S = RequestScalars;
using T = FieldType;

constexpr FieldBounds Between(double min, double max) { return {.min = min, .max = max}; }
constexpr FieldBounds Above(double min, double max) { return {.min = min, .max = max, .above = true}; }
constexpr FieldBounds Bytes(size_t size) { return {.size = size}; }

constexpr double kMaxShift = 100, kMaxScore = 100, kMaxExtent = 1 << 16;
constexpr size_t kMaxNumbers = 1000, kMaxNameBytes = 512;

constexpr std::monostate kServer;
constexpr bool kEverywhere = true, kSomewhere = false;

const RequestField kFields[] = {
    {"prompt", T::kText, &S::prompt, Bytes(kMaxPromptBytes), kEverywhere, "", "", "What to draw"},
    {"negative_prompt", T::kText, &S::negative_prompt, Bytes(kMaxPromptBytes), kEverywhere, "-n,--negative",
     "", "What not to draw"},
    {"prompt_2", T::kText, &S::prompt_2, Bytes(kMaxPromptBytes), kSomewhere, "--prompt-2", "",
     "Prompt of the second text encoder"},
    {"negative_prompt_2", T::kText, &S::negative_prompt_2, Bytes(kMaxPromptBytes), kSomewhere, "--negative-2",
     "", "Negative prompt of the second text encoder"},
    {"prompt_syntax",
     T::kChoice,
     &S::prompt_syntax,
     {},
     kSomewhere,
     "--prompt-syntax",
     "plain,compel,a1111",
     "How weights are written in prompts"},
    {"clip_skip",
     T::kInteger,
     &S::clip_skip,
     {},
     kSomewhere,
     "--clip-skip",
     "",
     "Layers of CLIP to leave out"},
    {"max_sequence_length", T::kInteger, &S::max_sequence_length, Between(1, 512), kSomewhere,
     "--max-sequence-length", "", "Tokens of the long text encoder"},
    {"width", T::kInteger, &S::width, Between(1, kMaxSide), kEverywhere, "-W,--width", "", "Pixels"},
    {"height", T::kInteger, &S::height, Between(1, kMaxSide), kEverywhere, "-H,--height", "", "Pixels"},
    {"steps", T::kInteger, &S::steps, Between(1, kMaxSteps), kEverywhere, "-s,--steps", "", "Steps"},
    {"guidance", T::kNumber, &S::guidance, Between(0, kMaxGuidance), kEverywhere, "-g,--guidance", "",
     "Guidance: that of a distilled FLUX, or of SD"},
    {"true_cfg_scale", T::kNumber, &S::true_cfg_scale, Between(1, kMaxGuidance), kSomewhere, "--true-cfg", "",
     "Classifier-free guidance beside the distilled one"},
    {"guidance_rescale", T::kNumber, &S::guidance_rescale, Between(0, 1), kSomewhere, "--guidance-rescale",
     "", "Takes back contrast of guidance"},
    {"guidance_list",
     T::kNumbers,
     &S::guidance_list,
     {.min = 0, .max = kMaxGuidance, .size = kMaxNumbers},
     kSomewhere,
     "--guidance-list",
     "",
     "Guidance by step; the last one stands for those that follow"},
    {"sampler", T::kText, &S::sampler, Bytes(kMaxNameBytes), kEverywhere, "--sampler", "",
     "Sampler; `latentctl model NAME` lists a model's"},
    {"schedule", T::kText, &S::schedule, Bytes(kMaxNameBytes), kSomewhere, "--schedule", "",
     "How noise levels are spaced, karras and others"},
    {"shift", T::kNumber, &S::shift, Above(0, kMaxShift), kSomewhere, "--shift", "", "Timestep shift"},
    {"eta", T::kNumber, &S::eta, Between(0, 1), kSomewhere, "--eta", "",
     "Share of noise that DDIM and TCD add"},
    {"init_image.strength", T::kNumber, &S::strength, Above(0, 1), kEverywhere, "--strength", "",
     "How much of the init image is redone"},
    {"denoising_start",
     T::kNumber,
     &S::denoising_start,
     {},
     kSomewhere,
     "--denoising-start",
     "",
     "Where the job before stopped, 0 to 1"},
    {"denoising_end",
     T::kNumber,
     &S::denoising_end,
     {},
     kSomewhere,
     "--denoising-end",
     "",
     "Where to stop, 0 to 1"},
    {"mask_image.gradient",
     T::kFlag,
     &S::gradient_mask,
     {},
     kSomewhere,
     "--gradient-mask",
     "",
     "Grey of the mask is repainted in the last steps only"},
    {"mask_image.paste_back",
     T::kFlag,
     &S::paste_back,
     {},
     kSomewhere,
     "--paste-back",
     "",
     "Put back what --mask leaves, to the pixel"},
    {"original_size", T::kSize, &S::original_size, Between(1, kMaxExtent), kSomewhere, "--original-size", "",
     "What the model is told that the picture measured, as WIDTHxHEIGHT"},
    {"target_size", T::kSize, &S::target_size, Between(1, kMaxExtent), kSomewhere, "--target-size", "",
     "What the model is told that it is to measure, as WIDTHxHEIGHT"},
    {"crop", T::kPoint, &S::crop, Between(0, kMaxExtent), kSomewhere, "--crop", "",
     "What the model is told that was cut off, as LEFT,TOP"},
    {"aesthetic_score", T::kNumber, &S::aesthetic_score, Between(0, kMaxScore), kSomewhere,
     "--aesthetic-score", "", "What the refiner is told of the picture"},
    {"negative_aesthetic_score", T::kNumber, &S::negative_aesthetic_score, Between(0, kMaxScore), kSomewhere,
     "--negative-aesthetic-score", "", "What the refiner is told of the picture to avoid"},
    {"denoise_tiles",
     T::kTiles,
     &S::tiles,
     {},
     kSomewhere,
     "--denoise-tiles",
     "",
     "Denoise in overlapping tiles, as WIDTHxHEIGHT,OVERLAP"},
    {"seed",
     T::kInteger,
     kServer,
     {},
     kEverywhere,
     "",
     "",
     "Of the noise; of several pictures, the first one's"},
    {"count", T::kInteger, kServer, Between(1, kMaxPictures), kEverywhere, "", "",
     "Pictures, of seed, seed + 1, …"},
    {"image_format", T::kChoice, kServer, {}, kEverywhere, "", "png,jpeg,webp,latents", "Of the pictures"},
    {"preview_every", T::kInteger, kServer, {.min = 0}, kEverywhere, "", "", "A preview each so many steps"},
    {"vae_tiling",
     T::kChoice,
     kServer,
     {},
     kEverywhere,
     "",
     "never,when_needed,always",
     "Whether pictures are decoded and encoded in tiles"},
    {"decode_tile", T::kInteger, kServer, {}, kEverywhere, "", "", "Pixels of a tile's side, of the decoder"},
    {"encode_tile", T::kInteger, kServer, {}, kEverywhere, "", "", "Pixels of a tile's side, of the encoder"},
    {"picture_metadata",
     T::kFlag,
     kServer,
     {},
     kEverywhere,
     "",
     "",
     "Whether pictures say how they were made"},
};

}  // namespace

absl::Span<const RequestField> RequestFields() { return kFields; }

const RequestField* FindRequestField(absl::string_view name) {
  const auto it = std::find_if(std::begin(kFields), std::end(kFields),
                               [&](const RequestField& field) { return field.name == name; });
  return it == std::end(kFields) ? nullptr : &*it;
}

bool IsSet(const RequestField& field, const RequestScalars& scalars) {
  return std::visit(
      [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), std::monostate>) {
          return false;
        } else if constexpr (requires { (scalars.*member).has_value(); }) {
          return (scalars.*member).has_value();
        } else {
          return !(scalars.*member).empty();
        }
      },
      field.member);
}

std::string WhyTooLarge(const RequestField& field, const RequestScalars& scalars) {
  const size_t most = field.bounds.size;
  if (most == 0) return "";
  size_t bytes = 0;
  if (const auto* list = std::get_if<std::vector<double> RequestScalars::*>(&field.member)) {
    return (scalars.*(*list)).size() > most ? absl::StrCat("has more than ", most, " entries") : "";
  }
  if (const auto* text = std::get_if<std::string RequestScalars::*>(&field.member)) {
    bytes = (scalars.*(*text)).size();
  } else if (const auto* maybe = std::get_if<std::optional<std::string> RequestScalars::*>(&field.member)) {
    bytes = (scalars.*(*maybe)) ? (scalars.*(*maybe))->size() : 0;
  }
  return bytes > most ? absl::StrCat("has ", bytes, " bytes, at most ", most, " are taken") : "";
}

absl::string_view MediaRoleName(MediaRole role) {
  switch (role) {
    case MediaRole::kInit:
      return "init";
    case MediaRole::kMask:
      return "mask";
    case MediaRole::kControl:
      return "control";
    case MediaRole::kReference:
      return "reference";
    case MediaRole::kFirstFrame:
      return "first_frame";
    case MediaRole::kLastFrame:
      return "last_frame";
  }
  return "";
}

}  // namespace latentd
