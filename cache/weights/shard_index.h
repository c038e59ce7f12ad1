// The *.safetensors.index.json that lists the shards of a model.
#ifndef LATENTD_CACHE_WEIGHTS_SHARD_INDEX_H_
#define LATENTD_CACHE_WEIGHTS_SHARD_INDEX_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace latentd {

// The distinct file names of "weight_map", sorted. Only plain names of files beside the index are accepted.
// Errors: those of ReadTextFile; DATA_LOSS CORRUPT_FILE.
absl::StatusOr<std::vector<std::string>> ReadShardIndex(const std::string& path);

}  // namespace latentd

#endif  // LATENTD_CACHE_WEIGHTS_SHARD_INDEX_H_
