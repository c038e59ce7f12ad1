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

MemoryBudget::MemoryBudget(std::string name, int64_t cap_bytes) : name_(std::move(name)), cap_(cap_bytes) {}

MemoryBudget::~MemoryBudget() = default;

Reservation MemoryBudget::Take(const Request& request) {
  reserved_ += request.bytes;
  peak_ = std::max(peak_, in_use_ + reserved_);
  promised_[request.owner] += request.bytes;
  return Reservation(this, request.bytes, request.owner);
}

void MemoryBudget::Give(int64_t bytes, bool committed, const std::string& owner) {
  absl::MutexLock lock(&mu_);
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
  absl::MutexLock lock(&mu_);
  reserved_ -= bytes;
  in_use_ += bytes;
  auto it = promised_.find(owner);
  if (it != promised_.end() && (it->second -= bytes) <= 0) promised_.erase(it);
}

bool MemoryBudget::AllHoldersWait(const Reclaimer::Held& held) const {
  auto waits = [&](const std::string& owner) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter& w) { return w.owner == owner; });
  };
  return std::all_of(held.owners.begin(), held.owners.end(), waits) &&
         std::all_of(promised_.begin(), promised_.end(), [&](const auto& p) { return waits(p.first); });
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
  // Wakes this request when its stop is requested. Declared before the lock is taken: its destructor waits
  // for a running callback, which needs the mutex.
  std::stop_callback wake(request.stop, [this] {
    absl::MutexLock lock(&mu_);
    ++epoch_;
    changed_.SignalAll();
  });

  absl::MutexLock lock(&mu_);
  if (request.bytes > cap_) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "MODEL_EXCEEDS_BUDGET", request, 0,
                  "it can never fit; raise the cap or use a smaller model");
  }
  if (waiters_.empty() && Fits(request.bytes)) return Take(request);

  auto me = waiters_.insert(waiters_.end(), Waiter{request.owner});
  ++epoch_;  // A new waiter can complete a cycle: let the others look.
  changed_.SignalAll();
  auto leave = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    waiters_.erase(me);
    ++epoch_;
    changed_.SignalAll();
  };

  while (true) {
    const uint64_t seen = epoch_;
    const bool first = &waiters_.front() == &*me;
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
    held.bytes += reserved_;
    if (request.stop.stop_requested()) {
      leave();
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while waiting for memory");
    }
    if (epoch_ != seen) continue;
    const bool newest = &waiters_.back() == &*me;
    if (newest && AllHoldersWait(held)) {
      const bool alone = waiters_.size() == 1;
      leave();
      return alone ? Refuse(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", request, held.bytes,
                            "nothing else will be given back; use fewer LoRAs or raise the cap")
                   : Refuse(absl::StatusCode::kAborted, "BUDGET_CYCLE", request, held.bytes,
                            "all of it by work that waits for memory too; try again");
    }
    if (changed_.WaitWithDeadline(&mu_, request.deadline) && epoch_ == seen) {
      leave();
      return Refuse(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", request, held.bytes,
                    "it was not given back in time; try again later");
    }
  }
}

void MemoryBudget::NotifyReclaimable() {
  absl::MutexLock lock(&mu_);
  if (waiters_.empty()) return;
  ++epoch_;
  changed_.SignalAll();
}

void MemoryBudget::set_cap(int64_t cap_bytes) {
  absl::MutexLock lock(&mu_);
  cap_ = cap_bytes;
  ++epoch_;
  changed_.SignalAll();
}

MemoryBudget::Stats MemoryBudget::stats() const {
  absl::MutexLock lock(&mu_);
  return {.cap_bytes = cap_,
          .in_use_bytes = in_use_,
          .reserved_bytes = reserved_,
          .peak_bytes = peak_,
          .waiting = static_cast<int64_t>(waiters_.size()),
          .refused = refused_};
}

}  // namespace latentd
