#include "cache/weights/safetensors_header.h"

#include <algorithm>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTensors = 200'000;
constexpr size_t kMaxDims = 16;
constexpr size_t kMaxNameBytes = 1024;
constexpr int kMaxDepth = 4;  // object → tensor → array, and one for what is skipped
constexpr char kMetadata[] = "__metadata__";
constexpr size_t kMaxEntries = 4096;        // of one tensor, or of the metadata
constexpr size_t kMaxMetadataBytes = 4096;  // of a text that is kept, and told
constexpr size_t kMaxShown = 200;

absl::Status Corrupt(absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                   absl::StrCat("not a valid safetensors file: ", what));
}

absl::Status CorruptTensor(absl::string_view name, absl::string_view what) {
  const std::string printable = absl::CHexEscape(CutUtf8(name, kMaxShown));
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                   absl::StrCat("not a valid safetensors file: tensor '", printable, "': ", what),
                   {{"tensor", printable}});
}

struct DTypeRow {
  absl::string_view name;
  DType dtype;
  int64_t bits;
};
// All that the safetensors library 0.8 has.
constexpr DTypeRow kDTypes[] = {
    {"F64", DType::kF64, 64},       {"F32", DType::kF32, 32},       {"F16", DType::kF16, 16},
    {"BF16", DType::kBF16, 16},     {"F8_E4M3", DType::kF8E4M3, 8}, {"F8_E5M2", DType::kF8E5M2, 8},
    {"I64", DType::kI64, 64},       {"I32", DType::kI32, 32},       {"I16", DType::kI16, 16},
    {"I8", DType::kI8, 8},          {"U8", DType::kU8, 8},          {"BOOL", DType::kBool, 8},
    {"U64", DType::kU64, 64},       {"U32", DType::kU32, 32},       {"U16", DType::kU16, 16},
    {"C64", DType::kC64, 64},       {"F8_E8M0", DType::kF8E8M0, 8}, {"F6_E3M2", DType::kF6E3M2, 6},
    {"F6_E2M3", DType::kF6E2M3, 6}, {"F4", DType::kF4, 4},
};

// Texts that say how the tensors are to be read, and name each of them.
constexpr absl::string_view kKeptWhole[] = {"lora_adapter_metadata", "_quantization_metadata"};
constexpr size_t kMaxWholeBytes = 16 << 20;

size_t MaxBytes(absl::string_view key) {
  const bool whole = std::find(std::begin(kKeptWhole), std::end(kKeptWhole), key) != std::end(kKeptWhole);
  return whole ? kMaxWholeBytes : kMaxMetadataBytes;
}

// Builds a header while it is parsed; nothing else is kept of the JSON. Where it stands is told by how deep
// it is:
//
//   depth 1   names of tensors, and __metadata__
//   depth 2   a tensor's dtype, shape and data_offsets, or metadata's keys and texts
//   depth 3   the numbers of shape and data_offsets
//
// What else a tensor has is skipped.
class HeaderBuilder : public nlohmann::json_sax<Json> {
 public:
  HeaderBuilder(int64_t data_start, int64_t data_bytes, SafetensorsHeader& header)
      : data_start_(data_start), data_bytes_(data_bytes), header_(header) {}

  const absl::Status& problem() const { return problem_; }

  bool null() override { return Other(); }
  bool boolean(bool) override { return Other(); }
  bool number_integer(number_integer_t) override { return Other(); }
  bool number_float(number_float_t, const string_t&) override { return Other(); }
  bool number_unsigned(number_unsigned_t value) override {
    if (in_metadata_) return Other();
    if (depth_ != 3 || field_ == Field::kOther) return Scalar();
    if (value > static_cast<uint64_t>(INT64_MAX)) return Other();
    if (field_ == Field::kShape && shape_.size() == kMaxDims) return BadShape();
    if (field_ == Field::kOffsets && offsets_.size() == 2) return BadOffsets();
    (field_ == Field::kShape ? shape_ : offsets_).push_back(static_cast<int64_t>(value));
    return true;
  }
  bool string(string_t& text) override {
    if (in_metadata_) {
      if (depth_ != 2) return BadMetadata();
      header_.metadata[key_] = std::string(CutUtf8(text, MaxBytes(key_)));
      return true;
    }
    if (depth_ != 2 || field_ != Field::kDtype) return Other();
    const auto* row = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                   [&](const DTypeRow& r) { return r.name == text; });
    if (row == std::end(kDTypes)) return FailTensor("unknown dtype");
    dtype_ = row;
    return true;
  }
  bool binary(binary_t&) override { return NoObject(); }

  bool start_object(std::size_t) override {
    if (depth_ == 1) {
      keys_.clear();
      dtype_ = nullptr;
      has_shape_ = has_offsets_ = false;
    } else if (depth_ > 1 && !Other()) {
      return false;
    }
    if (in_metadata_ && depth_ > 1) return BadMetadata();
    return Deeper();
  }
  bool end_object() override {
    --depth_;
    if (depth_ != 1) return true;
    if (!in_metadata_) return AddTensor();
    in_metadata_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ == 0) return NoObject();
    if (in_metadata_) return BadMetadata();
    if (depth_ == 1) return FailTensor(kNeeds);
    if (depth_ == 2 && field_ == Field::kDtype) return FailTensor("unknown dtype");
    if (depth_ == 2 && field_ == Field::kShape) {
      shape_.clear();
      has_shape_ = true;
    }
    if (depth_ == 2 && field_ == Field::kOffsets) {
      offsets_.clear();
      has_offsets_ = true;
    }
    if (depth_ == 3 && !Other()) return false;
    return Deeper();
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& key) override {
    if (depth_ == 1) {
      if (names_.size() > kMaxTensors) return Fail("too many tensors");
      name_ = key;
      in_metadata_ = name_ == kMetadata;
      field_ = Field::kOther;
      return Fresh(names_, key);
    }
    if (depth_ != 2) return true;  // of something that is skipped
    field_ = Field::kOther;
    if (in_metadata_) {
      key_ = std::string(CutUtf8(key, kMaxNameBytes));
    } else if (key == "dtype") {
      field_ = Field::kDtype;
    } else if (key == "shape") {
      field_ = Field::kShape;
    } else if (key == "data_offsets") {
      field_ = Field::kOffsets;
    }
    return keys_.size() < kMaxEntries ? Fresh(keys_, key) : Fail("an object has too many entries");
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return NoObject();
  }

 private:
  enum class Field { kOther, kDtype, kShape, kOffsets };
  static constexpr char kNeeds[] = "needs dtype, shape and data_offsets";

  bool Fail(absl::string_view what) {
    problem_ = Corrupt(what);
    return false;
  }
  bool FailTensor(absl::string_view what) {
    problem_ = CorruptTensor(name_, what);
    return false;
  }
  bool NoObject() { return Fail("header is no JSON object"); }
  bool BadMetadata() { return Fail("__metadata__ is no object of texts"); }
  bool BadShape() { return FailTensor("shape is no list of at most 16 sizes"); }
  bool BadOffsets() { return FailTensor("data_offsets is no pair of offsets"); }
  bool Deeper() { return ++depth_ <= kMaxDepth || Fail("header nests too deeply"); }
  bool Fresh(absl::flat_hash_set<std::string>& keys, const std::string& key) {
    if (keys.insert(key).second) return true;
    return Fail(absl::StrCat("name '", absl::CHexEscape(CutUtf8(key, kMaxShown)), "' appears twice"));
  }
  // A value where a tensor, or one of its fields, cannot have one of that kind.
  bool Other() {
    if (depth_ == 0) return NoObject();
    if (in_metadata_) return BadMetadata();
    if (depth_ == 1) return FailTensor(kNeeds);
    if (field_ == Field::kDtype) return FailTensor("unknown dtype");
    if (field_ == Field::kShape)
      return depth_ == 2 ? BadShape() : FailTensor("a size is negative or no integer");
    return field_ != Field::kOffsets || BadOffsets();
  }
  bool Scalar() { return depth_ == 3 || Other(); }

  bool AddTensor() {
    if (name_.empty() || name_.size() > kMaxNameBytes || name_.find('\0') != std::string::npos) {
      return FailTensor("name is empty, too long or holds a NUL");
    }
    if (dtype_ == nullptr || !has_shape_ || !has_offsets_) return FailTensor(kNeeds);
    // Whoever computes strides multiplies all sizes but for the zeros, so those must not overflow either.
    int64_t bits = dtype_->bits;
    bool empty = false;
    for (const int64_t size : shape_) {
      empty = empty || size == 0;
      if (size > 0 && __builtin_mul_overflow(bits, size, &bits)) return FailTensor("shape overflows");
    }
    if (!empty && bits % 8 != 0) return FailTensor("ends inside of a byte");
    const int64_t bytes = empty ? 0 : bits / 8;
    if (offsets_.size() != 2) return BadOffsets();
    const int64_t begin = offsets_[0], end = offsets_[1];
    if (end < begin) return FailTensor("bytes end before they begin");
    if (end > data_bytes_) {
      return FailTensor(
          absl::StrCat("file is cut short: these bytes end ", end - data_bytes_, " bytes behind its end"));
    }
    if (end - begin != bytes) {
      return FailTensor(absl::StrCat("has ", end - begin, " bytes where its shape takes ", bytes));
    }
    header_.tensors.push_back({name_, dtype_->dtype, shape_, data_start_ + begin, bytes});
    return true;
  }

  const int64_t data_start_, data_bytes_;
  SafetensorsHeader& header_;
  absl::Status problem_ = Corrupt("header is no JSON object");
  int depth_ = 0;
  absl::flat_hash_set<std::string> names_,
      keys_;  // of the outermost object, and of the one in it that is open
  // The tensor, or the metadata, that is open.
  std::string name_, key_;
  bool in_metadata_ = false;
  Field field_ = Field::kOther;
  const DTypeRow* dtype_ = nullptr;
  std::vector<int64_t> shape_, offsets_;
  bool has_shape_ = false, has_offsets_ = false;
};

}  // namespace

int64_t ElementSize(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.bits / 8;
  }
  return 0;
}

bool IsFloatingPoint(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return true;
    default:
      return false;
  }
}

absl::string_view DTypeName(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "?";
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view start, int64_t file_bytes) {
  if (start.size() < 8 || file_bytes < 8) return Corrupt("shorter than its 8-byte header length");
  uint64_t length = 0;
  std::memcpy(&length, start.data(), 8);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeader)) return Corrupt("header length is beyond 100 MB");
  if (length > static_cast<uint64_t>(file_bytes - 8))
    return Corrupt("file is cut short: header lies outside of it");
  if (start.size() - 8 < length) return Corrupt("header was not read whole");

  SafetensorsHeader header;
  const int64_t data_start = 8 + static_cast<int64_t>(length);
  HeaderBuilder builder(data_start, file_bytes - data_start, header);
  const absl::string_view json = start.substr(8, length);
  if (!Json::sax_parse(json.begin(), json.end(), &builder)) return builder.problem();
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  int64_t at = data_start;
  for (const TensorInfo& info : header.tensors) {
    if (info.offset != at) {
      return CorruptTensor(
          info.name, info.offset < at ? "bytes overlap another tensor's" : "a gap lies before its bytes");
    }
    at += info.bytes;
  }
  if (at != file_bytes) {
    return Corrupt(at < file_bytes ? "bytes after the last tensor" : "file is cut short");
  }
  return header;
}

}  // namespace latentd
