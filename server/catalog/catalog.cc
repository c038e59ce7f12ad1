#include "server/catalog/catalog.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/bounded_json.h"
#include "cache/base/error.h"
#include "cache/base/text_file.h"
#include "cache/base/utf8.h"
#include "cache/weights/file_identity.h"
#include "cache/weights/mapped_file.h"
#include "families/known_models.h"
#include "families/open_model.h"
#include "nlohmann/json.hpp"
#include "patcher/model_patch.h"
#include "server/logging.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexFile[] = "model_index.json";
constexpr char kWeightFile[] = ".safetensors";
constexpr int64_t kMaxSidecarBytes = 1 << 20;
constexpr int64_t kMaxSettingsBytes = 64 << 20;
constexpr size_t kMaxSeenFiles = 65'536;  // whose tokens are kept, or what was said of them
constexpr size_t kMaxShownName = 128;     // bytes, of a name that is not known
constexpr char kNameTaken[] = "another model has this name";

uint64_t Mix(uint64_t hash, absl::string_view text) {  // FNV-1a
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

// Shows `take` every file at or below `paths`, in order, with its name and its status; with `folders`, these
// too.
template <typename Take>
void ForEachFile(const Roots& roots, const std::vector<std::string>& paths, bool folders, const Take& take) {
  auto show = [&](const fs::path& p, const std::string& name) {
    struct stat st = {};
    if (stat(p.c_str(), &st) != 0) return;
    if (S_ISREG(st.st_mode) || (folders && S_ISDIR(st.st_mode))) take(p, name, st);
  };
  for (const fs::path path : paths) {
    std::error_code ec;
    show(path, path.filename().string());
    if (!fs::is_directory(path, ec)) continue;
    std::vector<fs::path> files;
    roots.Walk(path, [&](const RootEntry& entry) {
      files.push_back(entry.path);
      return true;
    });
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) show(file, file.lexically_relative(path).string());
  }
}

constexpr uint64_t kFirstHash = 14695981039346656037ull;

// Over all that can be seen from outside. Moves with whatever is done to a file, and with a folder that
// others are put in the place of; so if it is the same before and after, what was read in between was this.
std::string StateOf(const Roots& roots, const std::vector<std::string>& paths) {
  uint64_t hash = kFirstHash;
  ForEachFile(roots, paths, /*folders=*/true,
              [&](const fs::path&, const std::string& name, const struct stat& st) {
                hash = Mix(hash, absl::StrCat(name, "|", FileIdentity::Of(st).ToString(), ";"));
              });
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

// What families read besides weights: settings, vocabularies. All of it goes into an id.
bool IsSettings(const fs::path& path, int64_t size) {
  const std::string extension = path.extension().string();
  return size <= kMaxSettingsBytes && (extension == ".json" || extension == ".txt" || extension == ".model");
}

uint64_t MixContent(uint64_t hash, const fs::path& path) {
  const absl::StatusOr<std::string> text = ReadTextFile(path.string(), kMaxSettingsBytes);
  return text.ok() ? Mix(hash, *text) : hash;
}

// Over names, inodes, sizes and times of the files, what settings say, and the files that weights come from
// as they were opened.
std::string Signature(const Roots& roots, const std::vector<std::string>& paths, const Pipeline& pipeline) {
  uint64_t hash = kFirstHash;
  ForEachFile(roots, paths, /*folders=*/false,
              [&](const fs::path& path, const std::string& name, const struct stat& st) {
                const FileIdentity file = FileIdentity::Of(st);
                hash = Mix(hash, absl::StrCat(name, "|", file.device, "|", file.inode, "|", file.size, "|",
                                              file.mtime_ns, ";"));
                if (IsSettings(path, file.size)) hash = MixContent(hash, path);
              });
  for (const Component& component : pipeline.components()) {
    hash = Mix(hash, absl::StrCat(component.name, "|", component.files->fingerprint(), ";"));
  }
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

// The base that a single file's sidecar names; empty: it names none. Errors: those of ReadTextFile.
absl::StatusOr<std::string> ReadBase(const fs::path& sidecar) {
  if (sidecar.empty()) return "";
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(sidecar.string(), kMaxSidecarBytes));
  const absl::StatusOr<nlohmann::json> json = ParseBoundedJson(text);
  if (!json.ok()) return "";
  const auto base = json->find("base");
  return base != json->end() && base->is_string() ? base->get<std::string>() : "";
}

std::string NeedsBase(absl::string_view name) {
  const absl::string_view own = name.substr(name.rfind('/') + 1);
  return absl::StrCat(
      "needs a file ", own,
      ".json with {\"base\": \"MODEL\"}, naming the model whose text encoders and VAE it uses");
}

// Whether a folder has what a diffusers folder has, whatever it is of.
bool IsFolderOfParts(const fs::path& folder) {
  std::error_code ec;
  const auto has = [&](const char* part) { return fs::is_directory(folder / part, ec); };
  return (has("unet") || has("transformer")) && (has("vae") || has("scheduler") || has("text_encoder"));
}

absl::Status ModelNotFound(const std::string& name) {
  return MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
                   absl::StrCat("no model named '", name, "'; ListModels shows what there is"),
                   {{"resource_type", "model"}, {"resource_name", name}, {"field", "model"}});
}

absl::Status LoraNotFound(const std::string& name) {
  return MakeError(absl::StatusCode::kNotFound, "LORA_NOT_FOUND",
                   absl::StrCat("no LoRA named '", name, "'; ListLoras shows what there is"),
                   {{"resource_type", "lora"}, {"resource_name", name}, {"field", "loras.name"}});
}

constexpr char kLora[] = "lora", kEmbedding[] = "embedding";

std::string IdOf(absl::string_view kind, const std::string& name, const std::string& fingerprint) {
  return absl::StrCat(kind, "/", name, "@", fingerprint);
}

// NAME.safetensors below the first of the roots that has it. Its id is `kind`, the name and the fingerprint.
template <typename File>
std::optional<File> FindFile(const Roots& roots, absl::string_view kind, const std::string& name) {
  if (!IsValidName(name)) return std::nullopt;
  std::error_code ec;
  for (const std::string& root : roots.folders()) {
    const fs::path path = roots.WeightFile(root, name);
    if (path.empty()) continue;
    return File{name, IdOf(kind, name, WeightFiles::FingerprintAt(path.string())),
                static_cast<int64_t>(fs::file_size(path, ec)), path.string()};
  }
  return std::nullopt;
}

template <typename File>
std::vector<File> AllFiles(const Roots& roots, absl::string_view kind) {
  std::vector<File> files;
  for (const std::string& name : roots.List(/*with_unserved=*/false).names) {
    if (auto file = FindFile<File>(roots, kind, name)) files.push_back(*std::move(file));
  }
  return files;
}

// Which tensors of its file an embedding is.
absl::StatusOr<EmbeddingTensors> Select(const EmbeddingFile& embedding, const WeightFiles& files) {
  std::vector<EmbeddingTensors> all;
  if (embedding.bundle != nullptr) {
    all = BundledEmbeddings(files);
  } else {
    ASSIGN_OR_RETURN(all, EmbeddingsOf(files));
  }
  std::vector<std::string> names;
  for (EmbeddingTensors& tensors : all) {
    if (tensors.name == embedding.token) return std::move(tensors);
    names.push_back(absl::StrCat(embedding.name, "/", tensors.name));
  }
  if (!embedding.token.empty()) return InvalidEmbedding("the file holds it no longer");
  constexpr size_t kMaxShown = 10;
  const bool cut = names.size() > kMaxShown;
  if (cut) names.resize(kMaxShown);
  return InvalidEmbedding(absl::StrCat("the file holds ", all.size(),
                                       "; name one of them: ", absl::StrJoin(names, ", "), cut ? ", …" : ""));
}

// One of the textual inversions of a file that holds several.
EmbeddingFile OfToken(const EmbeddingFile& file, const std::string& token) {
  EmbeddingFile one = file;
  one.name = absl::StrCat(file.name, "/", token);
  one.id = IdOf(kEmbedding, one.name, file.id.substr(file.id.rfind('@') + 1));
  one.token = token;
  return one;
}

}  // namespace

std::vector<EmbeddingFile> EmbeddingsOfLora(const std::string& lora,
                                            const std::shared_ptr<const WeightFiles>& files) {
  std::vector<EmbeddingFile> embeddings;
  if (files == nullptr) return embeddings;
  const EmbeddingFile whole{lora, IdOf(kEmbedding, lora, files->fingerprint()), files->tensor_bytes(), "", "",
                            files};
  for (const EmbeddingTensors& tensors : BundledEmbeddings(*files)) {
    embeddings.push_back(OfToken(whole, tensors.name));
  }
  return embeddings;
}

absl::Status EmbeddingNotFound(const std::string& name) {
  return MakeError(absl::StatusCode::kNotFound, "EMBEDDING_NOT_FOUND",
                   absl::StrCat("no embedding named '", CutUtf8(name, kMaxShownName),
                                "'; ListEmbeddings shows what there is"),
                   {{"resource_type", "embedding"},
                    {"resource_name", std::string(CutUtf8(name, kMaxShownName))},
                    {"field", "name"}});
}

const Component& OpenModel::component(const std::string& component_name) const {
  const auto& components = pipeline->components();
  return *std::find_if(components.begin(), components.end(),
                       [&](const Component& c) { return c.name == component_name; });
}

std::shared_ptr<const OpenModel> OpenModel::Make(std::string name, std::string id, std::string source,
                                                 std::unique_ptr<const Pipeline> pipeline) {
  auto model = std::make_shared<OpenModel>();
  model->name = std::move(name);
  model->id = std::move(id);
  model->source = std::move(source);
  model->pipeline = std::move(pipeline);
  for (const Component& c : model->pipeline->components()) {
    if (c.patch_target) model->patch_targets.push_back(*c.patch_target);
    const std::string fingerprint = WeightsFingerprint(*c.files, *c.layout, c.key_map, c.prefix);
    model->parts[c.name] = {{absl::StrCat("weights/", fingerprint), c.name},
                            WeightBytes(*c.files, *c.layout, c.key_map, c.prefix)};
  }
  return model;
}

LockRequest OpenModel::ComponentRequest(const std::string& component_name) const {
  const Component& c = component(component_name);
  const Part& as_record = part(component_name);
  // Copies, so that a load outlives the model entry.
  return {as_record.key,
          {.kind = c.name,
           .estimated_bytes = as_record.bytes,
           .load = [files = c.files, layout = c.layout, key_map = c.key_map, prefix = c.prefix](
                       const LoadContext& context) -> absl::StatusOr<std::shared_ptr<const Resource>> {
             return LoadWeights(files, layout, key_map, prefix, context);
           },
           .name = id}};
}

std::string OpenModel::SourceOf(const Component& component) const {
  const auto& all = pipeline->components();
  const auto sharers =
      std::count_if(all.begin(), all.end(), [&](const Component& c) { return c.files == component.files; });
  return absl::StrCat(component.files->label(), sharers > 1 ? absl::StrCat(": ", component.prefix) : "");
}

absl::Status OpenModel::Check() const {
  for (const Component& c : pipeline->components()) RETURN_IF_ERROR(c.files->Check());
  return absl::OkStatus();
}

bool OpenModel::at_its_place() const {
  const auto& components = pipeline->components();
  return std::all_of(components.begin(), components.end(),
                     [](const Component& c) { return c.files->at_its_place(); });
}

absl::StatusOr<LockRequest> LoraFile::Request() const {
  auto files = WeightFiles::Open(path);
  if (!files.ok()) return WithPrefix(files.status(), absl::StrCat("LoRA ", name, ": "));
  Loader loader{
      .kind = kLora, .estimated_bytes = ModelPatch::MemoryBytes(**files), .use = MemoryUse::kPatches};
  loader.load = [files = *files,
                 name = name](const LoadContext& context) -> absl::StatusOr<std::shared_ptr<const Resource>> {
    auto patch = ModelPatch::Load(files, context);
    if (!patch.ok()) return WithPrefix(patch.status(), absl::StrCat("LoRA ", name, ": "));
    return *patch;
  };
  return LockRequest{{IdOf(kLora, name, (*files)->fingerprint()), ""}, std::move(loader)};
}

absl::StatusOr<EmbeddingFile::Opened> EmbeddingFile::Open() const {
  const std::string prefix = absl::StrCat("embedding ", name, ": ");
  absl::StatusOr<std::shared_ptr<const WeightFiles>> files = bundle;
  if (bundle == nullptr) files = WeightFiles::Open(path);
  if (!files.ok()) return WithPrefix(files.status(), prefix);
  const auto tensors = Select(*this, **files);
  if (!tensors.ok()) return WithPrefix(tensors.status(), prefix);
  auto shape = TextEmbedding::Describe(**files, *tensors);
  if (!shape.ok()) return WithPrefix(shape.status(), prefix);
  Loader loader{.kind = kEmbedding, .estimated_bytes = shape->bytes(), .use = MemoryUse::kPatches};
  loader.load = [files = *files, tensors = *tensors,
                 prefix](const LoadContext& context) -> absl::StatusOr<std::shared_ptr<const Resource>> {
    auto embedding = TextEmbedding::Load(files, tensors, context);
    if (!embedding.ok()) return WithPrefix(embedding.status(), prefix);
    return *embedding;
  };
  return Opened{.shape = *shape,
                .request = {{IdOf(kEmbedding, name, (*files)->fingerprint()), ""}, std::move(loader)}};
}

Catalog::Catalog(const std::vector<std::string>& model_roots, const std::vector<std::string>& lora_roots,
                 const std::vector<std::string>& embedding_roots, bool follow_links)
    : model_roots_(model_roots, follow_links),
      lora_roots_(lora_roots, follow_links),
      embedding_roots_(embedding_roots, follow_links) {}

RootListing Catalog::ListModels(bool with_unserved) const {
  std::set<std::string> names;
  RootListing listing;
  for (const std::string& root : model_roots_.folders()) {
    model_roots_.Walk(root, [&](const RootEntry& entry) {
      std::error_code ec;
      std::string problem;
      bool descend = entry.is_folder;
      if (entry.is_folder && fs::is_regular_file(entry.path / kIndexFile, ec)) {
        descend = false;  // nothing below a model is another model
        problem = WhyNoName(entry.relative);
        if (problem.empty() && !names.insert(entry.relative).second) problem = kNameTaken;
      } else if (entry.is_folder && IsFolderOfParts(entry.path)) {
        descend = false;
        problem =
            absl::StrCat("has the parts of a model, but no ", kIndexFile, " that says which model they are");
      } else if (const std::string name = NameOfWeightFile(entry.relative); entry.is_file && !name.empty()) {
        problem = WhyNoName(name);
        if (problem.empty() && !fs::is_regular_file(fs::path(entry.path).replace_extension(".json"), ec)) {
          problem = NeedsBase(name);
        }
        if (problem.empty() && !names.insert(name).second) problem = kNameTaken;
      }
      if (!with_unserved) return descend;
      if (problem.empty()) problem = WhyNoWeightFile(entry);
      if (!problem.empty()) listing.unserved.push_back(MakeUnserved(entry, std::move(problem)));
      return descend;
    });
  }
  {
    MutexLock lock(&mu_);
    for (const auto& [name, model] : added_) names.insert(name);
  }
  listing.names.assign(names.begin(), names.end());
  return listing;
}

std::vector<std::string> Catalog::ModelNames() const { return ListModels(/*with_unserved=*/false).names; }

std::vector<Unserved> Catalog::UnservedModels() const {
  return Noted("model", ListModels(/*with_unserved=*/true).unserved);
}

std::vector<Unserved> Catalog::UnservedLoras() const {
  return Noted("LoRA", lora_roots_.List(/*with_unserved=*/true).unserved);
}

std::vector<Unserved> Catalog::UnservedEmbeddings() const {
  return Noted("embedding", embedding_roots_.List(/*with_unserved=*/true).unserved);
}

std::vector<Unserved> Catalog::Noted(absl::string_view kind, std::vector<Unserved> unserved) const {
  MutexLock lock(&mu_);
  if (noted_.size() >= kMaxSeenFiles) noted_.clear();
  for (const Unserved& one : unserved) {
    if (!noted_.insert(absl::StrCat(kind, "/", one.name, ": ", one.problem)).second) continue;
    spdlog::warn("{} {} is not served: {}", std::string(kind), LogField(one.name), LogField(one.problem));
  }
  std::sort(unserved.begin(), unserved.end(),
            [](const Unserved& a, const Unserved& b) { return a.name < b.name; });
  return unserved;
}

absl::StatusOr<Catalog::Found> Catalog::Find(const std::string& name) const {
  if (!IsValidName(name)) return ModelNotFound(std::string(CutUtf8(name, kMaxShownName)));
  std::error_code ec;
  for (const std::string& root : model_roots_.folders()) {
    Found found;
    found.files.name = name;
    if (fs::path folder = model_roots_.Below(root, name);
        !folder.empty() && fs::is_regular_file(folder / kIndexFile, ec)) {
      RETURN_IF_ERROR(model_roots_.CheckLinks(folder));
      found.files.folder = folder.string();
      found.source = name;
      found.paths = {folder.string()};
      found.state = StateOf(model_roots_, found.paths);
      return found;
    }
    const fs::path file = model_roots_.WeightFile(root, name);
    if (file.empty()) continue;
    const fs::path sidecar = model_roots_.Below(root, absl::StrCat(name, ".json"));
    ASSIGN_OR_RETURN(const std::string base_name, ReadBase(sidecar));
    if (base_name.empty()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                       absl::StrCat("single-file model ", name, " ", NeedsBase(name)), {{"model", name}});
    }
    fs::path base;
    for (const std::string& base_root : model_roots_.folders()) {
      if (base.empty() && IsValidName(base_name)) base = model_roots_.Below(base_root, base_name);
    }
    if (base.empty() || !fs::is_regular_file(base / kIndexFile, ec)) {
      return WithPrefix(ModelNotFound(std::string(CutUtf8(base_name, kMaxShownName))),
                        absl::StrCat("base of ", name, ": "));
    }
    RETURN_IF_ERROR(model_roots_.CheckLinks(base));
    found.files.file = file.string();
    found.files.base_folder = base.string();
    found.source = absl::StrCat(name, kWeightFile);
    found.paths = {file.string(), sidecar.string(), base.string()};
    found.state = StateOf(model_roots_, found.paths);
    return found;
  }
  return ModelNotFound(std::string(CutUtf8(name, kMaxShownName)));
}

absl::StatusOr<std::shared_ptr<const OpenModel>> Catalog::Model(const std::string& name) {
  {
    MutexLock lock(&mu_);
    if (auto it = added_.find(name); it != added_.end()) return it->second;
  }
  auto model = FindOrOpen(name);
  if (absl::IsNotFound(model.status())) Forget(name);
  // What cannot be opened for want of a descriptor looks as if it were missing, or of no known kind.
  if (!model.ok()) RETURN_IF_ERROR(CheckDescriptors());
  return model;
}

absl::StatusOr<std::shared_ptr<const OpenModel>> Catalog::FindOrOpen(const std::string& name) {
  ASSIGN_OR_RETURN(Found found, Find(name));
  {
    Kept kept;
    {
      MutexLock lock(&mu_);
      if (auto it = open_.find(name); it != open_.end()) kept = it->second;
    }
    if (kept.model != nullptr && kept.state == found.state && kept.model->Check().ok()) return kept.model;
  }
  constexpr int kAttempts = 5;
  for (int attempt = 1;; ++attempt) {
    auto opened = Open(name, found);
    const std::string before = found.state;
    ASSIGN_OR_RETURN(found, Find(name));
    if (found.state != before) {
      if (attempt < kAttempts) continue;
      return MakeError(
          absl::StatusCode::kAborted, "FILE_CHANGED",
          absl::StrCat("the files of model ", name, " are being changed; try again when that is done"),
          {{"model", name}, {"retry_ms", "1000"}});
    }
    RETURN_IF_ERROR(opened.status());
    MutexLock lock(&mu_);
    Kept& kept = open_[name];
    // The files may have got another mode, or the folder a file that is none of the model's.
    if (kept.model == nullptr || kept.model->id != (*opened)->id || !kept.model->Check().ok()) {
      kept.model = *std::move(opened);
    }
    kept.state = found.state;
    opened_[kept.model->id] = kept.model;
    return kept.model;
  }
}

absl::StatusOr<std::shared_ptr<const OpenModel>> Catalog::Open(const std::string& name,
                                                               const Found& found) const {
  for (const Family* family : AllFamilies()) {
    if (!family->Detect(found.files)) continue;
    auto pipeline = family->Open(found.files);
    if (!pipeline.ok()) return WithPrefix(pipeline.status(), absl::StrCat("model ", name, ": "));
    // What cannot be loaded is no model: better said here than to the first who wants a picture.
    for (const Component& c : (*pipeline)->components()) {
      const absl::Status fit = CheckWeights(*c.files, *c.layout, c.key_map, c.prefix);
      if (!fit.ok()) return WithPrefix(fit, absl::StrCat("model ", name, ": ", c.name, ": "));
    }
    const std::string id = absl::StrCat(name, "@", Signature(model_roots_, found.paths, **pipeline));
    return OpenModel::Make(name, id, found.source, *std::move(pipeline));
  }
  if (!found.files.file.empty()) {
    ASSIGN_OR_RETURN(const auto file, WeightFiles::Open(found.files.file));
    if (const std::string about = AboutFile(*file); !about.empty()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                       absl::StrCat("model ", name, " cannot be served: ", about), {{"model", name}});
    }
  }
  std::vector<std::string> known;
  for (const Family* family : AllFamilies()) known.emplace_back(family->name());
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
      absl::StrCat("model ", name, " is of no family that is known here (", absl::StrJoin(known, ", "), ")",
                   found.files.folder.empty()
                       ? ""
                       : absl::StrCat(": ", AboutPipelineClass(PipelineClass(found.files.folder)))),
      {{"model", name}});
}

void Catalog::Forget(const std::string& name) {
  std::shared_ptr<const OpenModel> gone;  // its mappings end after the mutex is let go
  MutexLock lock(&mu_);
  auto it = open_.find(name);
  if (it == open_.end()) return;
  gone = std::move(it->second.model);
  open_.erase(it);
}

std::vector<std::string> Catalog::TakeUnused() {
  std::vector<std::shared_ptr<const OpenModel>> kept;
  {
    MutexLock lock(&mu_);
    for (const auto& [name, entry] : open_) kept.push_back(entry.model);
  }
  for (const std::shared_ptr<const OpenModel>& model : kept) {
    if (model->at_its_place() && model->Check().ok()) continue;
    MutexLock lock(&mu_);
    auto it = open_.find(model->name);
    if (it != open_.end() && it->second.model == model) open_.erase(it);
  }
  kept.clear();
  std::vector<std::string> ids;
  MutexLock lock(&mu_);
  std::erase_if(opened_, [&](const auto& entry) {
    if (!entry.second.expired()) return false;
    ids.push_back(entry.first);
    return true;
  });
  return ids;
}

std::vector<LoraFile> Catalog::Loras() const { return AllFiles<LoraFile>(lora_roots_, kLora); }

absl::StatusOr<LoraFile> Catalog::Lora(const std::string& name) const {
  auto file = FindFile<LoraFile>(lora_roots_, kLora, name);
  if (!file) return LoraNotFound(std::string(CutUtf8(name, kMaxShownName)));
  return *std::move(file);
}

std::vector<std::string> Catalog::TokensOf(const EmbeddingFile& file) const {
  {
    MutexLock lock(&mu_);
    const auto known = tokens_.find(file.path);
    if (known != tokens_.end() && known->second.first == file.id) return known->second.second;
  }
  std::vector<std::string> tokens;
  if (const auto files = WeightFiles::Open(file.path); files.ok()) {
    if (const auto all = EmbeddingsOf(**files); all.ok()) {
      for (const EmbeddingTensors& tensors : *all) {
        if (IsValidName(absl::StrCat(file.name, "/", tensors.name))) tokens.push_back(tensors.name);
      }
    }
  }
  MutexLock lock(&mu_);
  if (tokens_.size() >= kMaxSeenFiles) tokens_.clear();
  tokens_[file.path] = {file.id, tokens};
  return tokens;
}

std::vector<EmbeddingFile> Catalog::Embeddings() const {
  std::map<std::string, EmbeddingFile> by_name;
  std::vector<EmbeddingFile> several;
  for (EmbeddingFile& file : AllFiles<EmbeddingFile>(embedding_roots_, kEmbedding)) {
    const std::vector<std::string> tokens = TokensOf(file);
    for (const std::string& token : tokens) several.push_back(OfToken(file, token));
    if (tokens.empty()) by_name.emplace(file.name, std::move(file));
  }
  // A file of that name goes before what another file calls so.
  for (EmbeddingFile& one : several) by_name.emplace(one.name, std::move(one));
  std::vector<EmbeddingFile> embeddings;
  for (auto& [name, file] : by_name) embeddings.push_back(std::move(file));
  return embeddings;
}

std::vector<std::string> Catalog::EmbeddingNames() const {
  std::vector<std::string> names;
  for (const EmbeddingFile& file : Embeddings()) names.push_back(file.name);
  return names;
}

absl::StatusOr<EmbeddingFile> Catalog::Embedding(const std::string& name) const {
  if (auto file = FindFile<EmbeddingFile>(embedding_roots_, kEmbedding, name)) return *std::move(file);
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos) return EmbeddingNotFound(name);
  const auto file = FindFile<EmbeddingFile>(embedding_roots_, kEmbedding, name.substr(0, slash));
  if (!file) return EmbeddingNotFound(name);
  const std::string token = name.substr(slash + 1);
  const std::vector<std::string> tokens = TokensOf(*file);
  if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) return EmbeddingNotFound(name);
  return OfToken(*file, token);
}

void Catalog::AddModel(std::shared_ptr<const OpenModel> model) {
  MutexLock lock(&mu_);
  added_[model->name] = std::move(model);
}

}  // namespace latentd
