// The LoRAs that a request names: checked, and found on disk.
#ifndef LATENTD_SERVER_CATALOG_LORA_SET_H_
#define LATENTD_SERVER_CATALOG_LORA_SET_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "latentd/v1/common.pb.h"
#include "patcher/layer_patcher.h"
#include "server/catalog/catalog.h"
#include "server/config.h"

namespace latentd {

// A LoRA in a set, as the client wants it.
struct LoraUse {
  std::string name;
  double weight = 1;
  BlockWeights blocks;
  double start = 0, end = 1;      // of the steps, [start, end)
  std::vector<std::string> only;  // components; empty: all

  // `progress`: share of the steps that are done, [0, 1). Text encoders run at 0.
  bool ActiveAt(double progress) const { return weight != 0 && start <= progress && progress < end; }
};

struct LoraChoice : LoraUse {
  LoraFile file;
  LockRequest request;
};

// A LoRA that a session holds.
struct HeldLora : LoraUse {
  LockHandle handle;
  PatchReport report;
};

// Reads headers: not on an RPC thread. Errors: INVALID_ARGUMENT INVALID_FIELD (weights, start and end, a
// name twice, too many); NOT_FOUND LORA_NOT_FOUND; those of LoraFile::Request.
absl::StatusOr<std::vector<LoraChoice>> ResolveLoras(const std::vector<v1::LoraRef>& refs,
                                                     const Catalog& catalog);

// Inputs that a LoRA gives the denoiser's first layer; 0 when it grows none.
int64_t GrownInputs(const PatchReport& report);

// The request's patch mode, or the config's. Errors: INVALID_ARGUMENT INVALID_FIELD.
absl::StatusOr<PatchMode> PatchModeFromProto(v1::PatchMode mode, const Config& config);

}  // namespace latentd

#endif  // LATENTD_SERVER_CATALOG_LORA_SET_H_
