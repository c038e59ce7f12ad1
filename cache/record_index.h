// The records of a cache, in the orders in which it looks for them, so that no call has to go through all of
// them. For the files of ModelCache alone, under its mutex. Which of them go is decided in eviction_order.h.
#ifndef LATENTD_CACHE_RECORD_INDEX_H_
#define LATENTD_CACHE_RECORD_INDEX_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "cache/cache_record.h"
#include "cache/cache_stats.h"
#include "cache/eviction_order.h"
#include "cache/model_key.h"
#include "cache/wait_analysis.h"

namespace latentd {

using RecordPtr = std::shared_ptr<CacheRecord>;

class RecordIndex {
 public:
  // What a look at all records found, made of pieces between which others may do something: each record as it
  // was at the first. Begin(), then Continue() until it says that it is over; one look at a time.
  struct Look {
    std::vector<RecordStats> records;
    size_t next = 0, end = 0;
  };

  // The record that Lock would find; null when there is none.
  RecordPtr Find(const ModelKey& key) const;

  // A new record, under its key or, when `stale`, for its holders alone.
  void Insert(const RecordPtr& record, bool stale);
  // Takes a record from its key. With holders it stays until Forget; else it is forgotten.
  void TakeOut(const RecordPtr& record);
  void Forget(const RecordPtr& record);

  // Changes holders, worth or time of a record.
  template <typename F>
  void Change(const RecordPtr& record, F f) {
    WillChange(*record);
    Unlist(record.get());
    f();
    List(record.get());
  }
  // Changes what is there of it on a device: f(residency). One without a copy, a holder or a mover is gone.
  template <typename F>
  void ChangeOn(Device* device, const RecordPtr& record, F f) {
    WillChange(*record);
    OnDevice& on = devices_[device];
    Residency& there = record->residency[device];
    on.bytes -= there.bytes;
    f(there);
    on.bytes += there.bytes;
    if (there.copy == nullptr && there.holders.empty() && !there.moving_in) {
      record->residency.erase(device);
      on.records.erase(record.get());
    } else {
      on.records.insert(record.get());
    }
  }

  // Records that nobody holds, in order, as many as free `bytes`; all of them, when they do not.
  std::vector<RecordPtr> Victims(int64_t bytes) const;
  // The conditioning that goes when there are to be no more than `bytes` of it.
  std::vector<RecordPtr> ConditioningBeyond(int64_t bytes) const;
  // Records that nobody holds and that nobody took or let go of since.
  std::vector<RecordPtr> UnusedSince(absl::Time time) const;
  // Copies on a device that nobody holds: those that were not used for longest, as many as free `bytes`, less
  // what is not needed for that after all.
  std::vector<RecordPtr> VictimsOn(Device* device, int64_t bytes) const;

  // One more who asked for it by that name (Loader::name). Empty: no name.
  void AddName(const RecordPtr& record, const std::string& name);

  // What `pattern` covers, and what was made from it. Takes the name off that it covers; not from records
  // that are held, where those are to stay.
  std::vector<RecordPtr> Covered(const ModelKey& pattern, bool held_stay);
  // Ids and names of records under a key; sorted.
  std::vector<std::string> IdsThatBegin(const std::string& prefix) const;

  std::vector<HeldGroup> HeldByWhom() const;
  std::vector<HeldGroup> HeldByWhomOn(Device* device) const;
  int64_t idle_bytes() const { return idle_.bytes(); }
  int64_t held_bytes() const { return bytes_ - idle_.bytes(); }
  int64_t bytes() const { return bytes_; }
  size_t held_records() const { return held_.size(); }
  int64_t BytesOn(Device* device) const;

  std::vector<RecordPtr> HeldBy(const std::string& owner) const;

  // All records under a key, in pieces: those in up to `n` places from `*next` on, which moves on. False when
  // that was all. What comes to be meanwhile may be missed.
  bool Next(size_t* next, size_t n, std::vector<RecordPtr>* records) const;

  void Begin(Look* look);
  // Describes up to `n` more. False when that was all.
  bool Continue(Look* look, size_t n);
  static RecordStats Describe(const CacheRecord& record);
  // Into the order in which they go; then those that are held, then stale ones.
  static void Sort(std::vector<RecordStats>* records);

  // The most records that one call here looked at which is not named for that many: what it went through, not
  // what it returned. For tests.
  int64_t longest_walk() const { return longest_walk_; }

 private:
  struct ByTime {
    bool operator()(const CacheRecord* a, const CacheRecord* b) const {
      return std::pair(a->last_used, a) < std::pair(b->last_used, b);
    }
  };
  struct OnDevice {
    absl::flat_hash_set<CacheRecord*> records;
    int64_t bytes = 0;
  };

  void List(CacheRecord* record);
  void Unlist(CacheRecord* record);
  void WillChange(CacheRecord& record);
  void ListUnder(const std::string& id, CacheRecord* record) { by_id_[id].insert(record); }
  void UnlistUnder(const std::string& id, CacheRecord* record);
  RecordPtr Shared(const CacheRecord* record) const { return slots_[record->slot]; }
  std::vector<RecordPtr> Shared(const std::vector<CacheRecord*>& records) const;
  void Walked(size_t records) const;

  std::vector<RecordPtr> slots_;  // all there are, and gaps
  std::vector<size_t> gaps_;
  absl::flat_hash_map<ModelKey, CacheRecord*> by_key_;
  std::map<std::string, absl::flat_hash_set<CacheRecord*>> by_id_;  // and by names
  absl::flat_hash_map<std::string, absl::flat_hash_set<CacheRecord*>> by_source_;
  EvictionOrder<CacheRecord> idle_;
  std::set<CacheRecord*, ByTime> idle_by_time_;
  absl::flat_hash_set<CacheRecord*> held_;
  std::map<Device*, OnDevice> devices_;
  int64_t bytes_ = 0, conditioning_bytes_ = 0;
  Look* look_ = nullptr;
  uint64_t looks_ = 0;
  mutable int64_t longest_walk_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_CACHE_RECORD_INDEX_H_
