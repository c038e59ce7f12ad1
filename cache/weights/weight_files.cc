#include "cache/weights/weight_files.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"
#include "cache/base/text_file.h"
#include "cache/weights/file_kind.h"
#include "cache/weights/host_tensor.h"
#include "cache/weights/mapped_file.h"
#include "cache/weights/shard_index.h"
#include "cache/weights/weight_folder.h"
#include "cache/weights/weight_sources.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

// Nothing for those that nothing here reads.
std::optional<at::ScalarType> ToScalarType(DType dtype) {
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
    default:
      return std::nullopt;
  }
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

// Where links lead. A hub's cache is made of links, and whoever serves a folder has looked where they lead
// to; MappedFile takes none, so that none is put in a file's place after that look.
std::string Canonical(const std::string& path) {
  std::error_code error;
  const std::filesystem::path canonical = std::filesystem::canonical(path, error);
  return error ? path : canonical.string();
}

}  // namespace

absl::Status WeightFiles::AddFile(const std::string& path) {
  const std::string base = BaseName(path);
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kOpen, base));
  ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> mapping, MappedFile::Open(Canonical(path)));
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
    ASSIGN_OR_RETURN(file, PickWeightFile(path));
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

std::string WeightFiles::label() const { return files_.empty() ? "" : ShortPath(files_[0].path); }

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
  const std::optional<at::ScalarType> type = ToScalarType(info.dtype);
  if (!type) {
    return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_DTYPE",
                     absl::StrCat("tensor ", info.name, " is ", DTypeName(info.dtype), ", which is not read"),
                     {{"tensor", info.name}});
  }
  auto options = at::TensorOptions().dtype(*type);
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

namespace {

int64_t Sum(const std::map<DType, int64_t>& by_type) {
  int64_t sum = 0;
  for (const auto& [type, bytes] : by_type) sum += bytes;
  return sum;
}

}  // namespace

std::map<DType, int64_t> WeightBytesByType(const WeightFiles& files, const ComponentLayout& layout,
                                           const KeyMap* key_map, absl::string_view prefix) {
  return BytesByType(files, FindWeightSources(files, layout, key_map, prefix));
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

absl::Status CheckWeights(const WeightFiles& files, const ComponentLayout& layout, const KeyMap* key_map,
                          absl::string_view prefix) {
  return CheckWeightSources(files, layout, FindWeightSources(files, layout, key_map, prefix), prefix);
}

std::vector<std::string> TensorsOf(const WeightFiles& files, const ComponentLayout& layout,
                                   const KeyMap* key_map, absl::string_view prefix) {
  const WeightSources sources = FindWeightSources(files, layout, key_map, prefix);
  std::vector<std::string> names = sources.known;
  names.insert(names.end(), sources.marks.begin(), sources.marks.end());
  for (const auto& [module, tensor] : sources.scales) names.push_back(tensor);
  for (const auto& of_slot : sources.by_slot) {
    for (const WeightSource& source : of_slot) names.push_back(source.tensor);
  }
  return names;
}

absl::StatusOr<std::shared_ptr<const WeightSet>> LoadWeights(std::shared_ptr<const WeightFiles> files,
                                                             std::shared_ptr<const ComponentLayout> layout,
                                                             const KeyMap* key_map, absl::string_view prefix,
                                                             const LoadContext& context) {
  RETURN_IF_ERROR(files->Check());
  files->TakeSamples();
  const auto& decls = layout->tensors();
  const WeightSources sources = FindWeightSources(*files, *layout, key_map, prefix);
  RETURN_IF_ERROR(CheckWeightSources(*files, *layout, sources, prefix));
  std::map<std::string, double> scales;  // by module
  for (const auto& [module, tensor] : sources.scales) {
    ASSIGN_OR_RETURN(scales[module], ReadScale(*files, tensor));
  }

  std::vector<Weight> weights(decls.size());
  const int64_t total = Sum(BytesByType(*files, sources));
  int64_t done = 0;
  for (size_t i = 0; i < decls.size(); ++i) {
    if (context.cancelled()) return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "load cancelled");
    const WeightSource& from = sources.by_slot[i].front();
    ASSIGN_OR_RETURN(at::Tensor tensor, files->Alias(from.tensor));
    if (tensor.scalar_type() == at::kDouble) tensor = tensor.to(at::kFloat);
    const at::ScalarType type = tensor.scalar_type();
    if (at::isFloat8Type(type)) {
      weights[i].form = StorageForm::kFloat8;
      const auto scale = scales.find(std::string(absl::StripSuffix(from.tensor, ".weight")));
      if (scale != scales.end()) weights[i].scale = scale->second;
      tensor = tensor.view(at::kByte);  // what follows moves bytes; few operators know the type
    }
    if (from.transform == KeyTransform::kSqueezeConv && tensor.dim() == 4) tensor = tensor.flatten(1);
    if (from.transform == KeyTransform::kTranspose && tensor.dim() == 2) tensor = tensor.t().contiguous();
    if (from.rows >= 0 && tensor.dim() >= 1) tensor = tensor.narrow(0, from.row_begin, from.rows);
    if (from.transform == KeyTransform::kSwapHalves) {
      auto halves = tensor.chunk(2, 0);
      tensor = at::cat({halves[1], halves[0]}, 0);
    }
    if (tensor.sizes() != at::IntArrayRef(decls[i].shape))
      tensor = tensor.view(decls[i].shape);  // 1×1 as a matrix
    done += static_cast<int64_t>(tensor.nbytes());
    context.Progress(std::min(done, total), total);  // tied ones come twice
    weights[i].data = at::isFloat8Type(type) ? tensor.view(type) : std::move(tensor);
  }
  RETURN_IF_ERROR(files->Check());
  return std::make_shared<const WeightSet>(std::move(layout), std::move(weights),
                                           [files] { return files->Check(); });
}

}  // namespace latentd
