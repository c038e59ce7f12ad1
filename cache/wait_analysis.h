// What may go on and what cannot, of everybody who waits for memory: the policy of waiting, on plain values.
//
// Owners hold bytes of budgets: promised ones, and records, alone or together with others. Who runs lets go
// of what it holds sooner or later; who waits does not; what is *lasting* (a pin, the LoRAs of a session) is
// not let go of by itself. From that follows, of each wait:
//
//  * hopeless: the cap less what is lasting, and less what its owner holds, does not hold it. Refused at
//  once.
//  * in a deadlock: when everybody has let go who can, it is still not served, for others of the kind hold
//  what
//    it needs. The newest of those whose holdings are in the way is refused, so that the rest goes on.
//  * to be served: it fits now, and delays nobody who came before. The first of a budget delays nobody.
//  Another
//    goes ahead of the first
//     - if it fits beside what the first will take: the cap less what will be left when all have let go, less
//       the first's bytes, less what others got ahead of it and still have. So the first waits no longer than
//       until those have let go who held memory when it became the first;
//     - or if the first cannot be served before this one's owner has let go of what it holds.
//
// One per thread; made from a snapshot, knows nothing of the cache.
#ifndef LATENTD_CACHE_WAIT_ANALYSIS_H_
#define LATENTD_CACHE_WAIT_ANALYSIS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace latentd {

// Bytes of records that the same owners hold.
struct HeldGroup {
  std::vector<std::string> owners = {};  // each once; whose they are is not known where there is none
  int64_t bytes = 0;
  bool lasting = false;  // one of them keeps it until somebody from outside says otherwise
  uint64_t turn = 0;     // of the promise that they came from: Reservation::turn
};

struct BudgetView {
  int64_t cap = 0;
  int64_t at_once = 0;                           // bytes that are free, or are when what nobody holds is gone
  std::map<std::string, int64_t> promised = {};  // by owner
  std::vector<HeldGroup> held = {};
  uint64_t turn = 0;          // grants of this turn went ahead of the first who waits
  int64_t turn_promised = 0;  // promised bytes of this turn
};

struct WaitView {
  uint64_t id = 0;  // larger is newer
  std::string owner = {};
  int budget = -1;  // index of the budget; -1: for the work of `worker`
  int64_t bytes = 0;
  std::string worker = {};
};

class WaitAnalysis {
 public:
  // `waits`: oldest first.
  WaitAnalysis(const std::vector<BudgetView>& budgets, const std::vector<WaitView>& waits);

  enum class Verdict { kWait, kTake, kHopeless, kDeadlock };
  Verdict Of(uint64_t id) const;

  // Waits that are in a deadlock, oldest first.
  const std::vector<uint64_t>& deadlock() const { return deadlock_; }

  // Of a request that does not wait yet.
  bool IsHopeless(int budget, const std::string& owner, int64_t bytes) const;
  bool MayGoAhead(int budget, const std::string& owner, int64_t bytes) const;

  // Of records that somebody holds.
  int64_t HeldBytes(int budget) const { return budgets_[static_cast<size_t>(budget)].held; }

 private:
  struct Group {
    std::vector<int> owners;
    int64_t bytes;
  };
  struct Budget {
    int64_t cap = 0, at_once = 0, held = 0;
    int64_t lasting = 0;                           // bytes that are not let go of
    int64_t ahead = 0;                             // bytes that went ahead of the first and are still had
    absl::flat_hash_map<int, int64_t> ahead_with;  // of these, those that an owner shares in
    absl::flat_hash_map<int, int64_t> own;         // by owner: promised, and held and not lasting
    absl::flat_hash_map<int, int64_t> promised;
    std::vector<Group> groups;  // not lasting, with owners
    std::vector<size_t> waits;  // indices, oldest first
  };
  struct Wait {
    uint64_t id;
    int owner, budget;
    int64_t bytes;
    int worker;
    Verdict verdict = Verdict::kWait;
  };

  int Number(const std::string& owner);
  int Find(const std::string& owner) const;
  // Who goes on sooner or later, by owner, when `stays` never does.
  std::vector<bool> GoOn(int stays) const;
  bool IsHopeless(const Budget& budget, int owner, int64_t bytes) const;
  bool FitsBeside(const Budget& budget, const Wait& first, int owner, int64_t bytes) const;
  bool IsInTheWay(const Wait& wait, const std::vector<bool>& go_on) const;
  void FindDeadlock();
  void FindWhoTakes(Budget& budget);

  absl::flat_hash_map<std::string, int> numbers_;
  std::vector<Budget> budgets_;
  std::vector<Wait> waits_;
  absl::flat_hash_map<uint64_t, size_t> by_id_;
  std::vector<bool> waiting_;  // by owner
  std::vector<bool> go_on_;    // by owner
  std::vector<uint64_t> deadlock_;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_WAIT_ANALYSIS_H_
