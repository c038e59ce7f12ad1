// LibTorch throws; nothing else here does. Slices and loads run inside of this guard, which turns what comes
// out into a status. The text of a LibTorch error goes to the log, never to a client.
#ifndef LATENTD_SERVER_RUNTIME_TENSOR_GUARD_H_
#define LATENTD_SERVER_RUNTIME_TENSOR_GUARD_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace latentd {

// Errors besides those of `code`: RESOURCE_EXHAUSTED OUT_OF_MEMORY, INTERNAL INFERENCE_FAILED.
absl::Status GuardTensorCode(absl::string_view where, const std::function<absl::Status()>& code);

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_TENSOR_GUARD_H_
