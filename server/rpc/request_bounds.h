// What a request may hold, looked at when it arrives: before it waits in a queue, and before anything is read
// from disk for it. What it means is looked at later (params.h, lora_set.h).
#ifndef LATENTD_SERVER_RPC_REQUEST_BOUNDS_H_
#define LATENTD_SERVER_RPC_REQUEST_BOUNDS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "latentd/v1/common.pb.h"
#include "latentd/v1/denoise.pb.h"
#include "server/config.h"

namespace latentd {

// LoRAs of one set, and bytes that their references take together.
inline constexpr int kMaxLoras = 64;
inline constexpr int64_t kMaxLoraRefsBytes = 256 << 10;

// Errors: INVALID_ARGUMENT INVALID_FIELD.
absl::Status CheckBounds(const v1::GenerateParams& params, const Config& config);
absl::Status CheckBounds(const google::protobuf::RepeatedPtrField<v1::LoraRef>& refs);
absl::Status CheckNameBound(absl::string_view field, const std::string& name);

// Bytes that a message takes besides its picture files; 0 for those that are small, whose number is bounded.
int64_t RequestBytes(const v1::GenerateParams& params);
int64_t RequestBytes(const std::vector<v1::LoraRef>& refs);

// References as they are shown to others: factors by block are left out where they are many.
std::vector<v1::LoraRef> ShownRefs(const std::vector<v1::LoraRef>& refs);

}  // namespace latentd

#endif  // LATENTD_SERVER_RPC_REQUEST_BOUNDS_H_
