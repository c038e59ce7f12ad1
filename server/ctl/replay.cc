#include "server/ctl/replay.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/base/error.h"
#include "cache/base/sha256.h"
#include "latentd/v1/denoise.grpc.pb.h"
#include "latentd/v1/model.grpc.pb.h"
#include "server/ctl/ask.h"
#include "server/ctl/images.h"
#include "server/media/picture_record.h"

namespace latentd::ctl {
namespace {

constexpr DecodeLimits kLimits{.max_bytes = int64_t{1} << 30, .max_pixels = int64_t{1} << 28};

// What is not as it was when the picture was drawn, in words: "LoRA dusk".
struct Findings {
  std::vector<std::string> absent, changed;
};

absl::Status Usage(std::string message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "USAGE", message);
}

// Puts the pictures that the flags name into the request. What is another file than then goes to `findings`.
absl::Status TakeInputs(const JobOptions& job, const v1::PictureRecord& record, v1::GenerateParams& params,
                        Findings& findings) {
  const std::map<std::string, std::pair<std::string, std::string*>> given = {
      {"--image", {job.image, params.mutable_init_image()->mutable_data()}},
      {"--mask", {job.mask, params.mutable_mask_image()->mutable_data()}},
      {"--control", {job.control, params.mutable_control_image()->mutable_data()}},
      {"--latents", {job.latents, params.mutable_init_latents()}}};
  std::map<std::string, std::string> wanted;
  std::vector<std::string> missing;
  for (const RecordedInput& input : InputsOf(record)) {
    wanted[input.flag] = input.sha256;
    if (given.at(input.flag).first.empty()) missing.push_back(input.flag);
  }
  if (!missing.empty()) {
    return Usage(absl::StrCat("the picture was made with pictures that have to be given again: ",
                              absl::StrJoin(missing, ", ")));
  }
  for (const auto& [flag, input] : given) {
    const auto& [file, data] = input;
    if (file.empty()) continue;
    const auto sha256 = wanted.find(flag);
    if (sha256 == wanted.end()) return Usage(absl::StrCat("the picture was made without ", flag));
    ASSIGN_OR_RETURN(*data, ReadLocalFile(file));
    if (Sha256Hex(*data) != sha256->second) findings.changed.push_back(absl::StrCat(flag, " ", file));
  }
  // Made by the pointers above.
  if (!record.params().has_init_image()) params.clear_init_image();
  if (!record.params().has_mask_image()) params.clear_mask_image();
  if (!record.params().has_control_image()) params.clear_control_image();
  return absl::OkStatus();
}

bool IsAbsent(const absl::Status& status) { return absl::IsNotFound(status); }

// Asks the server for what the record names. What is there with another id goes to `changed`.
absl::Status LookFor(const GlobalOptions& global, const v1::PictureRecord& record, Findings& findings) {
  const auto note = [&](const std::string& what, bool there, const std::string& id, const std::string& then) {
    if (!there) {
      findings.absent.push_back(what);
    } else if (id != then) {
      findings.changed.push_back(what);
    }
  };
  v1::GetModelRequest get;
  get.set_name(record.model());
  const auto model = Ask<v1::ModelService>(global, &v1::ModelService::Stub::GetModel, get);
  if (!model.ok() && !IsAbsent(model.status())) return model.status();
  note(absl::StrCat("model ", record.model()), model.ok(), model.ok() ? model->model().id() : "",
       record.model_id());

  for (const auto& recorded : record.loras()) {
    v1::InspectLoraRequest inspect;
    inspect.set_name(recorded.lora().name());
    const auto lora = Ask<v1::ModelService>(global, &v1::ModelService::Stub::InspectLora, inspect);
    if (!lora.ok() && !IsAbsent(lora.status())) return lora.status();
    note(absl::StrCat("LoRA ", recorded.lora().name()), lora.ok(), lora.ok() ? lora->lora().id() : "",
         recorded.id());
  }

  if (record.embeddings().empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto all, AskForAll(global, &v1::ModelService::Stub::ListEmbeddings));
  std::map<std::string, std::string> ids;
  for (const v1::Embedding& embedding : all.embeddings()) ids[embedding.name()] = embedding.id();
  for (const auto& recorded : record.embeddings()) {
    const auto found = ids.find(recorded.name());
    // Those that a LoRA brings go with its file.
    const bool bundled = std::any_of(record.loras().begin(), record.loras().end(), [&](const auto& lora) {
      return absl::StartsWith(recorded.name(), absl::StrCat(lora.lora().name(), "/"));
    });
    if (found == ids.end() && bundled) continue;
    note(absl::StrCat("embedding ", recorded.name()), found != ids.end(),
         found != ids.end() ? found->second : "", recorded.id());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> DrawAgain(const GlobalOptions& global, const v1::GenerateRequest& request) {
  ASSIGN_OR_RETURN(auto channel, Connect(global));
  auto stub = v1::DenoiseService::NewStub(channel);
  Call call(global, std::nullopt);
  auto stream = stub->Generate(call.context(), request);
  ImageReceiver receiver;
  std::optional<std::string> picture;
  absl::Status local;
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    auto image = receiver.OnEvent(response.event());
    if (!image.ok()) {
      local = image.status();
      call.context()->TryCancel();
    } else if (*image) {
      picture = std::move((*image)->data);
    }
  }
  const absl::Status status = call.Result(stream->Finish());
  RETURN_IF_ERROR(local);
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(receiver.Finish());
  if (!picture) return MakeError(absl::StatusCode::kDataLoss, "DAMAGED_DATA", "there was no picture");
  return *std::move(picture);
}

// How much of two pictures is not the same.
struct PixelDifference {
  int64_t pixels = 0;  // of the picture; -1: the sizes differ, or one of them cannot be read
  int64_t differing = 0;
  int most = 0;
};

PixelDifference ComparePixels(const std::string& a, const std::string& b) {
  const auto left = DecodeImage(a, kLimits, "picture"), right = DecodeImage(b, kLimits, "picture");
  if (!left.ok() || !right.ok() || left->width != right->width || left->height != right->height)
    return {-1, 0, 0};
  PixelDifference out{int64_t{left->width} * left->height, 0, 0};
  for (int64_t i = 0; i < out.pixels; ++i) {
    int most = 0;
    for (size_t c = 0; c < 3; ++c) {
      const size_t at = 3 * static_cast<size_t>(i) + c;
      most = std::max(most, std::abs(int{left->pixels[at]} - int{right->pixels[at]}));
    }
    out.differing += most > 0 ? 1 : 0;
    out.most = std::max(out.most, most);
  }
  return out;
}

struct Comparison {
  Findings findings;
  bool drawn = false, equal = false;
  PixelDifference pixels;
  std::vector<std::string> fields;  // of the records that differ
};

std::string PixelsText(const PixelDifference& pixels) {
  if (pixels.pixels < 0) return "the pictures cannot be compared";
  if (pixels.differing == 0) return "its pixels are equal";
  return absl::StrCat(pixels.differing, " of ", pixels.pixels, " pixels differ, by at most ", pixels.most,
                      " of 255");
}

void PrintText(const Comparison& result, const std::string& file) {
  for (const std::string& what : result.findings.absent)
    std::printf("%s: is not there\n", Printable(what).c_str());
  for (const std::string& what : result.findings.changed) {
    std::printf("%s: is another file than then\n", Printable(what).c_str());
  }
  if (!result.drawn) {
    std::printf("not drawn\n");
  } else if (result.equal) {
    std::printf("%s: equal, byte for byte\n", Printable(file).c_str());
  } else {
    std::printf("%s: not equal; %s\n", Printable(file).c_str(), PixelsText(result.pixels).c_str());
    if (!result.fields.empty()) {
      std::printf("what they say differs in: %s\n", Printable(absl::StrJoin(result.fields, ", ")).c_str());
    }
  }
  std::fflush(stdout);
}

void PrintJson(const Comparison& result) {
  nlohmann::ordered_json object = {{"equal", result.equal},
                                   {"drawn", result.drawn},
                                   {"pixels", result.pixels.pixels},
                                   {"differing_pixels", result.pixels.differing},
                                   {"largest_difference", result.pixels.most},
                                   {"absent", result.findings.absent},
                                   {"changed", result.findings.changed},
                                   {"differing_fields", result.fields}};
  std::printf("%s\n", object.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace).c_str());
  std::fflush(stdout);
}

}  // namespace

absl::StatusOr<ExitCode> RunReplay(const GlobalOptions& global, const JobOptions& job,
                                   const std::string& file) {
  ASSIGN_OR_RETURN(const std::string old, ReadLocalFile(file));
  ASSIGN_OR_RETURN(const v1::PictureRecord record, RecordOfFile(old));
  v1::GenerateRequest request = RequestOf(record);
  Comparison result;
  RETURN_IF_ERROR(TakeInputs(job, record, *request.mutable_params(), result.findings));
  const bool inputs_differ = !result.findings.changed.empty();
  RETURN_IF_ERROR(LookFor(global, record, result.findings));
  if (!inputs_differ && result.findings.absent.empty()) {
    ASSIGN_OR_RETURN(const std::string picture, DrawAgain(global, request));
    if (!job.out.empty()) RETURN_IF_ERROR(WriteLocalFile(job.out, picture));
    result.drawn = true;
    result.equal = picture == old;
    result.pixels = ComparePixels(old, picture);
    if (!result.equal) {
      ASSIGN_OR_RETURN(const v1::PictureRecord now, RecordOfFile(picture));
      result.fields = DifferencesOf(record, now);
    }
  }
  if (global.json) {
    PrintJson(result);
  } else if (job.out != "-") {
    PrintText(result, file);
  }
  return result.equal ? kExitOk : kExitFailed;
}

}  // namespace latentd::ctl
