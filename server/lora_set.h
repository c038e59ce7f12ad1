// The LoRAs that a request names: checked, and found on disk.
#ifndef LATENTD_SERVER_LORA_SET_H_
#define LATENTD_SERVER_LORA_SET_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "latentd/v1/common.pb.h"
#include "patcher/layer_patcher.h"
#include "server/catalog.h"
#include "server/config.h"

namespace latentd {

struct LoraChoice {
  std::string name;
  double weight = 1;
  LoraFile file;
  LockRequest request;
};

// Reads headers: not on an RPC thread. Errors: INVALID_ARGUMENT INVALID_FIELD (weight, a name twice, too
// many); NOT_FOUND LORA_NOT_FOUND; those of LoraFile::Request.
absl::StatusOr<std::vector<LoraChoice>> ResolveLoras(const std::vector<v1::LoraRef>& refs,
                                                     const Catalog& catalog);

// The request's patch mode, or the config's. Errors: INVALID_ARGUMENT INVALID_FIELD.
absl::StatusOr<PatchMode> PatchModeFromProto(v1::PatchMode mode, const Config& config);

}  // namespace latentd

#endif  // LATENTD_SERVER_LORA_SET_H_
