#include "tests/stress/weight_editor.h"

#include <filesystem>
#include <fstream>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/weights/weight_files.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

const char* DTypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kFloat8_e4m3fn:
      return "F8_E4M3";
    default:
      ADD_FAILURE() << "no name for " << tensor.scalar_type();
      return "";
  }
}

}  // namespace

NamedTensors ReadTensors(const std::string& path) {
  NamedTensors tensors;
  const auto files = WeightFiles::Open(path);
  EXPECT_TRUE(files.ok()) << files.status();
  if (!files.ok()) return tensors;
  for (const auto& [name, entry] : (*files)->tensors()) {
    const auto tensor = (*files)->Read(name);
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    if (tensor.ok()) tensors[name] = tensor->clone();
  }
  return tensors;
}

void WriteTensors(const std::string& path, const NamedTensors& tensors) {
  std::string header = "{", data;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor flat = tensor.contiguous();
    const size_t begin = data.size();
    data.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
    absl::StrAppend(&header, header.size() > 1 ? "," : "", "\"", name, R"(":{"dtype":")", DTypeOf(tensor),
                    R"(","shape":[)", absl::StrJoin(tensor.sizes(), ","), R"(],"data_offsets":[)", begin, ",",
                    data.size(), "]}");
  }
  header += "}";
  while (header.size() % 8 != 0) header += ' ';
  const uint64_t length = header.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << header << data;
}

void EditTensors(const std::string& path, const std::function<void(NamedTensors&)>& edit) {
  NamedTensors tensors = ReadTensors(path);
  edit(tensors);
  const std::string fresh = path + ".new";
  WriteTensors(fresh, tensors);
  std::filesystem::rename(fresh, path);
}

}  // namespace latentd
