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
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "cache/base/error.h"
#include "server/ctl/memory.h"
#include "server/ctl/terminal.h"
#include "server/ctl/text.h"
#include "server/rpc/field_messages.h"

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

// "1024x768", "32,0", "1024x1024,64": numbers between signs. Empty: it is not of that form.
std::vector<int64_t> Numbers(const std::string& text, absl::string_view separators) {
  std::vector<int64_t> numbers;
  for (const absl::string_view part : absl::StrSplit(text, absl::ByAnyChar(separators), absl::SkipEmpty())) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(part, &number)) return {};
    numbers.push_back(number);
  }
  return numbers;
}

bool Parse(const std::string& text, PixelSize& size) {
  const std::vector<int64_t> n = Numbers(text, "x×");
  if (n.size() != 2) return false;
  size = {n[0], n[1]};
  return true;
}
bool Parse(const std::string& text, PixelPoint& point) {
  const std::vector<int64_t> n = Numbers(text, ",");
  if (n.size() != 2) return false;
  point = {n[0], n[1]};
  return true;
}
bool Parse(const std::string& text, DenoiseTiles& tiles) {
  const std::vector<int64_t> n = Numbers(text, "x,");
  if (n.size() == 1) tiles.width = tiles.height = n[0];
  if (n.size() == 2 || n.size() == 3) tiles = {.width = n[0], .height = n[1], .overlap = tiles.overlap};
  if (n.size() == 3) tiles.overlap = n[2];
  return !n.empty() && n.size() <= 3;
}

// A flag of the table. Values are looked at by the server, which knows the model.
void AddFieldFlag(CLI::App& app, const RequestField& field, RequestScalars& scalars) {
  const std::string flag(field.flag), help(field.help);
  std::visit(
      [&](auto member) {
        using Member = decltype(member);
        if constexpr (std::is_same_v<Member, std::monostate>) {
        } else if constexpr (std::is_same_v<Member, std::optional<bool> RequestScalars::*>) {
          // CLI11 gives a flag that was not given a value, too.
          app.add_flag_function(
              flag, [&value = scalars.*member](int64_t) { value = true; }, help);
        } else if constexpr (std::is_same_v<Member, std::vector<double> RequestScalars::*>) {
          app.add_option(flag, scalars.*member, help)->delimiter(',')->allow_extra_args(false);
        } else if constexpr (std::is_same_v<Member, std::optional<PixelSize> RequestScalars::*> ||
                             std::is_same_v<Member, std::optional<PixelPoint> RequestScalars::*> ||
                             std::is_same_v<Member, std::optional<DenoiseTiles> RequestScalars::*>) {
          app.add_option_function<std::string>(
              flag,
              [&value = scalars.*member, flag, help](const std::string& text) {
                if (!Parse(text, value.emplace())) throw CLI::ValidationError(flag, help);
              },
              help);
        } else {
          CLI::Option* option = app.add_option(flag, scalars.*member, help);
          if (field.type == FieldType::kChoice) {
            const std::vector<std::string> choices = absl::StrSplit(field.choices, ',');
            option->check(CLI::IsMember(choices));
          }
        }
      },
      field.member);
}

// The picture that a field belongs to, as a flag; null for others.
const char* PictureFlag(const RequestField& field) {
  if (absl::StartsWith(field.name, "init_image.")) return "--image";
  return absl::StartsWith(field.name, "mask_image.") ? "--mask" : nullptr;
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
  app.add_option(
         "-l,--lora", options.loras,
         "LoRA as NAME[:WEIGHT][@START-END][,PATH=FACTOR…][,only=COMPONENT…]; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--patch-mode", options.patch_mode, "How LoRAs are applied")
      ->check(CLI::IsMember({"auto", "direct", "sidecar"}));
  app.add_option("--priority", options.priority, "Higher runs first");
  for (const RequestField& field : RequestFields()) {
    if (!field.flag.empty()) AddFieldFlag(app, field, options.fields);
  }
  app.add_option("--seed", options.seed, "Seed; drawn by the server when left out");
  app.add_option("-c,--count", options.count, "Pictures, of seed, seed + 1, …");
  AddInputFlags(app, options);
  app.add_flag(
      "--metadata,!--no-metadata", options.metadata,
      "Let the pictures say how they were made, prompts included, for `replay` [as the server does]");
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
  if (options.seed) params.set_seed(*options.seed);
  if (options.count) params.set_count(*options.count);
  if (!options.image.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_init_image()->mutable_data(), ReadLocalFile(options.image));
  }
  if (!options.mask.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_mask_image()->mutable_data(), ReadLocalFile(options.mask));
  }
  if (!options.latents.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_init_latents(), ReadLocalFile(options.latents));
    if (options.fields.strength) params.mutable_init_image();
  }
  if (!options.control.empty()) {
    ASSIGN_OR_RETURN(*params.mutable_control_image()->mutable_data(), ReadLocalFile(options.control));
  }
  for (const RequestField& field : RequestFields()) {
    const char* picture = PictureFlag(field);
    if (picture == nullptr || !IsSet(field, options.fields)) continue;
    const bool given =
        absl::StartsWith(field.name, "init_image.") ? params.has_init_image() : params.has_mask_image();
    if (!given)
      return MakeError(absl::StatusCode::kInvalidArgument, "USAGE",
                       absl::StrCat(std::string(field.flag), " needs ", picture));
  }
  WriteScalars(options.fields, params);
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
