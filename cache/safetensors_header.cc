#include "cache/safetensors_header.h"

#include <algorithm>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cache/error.h"
#include "nlohmann/json.hpp"

namespace latentd {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTensors = 200'000;
constexpr size_t kMaxDims = 16;
constexpr size_t kMaxNameBytes = 1024;
constexpr int kMaxDepth = 4;  // object → tensor → array → number

absl::Status Corrupt(absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                   absl::StrCat("not a valid safetensors file: ", what));
}

absl::Status CorruptTensor(absl::string_view name, absl::string_view what) {
  const std::string printable = absl::CHexEscape(name.substr(0, 200));
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                   absl::StrCat("not a valid safetensors file: tensor '", printable, "': ", what),
                   {{"tensor", printable}});
}

struct DTypeRow {
  absl::string_view name;
  DType dtype;
  int64_t size;
};
constexpr DTypeRow kDTypes[] = {
    {"F64", DType::kF64, 8},   {"F32", DType::kF32, 4},        {"F16", DType::kF16, 2},
    {"BF16", DType::kBF16, 2}, {"F8_E4M3", DType::kF8E4M3, 1}, {"F8_E5M2", DType::kF8E5M2, 1},
    {"I64", DType::kI64, 8},   {"I32", DType::kI32, 4},        {"I16", DType::kI16, 2},
    {"I8", DType::kI8, 1},     {"U8", DType::kU8, 1},          {"BOOL", DType::kBool, 1},
};

// Looks at a header before anything is built of it: depth, keys that appear twice in one object, how many
// there are. (A callback of the parser that builds could do the same, but that one searches the whole object
// at the end of every object in it.)
class Inspector : public nlohmann::json_sax<Json> {
 public:
  const std::string& problem() const { return problem_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return Fail("header is no JSON object"); }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return Deeper();
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override { return Deeper(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& key) override {
    if (keys_.size() == 1 && keys_.back().size() > kMaxTensors) return Fail("too many tensors");
    if (keys_.back().insert(key).second) return true;
    return Fail(
        absl::StrCat("name '", absl::CHexEscape(absl::string_view(key).substr(0, 200)), "' appears twice"));
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return Fail("header is no JSON object");
  }

 private:
  bool Fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool Deeper() { return ++depth_ <= kMaxDepth || Fail("header nests too deeply"); }

  std::vector<absl::flat_hash_set<std::string>> keys_;  // of the objects that are open
  int depth_ = 0;
  std::string problem_;
};

absl::StatusOr<Json> ParseBounded(absl::string_view text) {
  Inspector inspector;
  if (!Json::sax_parse(text.begin(), text.end(), &inspector)) return Corrupt(inspector.problem());
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) return Corrupt("header is no JSON object");
  return json;
}

// A JSON number as a non-negative integer.
bool AsSize(const Json& value, int64_t& out) {
  if (!value.is_number_unsigned()) return false;
  const uint64_t n = value.get<uint64_t>();
  if (n > static_cast<uint64_t>(INT64_MAX)) return false;
  out = static_cast<int64_t>(n);
  return true;
}

absl::StatusOr<TensorInfo> ParseTensor(const std::string& name, const Json& value, int64_t data_start,
                                       int64_t data_bytes) {
  if (name.empty() || name.size() > kMaxNameBytes || name.find('\0') != std::string::npos) {
    return CorruptTensor(name, "name is empty, too long or holds a NUL");
  }
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    return CorruptTensor(name, "needs dtype, shape and data_offsets");
  }
  TensorInfo info;
  info.name = name;
  const Json& dtype = value["dtype"];
  const auto* row =
      dtype.is_string()
          ? std::find_if(std::begin(kDTypes), std::end(kDTypes),
                         [&](const DTypeRow& r) { return r.name == dtype.get_ref<const std::string&>(); })
          : std::end(kDTypes);
  if (row == std::end(kDTypes)) return CorruptTensor(name, "unknown dtype");
  info.dtype = row->dtype;

  const Json& shape = value["shape"];
  if (!shape.is_array() || shape.size() > kMaxDims)
    return CorruptTensor(name, "shape is no list of at most 16 sizes");
  int64_t bytes = row->size;
  for (const Json& dim : shape) {
    int64_t d = 0;
    if (!AsSize(dim, d)) return CorruptTensor(name, "a size is negative or no integer");
    if (__builtin_mul_overflow(bytes, d, &bytes)) return CorruptTensor(name, "shape overflows");
    info.shape.push_back(d);
  }
  const Json& offsets = value["data_offsets"];
  int64_t begin = 0;
  int64_t end = 0;
  if (!offsets.is_array() || offsets.size() != 2 || !AsSize(offsets[0], begin) || !AsSize(offsets[1], end)) {
    return CorruptTensor(name, "data_offsets is no pair of offsets");
  }
  if (end < begin) return CorruptTensor(name, "bytes end before they begin");
  if (end > data_bytes) {
    return CorruptTensor(
        name, absl::StrCat("file is cut short: these bytes end ", end - data_bytes, " bytes behind its end"));
  }
  if (end - begin != bytes) {
    return CorruptTensor(name, absl::StrCat("has ", end - begin, " bytes where its shape takes ", bytes));
  }
  info.offset = data_start + begin;
  info.bytes = bytes;
  return info;
}

}  // namespace

int64_t ElementSize(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.size;
  }
  return 0;
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
  ASSIGN_OR_RETURN(Json json, ParseBounded(start.substr(8, length)));

  SafetensorsHeader header;
  const int64_t data_start = 8 + static_cast<int64_t>(length);
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return Corrupt("__metadata__ is no object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return Corrupt("__metadata__ holds something else than text");
        header.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    ASSIGN_OR_RETURN(TensorInfo info, ParseTensor(name, value, data_start, file_bytes - data_start));
    header.tensors.push_back(std::move(info));
  }
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
