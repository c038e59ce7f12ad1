#include "cache/wait_registry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache/memory_budget.h"

namespace latentd {

WaitRegistry::Entry::Entry(std::shared_ptr<WaitRegistry> registry, const std::string& owner, std::string what,
                           const std::string& worker)
    : registry_(std::move(registry)), id_([&] {
        MutexLock lock(&registry_->mu_);
        return registry_->Enter({.view = {.owner = owner, .worker = worker}, .what = std::move(what)});
      }()) {}

void WaitRegistry::Entry::Over() {
  MutexLock lock(&registry_->mu_);
  registry_->Leave(id_);
}

bool WaitRegistry::Waits(const std::string& owner) const {
  MutexLock lock(&mu_);
  return std::any_of(waits_.begin(), waits_.end(),
                     [&](const auto& w) { return w.second.view.owner == owner; });
}

uint64_t WaitRegistry::Settled() const {
  MutexLock lock(&mu_);
  const bool any =
      std::any_of(waits_.begin(), waits_.end(), [](const auto& w) { return w.second.budget != nullptr; });
  return !any || (awake_ == 0 && analysis_ != nullptr && analysed_ == moved_) ? moved_ + 1 : 0;
}

void WaitRegistry::LookAgain() {
  // Whoever begins to wait after this looks at what happened before it.
  if (waiting_ == 0) return;
  MutexLock lock(&mu_);
  Moved();
}

uint64_t WaitRegistry::Enter(Wait wait) {
  const uint64_t id = ++next_;
  wait.view.id = id;
  if (wait.budget != nullptr) ++awake_;
  waits_.emplace(id, std::move(wait));
  waiting_ = static_cast<int64_t>(waits_.size());
  Moved();
  return id;
}

void WaitRegistry::Leave(uint64_t id) {
  const auto it = waits_.find(id);
  if (it == waits_.end()) return;
  if (it->second.budget != nullptr && it->second.awake) --awake_;
  waits_.erase(it);
  waiting_ = static_cast<int64_t>(waits_.size());
  Moved();
}

void WaitRegistry::Moved() {
  ++moved_;
  if (awake_ > 0) return;  // looks before it sleeps
  for (const auto& [id, wait] : waits_) {
    if (wait.budget != nullptr) return Wake(id);
  }
}

void WaitRegistry::Wake(uint64_t id) {
  const auto it = waits_.find(id);
  if (it == waits_.end() || it->second.awake) return;
  it->second.awake = true;
  ++awake_;
  it->second.wake->Signal();
}

void WaitRegistry::Sleep(uint64_t id, const WaitAnalysis& analysis, absl::Time until) {
  for (const auto& [other, wait] : waits_) {
    if (wait.budget != nullptr && analysis.Of(other) != WaitAnalysis::Verdict::kWait) Wake(other);
  }
  Wait& wait = waits_.at(id);
  wait.awake = false;
  --awake_;
  wait.wake->WaitWithDeadline(&mu_, until);
  if (wait.awake) return;
  wait.awake = true;  // nobody woke it
  ++awake_;
}

void WaitRegistry::Join(MemoryBudget* budget) {
  MutexLock lock(&mu_);
  budgets_.push_back(budget);
}

void WaitRegistry::Quit(MemoryBudget* budget) {
  MutexLock lock(&mu_);
  std::erase(budgets_, budget);
}

int WaitRegistry::IndexOf(const MemoryBudget* budget) const {
  const auto it = std::find(budgets_.begin(), budgets_.end(), budget);
  return static_cast<int>(it - budgets_.begin());
}

std::shared_ptr<const WaitAnalysis> WaitRegistry::Look(uint64_t seen) {
  if (analysis_ != nullptr && analysed_ == seen && moved_ == seen) return analysis_;
  const std::vector<MemoryBudget*> budgets = budgets_;
  std::vector<Reclaimer::Held> held;
  mu_.Unlock();
  for (MemoryBudget* budget : budgets) held.push_back(budget->AskHeld());
  mu_.Lock();
  if (moved_ != seen || budgets != budgets_) return nullptr;
  if (analysis_ != nullptr && analysed_ == seen) return analysis_;
  std::vector<BudgetView> views;
  for (size_t i = 0; i < budgets.size(); ++i) views.push_back(budgets[i]->View(std::move(held[i])));
  std::vector<WaitView> waits;
  for (const auto& [id, wait] : waits_) {
    waits.push_back(wait.view);
    if (wait.budget != nullptr) waits.back().budget = IndexOf(wait.budget);
  }
  analysis_ = std::make_shared<const WaitAnalysis>(views, waits);
  analysed_ = seen;
  return analysis_;
}

std::string WaitRegistry::Say(const std::vector<uint64_t>& ids) const {
  std::vector<std::string> list;
  for (uint64_t id : ids) {
    const auto it = waits_.find(id);
    if (it == waits_.end()) continue;
    list.push_back(absl::StrCat(it->second.view.owner, " waits for ", it->second.what));
  }
  return absl::StrJoin(list, "; ");
}

}  // namespace latentd
