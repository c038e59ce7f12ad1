#include "cache/wait_analysis.h"

#include <algorithm>

#include "cache/admission.h"

namespace latentd {
namespace {

constexpr int kNobody = -1;

int64_t At(const absl::flat_hash_map<int, int64_t>& map, int owner) {
  const auto it = map.find(owner);
  return it == map.end() ? 0 : it->second;
}

}  // namespace

WaitAnalysis::WaitAnalysis(const std::vector<BudgetView>& budgets, const std::vector<WaitView>& waits) {
  for (const BudgetView& view : budgets) {
    Budget& budget = budgets_.emplace_back();
    budget.cap = view.cap;
    budget.at_once = view.at_once;
    budget.ahead = view.turn_promised;
    for (const auto& [owner, bytes] : view.promised) {
      const int number = Number(owner);
      budget.promised[number] = bytes;
      budget.own[number] += bytes;
    }
    for (const HeldGroup& held : view.held) {
      budget.held += held.bytes;
      if (held.lasting) {
        budget.lasting += held.bytes;
        continue;
      }
      if (held.turn == view.turn) budget.ahead += held.bytes;
      if (held.owners.empty()) continue;  // whoever it is lets go of it
      Group& group = budget.groups.emplace_back(Group{{}, held.bytes});
      for (const std::string& owner : held.owners) {
        const int number = Number(owner);
        group.owners.push_back(number);
        budget.own[number] += held.bytes;
        if (held.turn == view.turn) budget.ahead_with[number] += held.bytes;
      }
    }
  }
  for (const WaitView& view : waits) {
    Wait& wait = waits_.emplace_back();
    wait.id = view.id;
    wait.owner = Number(view.owner);
    wait.budget = view.budget;
    wait.bytes = view.bytes;
    wait.worker = view.budget >= 0 ? kNobody : Number(view.worker);
    by_id_[view.id] = waits_.size() - 1;
    if (wait.budget >= 0) budgets_[static_cast<size_t>(wait.budget)].waits.push_back(waits_.size() - 1);
  }
  waiting_.assign(numbers_.size(), false);
  for (Wait& wait : waits_) {
    if (wait.budget >= 0 && IsHopeless(budgets_[static_cast<size_t>(wait.budget)], wait.owner, wait.bytes)) {
      wait.verdict = Verdict::kHopeless;
    } else {
      waiting_[static_cast<size_t>(wait.owner)] = true;
    }
  }
  // Whoever is refused goes on.
  for (const Wait& wait : waits_) {
    if (wait.verdict == Verdict::kHopeless) waiting_[static_cast<size_t>(wait.owner)] = false;
  }
  go_on_ = GoOn(kNobody);
  FindDeadlock();
  for (Budget& budget : budgets_) FindWhoTakes(budget);
}

int WaitAnalysis::Number(const std::string& owner) {
  return numbers_.try_emplace(owner, static_cast<int>(numbers_.size())).first->second;
}

int WaitAnalysis::Find(const std::string& owner) const {
  const auto it = numbers_.find(owner);
  return it == numbers_.end() ? kNobody : it->second;
}

WaitAnalysis::Verdict WaitAnalysis::Of(uint64_t id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? Verdict::kWait : waits_[it->second].verdict;
}

bool WaitAnalysis::IsHopeless(const Budget& budget, int owner, int64_t bytes) const {
  return latentd::IsHopeless(budget.cap, budget.lasting, At(budget.own, owner), bytes);
}

bool WaitAnalysis::IsHopeless(int budget, const std::string& owner, int64_t bytes) const {
  return IsHopeless(budgets_[static_cast<size_t>(budget)], Find(owner), bytes);
}

// Lets go of everything that can be let go of, until nobody more goes on by that.
std::vector<bool> WaitAnalysis::GoOn(int stays) const {
  std::vector<bool> on(numbers_.size(), false);
  // What is kept of each budget, and by how many of its owners each group.
  std::vector<int64_t> kept;
  std::vector<std::vector<size_t>> keepers;
  for (const Budget& budget : budgets_) {
    int64_t bytes = budget.lasting;
    for (const auto& [owner, promised] : budget.promised) bytes += promised;
    keepers.emplace_back();
    for (const Group& group : budget.groups) {
      bytes += group.bytes;
      keepers.back().push_back(group.owners.size());
    }
    kept.push_back(bytes);
  }
  auto let_go = [&](int owner) {
    on[static_cast<size_t>(owner)] = true;
    for (size_t b = 0; b < budgets_.size(); ++b) {
      kept[b] -= At(budgets_[b].promised, owner);
      if (At(budgets_[b].own, owner) == 0) continue;
      for (size_t g = 0; g < budgets_[b].groups.size(); ++g) {
        const Group& group = budgets_[b].groups[g];
        if (std::find(group.owners.begin(), group.owners.end(), owner) == group.owners.end()) continue;
        if (--keepers[b][g] == 0) kept[b] -= group.bytes;
      }
    }
  };
  for (size_t owner = 0; owner < on.size(); ++owner) {
    if (!waiting_[owner] && static_cast<int>(owner) != stays) let_go(static_cast<int>(owner));
  }
  for (bool more = true; more;) {
    more = false;
    for (const Wait& wait : waits_) {
      if (on[static_cast<size_t>(wait.owner)] || wait.owner == stays) continue;
      const bool can = wait.budget < 0 ? on[static_cast<size_t>(wait.worker)]
                                       : wait.bytes <= budgets_[static_cast<size_t>(wait.budget)].cap -
                                                           kept[static_cast<size_t>(wait.budget)];
      if (!can) continue;
      let_go(wait.owner);
      more = true;
    }
  }
  return on;
}

// Whether somebody else's wait cannot end because of what this one's owner has or does.
bool WaitAnalysis::IsInTheWay(const Wait& wait, const std::vector<bool>& go_on) const {
  return std::any_of(waits_.begin(), waits_.end(), [&](const Wait& other) {
    if (other.owner == wait.owner || go_on[static_cast<size_t>(other.owner)]) return false;
    if (other.budget < 0) return other.worker == wait.owner;
    return At(budgets_[static_cast<size_t>(other.budget)].own, wait.owner) > 0;
  });
}

void WaitAnalysis::FindDeadlock() {
  Wait *newest = nullptr, *newest_in_the_way = nullptr;
  for (Wait& wait : waits_) {
    if (go_on_[static_cast<size_t>(wait.owner)]) continue;
    deadlock_.push_back(wait.id);
    if (wait.budget < 0) continue;  // somebody's work is not a request that can be refused
    newest = &wait;
    if (IsInTheWay(wait, go_on_)) newest_in_the_way = &wait;
  }
  if (newest_in_the_way != nullptr) newest = newest_in_the_way;
  if (newest != nullptr) newest->verdict = Verdict::kDeadlock;
}

bool WaitAnalysis::FitsBeside(const Budget& budget, const Wait& first, int owner, int64_t bytes) const {
  const int64_t left = budget.cap - budget.lasting - At(budget.own, first.owner) - first.bytes;
  return bytes <= left - (budget.ahead - At(budget.ahead_with, first.owner));
}

// One after the other: when the oldest has taken what it waits for, everything is looked at anew.
void WaitAnalysis::FindWhoTakes(Budget& budget) {
  const Wait* first = nullptr;
  for (size_t index : budget.waits) {
    Wait& wait = waits_[index];
    if (wait.verdict != Verdict::kWait) continue;  // goes away
    if (first == nullptr) first = &wait;
    if (wait.bytes > budget.at_once) continue;
    bool may = &wait == first || FitsBeside(budget, *first, wait.owner, wait.bytes);
    // A deadlock is ended before the order is.
    if (!may && go_on_[static_cast<size_t>(first->owner)]) {
      may = !GoOn(wait.owner)[static_cast<size_t>(first->owner)];
    }
    if (!may) continue;
    wait.verdict = Verdict::kTake;
    return;
  }
}

bool WaitAnalysis::MayGoAhead(int number, const std::string& owner, int64_t bytes) const {
  const Budget& budget = budgets_[static_cast<size_t>(number)];
  const int who = Find(owner);
  const Wait* first = nullptr;
  for (size_t index : budget.waits) {
    const Wait& wait = waits_[index];
    if (wait.verdict == Verdict::kTake && wait.bytes + bytes > budget.at_once) return false;
    if (first == nullptr && (wait.verdict == Verdict::kWait || wait.verdict == Verdict::kTake)) first = &wait;
  }
  return first == nullptr || FitsBeside(budget, *first, who, bytes) ||
         !GoOn(who)[static_cast<size_t>(first->owner)];
}

}  // namespace latentd
