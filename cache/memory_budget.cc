// Invariant: in_use_ + reserved_ equals the bytes of all live Reservations, and so does the sum of uses_.
// Only Take, Give and Commit move them; Split and ShrinkTo go through them.
#include "cache/memory_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/error.h"
#include "cache/fault_injection.h"

namespace latentd {

absl::string_view MemoryUseName(MemoryUse use) {
  switch (use) {
    case MemoryUse::kWeights:
      return "weights";
    case MemoryUse::kPatches:
      return "patches";
    case MemoryUse::kMerged:
      return "merged";
    case MemoryUse::kConditioning:
      return "conditioning";
    case MemoryUse::kStaging:
      return "staging";
    case MemoryUse::kWorking:
      return "working";
    case MemoryUse::kImages:
      return "images";
  }
  return "";
}

// ----------------------------------------------------------------------------------------- Reservation

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Release();
    budget_ = std::exchange(other.budget_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    use_ = other.use_;
    committed_ = std::exchange(other.committed_, false);
    owner_ = std::move(other.owner_);
  }
  return *this;
}

void Reservation::Commit() {
  if (budget_ == nullptr || committed_) return;
  budget_->Commit(bytes_, use_, owner_);
  committed_ = true;
}

Reservation Reservation::Split(int64_t bytes, MemoryUse use) {
  bytes = std::clamp<int64_t>(bytes, 0, bytes_);
  if (budget_ != nullptr && use != use_) budget_->ChangeUse(bytes, committed_, use_, use);
  Reservation part(budget_, bytes, use, owner_);
  part.committed_ = committed_;
  bytes_ -= bytes;
  return part;
}

void Reservation::PassTo(std::string owner) {
  if (budget_ != nullptr && !committed_ && bytes_ > 0) budget_->ChangeOwner(bytes_, owner_, owner);
  owner_ = std::move(owner);
}

void Reservation::ShrinkTo(int64_t bytes) {
  if (bytes < bytes_) Split(bytes_ - bytes).Release();
}

void Reservation::Release() {
  if (budget_ != nullptr) budget_->Give(bytes_, use_, committed_, owner_);
  budget_ = nullptr;
  bytes_ = 0;
  committed_ = false;
}

// ---------------------------------------------------------------------------------------- MemoryBudget

MemoryBudget::MemoryBudget(std::string name, int64_t cap_bytes) : name_(std::move(name)), cap_(cap_bytes) {
  subscription_ = waits_->Subscribe([this] { Wake(); });
}

MemoryBudget::~MemoryBudget() { waits_->Unsubscribe(subscription_); }

void MemoryBudget::ShareWaits(const MemoryBudget& other) {
  waits_->Unsubscribe(subscription_);
  waits_ = other.waits_;
  subscription_ = waits_->Subscribe([this] { Wake(); });
}

void MemoryBudget::LookAgain() {
  if (waiters_.empty()) return;
  ++epoch_;
  changed_.SignalAll();
}

void MemoryBudget::Wake() {
  MutexLock lock(&mu_);
  LookAgain();
}

Reservation MemoryBudget::Take(const Request& request) {
  reserved_ += request.bytes;
  uses_[static_cast<size_t>(request.use)].reserved_bytes += request.bytes;
  peak_ = std::max(peak_, in_use_ + reserved_);
  promised_[request.owner] += request.bytes;
  return Reservation(this, request.bytes, request.use, request.owner);
}

void MemoryBudget::TakeOffPromised(int64_t bytes, const std::string& owner) {
  auto it = promised_.find(owner);
  if (it != promised_.end() && (it->second -= bytes) <= 0) promised_.erase(it);
}

void MemoryBudget::Give(int64_t bytes, MemoryUse use, bool committed, const std::string& owner) {
  MutexLock lock(&mu_);
  Use& ledger = uses_[static_cast<size_t>(use)];
  if (committed) {
    in_use_ -= bytes;
    ledger.in_use_bytes -= bytes;
  } else {
    reserved_ -= bytes;
    ledger.reserved_bytes -= bytes;
    TakeOffPromised(bytes, owner);
  }
  ++epoch_;
  changed_.SignalAll();
}

void MemoryBudget::Commit(int64_t bytes, MemoryUse use, const std::string& owner) {
  MutexLock lock(&mu_);
  Use& ledger = uses_[static_cast<size_t>(use)];
  reserved_ -= bytes;
  ledger.reserved_bytes -= bytes;
  in_use_ += bytes;
  ledger.in_use_bytes += bytes;
  TakeOffPromised(bytes, owner);
}

void MemoryBudget::ChangeOwner(int64_t bytes, const std::string& from, const std::string& to) {
  MutexLock lock(&mu_);
  TakeOffPromised(bytes, from);
  promised_[to] += bytes;
  ++epoch_;  // who was stuck for these bytes no longer is
  changed_.SignalAll();
}

void MemoryBudget::ChangeUse(int64_t bytes, bool committed, MemoryUse from, MemoryUse to) {
  MutexLock lock(&mu_);
  const auto field = committed ? &Use::in_use_bytes : &Use::reserved_bytes;
  uses_[static_cast<size_t>(from)].*field -= bytes;
  uses_[static_cast<size_t>(to)].*field += bytes;
}

void MemoryBudget::AskForeign() {
  if (!foreign_bytes_of_) return;
  const int64_t bytes = std::max<int64_t>(0, foreign_bytes_of_());
  MutexLock lock(&mu_);
  if (bytes < foreign_) {
    ++epoch_;
    changed_.SignalAll();
  }
  foreign_ = bytes;
}

bool MemoryBudget::Stuck(const Reclaimer::Held& held, const WaitRegistry::Entry& entry) const {
  if (waiters_.front() <= Obtainable(held)) return false;
  std::set<std::string> owners = held.owners;
  for (const auto& [owner, bytes] : promised_) owners.insert(owner);
  return entry.NewestWhileAllWait(owners);
}

absl::Status MemoryBudget::Refusal(absl::StatusCode code, const char* reason, const Request& request,
                                   int64_t held, const std::string& why) const {
  ErrorDetails details = {{"budget", name_},
                          {"what", request.what},
                          {"needed_bytes", absl::StrCat(request.bytes)},
                          {"held_bytes", absl::StrCat(held)},
                          {"cap_bytes", absl::StrCat(cap_)}};
  if (foreign_ > 0) details["foreign_bytes"] = absl::StrCat(foreign_);
  return MakeError(
      code, reason,
      absl::StrCat(request.what, " needs ", request.bytes, " bytes of ", name_, "; ", held, " of ", cap_,
                   " bytes are held by running work",
                   foreign_ > 0 ? absl::StrCat(" and ", foreign_, " by other processes") : "", ": ", why),
      details);
}

absl::StatusOr<Reservation> MemoryBudget::TryReserve(const Request& request) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kReserve, request.what));
  AskForeign();
  bool more = reclaimer_ != nullptr;  // may be had from the reclaimer
  while (true) {
    int64_t missing = 0;
    {
      MutexLock lock(&mu_);
      if (request.bytes > cap_) {
        return Refusal(absl::StatusCode::kFailedPrecondition, "MODEL_EXCEEDS_BUDGET", request, 0,
                       "it can never fit");
      }
      if (TakesAtOnce(request)) return Take(request);
      if (!more || !waiters_.empty()) {
        return Refusal(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", request, in_use_ + reserved_,
                       "there is no room now; try again later");
      }
      missing = request.bytes - Free();
    }
    // Evicting what would not suffice helps nobody. What is evicted may not be free yet: somebody can have
    // kept a pointer to it.
    more = request.bytes <= ObtainableBytes() && reclaimer_->Reclaim(missing) > 0;
  }
}

int64_t MemoryBudget::ObtainableBytes() const {
  const int64_t held = reclaimer_ == nullptr ? -1 : reclaimer_->HeldBytes().bytes;
  MutexLock lock(&mu_);
  return std::max<int64_t>(0, cap_ - foreign_ - reserved_ - (held < 0 ? in_use_ : held));
}

absl::StatusOr<Reservation> MemoryBudget::Reserve(const Request& request) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kReserve, request.what));
  AskForeign();
  {
    MutexLock lock(&mu_);
    if (request.bytes > cap_) {
      ++refused_;
      return Refusal(absl::StatusCode::kFailedPrecondition, "MODEL_EXCEEDS_BUDGET", request, 0,
                     "it can never fit; raise the cap or use a smaller model");
    }
    if (TakesAtOnce(request)) return Take(request);
  }
  // Both are declared before the lock is taken: their ends need mutexes.
  WaitRegistry::Entry entry(waits_, request.owner, absl::StrCat(request.what, " in ", name_),
                            /*refusable=*/true);
  std::stop_callback wake(request.stop, [this] { Wake(); });

  MutexLock lock(&mu_);
  const auto me = waiters_.insert(waiters_.end(), request.bytes);
  bool waited = false;
  // What comes after the end of the wait is decided before anybody else can look.
  auto leave = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    entry.Over();
    waiters_.erase(me);
    ++epoch_;  // the next one may be first now
    changed_.SignalAll();
  };
  auto refuse = [&](absl::StatusCode code, const char* reason, int64_t held, const std::string& why)
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                      leave();
                      ++refused_;
                      return Refusal(code, reason, request, held, why);
                    };

  while (true) {
    const uint64_t seen = epoch_;
    const bool first = waiters_.begin() == me;
    if (first && request.bytes <= Free()) {
      leave();
      return Take(request);
    }
    Reclaimer::Held held;
    if (reclaimer_ != nullptr) {
      mu_.Unlock();
      held = reclaimer_->HeldBytes();
      mu_.Lock();
      const int64_t missing = request.bytes - Free();
      // As in TryReserve: nothing goes in vain, and what went may not be free yet.
      if (first && missing > 0 && request.bytes <= Obtainable(held)) {
        mu_.Unlock();
        const bool freed = reclaimer_->Reclaim(missing) > 0;
        mu_.Lock();
        if (freed) continue;
      }
    }
    if (request.stop.stop_requested()) {
      leave();
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while waiting for memory");
    }
    if (epoch_ != seen) continue;
    const int64_t in_the_way = held.bytes + reserved_;
    if (Stuck(held, entry)) {
      const bool others_hold = std::any_of(held.owners.begin(), held.owners.end(),
                                           [&](const std::string& o) { return o != request.owner; });
      if (!others_hold) {
        return refuse(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", in_the_way,
                      "nothing else will be given back; use fewer LoRAs or raise the cap");
      }
      const std::string cycle = absl::StrJoin(waits_->List(), "; ");
      const absl::Status status = refuse(absl::StatusCode::kAborted, "BUDGET_CYCLE", in_the_way,
                                         "all of it by work that waits for memory too; try again");
      ErrorDetails details = GetErrorDetails(status);
      details["cycle"] = cycle;
      return MakeError(status.code(), "BUDGET_CYCLE", status.message(), details);
    }
    if (!waited) {
      waited = true;
      ++waits_ever_;
    }
    // What others do with the memory is not announced: it is asked for now and then.
    const absl::Time look_again = foreign_bytes_of_
                                      ? std::min(request.deadline, absl::Now() + absl::Milliseconds(200))
                                      : request.deadline;
    const bool late = changed_.WaitWithDeadline(&mu_, look_again);
    if (late && epoch_ == seen && absl::Now() >= request.deadline) {
      return refuse(absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED", in_the_way,
                    "it was not given back in time; try again later");
    }
    if (late && foreign_bytes_of_) {
      mu_.Unlock();
      AskForeign();
      mu_.Lock();
    }
  }
}

void MemoryBudget::NotifyReclaimable() {
  int64_t over = 0;
  {
    MutexLock lock(&mu_);
    over = -Free();
    LookAgain();
  }
  if (over > 0 && reclaimer_ != nullptr) reclaimer_->Reclaim(over);
}

void MemoryBudget::set_cap(int64_t cap_bytes) {
  int64_t over = 0;
  {
    MutexLock lock(&mu_);
    cap_ = cap_bytes;
    over = -Free();
    ++epoch_;
    changed_.SignalAll();
  }
  if (over > 0 && reclaimer_ != nullptr) reclaimer_->Reclaim(over);
}

MemoryBudget::Stats MemoryBudget::stats() const {
  MutexLock lock(&mu_);
  return {.cap_bytes = cap_,
          .foreign_bytes = foreign_,
          .in_use_bytes = in_use_,
          .reserved_bytes = reserved_,
          .peak_bytes = peak_,
          .waiting = static_cast<int64_t>(waiters_.size()),
          .waits = waits_ever_,
          .refused = refused_,
          .uses = uses_};
}

}  // namespace latentd
