// Invariant: in_use_ + reserved_ equals the bytes of all live Reservations. Only Take, Give and Commit move
// it; Split and ShrinkTo go through them.
#include "cache/memory_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache/error.h"

namespace latentd {

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    committed_ = std::exchange(other.committed_, false);
    owner_ = std::move(other.owner_);
  }
  return *this;
}

void Reservation::Commit() {
  if (budget_ == nullptr || committed_) return;
  budget_->Commit(bytes_, owner_);
  committed_ = true;
}

Reservation Reservation::Split(int64_t bytes) {
  bytes = std::clamp<int64_t>(bytes, 0, bytes_);
  Reservation part(budget_, bytes, owner_);
  part.committed_ = committed_;
  bytes_ -= bytes;
  return part;
}

void Reservation::ShrinkTo(int64_t bytes) {
  if (bytes < bytes_) Split(bytes_ - bytes).Release();
}

void Reservation::Release() {
  if (budget_ != nullptr) budget_->Give(bytes_, committed_, owner_);
  budget_ = nullptr;
  bytes_ = 0;
  committed_ = false;
}

MemoryBudget::MemoryBudget(std::string name, int64_t cap_bytes) : name_(std::move(name)), cap_(cap_bytes) {
  subscription_ = waits_->Subscribe([this] { Wake(); });
}

MemoryBudget::~MemoryBudget() { waits_->Unsubscribe(subscription_); }

void MemoryBudget::ShareWaits(const MemoryBudget& other) {
  waits_->Unsubscribe(subscription_);
  waits_ = other.waits_;
  subscription_ = waits_->Subscribe([this] { Wake(); });
}

void MemoryBudget::Wake() {
  MutexLock lock(&mu_);
  if (waiters_.empty()) return;
  ++epoch_;
  changed_.SignalAll();
}

Reservation MemoryBudget::Take(const Request& request) {
  reserved_ += request.bytes;
  peak_ = std::max(peak_, in_use_ + reserved_);
  promised_[request.owner] += request.bytes;
  return Reservation(this, request.bytes, request.owner);
}

void MemoryBudget::Give(int64_t bytes, bool committed, const std::string& owner) {
  MutexLock lock(&mu_);
  if (committed) {
    in_use_ -= bytes;
  } else {
    reserved_ -= bytes;
    auto it = promised_.find(owner);
    if (it != promised_.end() && (it->second -= bytes) <= 0) promised_.erase(it);
  }
  ++epoch_;
  changed_.SignalAll();
}

void MemoryBudget::Commit(int64_t bytes, const std::string& owner) {
  MutexLock lock(&mu_);
  reserved_ -= bytes;
  in_use_ += bytes;
  auto it = promised_.find(owner);
  if (it != promised_.end() && (it->second -= bytes) <= 0) promised_.erase(it);
}

bool MemoryBudget::Stuck(const Reclaimer::Held& held) const {
  if (waiters_.front() <= cap_ - held.bytes - reserved_) return false;
  return std::all_of(held.owners.begin(), held.owners.end(), [&](const auto& o) { return waits_->Waits(o); }) &&
         std::all_of(promised_.begin(), promised_.end(), [&](const auto& p) { return waits_->Waits(p.first); });
}

absl::Status MemoryBudget::Refuse(absl::StatusCode code, const char* reason, const Request& request,
                                  int64_t held, const char* why) {
  ++refused_;
  return MakeError(code, reason,
                   absl::StrCat(request.what, " needs ", request.bytes, " bytes of ", name_, "; ", held,
                                " of ", cap_, " bytes are held by running work: ", why),
                   {{"budget", name_},
                    {"what", request.what},
                    {"needed_bytes", absl::StrCat(request.bytes)},
                    {"held_bytes", absl::StrCat(held)},
                    {"cap_bytes", absl::StrCat(cap_)}});
}

absl::StatusOr<Reservation> MemoryBudget::Reserve(const Request& request) {
  {
    MutexLock lock(&mu_);
    if (request.bytes > cap_) {
      return Refuse(absl::StatusCode::kFailedPrecondition, "MODEL_EXCEEDS_BUDGET", request, 0,
                    "it can never fit; raise the cap or use a smaller model");
    }
    if (waiters_.empty() && Fits(request.bytes)) return Take(request);
  }
  // Both are declared before the lock is taken: their ends need mutexes.
  const WaitRegistry::Entry entry(waits_, request.owner, /*refusable=*/true);
  std::stop_callback wake(request.stop, [this] { Wake(); });

  MutexLock lock(&mu_);
  const auto me = waiters_.insert(waiters_.end(), request.bytes);
  auto leave = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    waiters_.erase(me);
    ++epoch_;  // the next one may be first now
    changed_.SignalAll();
  };

  while (true) {
    const uint64_t seen = epoch_;
    const bool first = waiters_.begin() == me;
    if (first && Fits(request.bytes)) {
      leave();
      return Take(request);
    }
    Reclaimer::Held held;
    if (reclaimer_ != nullptr) {
      const int64_t missing = request.bytes - (cap_ - in_use_ - reserved_);
      mu_.Unlock();
      if (first) reclaimer_->Reclaim(missing);
      held = reclaimer_->HeldBytes();
      mu_.Lock();
      if (first && Fits(request.bytes)) continue;
    }
    if (request.stop.stop_requested()) {
      leave();
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while waiting for memory");
    }
    if (epoch_ != seen) continue;
    const int64_t in_the_way = held.bytes + reserved_;
    if (entry.newest() && Stuck(held)) {
      const bool others_hold = std::any_of(held.owners.begin(), held.owners.end(),
                                           [&](const std::string& o) { return o != request.owner; });
      leave();
      return others_hold ? Refuse(absl::StatusCode::kAborted, "BUDGET_CYCLE", request, in_the_way,
                                  "all of it by work that waits for memory too; try again")
                         : Refuse(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", request, in_the_way,
                                  "nothing else will be given back; use fewer LoRAs or raise the cap");
    }
    if (changed_.WaitWithDeadline(&mu_, request.deadline) && epoch_ == seen) {
      leave();
      return Refuse(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", request, in_the_way,
                    "it was not given back in time; try again later");
    }
  }
}

void MemoryBudget::NotifyReclaimable() { Wake(); }

void MemoryBudget::set_cap(int64_t cap_bytes) {
  MutexLock lock(&mu_);
  cap_ = cap_bytes;
  ++epoch_;
  changed_.SignalAll();
}

MemoryBudget::Stats MemoryBudget::stats() const {
  MutexLock lock(&mu_);
  return {.cap_bytes = cap_,
          .in_use_bytes = in_use_,
          .reserved_bytes = reserved_,
          .peak_bytes = peak_,
          .waiting = static_cast<int64_t>(waiters_.size()),
          .refused = refused_};
}

}  // namespace latentd
