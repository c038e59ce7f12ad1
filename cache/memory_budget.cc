// Invariant: in_use_ + reserved_ equals the bytes of all live Reservations, and so does the sum of uses_.
// Only Take, Give and Commit move them; Split and ShrinkTo go through them.
#include "cache/memory_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/fault_injection.h"

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
    turn_ = other.turn_;
  }
  return *this;
}

void Reservation::Commit() {
  if (budget_ == nullptr || committed_) return;
  budget_->Commit(*this);
  committed_ = true;
}

Reservation Reservation::Split(int64_t bytes, MemoryUse use) {
  bytes = std::clamp<int64_t>(bytes, 0, bytes_);
  if (budget_ != nullptr && use != use_) budget_->ChangeUse(bytes, committed_, use_, use);
  Reservation part(budget_, bytes, use, owner_, turn_);
  part.committed_ = committed_;
  bytes_ -= bytes;
  return part;
}

void Reservation::PassTo(std::string owner) {
  if (budget_ != nullptr && !committed_ && bytes_ > 0) budget_->ChangeOwner(*this, owner);
  owner_ = std::move(owner);
}

void Reservation::ShrinkTo(int64_t bytes) {
  if (bytes < bytes_) Split(bytes_ - bytes).Release();
}

void Reservation::Release() {
  if (budget_ != nullptr) budget_->Give(*this);
  budget_ = nullptr;
  bytes_ = 0;
  committed_ = false;
}

// ---------------------------------------------------------------------------------------- MemoryBudget

MemoryBudget::MemoryBudget(std::string name, int64_t cap_bytes) : name_(std::move(name)), cap_(cap_bytes) {
  waits_->Join(this);
}

MemoryBudget::~MemoryBudget() { waits_->Quit(this); }

void MemoryBudget::ShareWaits(const MemoryBudget& other) {
  waits_->Quit(this);
  waits_ = other.waits_;
  waits_->Join(this);
}

Reservation MemoryBudget::Take(const Request& request) {
  reserved_ += request.bytes;
  uses_[static_cast<size_t>(request.use)].reserved_bytes += request.bytes;
  peak_ = std::max(peak_, in_use_ + reserved_);
  promised_[request.owner] += request.bytes;
  turn_promised_ += request.bytes;
  waits_->Moved();
  return Reservation(this, request.bytes, request.use, request.owner, turn_);
}

void MemoryBudget::TakeOffPromised(const Reservation& r) {
  auto it = promised_.find(r.owner_);
  if (it != promised_.end() && (it->second -= r.bytes_) <= 0) promised_.erase(it);
}

void MemoryBudget::Give(const Reservation& r) {
  MutexLock lock(&waits_->mu_);
  Use& ledger = uses_[static_cast<size_t>(r.use_)];
  if (r.committed_) {
    in_use_ -= r.bytes_;
    ledger.in_use_bytes -= r.bytes_;
  } else {
    reserved_ -= r.bytes_;
    ledger.reserved_bytes -= r.bytes_;
    if (r.turn_ == turn_) turn_promised_ -= r.bytes_;
    TakeOffPromised(r);
  }
  waits_->Moved();
}

void MemoryBudget::Commit(const Reservation& r) {
  MutexLock lock(&waits_->mu_);
  Use& ledger = uses_[static_cast<size_t>(r.use_)];
  reserved_ -= r.bytes_;
  ledger.reserved_bytes -= r.bytes_;
  in_use_ += r.bytes_;
  ledger.in_use_bytes += r.bytes_;
  if (r.turn_ == turn_) turn_promised_ -= r.bytes_;
  TakeOffPromised(r);
  waits_->Moved();
}

void MemoryBudget::ChangeOwner(const Reservation& r, const std::string& to) {
  MutexLock lock(&waits_->mu_);
  TakeOffPromised(r);
  promised_[to] += r.bytes_;
  waits_->Moved();  // who was stuck for these bytes no longer is
}

void MemoryBudget::ChangeUse(int64_t bytes, bool committed, MemoryUse from, MemoryUse to) {
  MutexLock lock(&waits_->mu_);
  const auto field = committed ? &Use::in_use_bytes : &Use::reserved_bytes;
  uses_[static_cast<size_t>(from)].*field -= bytes;
  uses_[static_cast<size_t>(to)].*field += bytes;
}

void MemoryBudget::AskForeign() {
  if (!foreign_bytes_of_) return;
  const int64_t bytes = std::max<int64_t>(0, foreign_bytes_of_());
  MutexLock lock(&waits_->mu_);
  if (bytes < foreign_) waits_->Moved();
  foreign_ = bytes;
}

Reclaimer::Held MemoryBudget::AskHeld() const {
  return reclaimer_ == nullptr ? Reclaimer::Held() : reclaimer_->HeldByWhom();
}

// What other processes take is not lasting: nobody knows when they give it back.
BudgetView MemoryBudget::View(Reclaimer::Held held) const {
  return {.cap = cap_,
          .at_once = Bytes().free() + held.idle_bytes,
          .promised = promised_,
          .held = std::move(held.groups),
          .turn = turn_,
          .turn_promised = turn_promised_};
}

void MemoryBudget::NewFirst() {
  ++turn_;
  turn_promised_ = 0;
}

absl::Status MemoryBudget::Refuse(RefusalCause cause, const Request& request, int64_t held, bool hopeless,
                                  const std::string& cycle) const {
  // Of what is more than the cap, nobody is in the way.
  return Refusal(cause,
                 {.budget = name_,
                  .what = request.what,
                  .bytes = request.bytes,
                  .held = cause == RefusalCause::kNever ? 0 : held + reserved_,
                  .hopeless = hopeless,
                  .cycle = cycle},
                 Bytes());
}

std::optional<Reservation> MemoryBudget::TakeAtOnce(const Request& request, bool* hopeless) {
  // What somebody else does while this one looks makes it look again, for so long.
  constexpr int kTries = 16;
  for (int tries = 0; tries < kTries; ++tries) {
    const int64_t idle = reclaimer_ == nullptr ? 0 : reclaimer_->IdleBytes();
    int64_t missing = 0;
    {
      MutexLock lock(&waits_->mu_);
      if (request.bytes == 0) return Take(request);
      const Admission admission = Admit(Bytes(), idle, request.bytes);
      const bool now = admission == Admission::kTake || admission == Admission::kMakeRoom;
      if (!waiters_.empty() || (hopeless != nullptr && !now)) {
        waits_->analysis_ = nullptr;  // locks that were found at once moved nothing
        const auto analysis = waits_->Look(waits_->moved_);
        if (analysis == nullptr) continue;
        const int me = waits_->IndexOf(this);
        if (hopeless != nullptr) *hopeless = analysis->IsHopeless(me, request.owner, request.bytes);
        if (!analysis->MayGoAhead(me, request.owner, request.bytes)) return std::nullopt;
      }
      if (!now) return std::nullopt;
      if (admission == Admission::kTake) return Take(request);
      missing = MissingBytes(Bytes(), request.bytes);
    }
    // What goes may not be free yet: somebody can have kept a pointer to it.
    if (reclaimer_->Reclaim(missing) > 0) tries = 0;
  }
  return std::nullopt;
}

absl::StatusOr<Reservation> MemoryBudget::TryReserve(const Request& request) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kReserve, request.what));
  AskForeign();
  {
    MutexLock lock(&waits_->mu_);
    if (request.bytes > cap_) return Refuse(RefusalCause::kNever, request, 0);
  }
  bool hopeless = false;
  if (auto taken = TakeAtOnce(request, &hopeless)) return *std::move(taken);
  const int64_t held = reclaimer_ == nullptr ? 0 : reclaimer_->HeldBytes();
  MutexLock lock(&waits_->mu_);
  return Refuse(RefusalCause::kNoRoomNow, request, held, hopeless);
}

int64_t MemoryBudget::ObtainableBytes() const {
  const int64_t idle = reclaimer_ == nullptr ? 0 : reclaimer_->IdleBytes();
  MutexLock lock(&waits_->mu_);
  return Bytes().Obtainable(idle);
}

absl::StatusOr<Reservation> MemoryBudget::Reserve(const Request& request) {
  RETURN_IF_ERROR(MaybeFail(FaultPoint::kReserve, request.what));
  AskForeign();
  {
    MutexLock lock(&waits_->mu_);
    if (request.bytes > cap_) {
      ++refused_;
      return Refuse(RefusalCause::kNever, request, 0);
    }
  }
  if (auto taken = TakeAtOnce(request, /*hopeless=*/nullptr)) return *std::move(taken);
  return Wait(request);
}

absl::StatusOr<Reservation> MemoryBudget::Wait(const Request& request) {
  CondVar woken;
  uint64_t id = 0;
  {
    MutexLock lock(&waits_->mu_);
    id = waits_->Enter({.view = {.owner = request.owner, .bytes = request.bytes},
                        .what = absl::StrCat(request.what, " in ", name_),
                        .budget = this,
                        .wake = &woken});
    if (waiters_.empty()) NewFirst();
    waiters_.push_back(id);
  }
  // Declared without the mutex, which it takes: begins and ends so.
  std::stop_callback stop(request.stop, [this, id] {
    MutexLock lock(&waits_->mu_);
    waits_->Wake(id);
  });

  MutexLock lock(&waits_->mu_);
  bool waited = false;
  // What comes after the end of the wait is decided before anybody else can look.
  auto leave = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(waits_->mu_) {
    const bool first = waiters_.front() == id;
    waiters_.remove(id);
    if (first) NewFirst();
    waits_->Leave(id);
  };
  int64_t held = 0;
  auto refuse = [&](RefusalCause cause, const std::string& cycle = {})
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(waits_->mu_) {
                      leave();
                      ++refused_;
                      return Refuse(cause, request, held, /*hopeless=*/false, cycle);
                    };

  while (true) {
    const uint64_t seen = waits_->moved_;
    const auto analysis = waits_->Look(seen);
    if (request.stop.stop_requested()) {
      leave();
      return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "cancelled while waiting for memory");
    }
    if (analysis == nullptr) continue;
    held = analysis->HeldBytes(waits_->IndexOf(this));
    switch (analysis->Of(id)) {
      case WaitAnalysis::Verdict::kTake: {
        const int64_t missing = MissingBytes(Bytes(), request.bytes);
        if (missing <= 0) {
          Reservation taken = Take(request);  // before the next one is the first
          leave();
          return taken;
        }
        waits_->mu_.Unlock();
        const int64_t freed = reclaimer_ == nullptr ? 0 : reclaimer_->Reclaim(missing);
        waits_->mu_.Lock();
        // Whoever took the rest meanwhile is seen at the next look.
        if (freed == 0) waits_->Moved();
        continue;
      }
      case WaitAnalysis::Verdict::kHopeless:
        return refuse(RefusalCause::kHopeless);
      case WaitAnalysis::Verdict::kDeadlock:
        return refuse(RefusalCause::kDeadlock, waits_->Say(analysis->deadlock()));
      case WaitAnalysis::Verdict::kWait:
        break;
    }
    if (!waited) {
      waited = true;
      ++waits_ever_;
    }
    if (absl::Now() >= request.deadline) {
      return refuse(RefusalCause::kNotInTime);
    }
    // What others do with the memory is not announced: it is asked for now and then.
    waits_->Sleep(id, *analysis,
                  foreign_bytes_of_ ? std::min(request.deadline, absl::Now() + absl::Milliseconds(200))
                                    : request.deadline);
    if (foreign_bytes_of_) {
      waits_->mu_.Unlock();
      AskForeign();
      waits_->mu_.Lock();
    }
  }
}

void MemoryBudget::NotifyReclaimable() {
  int64_t over = 0;
  {
    MutexLock lock(&waits_->mu_);
    over = Bytes().over();
    waits_->Moved();
  }
  if (over > 0 && reclaimer_ != nullptr) reclaimer_->Reclaim(over);
}

void MemoryBudget::set_cap(int64_t cap_bytes) {
  int64_t over = 0;
  {
    MutexLock lock(&waits_->mu_);
    cap_ = cap_bytes;
    over = Bytes().over();
    waits_->Moved();
  }
  if (over > 0 && reclaimer_ != nullptr) reclaimer_->Reclaim(over);
}

int64_t MemoryBudget::cap_bytes() const {
  MutexLock lock(&waits_->mu_);
  return cap_;
}

MemoryBudget::Stats MemoryBudget::stats() const {
  MutexLock lock(&waits_->mu_);
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
