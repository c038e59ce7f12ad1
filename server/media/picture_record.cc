#include "server/media/picture_record.h"

#include <google/protobuf/util/json_util.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"

namespace latentd {
namespace {

using google::protobuf::util::JsonPrintOptions;
using google::protobuf::util::JsonStringToMessage;
using google::protobuf::util::MessageToJsonString;
using nlohmann::json;

// With keys in order: those of a map come as they like from protobuf.
json JsonOf(const google::protobuf::Message& message) {
  JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  if (!MessageToJsonString(message, &text, options).ok()) return json::object();
  return json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// ---- A1111's text

struct Label {
  absl::string_view ours, theirs;
};
constexpr Label kSamplers[] = {{"euler", "Euler"},
                               {"euler_a", "Euler a"},
                               {"lms", "LMS"},
                               {"heun", "Heun"},
                               {"kdpm_2", "DPM2"},
                               {"kdpm_2_a", "DPM2 a"},
                               {"dpmpp_2m", "DPM++ 2M"},
                               {"dpmpp_sde", "DPM++ SDE"},
                               {"dpmpp_2m_sde", "DPM++ 2M SDE"},
                               {"ddim", "DDIM"},
                               {"pndm", "PLMS"},
                               {"unipc", "UniPC"},
                               {"lcm", "LCM"}};
constexpr Label kSchedules[] = {{"karras", "Karras"}, {"exponential", "Exponential"},
                                {"beta", "Beta"},     {"sgm_uniform", "SGM Uniform"},
                                {"simple", "Simple"}, {"ays", "Align Your Steps"}};

template <size_t N>
std::string Translated(const Label (&labels)[N], absl::string_view name) {
  for (const Label& label : labels) {
    if (label.ours == name) return std::string(label.theirs);
  }
  return std::string(name);
}

// "pets/cat" → "cat".
absl::string_view LastPart(absl::string_view name) { return name.substr(name.rfind('/') + 1); }

// As A1111 quotes a value that would end early.
std::string Quoted(absl::string_view value) {
  if (value.find_first_of(",\n:") == absl::string_view::npos) return std::string(value);
  return json(std::string(value)).dump(-1, ' ', false, json::error_handler_t::replace);
}

class A1111Text {
 public:
  explicit A1111Text(const v1::PictureRecord& record) : record_(record), params_(record.params()) {}

  std::string Text() {
    std::string prompt = params_.prompt();
    for (const auto& recorded : record_.loras()) {
      absl::StrAppend(&prompt, " <lora:", LastPart(recorded.lora().name()), ":", recorded.lora().weight(),
                      ">");
    }
    std::string text = prompt + "\n";
    if (!params_.negative_prompt().empty()) {
      absl::StrAppend(&text, "Negative prompt: ", params_.negative_prompt(), "\n");
    }
    Add("Steps", absl::StrCat(params_.steps()));
    AddSampler();
    if (params_.has_true_cfg_scale()) {
      Add("CFG scale", absl::StrCat(params_.true_cfg_scale()));
      Add("Distilled CFG Scale", absl::StrCat(params_.guidance()));
    } else {
      Add("CFG scale", absl::StrCat(params_.guidance()));
    }
    Add("Seed", absl::StrCat(params_.seed()));
    Add("Size", absl::StrCat(params_.width(), "x", params_.height()));
    Add("Model", LastPart(record_.model()));
    if (params_.has_init_image()) Add("Denoising strength", absl::StrCat(params_.init_image().strength()));
    // They count the last layer as the first that is left.
    if (params_.clip_skip() > 0) Add("Clip skip", absl::StrCat(params_.clip_skip() + 1));
    if (params_.has_eta()) Add("Eta", absl::StrCat(params_.eta()));
    return text + absl::StrJoin(values_, ", ");
  }

 private:
  void Add(absl::string_view key, absl::string_view value) {
    values_.push_back(absl::StrCat(key, ": ", Quoted(value)));
  }

  void AddSampler() {
    absl::string_view sampler = params_.sampler();
    const bool karras = absl::ConsumeSuffix(&sampler, "_k");
    Add("Sampler", Translated(kSamplers, sampler));
    if (params_.has_schedule()) {
      Add("Schedule type", Translated(kSchedules, params_.schedule()));
    } else if (karras) {
      Add("Schedule type", "Karras");
    }
  }

  const v1::PictureRecord& record_;
  const v1::GenerateParams& params_;
  std::vector<std::string> values_;
};

absl::Status BadRecord(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_RECORD",
                   absl::StrCat("what the picture says of how it was made cannot be read: ", what));
}

// Texts of all values below `value`, by their path. Elements of lists go by the name in them, where they have
// one.
void Flatten(const json& value, const std::string& path, std::map<std::string, std::string>& out) {
  const auto below = [&](const std::string& key) {
    return path.empty() ? key : absl::StrCat(path, ".", key);
  };
  if (value.is_object()) {
    for (const auto& [key, child] : value.items()) Flatten(child, below(key), out);
  } else if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) {
      const json& child = value[i];
      const json& named = child.is_object() && child.contains("lora") ? child["lora"] : child;
      const bool has_name = named.is_object() && named.contains("name") && named["name"].is_string();
      Flatten(child, below(has_name ? named["name"].get<std::string>() : absl::StrCat(i)), out);
    }
  } else {
    out[path] = value.dump(-1, ' ', true, json::error_handler_t::replace);
  }
}

}  // namespace

PictureNotes NotesOf(const v1::PictureRecord& record) {
  return {JsonOf(record).dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace),
          A1111Text(record).Text()};
}

absl::StatusOr<v1::PictureRecord> RecordOfFile(absl::string_view file) {
  const std::optional<std::string> text = RecordIn(file);
  if (!text) {
    return MakeError(
        absl::StatusCode::kNotFound, "NO_RECORD",
        "the file does not say how it was made: it was not drawn with picture_metadata, or another "
        "program has taken that out");
  }
  v1::PictureRecord record;
  const auto status = JsonStringToMessage(*text, &record);
  if (!status.ok()) return BadRecord(absl::string_view(status.message().data(), status.message().size()));
  if (record.version() != kRecordVersion) {
    return BadRecord(
        absl::StrCat("its version is ", record.version(), ", this program knows ", kRecordVersion));
  }
  return record;
}

v1::GenerateRequest RequestOf(const v1::PictureRecord& record) {
  v1::GenerateRequest request;
  request.set_model(record.model());
  for (const auto& recorded : record.loras()) *request.add_loras() = recorded.lora();
  request.set_patch_mode(record.patch_mode());
  *request.mutable_params() = record.params();
  request.mutable_params()->set_picture_metadata(true);
  return request;
}

std::vector<RecordedInput> InputsOf(const v1::PictureRecord& record) {
  std::vector<RecordedInput> inputs;
  for (const auto& [flag, sha256] :
       {std::pair<const char*, const std::string&>{"--image", record.init_image_sha256()},
        {"--mask", record.mask_image_sha256()},
        {"--control", record.control_image_sha256()},
        {"--latents", record.init_latents_sha256()}}) {
    if (!sha256.empty()) inputs.push_back({flag, sha256});
  }
  return inputs;
}

std::vector<std::string> DifferencesOf(const v1::PictureRecord& a, const v1::PictureRecord& b) {
  std::map<std::string, std::string> left, right;
  Flatten(JsonOf(a), "", left);
  Flatten(JsonOf(b), "", right);
  std::set<std::string> paths;
  for (const auto& [path, value] : left) {
    const auto other = right.find(path);
    if (other == right.end() || other->second != value) paths.insert(path);
  }
  for (const auto& [path, value] : right) {
    if (left.count(path) == 0) paths.insert(path);
  }
  return {paths.begin(), paths.end()};
}

}  // namespace latentd
