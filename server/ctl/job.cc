#include "server/ctl/job.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cache/base/error.h"
#include "server/ctl/memory.h"
#include "server/ctl/terminal.h"
#include "server/ctl/text.h"

namespace latentd::ctl {
namespace {

constexpr DecodeLimits kShowLimits{.max_bytes = int64_t{1} << 30, .max_pixels = int64_t{1} << 28};
constexpr int kBarWidth = 20;

absl::Status FileError(absl::string_view what, const std::string& file, int error) {
  return MakeError(error == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kInternal, "LOCAL_FILE",
                   absl::StrCat("cannot ", what, " '", file, "': ", std::strerror(error)), {{"file", file}});
}

std::string Bar(double share) {
  const int full = static_cast<int>(std::clamp(share, 0.0, 1.0) * kBarWidth);
  std::string out;
  for (int i = 0; i < kBarWidth; ++i) out += i < full ? "█" : "░";
  return out;
}

v1::ImageFormat FormatOf(const JobOptions& options) {
  const auto is = [&](absl::string_view format, absl::string_view extension) {
    return options.format.empty() ? absl::EndsWithIgnoreCase(options.out, extension)
                                  : options.format == format;
  };
  if (options.format == "latents") return v1::IMAGE_FORMAT_LATENTS;
  if (is("webp", ".webp")) return v1::IMAGE_FORMAT_WEBP;
  return is("jpeg", ".jpg") || is("jpeg", ".jpeg") ? v1::IMAGE_FORMAT_JPEG : v1::IMAGE_FORMAT_PNG;
}

void SetInitImageStrength(const JobOptions& options, v1::GenerateParams& params) {
  if (options.strength) params.mutable_init_image()->set_strength(*options.strength);
}

}  // namespace

absl::StatusOr<std::string> ReadLocalFile(const std::string& file) {
  errno = 0;
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  if (!stream || !(text << stream.rdbuf())) return FileError("read", file, errno != 0 ? errno : EIO);
  return std::move(text).str();
}

absl::Status WriteLocalFile(const std::string& file, const std::string& data) {
  if (file == "-") {
    std::fwrite(data.data(), 1, data.size(), stdout);
    return std::fflush(stdout) == 0 ? absl::OkStatus() : FileError("write", "stdout", errno);
  }
  errno = 0;
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream << data;
  stream.close();
  return stream ? absl::OkStatus() : FileError("write", file, errno != 0 ? errno : EIO);
}

void AddInputFlags(CLI::App& app, JobOptions& options) {
  app.add_option("-i,--image", options.image, "Picture to start from: a PNG, JPEG, WebP, GIF or BMP file");
  app.add_option("--mask", options.mask, "Picture of what of --image to repaint, in white");
  app.add_option("--latents", options.latents, "Latents to go on from, of a job with --format latents");
  app.add_option("--control", options.control, "Picture to draw after, with a control model or LoRA");
}

void AddJobFlags(CLI::App& app, JobOptions& options) {
  app.add_option("-m,--model", options.model, "Model; the server's default when left out");
  app.add_option("-l,--lora", options.loras,
                 "LoRA as NAME[:WEIGHT][@START-END][,PATH=FACTOR…]; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--patch-mode", options.patch_mode, "How LoRAs are applied")
      ->check(CLI::IsMember({"auto", "direct", "sidecar"}));
  app.add_option("--priority", options.priority, "Higher runs first");
  app.add_option("-n,--negative", options.negative, "Negative prompt");
  app.add_option("-W,--width", options.width, "Pixels");
  app.add_option("-H,--height", options.height, "Pixels");
  app.add_option("-s,--steps", options.steps, "Steps");
  app.add_option("-g,--guidance", options.guidance, "Guidance: that of a distilled FLUX, or of SD");
  app.add_option("--true-cfg", options.true_cfg, "Classifier-free guidance scale");
  app.add_option("--guidance-rescale", options.guidance_rescale,
                 "SD: 0 to 1, takes back contrast of guidance");
  app.add_option("--sampler", options.sampler, "Sampler; `latentctl info` lists them");
  app.add_option("--schedule", options.schedule, "SD: how noise levels are spaced, karras and others");
  app.add_option("--prompt-syntax", options.prompt_syntax, "SD: how weights are written in prompts")
      ->check(CLI::IsMember({"plain", "compel", "a1111"}));
  app.add_option("--prompt-2", options.prompt_2, "SDXL: prompt of the second text encoder");
  app.add_option("--clip-skip", options.clip_skip, "SD: layers of CLIP to leave out");
  app.add_option("--shift", options.shift, "Timestep shift");
  app.add_option("--max-sequence-length", options.max_sequence_length, "Tokens of the long text encoder");
  app.add_option("--seed", options.seed, "Seed; drawn by the server when left out");
  app.add_option("-c,--count", options.count, "Pictures, of seed, seed + 1, …");
  AddInputFlags(app, options);
  app.add_flag("--paste-back", options.paste_back, "Put back what --mask leaves, to the pixel");
  app.add_flag(
      "--metadata,!--no-metadata", options.metadata,
      "Let the pictures say how they were made, prompts included, for `replay` [as the server does]");
  app.add_option("--denoising-start", options.denoising_start, "Where the job before stopped, 0 to 1");
  app.add_option("--denoising-end", options.denoising_end, "Where to stop, 0 to 1");
  app.add_option("--strength", options.strength, "How much of the init image is redone, above 0 to 1");
  app.add_option("--format", options.format, "Of the pictures; else by the extension of --out")
      ->check(CLI::IsMember({"png", "jpeg", "webp", "latents"}));
  app.add_option("--vae-tiling", options.vae_tiling, "Whether pictures are decoded and encoded in tiles")
      ->check(CLI::IsMember({"never", "when-needed", "always"}));
  app.add_option("--preview-every", options.preview_every, "A preview each so many steps");
  app.add_option("-o,--out", options.out,
                 "File for the picture, - for stdout; {index}, {seed} and {job} are filled in");
  app.add_flag("-v,--verbose", options.verbose, "Say how much memory each phase took");
  app.add_flag("--show", options.show, "Draw pictures and previews in the terminal");
  app.add_flag("--raw", options.raw, "With --json: binary data too");
}

absl::StatusOr<std::vector<v1::LoraRef>> Loras(const JobOptions& options) {
  std::vector<v1::LoraRef> out;
  for (const std::string& text : options.loras) {
    ASSIGN_OR_RETURN(v1::LoraRef lora, ParseLora(text));
    out.push_back(std::move(lora));
  }
  return out;
}

v1::PatchMode PatchModeOf(const JobOptions& options) {
  v1::PatchMode mode = v1::PATCH_MODE_UNSPECIFIED;
  v1::PatchMode_Parse(absl::StrCat("PATCH_MODE_", absl::AsciiStrToUpper(options.patch_mode)), &mode);
  return mode;
}

absl::StatusOr<v1::GenerateParams> Params(const JobOptions& options) {
  v1::GenerateParams params;
  if (options.negative) params.set_negative_prompt(*options.negative);
  if (options.width) params.set_width(*options.width);
  if (options.height) params.set_height(*options.height);
  if (options.steps) params.set_steps(*options.steps);
  if (options.guidance) params.set_guidance(*options.guidance);
  if (options.true_cfg) params.set_true_cfg_scale(*options.true_cfg);
  if (options.sampler) params.set_sampler(*options.sampler);
  if (options.schedule) params.set_schedule(*options.schedule);
  if (options.guidance_rescale) params.set_guidance_rescale(*options.guidance_rescale);
  if (options.prompt_2) params.set_prompt_2(*options.prompt_2);
  if (options.clip_skip) params.set_clip_skip(*options.clip_skip);
  if (options.denoising_start) params.set_denoising_start(*options.denoising_start);
  if (options.denoising_end) params.set_denoising_end(*options.denoising_end);
  v1::PromptSyntax syntax = v1::PROMPT_SYNTAX_UNSPECIFIED;
  v1::PromptSyntax_Parse(absl::StrCat("PROMPT_SYNTAX_", absl::AsciiStrToUpper(options.prompt_syntax)),
                         &syntax);
  params.set_prompt_syntax(syntax);
  if (options.shift) params.set_shift(*options.shift);
  if (options.max_sequence_length) params.set_max_sequence_length(*options.max_sequence_length);
  if (options.seed) params.set_seed(*options.seed);
  if (options.count) params.set_count(*options.count);
  if (!options.image.empty()) {
    ASSIGN_OR_RETURN(std::string data, ReadLocalFile(options.image));
    params.mutable_init_image()->set_data(std::move(data));
    SetInitImageStrength(options, params);
  } else if (options.strength) {
    return MakeError(absl::StatusCode::kInvalidArgument, "USAGE", "--strength needs --image");
  }
  if (!options.mask.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_mask_image()->mutable_data(), ReadLocalFile(options.mask));
    if (options.paste_back) params.mutable_mask_image()->set_paste_back(true);
  } else if (options.paste_back) {
    return MakeError(absl::StatusCode::kInvalidArgument, "USAGE", "--paste-back needs --mask");
  }
  if (!options.latents.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_init_latents(), ReadLocalFile(options.latents));
  }
  if (!options.control.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_control_image()->mutable_data(), ReadLocalFile(options.control));
  }
  params.set_image_format(FormatOf(options));
  if (options.metadata) params.set_picture_metadata(*options.metadata);
  params.set_preview_every(options.preview_every);
  v1::VaeTiling tiling = v1::VAE_TILING_UNSPECIFIED;
  v1::VaeTiling_Parse(absl::StrCat("VAE_TILING_", absl::AsciiStrToUpper(
                                                      absl::StrReplaceAll(options.vae_tiling, {{"-", "_"}}))),
                      &tiling);
  params.set_vae_tiling(tiling);
  return params;
}

absl::Status JobOutput::OnEvent(const v1::JobEvent& event) {
  ASSIGN_OR_RETURN(std::optional<ReceivedImage> image, receiver_.OnEvent(event));
  if (image) return OnImage(*image);
  switch (event.event_case()) {
    case v1::JobEvent::kQueued:
      Progress(event.queued().position() > 0
                   ? absl::StrCat("queued, ", event.queued().position(), " before it")
                   : "queued");
      break;
    case v1::JobEvent::kLoading: {
      const auto& loading = event.loading();
      const double share =
          loading.bytes_total() > 0 ? double(loading.bytes_done()) / loading.bytes_total() : 0;
      Progress(absl::StrCat(Bar(share), " loading ", Printable(loading.component()), ", ",
                            HumanBytes(loading.bytes_done()), " of ", HumanBytes(loading.bytes_total())));
      break;
    }
    case v1::JobEvent::kEncoded:
      Progress("prompt encoded");
      break;
    case v1::JobEvent::kStep: {
      const auto& step = event.step();
      Progress(absl::StrCat(Bar(double(step.index()) / std::max(step.count(), 1)), " step ", step.index(),
                            "/", step.count(), ", ", HumanMs(step.ms())));
      break;
    }
    case v1::JobEvent::kPreview:
      // Only a terminal can take it away again.
      if (options_.show && IsTerminal(STDOUT_FILENO)) Draw(event.preview().data(), false);
      break;
    case v1::JobEvent::kAdapted:
      ClearProgress();
      if (!options_.quiet)
        std::fprintf(stderr, "%s%s\n", Prefix().c_str(), AdaptedText(event.adapted()).c_str());
      break;
    case v1::JobEvent::kDone:
      OnDone(event.done());
      break;
    default:
      break;
  }
  return absl::OkStatus();
}

absl::Status JobOutput::OnImage(const ReceivedImage& image) {
  ClearProgress();
  if (options_.show && !options_.quiet) Draw(image.data, true);
  if (options_.out.empty()) return absl::OkStatus();
  const std::string file =
      ExpandOutput(options_.out, {options_.job, image.header.index(), image.header.seed(), options_.count});
  RETURN_IF_ERROR(WriteLocalFile(file, image.data));
  if (!options_.quiet && file != "-") {
    std::printf("%s%s  %d×%d  seed %llu  %s\n", Prefix().c_str(), file.c_str(), image.header.width(),
                image.header.height(), static_cast<unsigned long long>(image.header.seed()),
                HumanBytes(image.header.size()).c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

void JobOutput::OnDone(const v1::JobEvent::Done& done) {
  ClearProgress();
  if (options_.quiet) return;
  for (const v1::LoraReport& lora : done.loras()) {
    if (lora.unused_embeddings_size() > 0) {
      std::fprintf(stderr, "%sLoRA %s: this model cannot use the embeddings that it brings: %s\n",
                   Prefix().c_str(), Printable(lora.name()).c_str(),
                   Printable(absl::StrJoin(lora.unused_embeddings(), ", ")).c_str());
    }
    if (lora.unmatched_count() == 0) continue;
    std::fprintf(stderr, "%sLoRA %s: %lld of %lld layers fit no component of the model, such as %s\n",
                 Prefix().c_str(), Printable(lora.name()).c_str(),
                 static_cast<long long>(lora.unmatched_count()),
                 static_cast<long long>(lora.layers_in_file()),
                 Printable(absl::StrJoin(lora.unmatched_samples(), ", ")).c_str());
  }
  for (const v1::Warning& warning : done.warnings()) {
    std::fprintf(stderr, "%s%s: %s\n", Prefix().c_str(), Printable(warning.field()).c_str(),
                 Printable(warning.message()).c_str());
  }
  const v1::Timings& t = done.timings();
  std::fprintf(stderr, "%sdone in %s: queue %s, load %s, encode %s, denoise %s, decode %s\n",
               Prefix().c_str(), HumanMs(t.total_ms()).c_str(), HumanMs(t.queue_ms()).c_str(),
               HumanMs(t.load_ms()).c_str(), HumanMs(t.encode_ms()).c_str(), HumanMs(t.denoise_ms()).c_str(),
               HumanMs(t.decode_ms()).c_str());
  if (options_.verbose) {
    for (const v1::EmbeddingReport& embedding : done.embeddings()) {
      std::fprintf(stderr, "%sembedding %s, tokens: %d\n", Prefix().c_str(),
                   Printable(embedding.name()).c_str(), embedding.tokens());
    }
    for (absl::string_view line : absl::StrSplit(PhasesText(done), '\n', absl::SkipEmpty())) {
      std::fprintf(stderr, "%s%s\n", Prefix().c_str(), std::string(line).c_str());
    }
  }
}

void JobOutput::Progress(const std::string& text) {
  if (options_.quiet || !IsTerminal(STDERR_FILENO)) return;
  std::fprintf(stderr, "\r\x1b[K%s%s", Prefix().c_str(), text.c_str());
  std::fflush(stderr);
  progress_shown_ = true;
}

void JobOutput::ClearProgress() {
  if (!progress_shown_) return;
  std::fprintf(stderr, "\r\x1b[K");
  std::fflush(stderr);
  progress_shown_ = false;
}

void JobOutput::Draw(const std::string& file, bool final) {
  auto image = DecodeImage(file, kShowLimits, "picture");
  if (!image.ok()) return;  // its checksum was right: a kind that cannot be drawn
  ClearProgress();
  // Beside a picture on stdout, this goes where it cannot spoil it.
  FILE* to = options_.out == "-" ? stderr : stdout;
  if (drawn_lines_ > 0) std::fprintf(to, "\x1b[%zuA", drawn_lines_);
  const TerminalSize size = GetTerminalSize();
  const int columns = size.columns, rows = size.rows - 3;
  // A preview is a fraction of the picture that follows it.
  if (!final) *image = EnlargeToFit(*image, columns, rows);
  const std::vector<std::string> lines = DrawHalfBlocks(*image, columns, rows);
  for (const std::string& line : lines)
    std::fprintf(to, "%s%s\n", drawn_lines_ > 0 ? "\x1b[K" : "", line.c_str());
  if (lines.size() < drawn_lines_) std::fprintf(to, "\x1b[J");
  std::fflush(to);
  drawn_lines_ = final ? 0 : lines.size();
}

std::string JobOutput::Prefix() const { return options_.job.empty() ? "" : absl::StrCat(options_.job, ": "); }

}  // namespace latentd::ctl
