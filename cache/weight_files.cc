#include "cache/weight_files.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/error.h"
#include "cache/fault_injection.h"
#include "cache/file_kind.h"
#include "cache/host_tensor.h"
#include "cache/mapped_file.h"
#include "cache/shard_index.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

at::ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return at::kDouble;
    case DType::kF32:
      return at::kFloat;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF8E4M3:
      return at::kFloat8_e4m3fn;
    case DType::kF8E5M2:
      return at::kFloat8_e5m2;
    case DType::kI64:
      return at::kLong;
    case DType::kI32:
      return at::kInt;
    case DType::kI16:
      return at::kShort;
    case DType::kI8:
      return at::kChar;
    case DType::kU8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
  }
  return at::kFloat;
}

std::string BaseName(const std::string& path) { return fs::path(path).filename().string(); }

// FNV-1a, 64 bits: http://www.isthe.com/chongo/tech/comp/fnv/
uint64_t Fnv1a(absl::string_view text, uint64_t hash = 14695981039346656037ull) {
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

std::string Digest(absl::string_view text) { return absl::StrCat(absl::Hex(Fnv1a(text), absl::kZeroPad16)); }

// An aligned copy of mapped bytes; undefined without memory. Source pages of large ones are let go, so that a
// load peaks at its size and one tensor.
at::Tensor AlignedCopy(const uint8_t* bytes, const TensorInfo& info, const at::TensorOptions& options) {
  constexpr int64_t kLarge = 4 << 20;
  at::Tensor copy = EmptyHostTensor(info.shape, options);
  if (!copy.defined()) return copy;
  std::memcpy(copy.data_ptr(), bytes, static_cast<size_t>(info.bytes));
  if (info.bytes < kLarge) return copy;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(bytes) + page - 1) / page * page;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(bytes) + static_cast<uintptr_t>(info.bytes)) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  return copy;
}

absl::StatusOr<std::string> PickFile(const fs::path& folder) {
  std::error_code ec;
  std::vector<std::string> indexes;
  std::vector<std::string> files;
  for (auto it = fs::directory_iterator(folder, ec); !ec && it != fs::directory_iterator();
       it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (absl::EndsWith(name, ".safetensors.index.json")) indexes.push_back(name);
    if (absl::EndsWith(name, ".safetensors")) files.push_back(name);
  }
  auto pick = [](std::vector<std::string>& names) {
    // Plain names before variants ("model.safetensors" before "model.fp16.safetensors").
    std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
      return std::make_pair(a.size(), a) < std::make_pair(b.size(), b);
    });
    return names.front();
  };
  // A whole file wins over shards: then the index belongs to a variant.
  std::vector<std::string> whole;
  for (const std::string& f : files) {
    if (f.find("-of-") == std::string::npos) whole.push_back(f);
  }
  if (!whole.empty()) return (folder / pick(whole)).string();
  if (!indexes.empty()) return (folder / pick(indexes)).string();
  RETURN_IF_ERROR(CheckDescriptors());  // without one a folder cannot be read
  return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                   absl::StrCat("no .safetensors file in ", folder.filename().string()));
}

}  // namespace

absl::Status WeightFiles::AddFile(const std::string& path) {
  const std::string base = BaseName(path);
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kOpen, base));
  ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> mapping, MappedFile::Open(path));
  uint64_t length = 0;
  if (mapping->size() >= 8) std::memcpy(&length, mapping->data(), 8);
  const auto take = static_cast<size_t>(
      std::min<uint64_t>(static_cast<uint64_t>(mapping->size()),
                         8 + std::min<uint64_t>(length, static_cast<uint64_t>(kMaxSafetensorsHeader))));
  auto header = ParseSafetensorsHeader(
      absl::string_view(reinterpret_cast<const char*>(mapping->data()), take), mapping->size());
  RETURN_IF_ERROR(mapping->Check());
  if (!header.ok()) {
    // Asked only now: the header length of a good file can read like the start of something else.
    RETURN_IF_ERROR(
        CheckFileKind(base, absl::string_view(reinterpret_cast<const char*>(mapping->data()), take)));
    return WithPrefix(header.status(), absl::StrCat(base, ": "));
  }
  files_.push_back({path, std::move(header->tensors), mapping});
  metadata_.merge(header->metadata);
  return absl::OkStatus();
}

void WeightFiles::Finish() {
  std::vector<std::string> identities;
  for (size_t f = 0; f < files_.size(); ++f) {
    identities.push_back(files_[f].mapping->identity());
    for (const TensorInfo& info : files_[f].infos) {
      tensors_[info.name] = {&info, static_cast<int>(f)};
      tensor_bytes_ += info.bytes;
    }
  }
  fingerprint_ = Digest(absl::StrJoin(identities, "|"));
}

std::string WeightFiles::FingerprintAt(const std::string& path) {
  return Digest(MappedFile::IdentityAt(path));
}

absl::StatusOr<std::shared_ptr<const WeightFiles>> WeightFiles::Open(const std::string& path) {
  std::string file = path;
  std::error_code ec;
  if (fs::is_directory(path, ec)) {
    ASSIGN_OR_RETURN(file, PickFile(path));
  }
  auto files = std::make_shared<WeightFiles>();
  if (absl::EndsWith(file, ".json")) {
    ASSIGN_OR_RETURN(std::vector<std::string> shards, ReadShardIndex(file));
    files->files_.reserve(shards.size());
    for (const std::string& shard : shards) {
      RETURN_IF_ERROR(files->AddFile((fs::path(file).parent_path() / shard).string()));
    }
  } else {
    RETURN_IF_ERROR(files->AddFile(file));
  }
  files->Finish();
  return files;
}

absl::Status WeightFiles::Check() const {
  for (const File& file : files_) {
    RETURN_IF_ERROR(file.mapping->Check());
  }
  return absl::OkStatus();
}

bool WeightFiles::at_its_place() const {
  return std::all_of(files_.begin(), files_.end(), [](const File& f) { return f.mapping->at_its_place(); });
}

void WeightFiles::TakeSamples() const {
  for (const File& file : files_) file.mapping->TakeSamples();
}

absl::StatusOr<at::Tensor> WeightFiles::Read(absl::string_view name, bool compute) const {
  const Entry& entry = tensors_.at(std::string(name));
  const File& file = files_[static_cast<size_t>(entry.file)];
  const TensorInfo& info = *entry.info;
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kRead, info.name));
  auto options = at::TensorOptions().dtype(ToScalarType(info.dtype));
  const uint8_t* bytes = file.mapping->data() + info.offset;
  if (info.bytes == 0) return at::empty(info.shape, options);
  const auto alignment = static_cast<uintptr_t>(compute ? kTensorAlignment : ElementSize(info.dtype));
  if (reinterpret_cast<uintptr_t>(bytes) % alignment == 0) {
    return at::from_blob(
        const_cast<uint8_t*>(bytes), info.shape, [mapping = file.mapping](void*) mutable { mapping.reset(); },
        options);
  }
  at::Tensor copy = AlignedCopy(bytes, info, options);
  if (!copy.defined()) {
    return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_MEMORY",
                     absl::StrCat("no memory for tensor ", info.name, " of ", info.bytes, " bytes"));
  }
  if (file.mapping->truncated()) RETURN_IF_ERROR(file.mapping->Check());
  return copy;
}

// ------------------------------------------------------------------------------------------- LoadWeights

namespace {

// Names that checkpoints carry and no network uses.
bool IsIgnored(absl::string_view name, const ComponentLayout& layout) {
  if (absl::EndsWith(name, ".position_ids") || absl::EndsWith(name, ".num_batches_tracked")) return true;
  if (name == "position_ids" || name == "logit_scale" || name == "spiece_model" || name == "scaled_fp8")
    return true;
  // T5 files name the tied embedding once or twice.
  return name == "encoder.embed_tokens.weight" && layout.Find("shared.weight");
}

struct Assigned {
  Slot slot;
  std::string source;
  int64_t row_begin = 0;
  int64_t rows = -1;  // -1: the whole tensor
  KeyTransform transform = KeyTransform::kNone;
};

// "a.b.weight" → {"a.b", ".weight"}; ".scale" is a weight by another name. Parameters that hang on no module
// of their own are taken as if they did: "a.in_proj_bias" → {"a.in_proj", ".bias"}, "b" → {"b", ".weight"}.
std::pair<absl::string_view, std::string> SplitSuffix(absl::string_view name) {
  if (absl::EndsWith(name, ".in_proj_weight")) return {absl::StripSuffix(name, "_weight"), ".weight"};
  if (absl::EndsWith(name, ".in_proj_bias")) return {absl::StripSuffix(name, "_bias"), ".bias"};
  const size_t dot = name.rfind('.');
  if (dot == absl::string_view::npos) return {name, ".weight"};
  std::string suffix(name.substr(dot));
  return {name.substr(0, dot), suffix == ".scale" ? ".weight" : suffix};
}

// A 1×1 convolution and a linear layer have the same numbers: [out, in, 1, 1] and [out, in].
bool DiffersByOnes(at::IntArrayRef a, at::IntArrayRef b) {
  if (a.size() > b.size()) std::swap(a, b);
  return a.size() == 2 && b.size() == 4 && b.slice(0, 2) == a && b[2] == 1 && b[3] == 1;
}

std::string Shape(at::IntArrayRef shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

// Scales of 8-bit weights, as ComfyUI writes them: "X.scale_weight" or "X.weight_scale" belongs to
// "X.weight". Sets `module` to X; empty for what is there for other programs' arithmetic.
bool IsScale(absl::string_view source, std::string* module) {
  module->clear();
  for (absl::string_view suffix : {".scale_weight", ".weight_scale"}) {
    if (!absl::EndsWith(source, suffix)) continue;
    *module = std::string(absl::StripSuffix(source, suffix));
    return true;
  }
  return absl::EndsWith(source, ".scale_input") || absl::EndsWith(source, ".input_scale") ||
         absl::EndsWith(source, "scaled_fp8");
}

absl::StatusOr<double> ReadScale(const WeightFiles& files, const std::string& source) {
  ASSIGN_OR_RETURN(const at::Tensor scale, files.Read(source));
  if (scale.numel() == 1 && at::isFloatingType(scale.scalar_type())) {
    const double value = scale.to(at::kDouble).item<double>();
    if (std::isfinite(value)) return value;
  }
  return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_DTYPE",
                   absl::StrCat("tensor ", source,
                                " is no finite number: weights with a scale per block or row are not read"),
                   {{"tensor", source}});
}

absl::Status Mismatch(absl::string_view what, const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 5);
  std::string sample = absl::StrJoin(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), ", ");
  return MakeError(absl::StatusCode::kFailedPrecondition, "WEIGHTS_MISMATCH",
                   absl::StrCat(names.size(), " ", what, ": ", sample, names.size() > shown ? ", …" : ""),
                   {{"count", absl::StrCat(names.size())}, {"sample", sample}});
}

absl::Status AddAssignments(absl::string_view source, absl::string_view name, const ComponentLayout& layout,
                            const KeyMap* key_map, std::vector<std::vector<Assigned>>& by_slot, bool& used) {
  used = true;
  if (Slot slot = layout.Find(name)) {
    by_slot[static_cast<size_t>(slot.index)].push_back({slot, std::string(source)});
    return absl::OkStatus();
  }
  if (name == "encoder.embed_tokens.weight") {
    if (Slot slot = layout.Find("shared.weight")) {
      by_slot[static_cast<size_t>(slot.index)].push_back({slot, std::string(source)});
      return absl::OkStatus();
    }
  }
  if (key_map != nullptr) {
    auto [module, suffix] = SplitSuffix(name);
    bool any = false;
    for (const KeyPart& part : key_map->Resolve(module, layout)) {
      if (Slot slot = layout.Find(part.canonical + suffix)) {
        any = true;
        by_slot[static_cast<size_t>(slot.index)].push_back(
            {slot, std::string(source), part.row_begin, part.rows, part.transform});
      }
    }
    if (any) return absl::OkStatus();
  }
  used = IsIgnored(name, layout);
  return absl::OkStatus();
}

// Where each weight of a layout comes from: by slot, the first one counts.
struct Sources {
  std::vector<std::vector<Assigned>> by_slot;
  std::vector<std::string> unused;
  std::map<std::string, std::string> scales;  // by module, the tensor that holds it
};

absl::StatusOr<Sources> FindSources(const WeightFiles& files, const ComponentLayout& layout,
                                    const KeyMap* key_map, absl::string_view prefix) {
  Sources sources;
  sources.by_slot.resize(layout.tensors().size());
  for (const auto& [source, entry] : files.tensors()) {
    absl::string_view name = source;
    if (!prefix.empty() && !absl::ConsumePrefix(&name, prefix)) continue;
    if (std::string module; IsScale(source, &module)) {
      if (!module.empty()) sources.scales[module] = source;
      continue;
    }
    bool used = false;
    RETURN_IF_ERROR(AddAssignments(source, name, layout, key_map, sources.by_slot, used));
    if (!used) sources.unused.push_back(source);
  }
  return sources;
}

// Bytes of a weight that comes from there.
int64_t BytesOf(const Assigned& from, const TensorInfo& info) {
  if (from.rows < 0 || info.shape.empty() || info.shape[0] <= 0) return info.bytes;
  return std::min(info.bytes, info.bytes / info.shape[0] * from.rows);
}

// Whether a weight lies where the file has it. What does not is a copy of its own.
bool IsAlias(const Assigned& from, const TensorInfo& info) {
  return info.offset % static_cast<int64_t>(ElementSize(info.dtype)) == 0 &&
         (from.transform == KeyTransform::kNone || from.transform == KeyTransform::kSqueezeConv);
}

std::map<DType, int64_t> BytesByType(const WeightFiles& files, const Sources& sources) {
  std::map<DType, int64_t> bytes;
  std::map<std::pair<int, int64_t>, int64_t> aliases;  // file and offset → bytes: tied weights are there once
  for (const std::vector<Assigned>& assigned : sources.by_slot) {
    if (assigned.empty()) continue;
    const Assigned& from = assigned.front();
    const WeightFiles::Entry& entry = files.tensors().at(from.source);
    const TensorInfo& info = *entry.info;
    const int64_t own = BytesOf(from, info);
    if (!IsAlias(from, info)) {
      bytes[info.dtype] += own;
      continue;
    }
    const int64_t row = from.rows > 0 ? own / from.rows : 0;
    int64_t& there = aliases[{entry.file, info.offset + row * from.row_begin}];
    bytes[info.dtype] += std::max<int64_t>(0, own - there);
    there = std::max(there, own);
  }
  return bytes;
}

int64_t Sum(const std::map<DType, int64_t>& by_type) {
  int64_t sum = 0;
  for (const auto& [type, bytes] : by_type) sum += bytes;
  return sum;
}

}  // namespace

std::map<DType, int64_t> WeightBytesByType(const WeightFiles& files, const ComponentLayout& layout,
                                           const KeyMap* key_map, absl::string_view prefix) {
  const auto sources = FindSources(files, layout, key_map, prefix);
  return sources.ok() ? BytesByType(files, *sources) : std::map<DType, int64_t>();
}

int64_t WeightBytes(const WeightFiles& files, const ComponentLayout& layout, const KeyMap* key_map,
                    absl::string_view prefix) {
  return Sum(WeightBytesByType(files, layout, key_map, prefix));
}

std::string WeightsFingerprint(const WeightFiles& files, const ComponentLayout& layout, const KeyMap* key_map,
                               absl::string_view prefix) {
  uint64_t hash = Fnv1a(absl::StrCat(files.fingerprint(), "|", prefix, "|"));
  for (const ComponentLayout::Block& block : layout.blocks()) {
    hash = Fnv1a(absl::StrCat(block.name, block.stays ? "!" : "", "|"), hash);
  }
  for (const TensorDecl& tensor : layout.tensors()) {
    hash =
        Fnv1a(absl::StrCat(tensor.name, "/", absl::StrJoin(tensor.shape, ","), "/", tensor.block, "|"), hash);
  }
  if (key_map != nullptr) hash = Fnv1a(key_map->ToString(), hash);
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

absl::StatusOr<std::shared_ptr<const WeightSet>> LoadWeights(std::shared_ptr<const WeightFiles> files,
                                                             std::shared_ptr<const ComponentLayout> layout,
                                                             const KeyMap* key_map, absl::string_view prefix,
                                                             const LoadContext& context) {
  RETURN_IF_ERROR(files->Check());
  files->TakeSamples();
  const auto& decls = layout->tensors();
  ASSIGN_OR_RETURN(Sources sources, FindSources(*files, *layout, key_map, prefix));
  const auto& by_slot = sources.by_slot;
  const std::vector<std::string>& unused = sources.unused;
  std::map<std::string, double> scales;  // by module
  for (const auto& [module, source] : sources.scales) {
    ASSIGN_OR_RETURN(scales[module], ReadScale(*files, source));
  }
  std::vector<std::string> missing;
  for (size_t i = 0; i < decls.size(); ++i) {
    if (by_slot[i].empty()) missing.push_back(decls[i].name);
  }
  if (!missing.empty()) return Mismatch("tensors are missing", missing);
  if (!unused.empty()) return Mismatch("tensors are not known to this architecture", unused);

  std::vector<Weight> weights(decls.size());
  const int64_t total = Sum(BytesByType(*files, sources));
  int64_t done = 0;
  for (size_t i = 0; i < decls.size(); ++i) {
    if (context.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
    const Assigned& from = by_slot[i].front();
    ASSIGN_OR_RETURN(at::Tensor tensor, files->Alias(from.source));
    if (!at::isFloatingType(tensor.scalar_type()) || tensor.scalar_type() == at::kDouble) {
      return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_DTYPE",
                       absl::StrCat("tensor ", from.source, " is ", at::toString(tensor.scalar_type()),
                                    "; weights are read in fp32, fp16, bf16 or fp8"),
                       {{"tensor", from.source}});
    }
    const at::ScalarType type = tensor.scalar_type();
    if (at::isFloat8Type(type)) {
      weights[i].form = StorageForm::kFloat8;
      const auto scale = scales.find(std::string(absl::StripSuffix(from.source, ".weight")));
      if (scale != scales.end()) weights[i].scale = scale->second;
      tensor = tensor.view(at::kByte);  // what follows moves bytes; few operators know the type
    }
    if (from.transform == KeyTransform::kSqueezeConv && tensor.dim() == 4) tensor = tensor.flatten(1);
    if (from.transform == KeyTransform::kTranspose && tensor.dim() == 2) tensor = tensor.t().contiguous();
    if (from.rows >= 0 && tensor.dim() >= 1) {
      if (from.row_begin + from.rows > tensor.size(0)) {
        return Mismatch("tensors have too few rows", {absl::StrCat(from.source, " ", Shape(tensor.sizes()))});
      }
      tensor = tensor.narrow(0, from.row_begin, from.rows);
    }
    if (from.transform == KeyTransform::kSwapHalves) {
      auto halves = tensor.chunk(2, 0);
      tensor = at::cat({halves[1], halves[0]}, 0);
    }
    if (DiffersByOnes(tensor.sizes(), decls[i].shape)) tensor = tensor.view(decls[i].shape);
    if (tensor.sizes() != at::IntArrayRef(decls[i].shape)) {
      return Mismatch("tensors have another shape",
                      {absl::StrCat(from.source, " ", Shape(tensor.sizes()), " where ", decls[i].name, " is ",
                                    Shape(decls[i].shape))});
    }
    done += static_cast<int64_t>(tensor.nbytes());
    context.Progress(std::min(done, total), total);  // tied ones come twice
    weights[i].data = at::isFloat8Type(type) ? tensor.view(type) : std::move(tensor);
  }
  RETURN_IF_ERROR(files->Check());
  return std::make_shared<const WeightSet>(std::move(layout), std::move(weights),
                                           [files] { return files->Check(); });
}

}  // namespace latentd
