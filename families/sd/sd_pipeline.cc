#include "families/sd/sd_pipeline.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "families/encoders/text_embedding.h"
#include "families/prompt/embedding_triggers.h"
#include "families/request_checks.h"
#include "families/sd/sd_denoiser.h"
#include "families/sd/sd_masks.h"
#include "families/sd/sd_paste.h"
#include "families/working_memory.h"

namespace latentd {
namespace {

constexpr char kPooled[] = "pooled", kNegative[] = "neg.";

// Whose vectors an encoder takes.
EmbeddingEncoder VectorsFor(const SdEncoder& encoder) {
  return encoder.component == "text_encoder_2" ? EmbeddingEncoder::kClipG : EmbeddingEncoder::kClipL;
}

// Of a schedule's text with that index, in a Conditioning.
std::string KeyOf(bool negative, size_t text, absl::string_view what) {
  return absl::StrCat(negative ? kNegative : "", text == 0 ? "" : absl::StrCat(text, "."), what);
}

absl::Status Missing() { return absl::InternalError("a prompt was not encoded"); }

// The sampler's word for a share of the schedule is the request's for an init image.
absl::Status InRequestTerms(const absl::Status& status) {
  const ErrorDetails details = GetErrorDetails(status);
  const auto field = details.find("field");
  if (field == details.end() || field->second != "params.strength") return status;
  return AtField(status, "params.init_image.strength");
}

absl::Status CheckTiles(const DenoiseTiles& tiles, int64_t scale) {
  constexpr int64_t kSmallestTile = 4;  // latents
  for (int64_t side : {tiles.width, tiles.height}) {
    if (side < kSmallestTile * scale || side % scale != 0) {
      return FieldError("params.denoise_tiles",
                        absl::StrCat("a side must be a multiple of ", scale, " and at least ",
                                     kSmallestTile * scale, "; it is ", side));
    }
  }
  const int64_t most = std::min(tiles.width, tiles.height) / 2;
  if (tiles.overlap >= 0 && tiles.overlap <= most && tiles.overlap % scale == 0) return absl::OkStatus();
  return FieldError("params.denoise_tiles", absl::StrCat("the overlap must be a multiple of ", scale,
                                                         " from 0 to half of a "
                                                         "tile's side; it is ",
                                                         tiles.overlap));
}

}  // namespace

bool SdPipeline::Guided(const GenerateParams& params) const {
  if (parts_.unet->config().guidance_dim > 0) return false;  // the network is told, and guides itself
  const auto guides = [](double scale) { return scale > 1; };
  if (params.guidance_list.empty()) return guides(*params.guidance);
  return std::any_of(params.guidance_list.begin(), params.guidance_list.end(), guides);
}

bool SdPipeline::EncodesNegative(const GenerateParams& params) const {
  return Guided(params) && (params.negative_prompt || !parts_.zeros_without_negative);
}

std::vector<int64_t> SdPipeline::LatentShape(const GenerateParams& params) const {
  const int64_t scale = parts_.vae->config().scale();
  return {1, parts_.vae->config().latent_channels, *params.height / scale, *params.width / scale};
}

// -------------------------------------------------------------------------------------------- validation

namespace {

// Beside those that every family knows.
constexpr absl::string_view kFields[] = {"prompt_syntax",
                                         "clip_skip",
                                         "schedule",
                                         "eta",
                                         "guidance_rescale",
                                         "guidance_list",
                                         "denoising_start",
                                         "denoising_end",
                                         "mask_image.gradient",
                                         "mask_image.paste_back",
                                         "denoise_tiles"};

}  // namespace

RequestUses SdPipeline::MakeUses() const {
  std::vector<absl::string_view> fields(std::begin(kFields), std::end(kFields));
  fields.insert(fields.end(), OwnFields().begin(), OwnFields().end());
  RequestUses uses = UsesOf(parts_.defaults, parts_.vae->config().scale(), fields);
  for (const SamplerInfo& sampler : AllSamplers()) {
    absl::StatusOr<SamplerSettings> settings = parts_.scheduler->For(sampler.name);
    if (!settings.ok()) continue;
    SamplerOptions options;
    options.solver = std::move(settings->solver);
    if (!MakeSampler(sampler.name, std::move(settings->schedule), options).ok()) continue;
    uses["sampler"].choices.emplace_back(sampler.name);
  }
  for (const absl::string_view name : SigmaScheduleNames()) {
    uses["schedule"].choices.emplace_back(name);
  }
  uses.init_latents = true;
  uses.Refuse("true_cfg_scale", absl::StrCat("not known to ", family(),
                                             " models: classifier-free guidance is params.guidance here"));
  uses.Refuse("max_sequence_length", absl::StrCat("not known to ", family(),
                                                  " models: their text encoders read 77 tokens at a time"));
  uses.media = {{.role = MediaRole::kInit, .required = takes_mask()},
                {.role = MediaRole::kMask, .required = takes_mask()}};
  return uses;
}

absl::Status SdPipeline::Validate(GenerateParams& params) const {
  const ModelDefaults& defaults = parts_.defaults;
  RETURN_IF_ERROR(CheckUses(params, uses(), family()));

  FillSize({defaults.width, defaults.height}, parts_.vae->config().scale(), params);
  RETURN_IF_ERROR(CheckSize(params, parts_.vae->config().scale()));
  if (!params.steps) params.steps = defaults.steps;
  if (!params.guidance) params.guidance = defaults.guidance;
  if (static_cast<int64_t>(params.guidance_list.size()) > *params.steps) {
    return FieldError("params.guidance_list", absl::StrCat("has ", params.guidance_list.size(),
                                                           " entries for ", *params.steps, " steps"));
  }
  RETURN_IF_ERROR(FillSeeds(params));
  if (!params.sampler) params.sampler = defaults.sampler;
  RETURN_IF_ERROR(ValidatePictures(params));
  RETURN_IF_ERROR(ValidateOwn(params));
  RETURN_IF_ERROR(NewSampler(params, nullptr).status());
  return ValidatePrompts(params);
}

absl::Status SdPipeline::ValidatePrompts(GenerateParams& params) const {
  if (params.prompt_syntax) RETURN_IF_ERROR(ParsePromptSyntax(*params.prompt_syntax).status());
  size_t parts = 1;
  for (const SdEncoder& encoder : parts_.encoders) {
    for (const bool negative : {false, true}) {
      if (negative && !EncodesNegative(params)) continue;
      const SdText text = TextOf(encoder, params, negative);
      ASSIGN_OR_RETURN(const PromptSchedule schedule, ScheduleOf(text, params, negative));
      for (const SdText& one : TextsOf(encoder, params, negative)) {
        RETURN_IF_ERROR(TokensOf(encoder, one).status());
      }
      if (negative) continue;
      const size_t joined = schedule.at(0).size();
      if (joined > 1 && !Guided(params)) {
        if (parts_.unet->config().guidance_dim > 0) {
          return FieldError(text.field,
                            "joins prompts with AND, which models that embed the guidance cannot weigh");
        }
        return FieldError("params.guidance",
                          "must be above 1 where prompts are joined with AND: without guidance there is "
                          "nothing that they could be weighed against");
      }
      if (&encoder == &parts_.encoders.front()) parts = joined;
      if (joined != parts) {
        return FieldError(text.field, absl::StrCat("joins ", joined, " prompts with AND, params.prompt ",
                                                   parts, "; they go together one by one"));
      }
    }
    const int64_t layers = encoder.model->config().layers - 1 - usual_skip();
    RETURN_IF_ERROR(CheckRange("params.clip_skip", static_cast<double>(params.clip_skip.value_or(0)), 0,
                               static_cast<double>(layers)));
  }
  return absl::OkStatus();
}

absl::Status SdPipeline::ValidatePictures(GenerateParams& params) const {
  if (!params.strength) params.strength = parts_.defaults.strength;
  const std::vector<int64_t> shape = LatentShape(params);
  const auto count = static_cast<int64_t>(params.seeds.size());
  auto fits = [&](const at::Tensor& t, bool one) {
    return t.dim() == 4 && (t.size(0) == count || (one && t.size(0) == 1)) &&
           t.sizes().slice(1) == at::IntArrayRef(shape).slice(1) && t.scalar_type() == at::kFloat &&
           t.is_cpu();
  };
  if (params.has(MediaRole::kInit))
    RETURN_IF_ERROR(CheckPicture("params.init_image", params.picture(MediaRole::kInit)));
  if (params.init_latents.defined()) {
    if (params.has(MediaRole::kInit))
      return FieldError("params.init_latents", "cannot be given with an init image");
    if (!fits(params.init_latents, /*one=*/true)) {
      return FieldError("params.init_latents", absl::StrCat("must be fp32 of the shape [1 or ", count, ", ",
                                                            shape[1], ", ", shape[2], ", ", shape[3], "]"));
    }
  }
  if (params.has(MediaRole::kMask)) {
    RETURN_IF_ERROR(CheckPicture("params.mask_image", params.picture(MediaRole::kMask)));
    if (!params.has(MediaRole::kInit))
      return FieldError("params.mask_image", "needs an init image to keep parts of");
    if (takes_mask() && params.gradient_mask.value_or(false)) {
      return FieldError("params.mask_image.gradient",
                        "is not known to inpainting models, which read a mask of two values");
    }
  } else if (takes_mask()) {
    return FieldError("params.mask_image",
                      "is missing: this model was trained to repaint a part of an init image");
  } else if (params.gradient_mask) {
    return FieldError("params.mask_image.gradient", "needs a mask");
  }
  const SamplerSettings& own = parts_.scheduler->own();
  if (params.gradient_mask.value_or(false) && (own.solver.edm || own.solver.continuous)) {
    return FieldError("params.mask_image.gradient",
                      "compares with training steps, which this model does not have");
  }
  if (params.denoising_start && !params.init_latents.defined() && !params.has(MediaRole::kInit)) {
    return FieldError("params.denoising_start", "needs the latents of another model's run, or an init image");
  }
  if (params.tiles) RETURN_IF_ERROR(CheckTiles(*params.tiles, parts_.vae->config().scale()));
  if (params.noise.defined() && !fits(params.noise, /*one=*/false)) {
    return FieldError("params.noise", "has another shape");
  }
  return absl::OkStatus();
}

SamplerOptions SdPipeline::OptionsOf(const GenerateParams& params) const {
  SamplerOptions options;
  options.steps = *params.steps;
  options.ays = ays_table();
  if (params.has(MediaRole::kInit) || params.init_latents.defined()) options.strength = *params.strength;
  options.denoising_start = params.denoising_start;
  options.denoising_end = params.denoising_end;
  options.eta = params.eta;
  return options;
}

absl::StatusOr<std::unique_ptr<Sampler>> SdPipeline::NewSampler(const GenerateParams& params,
                                                                std::shared_ptr<NoiseSource> noise) const {
  SamplerOptions options = OptionsOf(params);
  options.noise = std::move(noise);
  if (params.schedule) {
    ASSIGN_OR_RETURN(options.schedule, ParseSigmaSchedule(*params.schedule, "params.schedule"));
  }
  ASSIGN_OR_RETURN(SamplerSettings settings, parts_.scheduler->For(*params.sampler));
  options.solver = std::move(settings.solver);
  auto sampler = MakeSampler(*params.sampler, std::move(settings.schedule), options);
  if (!sampler.ok()) return InRequestTerms(sampler.status());
  return sampler;
}

// --------------------------------------------------------------------------------------------------- text

std::vector<std::string> SdPipeline::EncoderComponents(const GenerateParams& params) const {
  std::vector<std::string> names;
  for (const SdEncoder& encoder : parts_.encoders) names.push_back(encoder.component);
  return names;
}

std::vector<PromptField> SdPipeline::EmbeddingPrompts(const GenerateParams& params) const {
  std::vector<PromptField> prompts = {{"params.prompt", params.prompt}};
  for (const auto& [field, text] : {std::pair<absl::string_view, const std::optional<std::string>&>{
                                        "params.negative_prompt", params.negative_prompt},
                                    {"params.prompt_2", params.prompt_2},
                                    {"params.negative_prompt_2", params.negative_prompt_2}}) {
    if (text) prompts.push_back({field, *text});
  }
  return prompts;
}

absl::Status SdPipeline::CheckEmbedding(const std::string& name, const TextEmbeddingShape& shape) const {
  TextEmbeddingShape wanted;
  bool fits = true;
  for (const SdEncoder& encoder : parts_.encoders) {
    const bool second = VectorsFor(encoder) == EmbeddingEncoder::kClipG;
    const int64_t columns = encoder.model->config().dim;
    (second ? wanted.clip_g : wanted.clip_l) = columns;
    fits = fits && shape.columns(VectorsFor(encoder)) == columns;
  }
  // A refiner has no use for clip_l, and is given the base model's prompts; without clip_g it is another
  // family.
  if (fits && (shape.clip_g == 0 || wanted.clip_g != 0)) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "EMBEDDING_MISMATCH",
      absl::StrCat("embedding ", name, " does not fit: it has vectors of ", shape.ToString(),
                   ", and the text encoders of this ", family(), " model take ", wanted.ToString()),
      {{"embedding", name}, {"has", shape.ToString()}, {"wants", wanted.ToString()}});
}

absl::StatusOr<at::Tensor> SdPipeline::EmbeddingRowsOf(
    const SdEncoder& encoder, const GenerateParams& params,
    const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings) const {
  if (embeddings.size() != params.embeddings.size())
    return absl::InternalError("an embedding was not loaded");
  std::vector<at::Tensor> rows;
  for (const auto& embedding : embeddings) rows.push_back(embedding->vectors(VectorsFor(encoder)));
  return rows.empty() ? at::Tensor() : at::cat(rows);
}

SdText SdPipeline::TextOf(const SdEncoder& encoder, const GenerateParams& params, bool negative) const {
  const bool second = &encoder != &parts_.encoders.front();
  SdText text;
  text.text = negative ? params.negative_prompt.value_or("") : params.prompt;
  text.field = negative ? "params.negative_prompt" : "params.prompt";
  // An empty second prompt is none, as in diffusers.
  const auto& own = negative ? params.negative_prompt_2 : params.prompt_2;
  if (second && own && !own->empty()) {
    text.text = *own;
    text.field = negative ? "params.negative_prompt_2" : "params.prompt_2";
  }
  std::map<std::string, EmbeddingRows, std::less<>> rows;
  for (const auto& [name, index] : params.embedding_names) {
    EmbeddingRows& its = rows[name];
    for (size_t i = 0; i < index; ++i) its.first += params.embeddings[i].tokens;
    its.count = params.embeddings[index].tokens;
  }
  text.text = MarkEmbeddings(text.text, rows);
  if (params.prompt_syntax)
    text.syntax = ParsePromptSyntax(*params.prompt_syntax).value_or(PromptSyntax::kPlain);
  return text;
}

absl::StatusOr<PromptSchedule> SdPipeline::ScheduleOf(const SdText& text, const GenerateParams& params,
                                                      bool negative) const {
  if (text.syntax != PromptSyntax::kA1111) return UnchangingPrompt(text.text);
  ASSIGN_OR_RETURN(const std::unique_ptr<Sampler> sampler, NewSampler(params, nullptr));
  const std::vector<SamplerInfo>& all = AllSamplers();
  const bool twice = std::any_of(all.begin(), all.end(), [&](const SamplerInfo& info) {
    return info.name == *params.sampler && info.second_order;
  });
  return ScheduleA1111Prompt(text.text, {*params.steps, sampler->step_count(), twice ? 2 : 1},
                             /*joins=*/!negative, text.field);
}

std::vector<SdText> SdPipeline::TextsOf(const SdEncoder& encoder, const GenerateParams& params,
                                        bool negative) const {
  const SdText whole = TextOf(encoder, params, negative);
  const auto schedule = ScheduleOf(whole, params, negative);
  if (!schedule.ok()) return {};
  std::vector<SdText> texts;
  for (const std::string& text : schedule->texts) {
    texts.push_back(whole);
    texts.back().text = text;
  }
  return texts;
}

absl::StatusOr<std::vector<TokenCount>> SdPipeline::CountTokens(const GenerateParams& params) const {
  std::vector<TokenCount> counts;
  for (const bool negative : {false, true}) {
    if (negative && !EncodesNegative(params)) continue;
    for (const SdEncoder& encoder : parts_.encoders) {
      TokenCount count{std::string(TextOf(encoder, params, negative).field), encoder.component};
      for (const SdText& text : TextsOf(encoder, params, negative)) {
        ASSIGN_OR_RETURN(const TextTokens tokens, CountTextTokens(encoder, text));
        if (tokens.total <= count.total) continue;
        count.total = tokens.total;
        count.read = tokens.read;
      }
      counts.push_back(std::move(count));
    }
  }
  return counts;
}

int64_t SdPipeline::Tokens(const GenerateParams& params) const {
  int64_t longest = 0;
  for (const SdEncoder& encoder : parts_.encoders) {
    for (const bool negative : {false, true}) {
      if (negative && !EncodesNegative(params)) continue;
      for (const SdText& text : TextsOf(encoder, params, negative)) {
        longest = std::max(longest, TokensOf(encoder, text).value_or(0));
      }
    }
  }
  return longest;
}

absl::Status SdPipeline::Encode(const std::string& component, const WeightView& weights,
                                const GenerateParams& params,
                                const std::vector<std::shared_ptr<const TextEmbedding>>& embeddings,
                                Conditioning& conditioning) const {
  c10::InferenceMode inference;
  const auto encoder = std::find_if(parts_.encoders.begin(), parts_.encoders.end(),
                                    [&](const SdEncoder& e) { return e.component == component; });
  if (encoder == parts_.encoders.end())
    return absl::InternalError(absl::StrCat(component, " is no text encoder"));
  const int64_t tokens = Tokens(params);
  ASSIGN_OR_RETURN(const at::Tensor rows, EmbeddingRowsOf(*encoder, params, embeddings));
  for (const bool negative : {false, true}) {
    if (negative && !EncodesNegative(params)) continue;
    const ClipTap tap = Tap(*encoder, negative ? 0 : params.clip_skip.value_or(0));
    const std::vector<SdText> texts = TextsOf(*encoder, params, negative);
    for (size_t i = 0; i < texts.size(); ++i) {
      ASSIGN_OR_RETURN(const ClipTextModel::Output output,
                       EncodeText(*encoder, weights, texts[i], tap, tokens, rows));
      conditioning[KeyOf(negative, i, component)] = ToHost(output.hidden);
      if (output.pooled.defined()) conditioning[KeyOf(negative, i, kPooled)] = ToHost(output.pooled);
    }
  }
  return absl::OkStatus();
}

std::string SdPipeline::EncodeKey(const std::string& component, const GenerateParams& params) const {
  std::string key = absl::StrCat(params.clip_skip.value_or(0), "|", params.prompt_syntax.value_or("plain"),
                                 "|", Tokens(params));
  for (const SdEncoder& encoder : parts_.encoders) {
    if (encoder.component != component) continue;
    for (const bool negative : {false, true}) {
      if (negative && !EncodesNegative(params)) continue;
      // Texts may hold anything: their lengths keep them apart.
      for (const SdText& text : TextsOf(encoder, params, negative)) {
        absl::StrAppend(&key, "|", text.text.size(), ":", text.text);
      }
      absl::StrAppend(&key, "|.");
    }
  }
  // Marks say where rows are, not whose.
  for (const PromptEmbedding& embedding : params.embeddings) absl::StrAppend(&key, "|", embedding.id);
  return key;
}

int64_t SdPipeline::ConditioningBytes(const std::string& component, const GenerateParams& params) const {
  int64_t floats = 0;
  for (const SdEncoder& encoder : parts_.encoders) {
    if (encoder.component != component) continue;
    size_t texts = TextsOf(encoder, params, /*negative=*/false).size();
    if (EncodesNegative(params)) texts += TextsOf(encoder, params, /*negative=*/true).size();
    const ClipTextConfig& c = encoder.model->config();
    floats = static_cast<int64_t>(texts) * (Tokens(params) * c.dim + std::max(c.dim, c.projection));
  }
  return floats * int64_t{sizeof(float)};
}

absl::StatusOr<SdPromptRow> SdPipeline::RowOf(const GenerateParams& params, const std::vector<size_t>& texts,
                                              bool negative, Conditioning& conditioning) const {
  const bool zeros = negative && !EncodesNegative(params);
  auto value = [&](size_t text, absl::string_view what) {
    const at::Tensor encoded = conditioning[KeyOf(negative && !zeros, text, what)];
    return zeros && encoded.defined() ? at::zeros_like(encoded) : encoded;
  };
  SdPromptRow row;
  for (size_t i = 0; i < parts_.encoders.size(); ++i) {
    row.hidden.push_back(value(texts[i], parts_.encoders[i].component));
    if (!row.hidden.back().defined()) return Missing();
  }
  row.pooled = value(texts.back(), kPooled);  // of the last encoder, where there is any
  RETURN_IF_ERROR(AddToRow(params, negative, row));
  return row;
}

absl::Status SdPipeline::AddPrompts(const GenerateParams& params, Conditioning& conditioning,
                                    SdRun& run) const {
  std::vector<PromptSchedule> wanted, unwanted;
  size_t steps = 1;
  for (const SdEncoder& encoder : parts_.encoders) {
    for (const bool negative : {false, true}) {
      std::vector<PromptSchedule>& schedules = negative ? unwanted : wanted;
      if (negative && !EncodesNegative(params)) {
        schedules.push_back(UnchangingPrompt(""));
        continue;
      }
      ASSIGN_OR_RETURN(PromptSchedule schedule,
                       ScheduleOf(TextOf(encoder, params, negative), params, negative));
      steps = std::max(steps, schedule.steps.size());
      schedules.push_back(std::move(schedule));
    }
  }
  // Rows as the texts of all encoders; equal ones are one.
  std::map<std::vector<std::vector<size_t>>, size_t> known;
  for (size_t step = 0; step < steps; ++step) {
    const auto texts = [&](const std::vector<PromptSchedule>& schedules, size_t part) {
      std::vector<size_t> of_row;
      for (const PromptSchedule& schedule : schedules) of_row.push_back(schedule.at(step)[part].text);
      return of_row;
    };
    std::vector<std::vector<size_t>> rows;
    if (Guided(params)) rows.push_back(texts(unwanted, 0));
    for (size_t part = 0; part < wanted.front().at(step).size(); ++part) rows.push_back(texts(wanted, part));
    const auto [it, added] = known.try_emplace(rows, run.prompts.size());
    run.prompts_of_step.push_back(it->second);
    if (!added) continue;
    SdPrompts prompts;
    for (const PromptSchedule::Part& part : wanted.front().at(step)) prompts.weights.push_back(part.weight);
    for (size_t i = 0; i < rows.size(); ++i) {
      const bool negative = Guided(params) && i == 0;
      ASSIGN_OR_RETURN(SdPromptRow row, RowOf(params, rows[i], negative, conditioning));
      prompts.rows.push_back(std::move(row));
    }
    run.prompts.push_back(std::move(prompts));
  }
  return absl::OkStatus();
}

// ----------------------------------------------------------------------------------------------- pictures

absl::StatusOr<at::Tensor> SdPipeline::EncodeImage(const WeightView& weights, const GenerateParams& params,
                                                   const PhaseOptions& options) const {
  c10::InferenceMode inference;
  const AutoencoderKl& vae = *parts_.vae;
  const at::Tensor input =
      PictureToInput(weights, ResizePicture(params.picture(MediaRole::kInit), *params.width, *params.height));
  const SdDraws draws = DrawsOf(params, takes_mask());
  AutoencoderKl::Posterior image, masked;
  if (draws.image) image = EncodePicture(vae, weights, input, options.tile);
  if (draws.masked && takes_mask()) {
    const at::Tensor kept =
        PixelMask(params, /*binary=*/true).lt(0.5).to(weights.device(), input.scalar_type());
    masked = EncodePicture(vae, weights, input * kept, options.tile);
  }
  const std::vector<int64_t> shape = LatentShape(params);
  std::vector<at::Tensor> samples;
  for (uint64_t seed : params.seeds) {
    NoiseSource source(seed);
    at::Tensor sample = draws.image ? vae.ToModel(image.Sample(source.Draw(shape))) : at::zeros(shape);
    if (draws.masked && takes_mask()) {
      if (draws.noise) source.Draw(shape);
      sample = at::cat({sample, vae.ToModel(masked.Sample(source.Draw(shape)))}, 1);
    }
    samples.push_back(sample);
  }
  return at::cat(samples);
}

absl::StatusOr<std::unique_ptr<Denoiser>> SdPipeline::Begin(const GenerateParams& params,
                                                            Conditioning conditioning,
                                                            at::Tensor init_latents) const {
  c10::InferenceMode inference;
  const std::vector<int64_t> shape = LatentShape(params);
  const int64_t channels = shape[1];
  const SdDraws draws = DrawsOf(params, takes_mask());
  if (params.init_latents.defined()) init_latents = params.init_latents;
  const bool from_picture = init_latents.defined();
  SdMask mask;
  if (params.has(MediaRole::kMask)) {
    mask.gradient = params.gradient_mask.value_or(false);
    mask.train_steps = parts_.scheduler->own().schedule->config().train_steps;
    mask.mask = LatentMask(PixelMask(params, /*binary=*/!mask.gradient), parts_.vae->config().scale());
  }

  std::vector<SdPicture> pictures;
  for (size_t i = 0; i < params.seeds.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    auto source = std::make_shared<NoiseSource>(params.seeds[i]);
    at::Tensor noise = params.noise.defined() ? params.noise.narrow(0, n, 1) : at::Tensor();
    if (draws.image) source->Draw(shape);
    if (draws.noise && !noise.defined()) noise = source->Draw(shape);
    if (draws.masked) source->Draw(shape);
    at::Tensor init;
    if (from_picture) {
      init = init_latents.size(0) == 1 ? init_latents : init_latents.narrow(0, n, 1);
      if (init.size(2) != shape[2] || init.size(3) != shape[3] || init.size(1) < channels) {
        return absl::InternalError("init latents have another shape");
      }
    }
    SdPicture picture;
    picture.source = source;
    ASSIGN_OR_RETURN(picture.sampler, NewSampler(params, std::move(source)));
    const at::Tensor original = from_picture ? init.narrow(1, 0, channels) : at::Tensor();
    if (StartsFromNoise(params)) {
      picture.x = noise * picture.sampler->initial_noise_scale();
    } else {
      picture.x = params.denoising_start ? original.clone() : picture.sampler->AddNoise(original, noise);
    }
    if (mask.mask.defined()) {
      if (takes_mask()) {
        picture.more = at::cat({mask.mask, init.narrow(1, channels, channels)}, 1);
      } else {
        picture.original = original;
        picture.noise = noise;
      }
    }
    pictures.push_back(std::move(picture));
  }
  SdRun run{.predictor = SdPredictor(parts_.unet, params.guidance_rescale.value_or(0)),
            .prompts = {},
            .prompts_of_step = {},
            .pictures = std::move(pictures),
            .mask = std::move(mask),
            .tiles = TilesOf(params),
            .guidance = params.guidance_list};
  if (run.guidance.empty()) run.guidance = {*params.guidance};
  RETURN_IF_ERROR(AddPrompts(params, conditioning, run));
  return MakeSdDenoiser(std::move(run));
}

std::vector<SdTile> SdPipeline::TilesOf(const GenerateParams& params) const {
  const std::vector<int64_t> shape = LatentShape(params);
  if (!params.tiles) return LayTiles(shape[2], shape[3], shape[2], shape[3], 0);
  const int64_t scale = parts_.vae->config().scale();
  return LayTiles(shape[2], shape[3], params.tiles->height / scale, params.tiles->width / scale,
                  params.tiles->overlap / scale);
}

absl::StatusOr<at::Tensor> SdPipeline::Decode(const WeightView& weights, const at::Tensor& latents,
                                              const PhaseOptions& options) const {
  c10::InferenceMode inference;
  return DecodePicture(*parts_.vae, weights, latents, options.tile);
}

at::Tensor SdPipeline::Finish(const at::Tensor& picture, const GenerateParams& params) const {
  c10::InferenceMode inference;
  return params.paste_back.value_or(false) ? PasteBack(picture, params) : picture;
}

int64_t SdPipeline::SmallerTile(const GenerateParams& params, int64_t tile) const {
  return SmallerVaeTile(*parts_.vae, *params.width, *params.height, tile);
}

at::Tensor SdPipeline::Preview(const at::Tensor& latents) const {
  c10::InferenceMode inference;
  return parts_.preview.Render(latents);
}

int64_t SdPipeline::WorkingBytes(const std::string& component, const GenerateParams& params,
                                 const PhaseOptions& options, bool encodes_picture) const {
  const std::vector<int64_t> shape = LatentShape(params);
  const auto pictures = static_cast<int64_t>(params.seeds.size());
  const int64_t latent_bytes = shape[1] * shape[2] * shape[3] * pictures * int64_t{sizeof(float)};
  const WeightUse use = UseOf(*this, component, options);
  if (component == "vae") {
    if (!encodes_picture) {
      return parts_.vae->DecodeBytes(*params.width, *params.height, options.tile, use);
    }
    // With a mask, what it leaves of the picture is a second one beside it.
    const int64_t masked = takes_mask() && params.has(MediaRole::kMask)
                               ? 4 * *params.width * *params.height * int64_t{sizeof(float)}
                               : 0;
    return 6 * latent_bytes + masked +
           parts_.vae->EncodeBytes(*params.width, *params.height, options.tile, use);
  }
  if (component == "unet") {
    // Latents before and after a step, what a mask adds to them, and what samplers remember.
    constexpr int64_t kTensorsOfLatents = 12;
    const std::vector<SdTile> tiles = TilesOf(params);
    // Neighbours overlap by half at most: four times the latents once more.
    return (tiles.size() > 1 ? 5 : 1) * kTensorsOfLatents * latent_bytes +
           parts_.unet->WorkingBytes(Guided(params) ? 2 : 1, Tokens(params), tiles.front().height,
                                     tiles.front().width, use);
  }
  for (const SdEncoder& encoder : parts_.encoders) {
    if (encoder.component != component) continue;
    // Windows are encoded one by one; versions of the whole prompt are mixed.
    constexpr int64_t kVersions = 8;
    const int64_t versions = params.prompt_syntax.value_or("plain") == "plain" ? 2 : kVersions;
    return encoder.model->WorkingBytes(use) +
           versions * Tokens(params) * encoder.model->config().dim * int64_t{sizeof(float)};
  }
  return 0;
}

std::string SdPipeline::ShapeKey(const std::string& component, const GenerateParams& params) const {
  if (component != "vae" && component != "unet") {
    return absl::StrCat("t", Tokens(params), params.prompt_syntax.value_or(""),
                        EncodesNegative(params) ? "g" : "");
  }
  std::string key = absl::StrCat(*params.width, "x", *params.height, "n", params.seeds.size());
  if (params.has_pictures()) key += "i";
  if (params.has(MediaRole::kMask)) key += "m";
  if (component == "vae") return key;
  absl::StrAppend(&key, "t", Tokens(params), Guided(params) ? "g" : "", *params.sampler);
  if (params.tiles) {
    absl::StrAppend(&key, "/", params.tiles->width, "x", params.tiles->height, "-", params.tiles->overlap);
  }
  return key;
}

}  // namespace latentd
