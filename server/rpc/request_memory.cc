#include "server/rpc/request_memory.h"

#include <utility>

namespace latentd {

RequestMemory::Charge& RequestMemory::Charge::operator=(Charge&& other) noexcept {
  if (this == &other) return *this;
  Release();
  memory_ = std::exchange(other.memory_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  reservation_ = std::move(other.reservation_);
  return *this;
}

void RequestMemory::Charge::Release() {
  reservation_.Release();
  if (memory_ != nullptr) memory_->bytes_ -= bytes_;
  memory_ = nullptr;
  bytes_ = 0;
}

std::optional<RequestMemory::Charge> RequestMemory::Take(int64_t bytes, const std::string& owner,
                                                         const std::string& what) {
  if (bytes_.fetch_add(bytes) + bytes > limit_) {
    bytes_ -= bytes;
    return std::nullopt;
  }
  taken_ever_ += bytes;
  Charge charge;
  charge.memory_ = this;
  charge.bytes_ = bytes;
  if (budget_ != nullptr && bytes > kLarge) {
    auto promised =
        budget_->TryReserve({.bytes = bytes, .use = MemoryUse::kImages, .owner = owner, .what = what});
    if (promised.ok()) charge.reservation_ = *std::move(promised);
  }
  return charge;
}

}  // namespace latentd
