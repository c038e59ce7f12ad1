// Weight files of a test's own: a model's with some tensors changed, and small LoRA files.
#ifndef LATENTD_TESTS_STRESS_WEIGHT_EDITOR_H_
#define LATENTD_TESTS_STRESS_WEIGHT_EDITOR_H_

#include <functional>
#include <map>
#include <string>

#include "ATen/core/Tensor.h"

namespace latentd {

using NamedTensors = std::map<std::string, at::Tensor>;

// All tensors of a .safetensors file, as copies. Fails the test where it cannot be read.
NamedTensors ReadTensors(const std::string& path);

// A .safetensors file of tensors in fp32, fp16, bf16 or fp8 (e4m3fn).
void WriteTensors(const std::string& path, const NamedTensors& tensors);

// Reads a file, changes what it holds, and puts the result in its place (another file of that name).
void EditTensors(const std::string& path, const std::function<void(NamedTensors&)>& edit);

}  // namespace latentd

#endif  // LATENTD_TESTS_STRESS_WEIGHT_EDITOR_H_
