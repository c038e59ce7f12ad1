#include "server/runtime/imagined_memory.h"

#include <algorithm>

#include "cache/base/error.h"
#include "cache/load_set.h"

namespace latentd {

ImaginedMemory::ImaginedMemory(const CacheStats& stats,
                               std::function<double(const std::string&, int64_t)> seconds_to_load)
    : seconds_to_load_(std::move(seconds_to_load)),
      conditioning_cap_(stats.conditioning_cap),
      uses_(stats.uses) {
  auto bytes_of = [](const MemoryBudget::Stats& budget) {
    return BudgetBytes{.cap = budget.cap_bytes,
                       .foreign = budget.foreign_bytes,
                       .in_use = budget.in_use_bytes,
                       .reserved = budget.reserved_bytes};
  };
  ram_ = {.name = "ram", .bytes = bytes_of(stats.ram)};
  ram_.bytes.in_use -= stats.leaving_bytes;
  for (const auto& [name, device] : stats.devices) {
    devices_[name] = {.name = name, .bytes = bytes_of(device.budget)};
  }
  for (const RecordStats& r : stats.records) {
    Record record = {.key = r.key,
                     .kind = r.kind,
                     .use = r.use,
                     .bytes = r.bytes,
                     .seconds = r.load_seconds,
                     .names = {r.names.begin(), r.names.end()},
                     .worth = r.worth,
                     .others = r.lock_count,
                     .lasting = r.lasting,
                     .stale = r.stale};
    for (const ResidencyStats& there : r.residency) {
      record.blocks = there.blocks;
      record.copies[there.device] = {
          .part = {true, there.bytes, there.resident}, .others = there.lock_count, .lasting = there.lasting};
    }
    Add(std::move(record));
  }
}

ImaginedMemory::Record& ImaginedMemory::Add(Record record) {
  records_.push_back(std::move(record));
  Record& added = records_.back();
  if (!added.stale) by_key_[added.key] = std::prev(records_.end());
  if (!added.stale && !added.held()) idle_.Add(&added);
  return added;
}

std::map<ModelKey, ImaginedMemory::There> ImaginedMemory::Contents() const {
  std::map<ModelKey, There> contents;
  for (const auto& [key, record] : by_key_) {
    There& there = contents[key];
    there.bytes = record->bytes;
    for (const auto& [device, copy] : record->copies) {
      if (copy.part.any) there.copies[device] = copy.part;
    }
  }
  return contents;
}

// ----------------------------------------------------------------------------------------------- budgets

ImaginedMemory::Budget& ImaginedMemory::BudgetOf(const std::string& device) {
  const auto it = devices_.find(device);
  return it == devices_.end() ? ram_ : it->second;
}

const ImaginedMemory::Budget& ImaginedMemory::BudgetOf(const std::string& device) const {
  const auto it = devices_.find(device);
  return it == devices_.end() ? ram_ : it->second;
}

template <typename F>
void ImaginedMemory::ForEachIn(const Budget& budget, F f) const {
  for (const Record& record : records_) {
    if (IsHost(budget)) {
      f(record.bytes, record.held(), record.lasting, record.mine > 0);
      continue;
    }
    const auto copy = record.copies.find(budget.name);
    if (copy == record.copies.end() || !copy->second.part.any) continue;
    f(copy->second.part.bytes, copy->second.held(), copy->second.lasting, copy->second.mine > 0);
  }
}

int64_t ImaginedMemory::IdleBytes(const Budget& budget) const {
  if (IsHost(budget)) return idle_.bytes();
  int64_t idle = 0;
  ForEachIn(budget, [&](int64_t bytes, bool held, bool, bool) { idle += held ? 0 : bytes; });
  return idle;
}

int64_t ImaginedMemory::ObtainableBytes(const std::string& device) const {
  const Budget& budget = BudgetOf(device);
  return budget.bytes.Obtainable(IdleBytes(budget));
}

void ImaginedMemory::HoldsRam(int64_t more) {
  ram_bytes_ += more;
  peak_ram_bytes_ = std::max(peak_ram_bytes_, ram_bytes_);
}

absl::Status ImaginedMemory::Take(Budget& budget, int64_t bytes, const std::string& what) {
  switch (Admit(budget.bytes, IdleBytes(budget), bytes)) {
    case Admission::kNever:
      return Refuse(budget, RefusalCause::kNever, bytes, what);
    case Admission::kNoRoomNow:
      return Refuse(budget, RefusalCause::kNoRoomNow, bytes, what);
    case Admission::kMakeRoom:
      MakeRoom(budget, MissingBytes(budget.bytes, bytes));
      break;
    case Admission::kTake:
      break;
  }
  budget.bytes.reserved += bytes;
  budget.mine += bytes;
  if (IsHost(budget)) HoldsRam(bytes);
  return absl::OkStatus();
}

void ImaginedMemory::Commit(Budget& budget, int64_t bytes) {
  GiveBack(budget, bytes);
  budget.bytes.in_use += bytes;
}

void ImaginedMemory::GiveBack(Budget& budget, int64_t bytes) {
  budget.bytes.reserved -= bytes;
  budget.mine -= bytes;
  if (IsHost(budget)) HoldsRam(-bytes);
}

absl::Status ImaginedMemory::Refuse(const Budget& budget, RefusalCause cause, int64_t bytes,
                                    const std::string& what) const {
  int64_t held = budget.bytes.reserved, lasting = 0, own = budget.mine;
  ForEachIn(budget, [&](int64_t of, bool is_held, bool is_lasting, bool is_mine) {
    if (is_held) held += of;
    if (is_lasting) lasting += of;
    if (is_mine && !is_lasting) own += of;
  });
  if (cause == RefusalCause::kNever) held = 0;
  const bool hopeless =
      cause == RefusalCause::kNoRoomNow && IsHopeless(budget.bytes.cap, lasting, own, bytes);
  return Refusal(hopeless ? RefusalCause::kHopeless : cause,
                 {.budget = budget.name, .what = what, .bytes = bytes, .held = held}, budget.bytes);
}

void ImaginedMemory::MakeRoom(Budget& budget, int64_t bytes) {
  if (IsHost(budget)) {
    for (Record* record : idle_.Victims(bytes)) Evict(*record);
    return;
  }
  std::vector<std::pair<Record*, Copy*>> idle;
  std::vector<IdleCopy> copies;
  for (Record& record : records_) {
    const auto copy = record.copies.find(budget.name);
    if (copy == record.copies.end() || !copy->second.part.any || copy->second.held()) continue;
    idle.emplace_back(&record, &copy->second);
    copies.push_back({record.worth.last_used, copy->second.part.bytes});
  }
  for (const size_t i : CopiesThatGo(copies, bytes)) {
    const auto [record, copy] = idle[i];
    evictions_.push_back({record->key,
                          record->kind,
                          copy->part.bytes,
                          budget.name,
                          {record->names.begin(), record->names.end()}});
    LetGoOfCopy(budget.name, *copy);
  }
}

void ImaginedMemory::Evict(Record& record) {
  LearnFromEviction(uses_, record, EvictReason::kRoom);
  evictions_.push_back(
      {record.key, record.kind, record.bytes, "", {record.names.begin(), record.names.end()}});
  idle_.Remove(&record);
  ram_.bytes.in_use -= record.bytes;
  for (auto& [device, copy] : record.copies) LetGoOfCopy(device, copy);
  const auto it = by_key_.find(record.key);
  records_.erase(it->second);
  by_key_.erase(it);
}

void ImaginedMemory::LetGoOfCopy(const std::string& device, Copy& copy) {
  devices_[device].bytes.in_use -= copy.part.bytes;
  copy.part = {};
}

absl::Status ImaginedMemory::Promise(const std::string& device, int64_t bytes, const std::string& what) {
  return Take(BudgetOf(device), bytes, what);
}

void ImaginedMemory::GiveBack(const std::string& device, int64_t bytes) { GiveBack(BudgetOf(device), bytes); }

// ----------------------------------------------------------------------------------------------- records

template <typename F>
void ImaginedMemory::Change(Record& record, F f) {
  idle_.Remove(&record);
  f();
  if (!record.held() && !record.stale) idle_.Add(&record);
}

void ImaginedMemory::AddLock(Record& record) {
  Change(record, [&] {
    if (record.mine++ == 0) HoldsRam(record.bytes);
    uses_.Use(record.worth, GreedyDual::Cost(record.seconds, record.bytes));
  });
}

void ImaginedMemory::Unlock(Record& record) {
  Change(record, [&] {
    if (--record.mine == 0) HoldsRam(-record.bytes);
    uses_.Use(record.worth, GreedyDual::Cost(record.seconds, record.bytes));
  });
  if (!record.held()) KeepTheCap(ram_);
}

void ImaginedMemory::BoundConditioning() {
  int64_t all = 0;
  for (const auto& [key, record] : by_key_) {
    if (record->use == MemoryUse::kConditioning) all += record->bytes;
  }
  for (Record* record : idle_.ConditioningBeyond(conditioning_cap_, all)) Evict(*record);
}

bool ImaginedMemory::TryLock(const ModelKey& key) {
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return false;
  AddLock(*it->second);
  return true;
}

void ImaginedMemory::LoadPromised(const LockRequest& request, int64_t bytes) {
  const Loader& loader = request.loader;
  GiveBack(ram_, loader.estimated_bytes - bytes);
  Commit(ram_, bytes);
  Record record = {.key = request.key,
                   .kind = loader.kind,
                   .use = loader.use,
                   .bytes = bytes,
                   .seconds = seconds_to_load_(loader.kind, bytes)};
  if (!loader.name.empty()) record.names = {loader.name};
  loads_.push_back({record.key, record.kind, bytes, {record.names.begin(), record.names.end()}});
  AddLock(Add(std::move(record)));
  if (loader.use == MemoryUse::kConditioning) BoundConditioning();
}

absl::Status ImaginedMemory::Lock(const LockRequest& request, int64_t bytes) {
  if (Has(request.key)) return Lock(request);
  RETURN_IF_ERROR(Take(ram_, request.loader.estimated_bytes,
                       PurposeOfRecord(request.loader.kind, request.key.ToString())));
  LoadPromised(request, bytes);
  return absl::OkStatus();
}

absl::Status ImaginedMemory::LockAll(absl::Span<const LockRequest> requests) {
  std::vector<ModelKey> locked;
  std::vector<size_t> missing, again;
  std::set<ModelKey> claimed;
  for (size_t i = 0; i < requests.size(); ++i) {
    const LockRequest& request = requests[i];
    if (TryLock(request.key)) {
      if (!request.loader.name.empty()) by_key_[request.key]->names.insert(request.loader.name);
      locked.push_back(request.key);
    } else {
      (claimed.insert(request.key).second ? missing : again).push_back(i);
    }
  }
  const LoadSet set = SetToLoad(requests, std::move(missing));
  if (!set.order.empty()) {
    const absl::Status promised = Take(ram_, set.bytes, set.what);
    if (!promised.ok()) {
      for (const ModelKey& key : locked) Unlock(key);
      return promised;
    }
  }
  for (const size_t i : set.order) LoadPromised(requests[i], requests[i].loader.estimated_bytes);
  for (const size_t i : again) TryLock(requests[i].key);
  return absl::OkStatus();
}

void ImaginedMemory::Insert(const ModelKey& key, const std::string& kind, MemoryUse use, int64_t bytes,
                            double seconds) {
  if (TryLock(key)) {
    GiveBack(ram_, bytes);
    return;
  }
  Commit(ram_, bytes);
  AddLock(Add({.key = key, .kind = kind, .use = use, .bytes = bytes, .seconds = seconds}));
  if (use == MemoryUse::kConditioning) BoundConditioning();
}

void ImaginedMemory::Unlock(const ModelKey& key) { Unlock(*by_key_.at(key)); }

// ----------------------------------------------------------------------------------------------- devices

// One move of a record to a device.
class ImaginedMemory::Room : public MoversRoom {
 public:
  Room(ImaginedMemory& memory, Budget& budget, Record& record, Copy& copy)
      : memory_(memory), budget_(budget), record_(record), copy_(copy) {}

  absl::Status TryPromise(For purpose, int64_t bytes) override {
    const bool work = purpose == For::kWork;
    RETURN_IF_ERROR(memory_.Take(
        budget_, bytes,
        work ? PurposeOfWork(record_.kind) : PurposeOfRecord(record_.kind, record_.key.ToString())));
    (work ? working_ : weights_) = bytes;
    return absl::OkStatus();
  }
  absl::Status Promise(For purpose, int64_t bytes) override { return TryPromise(purpose, bytes); }
  int64_t ObtainableBytes() override { return memory_.ObtainableBytes(budget_.name); }

  ResidentPart WhatIsThere() override { return copy_.part; }
  void Unpin() override { --copy_.mine; }
  void Pin() override { ++copy_.mine; }
  bool LetGo() override {
    if (copy_.others + copy_.mine > 1) return false;
    memory_.LetGoOfCopy(budget_.name, copy_);
    return true;
  }

  int64_t working() const { return working_; }
  int64_t weights() const { return weights_; }

 private:
  ImaginedMemory& memory_;
  Budget& budget_;
  Record& record_;
  Copy& copy_;
  int64_t working_ = 0, weights_ = 0;  // promised
};

absl::StatusOr<ImaginedMemory::OnDevice> ImaginedMemory::LockOnDevice(const ModelKey& key,
                                                                      const std::string& device,
                                                                      ResidencyWish wish) {
  Record& record = *by_key_.at(key);
  Budget& budget = BudgetOf(device);
  AddLock(record);
  if (!record.blocks.empty()) wish.blocks = record.blocks;
  if (!wish.chosen.empty()) wish.chosen.resize(wish.blocks.size());
  OnDevice lock;
  lock.key = key;
  lock.device = device;
  lock.working_bytes = wish.working_bytes;
  for (const ResourceBlock& block : wish.blocks) lock.full_bytes += block.bytes;
  if (IsHost(budget)) {
    const absl::Status promised = wish.working_bytes > 0
                                      ? Take(budget, wish.working_bytes, PurposeOfWork(record.kind))
                                      : absl::OkStatus();
    if (!promised.ok()) {
      Unlock(record);
      return promised;
    }
    lock.plan = PlanResidency(wish.blocks, MemoryBudget::kUnlimited, wish.ring_slots);
    return lock;
  }
  Copy& copy = record.copies[device];
  ++copy.mine;
  Room room(*this, budget, record, copy);
  ResidentPart there;
  auto plan = ChooseResidency(wish, room, &there);
  if (!plan.ok()) {
    --copy.mine;
    GiveBack(budget, room.working());
    KeepTheCap(budget);
    Unlock(record);
    return plan.status();
  }
  lock.plan = *std::move(plan);
  const int64_t copied = room.weights() - lock.plan.ring_bytes();
  Commit(budget, copied);
  copy.part = {.any = true, .bytes = there.bytes + copied, .resident = lock.plan.resident};
  record.blocks = std::move(wish.blocks);
  return lock;
}

void ImaginedMemory::Unlock(const OnDevice& lock) {
  Record& record = *by_key_.at(lock.key);
  Budget& budget = BudgetOf(lock.device);
  GiveBack(budget, lock.working_bytes + lock.plan.ring_bytes());
  if (!IsHost(budget)) {
    --record.copies.at(lock.device).mine;
    KeepTheCap(budget);
  }
  Unlock(record);
}

}  // namespace latentd
