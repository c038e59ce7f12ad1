// What plan_outcome_test.cc does, in the imagination and really: random jobs, and what is said of each of
// their steps.
#ifndef LATENTD_SERVER_RUNTIME_PLAN_OUTCOME_JOB_H_
#define LATENTD_SERVER_RUNTIME_PLAN_OUTCOME_JOB_H_

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "cache/base/error.h"
#include "cache/model_cache.h"
#include "server/runtime/imagined_memory.h"

namespace latentd {

inline constexpr int kKeys = 12;

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int64_t From(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  size_t Pick(size_t n) { return static_cast<size_t>(From(0, static_cast<int64_t>(n) - 1)); }
  bool Chance(int64_t one_in) { return From(1, one_in) == 1; }

 private:
  std::mt19937_64 random_;
};

// What there is to load, in one state.
struct Item {
  ModelKey key;
  std::string kind, name;
  MemoryUse use = MemoryUse::kWeights;
  int64_t bytes = 0;
  int64_t scratch = 0;  // that its load is promised, and does not keep
  std::vector<ResourceBlock> blocks;
};

inline absl::Duration TimeToLoad(const std::string& kind, int64_t bytes) {
  const int64_t rate = kind == "vae" ? 0 : kind == "lora" ? 3 : kind == "merged" ? 100 : 20;
  return absl::Nanoseconds(rate * bytes);
}

inline Item RandomItem(int n, Dice& dice) {
  static const std::vector<std::pair<std::string, MemoryUse>> kKinds = {
      {"vae", MemoryUse::kWeights},   {"transformer", MemoryUse::kWeights},
      {"lora", MemoryUse::kPatches},  {"conditioning", MemoryUse::kConditioning},
      {"merged", MemoryUse::kMerged},
  };
  Item item;
  const auto& [kind, use] = kKinds[dice.Pick(kKinds.size())];
  item.kind = kind;
  item.use = use;
  item.key = {absl::StrCat("m", dice.From(0, 9), "-", n), dice.Chance(2) ? "part" : ""};
  if (kind == "merged") item.scratch = dice.From(0, 10);
  if (dice.Chance(2)) item.name = absl::StrCat("model-", dice.From(0, 2));
  if (dice.Chance(3)) {
    item.blocks = {{dice.From(1, 30), true}};
  } else {
    for (int64_t i = dice.From(4, 14); i > 0; --i) item.blocks.push_back({dice.From(0, 4), dice.Chance(8)});
  }
  for (const ResourceBlock& block : item.blocks) item.bytes += block.bytes;
  item.bytes = std::max<int64_t>(1, item.bytes - dice.From(0, 2));  // blocks are padded
  return item;
}

// One thing that a job does. `which` picks among what it holds then.
struct Step {
  enum Kind { kLock, kLockAll, kTryLock, kUnlock, kLockOn, kUnlockOn, kPromise, kGiveBack, kInsert, kKinds };
  Kind kind = kLock;
  std::vector<size_t> items;
  size_t which = 0;
  int64_t bytes = 0;  // all that can be had where below 0
  std::string device;
  ResidencyMode mode = ResidencyMode::kAuto;
  int32_t ring_slots = 2;
  uint64_t chosen = 0;  // seed of the blocks that are asked for; 0: by the mode
  bool may_wait = true;
};

inline Step RandomStep(Dice& dice) {
  Step step;
  // Devices are what it is most about.
  static const std::vector<Step::Kind> kOften = {Step::kLock, Step::kLockOn, Step::kLockOn, Step::kUnlockOn};
  step.kind =
      dice.Chance(2) ? kOften[dice.Pick(kOften.size())] : static_cast<Step::Kind>(dice.Pick(Step::kKinds));
  for (int64_t i = step.kind == Step::kLockAll ? dice.From(1, 4) : 1; i > 0; --i)
    step.items.push_back(dice.Pick(kKeys));
  step.which = dice.Pick(1000);
  step.bytes = dice.Chance(2) ? 0 : dice.From(0, dice.Chance(12) ? 150 : 20);
  static const std::vector<std::string> kDevices = {"cpu", "sim:0", "sim:1", "sim:0"};
  step.device = kDevices[dice.Pick(kDevices.size())];
  step.mode = dice.Chance(4)   ? ResidencyMode::kFull
              : dice.Chance(5) ? ResidencyMode::kStream
                               : ResidencyMode::kAuto;
  step.ring_slots = static_cast<int32_t>(dice.From(1, 4));
  step.chosen = dice.Chance(4) ? static_cast<uint64_t>(dice.From(1, 1 << 20)) : 0;
  step.may_wait = dice.Chance(2);
  return step;
}

// Whoever does a job's steps: in the imagination, or really. Both say the same, in the same words.
class Doer {
 public:
  explicit Doer(const std::vector<Item>& items) : items_(items) {}
  virtual ~Doer() = default;

  std::vector<std::string> Do(const std::vector<Step>& steps) {
    std::vector<std::string> outcomes;
    for (const Step& step : steps) {
      own_.clear();
      const std::string done = DoOne(step);
      outcomes.push_back(absl::StrCat(done, "\n", Look()));
    }
    return outcomes;
  }

 protected:
  struct Event {
    std::string what, key, more;
  };

  virtual absl::Status Lock(const Item& item) = 0;
  virtual absl::Status LockAll(const std::vector<LockRequest>& requests) = 0;
  virtual bool TryLock(const Item& item) = 0;
  virtual absl::Status Insert(const Item& item) = 0;
  virtual void Unlock(size_t i) = 0;
  virtual absl::StatusOr<ResidencyPlan> LockOn(size_t i, const Step& step, ResidencyWish wish) = 0;
  virtual void UnlockOn(size_t i) = 0;
  virtual absl::Status Promise(const std::string& device, int64_t bytes) = 0;
  virtual void GiveBack(size_t i) = 0;
  virtual int64_t Obtainable(const std::string& device) = 0;
  virtual std::map<ModelKey, ImaginedMemory::There> Contents() = 0;
  // What happened since the last call: loads and evictions out of host memory, and by device those off it.
  virtual std::vector<Event> HostEvents() = 0;
  virtual std::vector<Event> DeviceEvents() = 0;

  virtual LockRequest Request(const Item& item) const {
    return {item.key,
            {.kind = item.kind,
             .estimated_bytes = item.bytes + item.scratch,
             .use = item.use,
             .name = item.name}};
  }
  const Item& ItemOf(const ModelKey& key) const {
    return *std::find_if(items_.begin(), items_.end(), [&](const Item& item) { return item.key == key; });
  }
  static std::string Say(const absl::Status& status) {
    if (status.ok()) return "OK";
    std::string text = absl::StrCat(status.raw_code(), " ", ErrorReason(status));
    for (const auto& [name, value] : GetErrorDetails(status)) absl::StrAppend(&text, " ", name, "=", value);
    return text;
  }

  const std::vector<Item>& items_;
  std::vector<ModelKey> held_, held_on_;  // locks, in host memory and on devices
  size_t promises_ = 0;

 private:
  std::string DoOne(const Step& step) {
    const Item& item = items_[step.items[0]];
    switch (step.kind) {
      case Step::kLock: {
        const absl::Status status = Lock(item);
        if (status.ok()) held_.push_back(item.key);
        return absl::StrCat("lock ", item.key.ToString(), ": ", Say(status));
      }
      case Step::kLockAll: {
        std::vector<LockRequest> requests;
        for (const size_t i : step.items) {
          requests.push_back(Request(items_[i]));
          requests.back().loader.estimated_bytes = items_[i].bytes;
        }
        const absl::Status status = LockAll(requests);
        if (status.ok()) {
          for (const LockRequest& request : requests) held_.push_back(request.key);
        }
        return absl::StrCat("lock ", requests.size(), " from ", item.key.ToString(), ": ", Say(status));
      }
      case Step::kTryLock: {
        const bool locked = TryLock(item);
        if (locked) held_.push_back(item.key);
        return absl::StrCat("try ", item.key.ToString(), ": ", locked);
      }
      case Step::kInsert: {
        const absl::Status status = Insert(item);
        if (status.ok()) held_.push_back(item.key);
        return absl::StrCat("insert ", item.key.ToString(), ": ", Say(status));
      }
      case Step::kUnlock: {
        if (held_.empty()) return "unlock nothing";
        const size_t i = step.which % held_.size();
        Unlock(i);
        const std::string key = held_[i].ToString();
        held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
        return absl::StrCat("unlock ", key);
      }
      case Step::kLockOn: {
        if (held_.empty()) return "lock nothing";
        const size_t i = step.which % held_.size();
        own_ = held_[i].ToString();
        const Item& of = ItemOf(held_[i]);
        ResidencyWish wish = {.blocks = of.blocks,
                              .working_bytes = step.bytes,
                              .mode = step.mode,
                              .ring_slots = step.ring_slots};
        Dice dice(step.chosen);
        for (size_t b = 0; step.chosen != 0 && b < of.blocks.size(); ++b)
          wish.chosen.push_back(dice.Chance(2));
        const auto plan = LockOn(i, step, std::move(wish));
        if (plan.ok()) held_on_.push_back(held_[i]);
        return absl::StrCat(
            "lock ", own_, " on ", step.device, ": ", Say(plan.status()),
            plan.ok() ? absl::StrCat(" ", absl::StrJoin(plan->resident, ""), " ", plan->resident_bytes, "+",
                                     plan->ring_slots, "*", plan->slot_bytes)
                      : "");
      }
      case Step::kUnlockOn: {
        if (held_on_.empty()) return "unlock nothing";
        const size_t i = step.which % held_on_.size();
        UnlockOn(i);
        const std::string key = held_on_[i].ToString();
        held_on_.erase(held_on_.begin() + static_cast<std::ptrdiff_t>(i));
        return absl::StrCat("unlock on a device ", key);
      }
      case Step::kPromise: {
        const int64_t bytes = step.bytes >= 0 ? step.bytes : Obtainable(step.device);
        const absl::Status status = Promise(step.device, bytes);
        if (status.ok()) ++promises_;
        return absl::StrCat("promise ", bytes, " of ", step.device, ": ", Say(status));
      }
      case Step::kGiveBack: {
        if (promises_ == 0) return "give nothing back";
        GiveBack(step.which % promises_--);
        return "give back";
      }
      case Step::kKinds:
        break;
    }
    return "";
  }

  // Of what goes off devices, what concerns the record that is moved itself is not told apart by the cache,
  // nor what goes of a record that then goes altogether.
  std::string Look() {
    std::string text;
    const auto contents = Contents();
    std::set<std::string> there;
    for (const auto& [key, record] : contents) {
      there.insert(key.ToString());
      absl::StrAppend(&text, "  ", key.ToString(), " ", record.bytes);
      for (const auto& [device, part] : record.copies)
        absl::StrAppend(&text, " ", device, " ", absl::StrJoin(part.resident, ""), " ", part.bytes);
      absl::StrAppend(&text, "\n");
    }
    for (const char* device : {"cpu", "sim:0", "sim:1"})
      absl::StrAppend(&text, "  ", device, " can have ", Obtainable(device), "\n");
    for (const Event& event : HostEvents()) {
      if (event.what == "evicted") there.erase(event.key);
      absl::StrAppend(&text, "  ", event.what, " ", event.key, " ", event.more, "\n");
    }
    for (const Event& event : DeviceEvents()) {
      if (event.key == own_ || there.count(event.key) == 0) continue;
      absl::StrAppend(&text, "  ", event.what, " ", event.key, " ", event.more, "\n");
    }
    return text;
  }

  std::string own_;  // what a step moves to a device
};

class Planned : public Doer {
 public:
  Planned(const std::vector<Item>& items, const CacheStats& stats)
      : Doer(items), memory_(stats, [](const std::string& kind, int64_t bytes) {
          return absl::ToDoubleSeconds(TimeToLoad(kind, bytes));
        }) {}
  const ImaginedMemory& memory() const { return memory_; }
  std::map<std::string, int64_t> Offloads() const {
    std::map<std::string, int64_t> offloads = {{"sim:0", 0}, {"sim:1", 0}};
    for (const auto& eviction : memory_.evictions()) {
      if (!eviction.device.empty()) ++offloads[eviction.device];
    }
    return offloads;
  }

 private:
  absl::Status Lock(const Item& item) override { return memory_.Lock(Request(item), item.bytes); }
  absl::Status LockAll(const std::vector<LockRequest>& requests) override {
    return memory_.LockAll(requests);
  }
  bool TryLock(const Item& item) override { return memory_.TryLock(item.key); }
  absl::Status Insert(const Item& item) override {
    RETURN_IF_ERROR(memory_.Promise("", item.bytes, "an insert"));
    memory_.Insert(item.key, item.kind, item.use, item.bytes,
                   absl::ToDoubleSeconds(TimeToLoad(item.kind, item.bytes)));
    return absl::OkStatus();
  }
  void Unlock(size_t i) override { memory_.Unlock(held_[i]); }
  absl::StatusOr<ResidencyPlan> LockOn(size_t i, const Step& step, ResidencyWish wish) override {
    ASSIGN_OR_RETURN(auto lock, memory_.LockOnDevice(held_[i], step.device, std::move(wish)));
    locks_.push_back(lock);
    return lock.plan;
  }
  void UnlockOn(size_t i) override {
    memory_.Unlock(locks_[i]);
    locks_.erase(locks_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  absl::Status Promise(const std::string& device, int64_t bytes) override {
    RETURN_IF_ERROR(memory_.Promise(device, bytes, "a promise"));
    promised_.emplace_back(device, bytes);
    return absl::OkStatus();
  }
  void GiveBack(size_t i) override {
    memory_.GiveBack(promised_[i].first, promised_[i].second);
    promised_.erase(promised_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  int64_t Obtainable(const std::string& device) override { return memory_.ObtainableBytes(device); }
  std::map<ModelKey, ImaginedMemory::There> Contents() override { return memory_.Contents(); }
  std::vector<Event> HostEvents() override {
    std::vector<Event> events;
    for (; loads_ < memory_.loads().size(); ++loads_) {
      const auto& load = memory_.loads()[loads_];
      events.push_back({"loaded", load.key.ToString(), absl::StrCat(load.kind, " ", load.bytes)});
    }
    for (size_t i = evictions_; i < memory_.evictions().size(); ++i) {
      const auto& e = memory_.evictions()[i];
      if (!e.device.empty()) continue;
      events.push_back(
          {"evicted", e.key.ToString(), absl::StrCat(e.bytes, " ", absl::StrJoin(e.names, ","))});
    }
    return events;
  }
  std::vector<Event> DeviceEvents() override {
    std::vector<Event> events;
    for (; evictions_ < memory_.evictions().size(); ++evictions_) {
      const auto& e = memory_.evictions()[evictions_];
      if (!e.device.empty()) events.push_back({"offloaded", e.key.ToString(), e.device});
    }
    return events;
  }

  ImaginedMemory memory_;
  std::vector<ImaginedMemory::OnDevice> locks_;
  std::vector<std::pair<std::string, int64_t>> promised_;
  size_t loads_ = 0, evictions_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_PLAN_OUTCOME_JOB_H_
