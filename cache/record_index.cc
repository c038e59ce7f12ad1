#include "cache/record_index.h"

#include <tuple>

namespace latentd {
namespace {

std::vector<HeldGroup> Groups(std::map<std::tuple<std::vector<std::string>, bool, uint64_t>, int64_t> sums) {
  std::vector<HeldGroup> groups;
  for (const auto& [who, bytes] : sums) {
    const auto& [owners, lasting, turn] = who;
    groups.push_back({owners, bytes, lasting, turn});
  }
  return groups;
}

std::vector<std::string> EachOnce(const Holders& holders) {
  std::vector<std::string> owners = holders.Owners();
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  return owners;
}

// Off a list that is gone with the last on it.
void EraseFrom(auto& lists, const std::string& id, CacheRecord* record) {
  const auto it = lists.find(id);
  if (it == lists.end()) return;
  it->second.erase(record);
  if (it->second.empty()) lists.erase(it);
}

}  // namespace

RecordPtr RecordIndex::Find(const ModelKey& key) const {
  const auto it = by_key_.find(key);
  return it == by_key_.end() ? nullptr : Shared(it->second);
}

void RecordIndex::Insert(const RecordPtr& record, bool stale) {
  if (gaps_.empty()) {
    gaps_.push_back(slots_.size());
    slots_.emplace_back();
  }
  record->slot = gaps_.back();
  gaps_.pop_back();
  slots_[record->slot] = record;
  record->look = looks_;  // no part of a look that is under way
  bytes_ += record->bytes;
  if (!stale) {
    record->indexed = true;
    by_key_[record->key] = record.get();
    ListUnder(record->key.id, record.get());
    for (const std::string& name : record->names) ListUnder(name, record.get());
    for (const std::string& source : record->sources) by_source_[source].insert(record.get());
    if (record->use == MemoryUse::kConditioning) conditioning_bytes_ += record->bytes;
  }
  List(record.get());
}

void RecordIndex::TakeOut(const RecordPtr& record) {
  WillChange(*record);
  Unlist(record.get());
  record->indexed = false;
  by_key_.erase(record->key);
  UnlistUnder(record->key.id, record.get());
  for (const std::string& name : record->names) UnlistUnder(name, record.get());
  for (const std::string& source : record->sources) EraseFrom(by_source_, source, record.get());
  if (record->use == MemoryUse::kConditioning) conditioning_bytes_ -= record->bytes;
  List(record.get());
  if (record->holders.empty()) Forget(record);
}

void RecordIndex::Forget(const RecordPtr& record) {
  WillChange(*record);
  Unlist(record.get());
  for (auto& [device, there] : record->residency) {
    OnDevice& on = devices_[device];
    on.bytes -= there.bytes;
    on.records.erase(record.get());
  }
  bytes_ -= record->bytes;
  const RecordPtr keep = record;  // may be a reference to the slot
  gaps_.push_back(keep->slot);
  slots_[keep->slot] = nullptr;
}

void RecordIndex::List(CacheRecord* record) {
  if (!record->holders.empty()) {
    held_.insert(record);
  } else if (record->indexed) {
    idle_.Add(record);
    idle_by_time_.insert(record);
  }
}

void RecordIndex::Unlist(CacheRecord* record) {
  if (held_.erase(record) != 0 || !record->indexed) return;
  if (idle_by_time_.erase(record) != 0) idle_.Remove(record);
}

void RecordIndex::UnlistUnder(const std::string& id, CacheRecord* record) { EraseFrom(by_id_, id, record); }

void RecordIndex::AddName(const RecordPtr& record, const std::string& name) {
  if (name.empty() || record->names.count(name) != 0) return;
  WillChange(*record);
  record->names.insert(name);
  if (record->indexed) ListUnder(name, record.get());
}

void RecordIndex::Walked(size_t records) const {
  longest_walk_ = std::max(longest_walk_, static_cast<int64_t>(records));
}

std::vector<RecordPtr> RecordIndex::Shared(const std::vector<CacheRecord*>& records) const {
  std::vector<RecordPtr> shared;
  shared.reserve(records.size());
  for (const CacheRecord* record : records) shared.push_back(Shared(record));
  return shared;
}

std::vector<RecordPtr> RecordIndex::Victims(int64_t bytes) const { return Shared(idle_.Victims(bytes)); }

std::vector<RecordPtr> RecordIndex::ConditioningBeyond(int64_t bytes) const {
  return Shared(idle_.ConditioningBeyond(bytes, conditioning_bytes_));
}

std::vector<RecordPtr> RecordIndex::UnusedSince(absl::Time time) const {
  std::vector<RecordPtr> unused;
  for (const CacheRecord* record : idle_by_time_) {
    if (record->last_used > time) break;
    unused.push_back(Shared(record));
  }
  return unused;
}

std::vector<RecordPtr> RecordIndex::VictimsOn(Device* device, int64_t bytes) const {
  const auto on = devices_.find(device);
  if (on == devices_.end() || bytes <= 0) return {};
  Walked(on->second.records.size());
  std::vector<CacheRecord*> idle;
  std::vector<IdleCopy> copies;
  for (CacheRecord* record : on->second.records) {
    const Residency& there = record->residency.at(device);
    if (there.copy == nullptr || !there.holders.empty()) continue;
    idle.push_back(record);
    copies.push_back({record->worth.last_used, there.bytes});
  }
  std::vector<RecordPtr> victims;
  for (size_t i : CopiesThatGo(copies, bytes)) victims.push_back(Shared(idle[i]));
  return victims;
}

std::vector<RecordPtr> RecordIndex::Covered(const ModelKey& pattern, bool held_stay) {
  absl::flat_hash_set<CacheRecord*> found;
  std::vector<CacheRecord*> shared;
  if (const auto it = by_id_.find(pattern.id); it != by_id_.end()) {
    for (CacheRecord* record : it->second) {
      if (pattern.Covers(record->key)) {
        found.insert(record);
      } else if (pattern.Covers({pattern.id, record->key.component})) {
        shared.push_back(record);  // by one of its names
      }
    }
  }
  if (pattern.component.empty()) {
    if (const auto it = by_source_.find(pattern.id); it != by_source_.end()) {
      found.insert(it->second.begin(), it->second.end());
    }
  }
  for (CacheRecord* record : shared) {
    if (found.count(record) != 0) continue;
    const bool last = record->names.size() == 1;
    if (last) found.insert(record);
    if (last && held_stay && !record->holders.empty()) continue;
    WillChange(*record);
    record->names.erase(pattern.id);
    UnlistUnder(pattern.id, record);
  }
  std::vector<RecordPtr> covered;
  for (const CacheRecord* record : found) covered.push_back(Shared(record));
  return covered;
}

std::vector<std::string> RecordIndex::IdsThatBegin(const std::string& prefix) const {
  std::vector<std::string> ids;
  for (auto it = by_id_.lower_bound(prefix); it != by_id_.end(); ++it) {
    if (it->first.compare(0, prefix.size(), prefix) != 0) break;
    ids.push_back(it->first);
  }
  return ids;
}

std::vector<HeldGroup> RecordIndex::HeldByWhom() const {
  Walked(held_.size());
  std::map<std::tuple<std::vector<std::string>, bool, uint64_t>, int64_t> sums;
  for (const CacheRecord* record : held_) {
    sums[{EachOnce(record->holders), record->holders.lasting(), record->turn}] += record->bytes;
  }
  return Groups(std::move(sums));
}

std::vector<HeldGroup> RecordIndex::HeldByWhomOn(Device* device) const {
  std::map<std::tuple<std::vector<std::string>, bool, uint64_t>, int64_t> sums;
  if (const auto on = devices_.find(device); on != devices_.end()) {
    Walked(on->second.records.size());
    for (const CacheRecord* record : on->second.records) {
      const Residency& there = record->residency.at(device);
      if (there.holders.empty() || there.copy == nullptr) continue;
      sums[{EachOnce(there.holders), there.holders.lasting(), there.turn}] += there.bytes;
    }
  }
  return Groups(std::move(sums));
}

int64_t RecordIndex::BytesOn(Device* device) const {
  const auto on = devices_.find(device);
  return on == devices_.end() ? 0 : on->second.bytes;
}

std::vector<RecordPtr> RecordIndex::HeldBy(const std::string& owner) const {
  Walked(held_.size());
  std::vector<RecordPtr> records;
  for (const CacheRecord* record : held_) {
    const auto& all = record->holders.all();
    if (std::any_of(all.begin(), all.end(), [&](const Holders::Holder& h) { return h.owner == owner; })) {
      records.push_back(Shared(record));
    }
  }
  return records;
}

bool RecordIndex::Next(size_t* next, size_t n, std::vector<RecordPtr>* records) const {
  const size_t end = std::min(slots_.size(), *next + n);
  Walked(end - *next);
  for (; *next < end; ++*next) {
    const RecordPtr& record = slots_[*next];
    if (record != nullptr && record->indexed) records->push_back(record);
  }
  return end < slots_.size();
}

// ------------------------------------------------------------------------------------------- looks at all

void RecordIndex::Begin(Look* look) {
  look->end = slots_.size();
  look->records.reserve(slots_.size() - gaps_.size());
  look_ = look;
  ++looks_;
}

bool RecordIndex::Continue(Look* look, size_t n) {
  const size_t end = std::min(look->end, look->next + n);
  Walked(end - look->next);
  for (; look->next < end; ++look->next) {
    const RecordPtr& record = slots_[look->next];
    if (record != nullptr) WillChange(*record);
  }
  if (look->next < look->end) return true;
  look_ = nullptr;
  return false;
}

void RecordIndex::WillChange(CacheRecord& record) {
  if (look_ == nullptr || record.look == looks_) return;
  record.look = looks_;
  look_->records.push_back(Describe(record));
}

RecordStats RecordIndex::Describe(const CacheRecord& record) {
  RecordStats r;
  r.key = record.key;
  r.names.assign(record.names.begin(), record.names.end());
  r.kind = record.kind;
  r.use = record.use;
  r.bytes = record.bytes;
  r.lock_count = static_cast<int64_t>(record.holders.size());
  r.holders = record.holders.Owners();
  r.lasting = record.holders.lasting();
  r.stale = !record.indexed;
  r.load_seconds = record.load_seconds;
  r.last_used = record.last_used;
  r.worth = record.worth;
  for (const auto& [device, there] : record.residency) {
    if (there.copy == nullptr) continue;
    std::vector<ResourceBlock> blocks = record.resource->device_blocks();
    int64_t full = 0;
    for (const ResourceBlock& block : blocks) full += block.bytes;
    r.residency.push_back({.device = device->name(),
                           .bytes = there.bytes,
                           .full_bytes = full,
                           .lock_count = static_cast<int64_t>(there.holders.size()),
                           .lasting = there.holders.lasting(),
                           .blocks = std::move(blocks),
                           .resident = there.resident});
  }
  return r;
}

void RecordIndex::Sort(std::vector<RecordStats>* records) {
  std::vector<RecordStats> held, stale, sorted;
  EvictionOrder<RecordStats> idle;
  for (RecordStats& r : *records) {
    if (!r.stale && r.lock_count == 0) {
      idle.Add(&r);
    } else {
      (r.stale ? stale : held).push_back(std::move(r));
    }
  }
  std::sort(held.begin(), held.end(),
            [](const RecordStats& a, const RecordStats& b) { return a.worth < b.worth; });
  sorted.reserve(records->size());
  idle.ForEach([&](RecordStats* r) {
    sorted.push_back(std::move(*r));
    return true;
  });
  std::move(held.begin(), held.end(), std::back_inserter(sorted));
  std::move(stale.begin(), stale.end(), std::back_inserter(sorted));
  *records = std::move(sorted);
}

}  // namespace latentd
