#include "cache/weights/weight_folder.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "cache/weights/mapped_file.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kDiffusers = "diffusion_pytorch_model", kTransformers = "model";
constexpr absl::string_view kEnding = ".safetensors", kIndex = ".index", kJson = ".json";

// "model.fp16.safetensors" is the whole file "model", variant "fp16".
struct Candidate {
  std::string file;
  absl::string_view stem, variant;  // parts of `name`
  bool index = false;
  bool without_shards = false;  // an index that a save in one file has left behind

  bool is_known() const { return stem == kDiffusers || stem == kTransformers; }
};

std::optional<Candidate> Parse(const std::string& file) {
  Candidate candidate{.file = file, .stem = {}, .variant = {}};
  absl::string_view rest = file;
  if (absl::ConsumeSuffix(&rest, kJson)) {
    // NAME[.VARIANT].safetensors.index or NAME.safetensors.index.VARIANT
    const size_t ending = rest.find(absl::StrCat(kEnding, kIndex));
    if (ending == absl::string_view::npos) return std::nullopt;
    absl::string_view behind = rest.substr(ending + kEnding.size() + kIndex.size());
    if (!behind.empty() && !absl::ConsumePrefix(&behind, ".")) return std::nullopt;
    candidate.index = true;
    candidate.variant = behind;
    rest = rest.substr(0, ending);
  } else if (!absl::ConsumeSuffix(&rest, kEnding) || absl::StrContains(rest, "-of-")) {
    return std::nullopt;
  }
  candidate.stem = rest;
  for (const absl::string_view known : {kDiffusers, kTransformers}) {
    absl::string_view variant = rest;
    if (!absl::ConsumePrefix(&variant, known) || !absl::ConsumePrefix(&variant, ".")) continue;
    candidate.stem = known;
    candidate.variant = variant;
  }
  return candidate;
}

// What comes first is taken.
auto Rank(const Candidate& c) {
  const int variant = c.variant.empty() ? 0 : c.variant == "non_ema" ? 2 : 1;
  const bool shards_first = c.stem != kTransformers;
  return std::make_tuple(c.without_shards, !c.is_known(), variant, c.variant, c.stem != kDiffusers,
                         c.index != shards_first, c.file);
}

bool IsPickle(absl::string_view file) {
  return absl::EndsWith(file, ".bin") || absl::EndsWith(file, ".pt") || absl::EndsWith(file, ".ckpt");
}

}  // namespace

absl::StatusOr<std::string> PickWeightFile(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code ec;
  for (auto it = fs::directory_iterator(folder, ec); !ec && it != fs::directory_iterator();
       it.increment(ec)) {
    std::string name = it->path().filename().string();
    if (!absl::StartsWith(name, ".")) files.push_back(std::move(name));
  }
  std::sort(files.begin(), files.end());
  std::vector<Candidate> candidates;
  for (const std::string& file : files) {
    // Views into `files`, which stays as it is.
    auto candidate = Parse(file);
    if (!candidate) continue;
    candidate->without_shards =
        candidate->index && std::none_of(files.begin(), files.end(), [&](const std::string& f) {
          return absl::StartsWith(f, candidate->stem) && absl::StrContains(f, "-of-") &&
                 absl::EndsWith(f, kEnding);
        });
    candidates.push_back(*std::move(candidate));
  }
  const std::string label = fs::path(folder).filename().string();
  const auto best =
      std::min_element(candidates.begin(), candidates.end(),
                       [](const Candidate& a, const Candidate& b) { return Rank(a) < Rank(b); });
  if (best == candidates.end()) {
    RETURN_IF_ERROR(CheckDescriptors());  // without one a folder cannot be read
    const auto pickle = std::find_if(files.begin(), files.end(), IsPickle);
    if (pickle == files.end()) {
      return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                       absl::StrCat("no .safetensors file in ", label));
    }
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSAFE_FILE",
                     absl::StrCat(label, " has no .safetensors file, and ", *pickle,
                                  " is a pickle, which can run code; convert it to safetensors"),
                     {{"file", absl::StrCat(label, "/", *pickle)}});
  }
  const auto others =
      std::count_if(candidates.begin(), candidates.end(), [](const Candidate& c) { return !c.index; });
  if (!best->is_known() && !best->index && others > 1) {
    constexpr size_t kMaxShown = 5;
    std::vector<std::string> names;
    for (const Candidate& c : candidates) {
      if (names.size() < kMaxShown) names.push_back(c.file);
    }
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                     absl::StrCat(label, " has ", others, " files of weights (", absl::StrJoin(names, ", "),
                                  "), and none has the name that tells which is the component's: ",
                                  kDiffusers, kEnding, " or ", kTransformers, kEnding));
  }
  return (fs::path(folder) / best->file).string();
}

}  // namespace latentd
