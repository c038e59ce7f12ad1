// The fields of a request, declared once: what they are called, what they may hold, who knows them, how a
// client's flags name them and what they do. A field of latentd.v1.GenerateParams that holds a value is a
// member of RequestScalars and a row of RequestFields(); with these it is read, checked, echoed, listed by
// GetModel and taken by latentctl. What is left is its use.
//
// No LibTorch and no protobuf: the client reads the table, too. Constant; any thread.
#ifndef LATENTD_FAMILIES_REQUEST_FIELDS_H_
#define LATENTD_FAMILIES_REQUEST_FIELDS_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace latentd {

inline constexpr int64_t kMaxSteps = 1000;
inline constexpr double kMaxGuidance = 100;
inline constexpr size_t kMaxPromptBytes = 64 << 10;
inline constexpr int64_t kMaxPictures = 64;  // of one request
inline constexpr int64_t kMaxSide = 4096;    // of a picture, in pixels

struct PixelSize {
  int64_t width = 0, height = 0;
};
struct PixelPoint {
  int64_t left = 0, top = 0;
};
// The picture is denoised in tiles that overlap, each as the model was trained for. In pixels.
struct DenoiseTiles {
  int64_t width = 1024, height = 1024, overlap = 32;
};

// What a request says in words and numbers, with presence. Names are those of latentd.v1.GenerateParams.
struct RequestScalars {
  std::string prompt;
  std::optional<std::string> negative_prompt;
  // For the second text encoder, where it should read another text.
  std::optional<std::string> prompt_2, negative_prompt_2;
  // How weights are written in prompts (families/prompt/prompt.h): "plain" (not at all, and what is longer
  // than the encoder reads is cut off), "compel", "a1111".
  std::optional<std::string> prompt_syntax;
  // Layers of CLIP to leave out at its end, beyond those that the model leaves out. Of the wanted prompt
  // alone, as in diffusers.
  std::optional<int64_t> clip_skip;
  std::optional<int64_t> max_sequence_length;  // tokens of the long text encoder

  std::optional<int64_t> width, height;  // pixels
  std::optional<int64_t> steps;
  // Embedded guidance scale, for models that are distilled with one. SD families: classifier-free guidance;
  // above 1 there is a second pass with the negative prompt.
  std::optional<double> guidance;
  std::optional<double> true_cfg_scale;    // classic classifier-free guidance; > 1 needs a negative prompt
  std::optional<double> guidance_rescale;  // [0, 1]: how much of the guided deviation is brought back
  // Guidance by step, the first of which is the first that is run; the last one stands for those that follow.
  std::vector<double> guidance_list;
  std::optional<std::string> sampler;   // "euler"
  std::optional<std::string> schedule;  // how noise levels are spaced: "karras", …
  std::optional<double> shift;          // overrides the model's timestep shift
  std::optional<double> eta;            // share of noise that DDIM and TCD add, [0, 1]
  std::optional<double> strength;       // (0, 1]: share of the schedule that is run on the init image
  // Hand-over between two models, (0, 1): the first denoises up to `denoising_end`, the second goes on from
  // `denoising_start` with the first one's latents and adds no noise.
  std::optional<double> denoising_start, denoising_end;

  // Grey is repainted in the last steps only: the darker, the later. Otherwise grey is black or white.
  std::optional<bool> gradient_mask;
  // What the mask leaves is that of the init image, after the picture is decoded.
  std::optional<bool> paste_back;
  // SDXL: what the model is told about the picture. Sizes are its own where absent, the crop is (0, 0).
  std::optional<PixelSize> original_size, target_size;
  std::optional<PixelPoint> crop;
  // SDXL refiner; 6 and 2.5.
  std::optional<double> aesthetic_score, negative_aesthetic_score;
  // For pictures larger than the model was trained for; absent: the whole picture at once.
  std::optional<DenoiseTiles> tiles;
};

// Where a field's value is kept. Nowhere: what the server alone reads, whatever the family (the seed, the
// file's format).
using FieldMember =
    std::variant<std::monostate, std::string RequestScalars::*, std::optional<std::string> RequestScalars::*,
                 std::optional<int64_t> RequestScalars::*, std::optional<double> RequestScalars::*,
                 std::optional<bool> RequestScalars::*, std::vector<double> RequestScalars::*,
                 std::optional<PixelSize> RequestScalars::*, std::optional<PixelPoint> RequestScalars::*,
                 std::optional<DenoiseTiles> RequestScalars::*>;

enum class FieldType { kText, kInteger, kNumber, kNumbers, kFlag, kChoice, kSize, kPoint, kTiles };

struct FieldBounds {
  // Of a number, or of each of several; both belong to the range unless `above` says that min does not.
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above = false;
  size_t size = 0;  // bytes of a text, entries of a list; 0: not bounded here
};

struct RequestField {
  absl::string_view name;  // a path in GenerateParams: "steps", "init_image.strength"
  FieldType type;
  FieldMember member;
  FieldBounds bounds;
  // Whether every model takes it; otherwise those whose families say so (Pipeline::uses).
  bool everywhere;
  absl::string_view flag;     // latentctl's; empty: none, it has a way of its own
  absl::string_view choices;  // "plain,compel,a1111"; empty: any, or a model's own
  absl::string_view help;

  std::string path() const { return "params." + std::string(name); }  // as errors call it
};

// In the order in which they are shown.
absl::Span<const RequestField> RequestFields();
// By its name without "params."; null: there is none.
const RequestField* FindRequestField(absl::string_view name);
bool IsSet(const RequestField& field, const RequestScalars& scalars);
// Why a text or list is larger than the field may be; empty for what is not.
std::string WhyTooLarge(const RequestField& field, const RequestScalars& scalars);

// What pictures and frames of a request are for.
enum class MediaRole { kInit, kMask, kControl, kReference, kFirstFrame, kLastFrame };
absl::string_view MediaRoleName(MediaRole role);  // "first_frame"

}  // namespace latentd

#endif  // LATENTD_FAMILIES_REQUEST_FIELDS_H_
