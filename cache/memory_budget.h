// A cap on bytes, and promises against it.
//
// RamBudget is the one for the host's memory, DeviceBudget the one of a device; both are this class. Memory
// is promised before it is used: Reserve() gives a Reservation (RAII) or says why not. A reservation is
// "reserved" until Commit(), from then on "in use"; its end gives the bytes back. So at all times
//
//     reserved_bytes + in_use_bytes  =  sum over all live Reservations   <=  cap_bytes
//
// (the right side can be exceeded only by lowering the cap).
//
// Every promise says what it is for (MemoryUse); Stats keeps the ledger by use.
//
// Thread-safe. A Reservation itself belongs to one thread at a time. The budget must outlive its
// reservations. Lock order: the cache's mutex may be held while calling anything here except Reserve();
// Reserve() calls the Reclaimer without holding the budget's mutex.
//
//   ASSIGN_OR_RETURN(Reservation r, budget.Reserve({.bytes = n, .use = MemoryUse::kPatches,
//                                                   .owner = "session-1", .what = "lora dusk"}));
//   ... allocate and fill n bytes ...
//   r.Commit();
#ifndef LATENTD_CACHE_MEMORY_BUDGET_H_
#define LATENTD_CACHE_MEMORY_BUDGET_H_

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache/admission.h"
#include "cache/base/mutex.h"
#include "cache/memory_use.h"
#include "cache/wait_analysis.h"
#include "cache/wait_registry.h"

namespace latentd {

class MemoryBudget;

// Bytes promised to somebody. Move-only; gives its bytes back when it ends. A default-made one is empty.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation() { Release(); }

  int64_t bytes() const { return bytes_; }
  bool committed() const { return committed_; }
  MemoryUse use() const { return use_; }
  // Of its budget when this was taken: what went ahead of somebody who waits is told by it.
  uint64_t turn() const { return turn_; }

  // Turns promised bytes into bytes in use. No-op when committed or empty.
  void Commit();

  // Takes `bytes` off this reservation into one of its own, in the same state, for the same use or another.
  // REQUIRES: bytes <= bytes().
  Reservation Split(int64_t bytes) { return Split(bytes, use_); }
  Reservation Split(int64_t bytes, MemoryUse use);

  // From now on the bytes are another's, who does not wait for memory because of it: a wait for them is one
  // that can end.
  void PassTo(std::string owner);

  // Gives back what goes beyond `bytes`. Never grows.
  void ShrinkTo(int64_t bytes);

  void Release();

 private:
  friend class MemoryBudget;
  Reservation(MemoryBudget* budget, int64_t bytes, MemoryUse use, std::string owner, uint64_t turn)
      : budget_(budget), bytes_(bytes), use_(use), owner_(std::move(owner)), turn_(turn) {}

  MemoryBudget* budget_ = nullptr;
  int64_t bytes_ = 0;
  MemoryUse use_ = MemoryUse::kWorking;
  bool committed_ = false;
  std::string owner_;
  uint64_t turn_ = 0;
};

// What a budget asks of whoever holds the bytes. Implemented by ModelCache.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;

  // Frees at least `bytes` if that can be done without touching anything in use. Returns the bytes freed.
  virtual int64_t Reclaim(int64_t bytes) = 0;

  // Bytes that Reclaim can free now, for nobody holds them.
  virtual int64_t IdleBytes() const = 0;

  // Bytes that Reclaim cannot free now, for somebody holds them.
  virtual int64_t HeldBytes() const = 0;

  // Both at one moment, and who the holders are.
  struct Held {
    int64_t idle_bytes = 0;
    std::vector<HeldGroup> groups = {};
  };
  virtual Held HeldByWhom() const = 0;
};

class MemoryBudget {
 public:
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  struct Request {
    int64_t bytes = 0;
    MemoryUse use = MemoryUse::kWorking;
    std::string owner = {};  // who will hold the bytes: a session or job name; decides who waits for whom
    std::string what = {};   // what they are for, for the error message
    absl::Time deadline = absl::InfiniteFuture();
    std::stop_token stop = {};
  };

  struct Use {
    int64_t in_use_bytes = 0;
    int64_t reserved_bytes = 0;
  };

  struct Stats {
    int64_t cap_bytes = 0;
    int64_t foreign_bytes = 0;  // taken by others than this process, as far as known; lowers what there is
    int64_t in_use_bytes = 0;
    int64_t reserved_bytes = 0;
    int64_t peak_bytes = 0;             // high-water mark of in use + reserved
    int64_t waiting = 0;                // requests that wait for room, now
    int64_t waits = 0;                  // requests that had to wait, ever
    int64_t refused = 0;                // requests that were refused, ever
    std::array<Use, kMemoryUses> uses;  // by MemoryUse; they add up to the two sums above

    const Use& use(MemoryUse u) const { return uses[static_cast<size_t>(u)]; }
  };

  // `name` appears in errors ("ram", "sim:0").
  MemoryBudget(std::string name, int64_t cap_bytes);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Set once, before the first Reserve(); may be null. Must outlive the last Reserve() of all budgets that
  // share waits.
  void set_reclaimer(Reclaimer* reclaimer) { reclaimer_ = reclaimer; }

  // Makes this budget one of those whose waits are looked at together. Before the first Reserve(); they all
  // outlive the last wait of any of them.
  void ShareWaits(const MemoryBudget& other);
  const std::shared_ptr<WaitRegistry>& waits() const { return waits_; }

  // Promises bytes, making room through the Reclaimer if needed, else waiting: in order, but what delays
  // nobody who came before goes ahead (wait_analysis.h has the rules). Errors:
  //   FAILED_PRECONDITION MODEL_EXCEEDS_BUDGET   more than the cap: could never fit
  //   RESOURCE_EXHAUSTED  BUDGET_EXHAUSTED       the deadline came; or at once, with detail "hopeless": what
  //   is
  //                                              lasting and what the caller itself holds leave no room, so
  //                                              that no wait could end well. Details: needed, held, cap
  //   ABORTED             BUDGET_CYCLE           those who hold what is in the way all wait for each other,
  //                                              this one among them, and it is the newest; detail "cycle"
  //                                              says who waits for what
  //   CANCELLED           CANCELLED              `stop` was requested
  absl::StatusOr<Reservation> Reserve(const Request& request);

  // The same without waiting: makes room, and goes ahead of those who wait by the same rules. Errors:
  // MODEL_EXCEEDS_BUDGET and BUDGET_EXHAUSTED as above. Not counted as refused: the caller has another way.
  absl::StatusOr<Reservation> TryReserve(const Request& request);

  // What is free, or is when what nobody holds is gone.
  int64_t ObtainableBytes() const;

  // Lets waiting requests look again, and makes up for a cap that was lowered meanwhile. The cache calls it,
  // without its mutex, when a record becomes evictable.
  void NotifyReclaimable();

  // Live change. Lowering it makes room as far as that can be done at once; what runs keeps what it has, and
  // later requests wait or fail.
  void set_cap(int64_t cap_bytes);

  // Says how many bytes others than this process take of the same memory (a device's driver knows). Asked
  // before a request is looked at. Set once, before the first Reserve().
  void set_foreign(std::function<int64_t()> foreign) { foreign_bytes_of_ = std::move(foreign); }

  Stats stats() const;
  int64_t cap_bytes() const;
  const std::string& name() const { return name_; }

 private:
  friend class Reservation;
  friend class WaitRegistry;

  BudgetBytes Bytes() const ABSL_SHARED_LOCKS_REQUIRED(waits_->mu_) {
    return {.cap = cap_, .foreign = foreign_, .in_use = in_use_, .reserved = reserved_};
  }
  void AskForeign();
  Reservation Take(const Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(waits_->mu_);
  // Takes what is there or can be made room for, if that delays nobody. Empty: it has to wait. `hopeless`,
  // where not null, says then whether a wait could end well.
  std::optional<Reservation> TakeAtOnce(const Request& request, bool* hopeless);
  absl::StatusOr<Reservation> Wait(const Request& request);
  // `held`: in records.
  absl::Status Refuse(RefusalCause cause, const Request& request, int64_t held, bool hopeless = false,
                      const std::string& cycle = {}) const ABSL_SHARED_LOCKS_REQUIRED(waits_->mu_);

  // For the registry: what is held, which takes the holder's mutex; and all of it, as it is judged.
  Reclaimer::Held AskHeld() const;
  BudgetView View(Reclaimer::Held held) const ABSL_SHARED_LOCKS_REQUIRED(waits_->mu_);
  // The first of those who wait is another one: from now on it is counted anew what goes ahead of it.
  void NewFirst() ABSL_EXCLUSIVE_LOCKS_REQUIRED(waits_->mu_);

  void ChangeUse(int64_t bytes, bool committed, MemoryUse from, MemoryUse to);
  void Give(const Reservation& r);
  void Commit(const Reservation& r);
  void ChangeOwner(const Reservation& r, const std::string& to);
  void TakeOffPromised(const Reservation& r) ABSL_EXCLUSIVE_LOCKS_REQUIRED(waits_->mu_);

  const std::string name_;
  Reclaimer* reclaimer_ = nullptr;
  std::function<int64_t()> foreign_bytes_of_;
  std::shared_ptr<WaitRegistry> waits_ = std::make_shared<WaitRegistry>();  // has the mutex

  int64_t cap_ ABSL_GUARDED_BY(waits_->mu_);
  int64_t foreign_ ABSL_GUARDED_BY(waits_->mu_) = 0;
  int64_t in_use_ ABSL_GUARDED_BY(waits_->mu_) = 0;
  int64_t reserved_ ABSL_GUARDED_BY(waits_->mu_) = 0;
  int64_t peak_ ABSL_GUARDED_BY(waits_->mu_) = 0;
  int64_t waits_ever_ ABSL_GUARDED_BY(waits_->mu_) = 0;
  int64_t refused_ ABSL_GUARDED_BY(waits_->mu_) = 0;
  std::array<Use, kMemoryUses> uses_ ABSL_GUARDED_BY(waits_->mu_);
  std::list<uint64_t> waiters_ ABSL_GUARDED_BY(waits_->mu_);              // ids of waits, oldest first
  uint64_t turn_ ABSL_GUARDED_BY(waits_->mu_) = 0;                        // moves with the first of waiters_
  int64_t turn_promised_ ABSL_GUARDED_BY(waits_->mu_) = 0;                // promised bytes of this turn
  std::map<std::string, int64_t> promised_ ABSL_GUARDED_BY(waits_->mu_);  // uncommitted bytes by owner
};

class RamBudget : public MemoryBudget {
 public:
  explicit RamBudget(int64_t cap_bytes) : MemoryBudget("ram", cap_bytes) {}
};

class DeviceBudget : public MemoryBudget {
 public:
  using MemoryBudget::MemoryBudget;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_MEMORY_BUDGET_H_
