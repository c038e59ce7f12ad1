#include "server/catalog.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/bounded_json.h"
#include "cache/error.h"
#include "cache/file_identity.h"
#include "cache/mapped_file.h"
#include "cache/text_file.h"
#include "cache/utf8.h"
#include "nlohmann/json.hpp"
#include "patcher/model_patch.h"
#include "server/root_links.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexFile[] = "model_index.json";
constexpr char kWeightFile[] = ".safetensors";
constexpr int kMaxDepth = 6;
constexpr int64_t kMaxSidecarBytes = 1 << 20;
constexpr int64_t kMaxSettingsBytes = 64 << 20;
constexpr size_t kMaxSeenFiles = 65'536;  // whose tokens are kept

uint64_t Mix(uint64_t hash, absl::string_view text) {  // FNV-1a
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

// Shows `take` the paths below `folder`, each with its name (relative to the root), and what is below those
// for which it says false. A folder that cannot be read ends nothing but itself: clients' uploads come and go
// while this runs. What begins with a dot is nobody's name, and no file of a model.
template <typename Take>
void Walk(const fs::path& root, const fs::path& folder, int depth, const Take& take) {
  std::error_code ec, no;
  for (auto it = fs::directory_iterator(folder, ec); !ec && it != fs::directory_iterator();
       it.increment(ec)) {
    const fs::path& path = it->path();
    if (absl::StartsWith(path.filename().string(), ".")) continue;
    if (take(path, path.lexically_relative(root).string()) || depth >= kMaxDepth) continue;
    if (it->is_directory(no) && !it->is_symlink(no)) Walk(root, path, depth + 1, take);
  }
}

// Shows `take` every file at or below `paths`, in order, with its name and its status; with `folders`, these
// too.
template <typename Take>
void ForEachFile(const std::vector<std::string>& paths, bool folders, const Take& take) {
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
    Walk(path, path, 0, [&](const fs::path& file, const std::string&) {
      files.push_back(file);
      return false;
    });
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) show(file, file.lexically_relative(path).string());
  }
}

constexpr uint64_t kFirstHash = 14695981039346656037ull;

// Over all that can be seen from outside. Moves with whatever is done to a file, and with a folder that
// others are put in the place of; so if it is the same before and after, what was read in between was this.
std::string StateOf(const std::vector<std::string>& paths) {
  uint64_t hash = kFirstHash;
  ForEachFile(paths, /*folders=*/true, [&](const fs::path&, const std::string& name, const struct stat& st) {
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
std::string Signature(const std::vector<std::string>& paths, const Pipeline& pipeline) {
  uint64_t hash = kFirstHash;
  ForEachFile(paths, /*folders=*/false,
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

std::vector<std::string> Canonical(const std::vector<std::string>& roots) {
  std::vector<std::string> out;
  for (const std::string& root : roots) {
    std::error_code ec;
    fs::path path = fs::canonical(root, ec);
    if (!ec) out.push_back(path.string());
  }
  return out;
}

// The path of `name` below `root`, or empty when it is not there or leads out of the root.
fs::path Below(const std::string& root, absl::string_view name) {
  std::error_code ec;
  const fs::path path = fs::canonical(fs::path(root) / std::string(name), ec);
  if (ec) return {};
  const fs::path relative = path.lexically_relative(root);
  if (relative.empty() || *relative.begin() == "..") return {};
  return path;
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
std::optional<File> FindFile(const std::vector<std::string>& roots, absl::string_view kind,
                             const std::string& name) {
  if (!IsValidName(name)) return std::nullopt;
  std::error_code ec;
  for (const std::string& root : roots) {
    const fs::path path = Below(root, absl::StrCat(name, kWeightFile));
    if (path.empty() || !fs::is_regular_file(path, ec)) continue;
    return File{name, IdOf(kind, name, WeightFiles::FingerprintAt(path.string())),
                static_cast<int64_t>(fs::file_size(path, ec)), path.string()};
  }
  return std::nullopt;
}

// Names of all .safetensors files below the roots, sorted; not all of them need be found.
std::vector<std::string> FileNames(const std::vector<std::string>& roots) {
  std::set<std::string> names;
  for (const std::string& root : roots) {
    Walk(root, root, 0, [&](const fs::path&, const std::string& relative) {
      const std::string name(absl::StripSuffix(relative, kWeightFile));
      if (name.size() < relative.size() && IsValidName(name)) names.insert(name);
      return false;
    });
  }
  return {names.begin(), names.end()};
}

template <typename File>
std::vector<File> AllFiles(const std::vector<std::string>& roots, absl::string_view kind) {
  std::vector<File> files;
  for (const std::string& name : FileNames(roots)) {
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
  const EmbeddingFile whole{
      lora, IdOf(kEmbedding, lora, files->fingerprint()), files->tensor_bytes(), "", "", files};
  for (const EmbeddingTensors& tensors : BundledEmbeddings(*files)) {
    embeddings.push_back(OfToken(whole, tensors.name));
  }
  return embeddings;
}

absl::Status EmbeddingNotFound(const std::string& name) {
  return MakeError(
      absl::StatusCode::kNotFound, "EMBEDDING_NOT_FOUND",
      absl::StrCat("no embedding named '", name.substr(0, 128), "'; ListEmbeddings shows what there is"),
      {{"resource_type", "embedding"}, {"resource_name", name.substr(0, 128)}, {"field", "name"}});
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

Catalog::Catalog(std::vector<std::string> model_roots, std::vector<std::string> lora_roots,
                 std::vector<std::string> embedding_roots)
    : model_roots_(Canonical(model_roots)),
      lora_roots_(Canonical(lora_roots)),
      embedding_roots_(Canonical(embedding_roots)) {}

std::vector<std::string> Catalog::ModelNames() const {
  std::set<std::string> names;
  for (const std::string& root : model_roots_) {
    Walk(root, root, 0, [&](const fs::path& path, const std::string& relative) {
      std::error_code ec;
      if (fs::is_regular_file(path / kIndexFile, ec)) {
        if (IsValidName(relative)) names.insert(relative);
        return true;  // nothing below a model is another model
      }
      if (absl::EndsWith(relative, kWeightFile)) {
        fs::path sidecar = path;
        sidecar.replace_extension(".json");
        const std::string name(absl::StripSuffix(relative, kWeightFile));
        if (fs::is_regular_file(sidecar, ec) && IsValidName(name)) names.insert(name);
      }
      return false;
    });
  }
  MutexLock lock(&mu_);
  for (const auto& [name, model] : added_) names.insert(name);
  return {names.begin(), names.end()};
}

absl::StatusOr<Catalog::Found> Catalog::Find(const std::string& name) const {
  if (!IsValidName(name)) return ModelNotFound(name.substr(0, 128));
  std::error_code ec;
  for (const std::string& root : model_roots_) {
    Found found;
    found.files.name = name;
    if (fs::path folder = Below(root, name);
        !folder.empty() && fs::is_regular_file(folder / kIndexFile, ec)) {
      RETURN_IF_ERROR(CheckLinks(model_roots_, folder));
      found.files.folder = folder.string();
      found.source = folder.lexically_relative(root).string();
      found.paths = {folder.string()};
      found.state = StateOf(found.paths);
      return found;
    }
    fs::path file = Below(root, absl::StrCat(name, kWeightFile));
    if (file.empty() || !fs::is_regular_file(file, ec)) continue;
    fs::path sidecar = Below(root, absl::StrCat(name, ".json"));
    ASSIGN_OR_RETURN(const std::string base_name, ReadBase(sidecar));
    if (base_name.empty()) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
          absl::StrCat(
              "single-file model ", name, " needs a file ", name,
              ".json with {\"base\": \"MODEL\"}, naming the model whose text encoders and VAE it uses"),
          {{"model", name}});
    }
    fs::path base;
    for (const std::string& base_root : model_roots_) {
      if (base.empty() && IsValidName(base_name)) base = Below(base_root, base_name);
    }
    if (base.empty() || !fs::is_regular_file(base / kIndexFile, ec)) {
      return WithPrefix(ModelNotFound(std::string(CutUtf8(base_name, 128))), absl::StrCat("base of ", name, ": "));
    }
    RETURN_IF_ERROR(CheckLinks(model_roots_, base));
    found.files.file = file.string();
    found.files.base_folder = base.string();
    found.source = file.lexically_relative(root).string();
    found.paths = {file.string(), sidecar.string(), base.string()};
    found.state = StateOf(found.paths);
    return found;
  }
  return ModelNotFound(name);
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

absl::StatusOr<std::shared_ptr<const OpenModel>> Catalog::Open(const std::string& name, const Found& found) {
  for (const Family* family : AllFamilies()) {
    if (!family->Detect(found.files)) continue;
    auto pipeline = family->Open(found.files);
    if (!pipeline.ok()) return WithPrefix(pipeline.status(), absl::StrCat("model ", name, ": "));
    const std::string id = absl::StrCat(name, "@", Signature(found.paths, **pipeline));
    return OpenModel::Make(name, id, found.source, *std::move(pipeline));
  }
  std::vector<std::string> known;
  for (const Family* family : AllFamilies()) known.emplace_back(family->name());
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
      absl::StrCat("model ", name, " is of no family that is known here (", absl::StrJoin(known, ", "), ")"),
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
  if (!file) return LoraNotFound(name.substr(0, 128));
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
