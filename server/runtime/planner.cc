#include "server/runtime/planner.h"

#include <algorithm>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "patcher/layer_resolver.h"
#include "patcher/model_patch.h"
#include "server/catalog/embedding_set.h"
#include "server/catalog/lora_set.h"
#include "server/media/picture_memory.h"
#include "server/rpc/field_messages.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/params.h"
#include "server/runtime/conditioning_key.h"
#include "server/runtime/job_record.h"
#include "server/runtime/phase_resources.h"

namespace latentd {
namespace {

constexpr char kConditioning[] = "conditioning";

// A cache that is only thought of: the records of a snapshot in the order in which they would go, and how
// many bytes are free. Goes through what a job does as the job would.
class ImaginedCache {
 public:
  ImaginedCache(const CacheStats& stats, v1::PlanResponse* plan)
      : plan_(plan),
        cap_(stats.ram.cap_bytes),
        free_(stats.ram.cap_bytes - stats.ram.in_use_bytes + stats.leaving_bytes - stats.ram.reserved_bytes) {
    for (const RecordStats& r : stats.records) {
      if (!r.stale) records_.push_back({r.key.ToString(), r.kind, r.bytes, r.lock_count > 0, false, r.names});
    }
  }

  bool Has(const std::string& key) const { return const_cast<ImaginedCache*>(this)->Find(key) != nullptr; }

  // Bytes for running work. False, with the reason in the plan, when they cannot be had.
  bool Promise(int64_t bytes, const std::string& what) {
    if (!MakeRoom(bytes, what)) return false;
    free_ -= bytes;
    Hold(bytes);
    return true;
  }
  void GiveBack(int64_t bytes) {
    free_ += bytes;
    held_ -= bytes;
  }

  // Locks a record, loading it when it is not there. `names` as of RecordStats.
  bool Lock(const std::string& key, const std::string& kind, int64_t bytes,
            const std::vector<std::string>& names = {}) {
    Record* record = Find(key);
    if (record == nullptr) {
      if (!MakeRoom(bytes, absl::StrCat(kind, " ", key))) return false;
      free_ -= bytes;
      v1::PlanResponse::Load& load = *plan_->add_loads();
      load.set_key(key);
      load.set_kind(kind);
      load.set_bytes(bytes);
      for (const std::string& name : names) load.add_names(name);
      records_.push_back({key, kind, bytes, false, false, names});
      record = &records_.back();
    }
    record->locked = record->mine = true;
    Hold(record->bytes);
    return true;
  }
  void Unlock(const std::string& key) {
    for (auto it = records_.begin(); it != records_.end(); ++it) {
      if (it->key != key || !it->mine) continue;
      it->mine = it->locked = false;
      held_ -= it->bytes;
      records_.splice(records_.end(), records_, it);  // just used: goes last
      return;
    }
  }
  int64_t Obtainable() const {
    int64_t bytes = free_;
    for (const Record& record : records_) bytes += record.locked ? 0 : record.bytes;
    return bytes;
  }
  // A record that came to be without a load.
  void Keep(const std::string& key, const std::string& kind, int64_t promised) {
    records_.push_back({key, kind, promised, true, true, {}});
  }
  // Conditioning goes where there is more of it than that, the least recently used first.
  void BoundConditioning(int64_t cap) {
    int64_t sum = 0;
    for (const Record& record : records_) sum += record.kind == kConditioning ? record.bytes : 0;
    for (auto it = records_.begin(); sum > cap && it != records_.end();) {
      if (it->locked || it->kind != kConditioning) {
        ++it;
        continue;
      }
      sum -= it->bytes;
      it = Evict(it);
    }
  }

 private:
  struct Record {
    std::string key, kind;
    int64_t bytes;
    bool locked;        // by anybody
    bool mine = false;  // by this job
    std::vector<std::string> names = {};
  };

  Record* Find(const std::string& key) {
    auto it = std::find_if(records_.begin(), records_.end(), [&](const Record& r) { return r.key == key; });
    return it == records_.end() ? nullptr : &*it;
  }

  void Hold(int64_t bytes) {
    held_ += bytes;
    plan_->set_peak_ram_bytes(std::max(plan_->peak_ram_bytes(), held_));
  }

  bool MakeRoom(int64_t bytes, const std::string& what) {
    if (bytes > Obtainable()) return Refuse(bytes, what);
    for (auto it = records_.begin(); free_ < bytes && it != records_.end();) {
      if (it->locked) {
        ++it;
        continue;
      }
      it = Evict(it);
    }
    return true;
  }

  std::list<Record>::iterator Evict(std::list<Record>::iterator it) {
    v1::PlanResponse::Eviction& eviction = *plan_->add_evictions();
    eviction.set_key(it->key);
    eviction.set_kind(it->kind);
    eviction.set_bytes(it->bytes);
    for (const std::string& name : it->names) eviction.add_names(name);
    free_ += it->bytes;
    return records_.erase(it);
  }

  bool Refuse(int64_t bytes, const std::string& what) {
    const char* reason = bytes > cap_ ? "MODEL_EXCEEDS_BUDGET" : "BUDGET_EXHAUSTED";
    *plan_->mutable_reason() = ToRpcStatus(MakeError(
        bytes > cap_ ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kResourceExhausted, reason,
        absl::StrCat(what, " needs ", bytes, " bytes of ram; ", std::max<int64_t>(Obtainable(), 0), " of ",
                     cap_, " bytes could be had"),
        {{"budget", "ram"},
         {"what", what},
         {"needed_bytes", absl::StrCat(bytes)},
         {"held_bytes", absl::StrCat(cap_ - Obtainable())},
         {"cap_bytes", absl::StrCat(cap_)}}));
    return false;
  }

  v1::PlanResponse* const plan_;
  std::list<Record> records_;
  const int64_t cap_;
  int64_t free_;
  int64_t held_ = 0;
};

// The same for a device with memory of its own.
class ImaginedDevice {
 public:
  ImaginedDevice(const Device& device, const CacheStats& stats, v1::PlanResponse* plan)
      : name_(device.name()), plan_(plan) {
    const auto it = stats.devices.find(name_);
    if (it != stats.devices.end()) {
      const MemoryBudget::Stats& budget = it->second.budget;
      cap_ = budget.cap_bytes;
      free_ = budget.cap_bytes - budget.foreign_bytes - budget.in_use_bytes - budget.reserved_bytes;
    }
    for (const RecordStats& r : stats.records) {
      for (const ResidencyStats& there : r.residency) {
        if (there.device != name_) continue;
        copies_.push_back(
            {r.key.ToString(), r.kind, there.bytes, there.lock_count > 0, r.names, r.worth.last_used});
      }
    }
    std::sort(copies_.begin(), copies_.end(), [](const Copy& a, const Copy& b) { return a.turn < b.turn; });
  }

  bool Promise(int64_t bytes, const std::string& what) {
    if (bytes > Obtainable()) {
      *plan_->mutable_reason() = ToRpcStatus(MakeError(
          absl::StatusCode::kResourceExhausted, "BUDGET_EXHAUSTED",
          absl::StrCat(what, " needs ", bytes, " bytes of ", name_, "; ", Obtainable(), " could be had"),
          {{"budget", name_},
           {"what", what},
           {"needed_bytes", absl::StrCat(bytes)},
           {"held_bytes", absl::StrCat(cap_ - Obtainable())},
           {"cap_bytes", absl::StrCat(cap_)}}));
      return false;
    }
    MakeRoom(bytes);
    free_ -= bytes;
    return true;
  }
  void GiveBack(int64_t bytes) { free_ += bytes; }

  // As ModelCache::LockOnDevice does it. Sets what is resident of how much.
  bool Lock(const std::string& key, const std::string& kind, const std::vector<ResourceBlock>& blocks,
            ResidencyMode mode, int32_t ring_slots, v1::PlanResponse::Phase* phase, int64_t* ring) {
    int64_t full = 0, have = 0;
    for (const ResourceBlock& block : blocks) full += block.bytes;
    for (Copy& copy : copies_) {
      if (copy.key != key) continue;
      have = copy.bytes;
      copy.locked = true;
    }
    const ResidencyPlan smallest = PlanResidency(blocks, 0, ring_slots);
    ResidencyPlan plan = PlanResidency(blocks, MemoryBudget::kUnlimited, ring_slots);
    const bool stream = mode == ResidencyMode::kStream && smallest.streams();
    if (stream || (mode == ResidencyMode::kAuto && smallest.streams() && full - have > Obtainable())) {
      plan = stream ? smallest : PlanResidency(blocks, Obtainable() + have, ring_slots);
    }
    phase->set_full_bytes(full);
    phase->set_resident_bytes(plan.resident_bytes);
    *ring = plan.ring_bytes();
    const int64_t more = std::max<int64_t>(0, plan.resident_bytes - have);
    if (!Promise(more + plan.ring_bytes(), absl::StrCat(kind, " ", key))) return false;
    if (have == 0) copies_.push_back({key, kind, plan.resident_bytes, true, {}});
    return true;
  }
  int64_t Obtainable() const {
    int64_t bytes = free_;
    for (const Copy& copy : copies_) bytes += copy.locked ? 0 : copy.bytes;
    return std::max<int64_t>(0, bytes);
  }
  void Unlock(const std::string& key) {
    for (auto it = copies_.begin(); it != copies_.end(); ++it) {
      if (it->key != key) continue;
      it->locked = false;
      std::rotate(it, it + 1, copies_.end());  // just used: goes last
      return;
    }
  }

 private:
  struct Copy {
    std::string key, kind;
    int64_t bytes;
    bool locked;
    std::vector<std::string> names;
    uint64_t turn = 0;  // of its last use; copies_ is in that order
  };

  // As ModelCache::Offload does it.
  void MakeRoom(int64_t bytes) {
    int64_t free = free_;
    std::vector<size_t> go;
    for (size_t i = 0; i < copies_.size() && free < bytes; ++i) {
      if (copies_[i].locked) continue;
      free += copies_[i].bytes;
      go.push_back(i);
    }
    for (size_t n = go.size(); n-- > 0;) {
      if (free - copies_[go[n]].bytes < bytes) continue;
      free -= copies_[go[n]].bytes;
      go.erase(go.begin() + static_cast<std::ptrdiff_t>(n));
    }
    free_ = free;
    for (size_t index : go) {
      v1::PlanResponse::Eviction& eviction = *plan_->add_evictions();
      eviction.set_key(copies_[index].key);
      eviction.set_kind(copies_[index].kind);
      eviction.set_bytes(copies_[index].bytes);
      eviction.set_device(name_);
      for (const std::string& name : copies_[index].names) eviction.add_names(name);
    }
    for (size_t n = go.size(); n-- > 0;) copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(go[n]));
  }

  const std::string name_;
  v1::PlanResponse* const plan_;
  std::vector<Copy> copies_;
  int64_t cap_ = 0;
  int64_t free_ = 0;
};

double BytesPerNumber(const OpenModel& model, const Component& component) {
  return static_cast<double>(model.part(component.name).bytes) /
         static_cast<double>(std::max<int64_t>(component.layout->parameter_count(), 1));
}

// Most of its numbers, at least.
bool StoredAsFloat8(const OpenModel& model, const Component& component) {
  return BytesPerNumber(model, component) < 1.5;
}

// Of the widest low-rank layer that a LoRA's file has for a component, by its header.
int64_t RankInFile(const std::string& path, const PatchTarget& target) {
  const auto files = WeightFiles::Open(path);
  if (!files.ok()) return 0;
  int64_t widest = 0;
  for (const auto& [name, entry] : (*files)->tensors()) {
    for (const char* down : {".lora_A.", ".lora_down.", ".lora.down."}) {
      const size_t end = name.find(down);
      if (end == std::string::npos || entry.info->shape.empty()) continue;
      if (!target.resolver().Resolve(name.substr(0, end)).empty())
        widest = std::max(widest, entry.info->shape[0]);
    }
  }
  return widest;
}

// What a component's weights will be on a device, from its description: shapes, and its bytes per number.
std::vector<ResourceBlock> DescribeBlocks(const OpenModel& model, const Component& component) {
  const ComponentLayout& layout = *component.layout;
  const double bytes_per_number = BytesPerNumber(model, component);
  std::vector<ResourceBlock> blocks;
  for (const ComponentLayout::Block& block : layout.blocks()) blocks.push_back({0, block.stays});
  blocks.push_back({0, true});
  for (const TensorDecl& tensor : layout.tensors()) {
    int64_t numbers = 1;
    for (int64_t extent : tensor.shape) numbers *= extent;
    const size_t block = tensor.shape.size() >= 2 ? static_cast<size_t>(tensor.block) : blocks.size() - 1;
    blocks[block].bytes += PaddedBytes(static_cast<int64_t>(static_cast<double>(numbers) * bytes_per_number));
  }
  return blocks;
}

class Planner {
 public:
  Planner(ServerCore& core, const OpenModel& model, std::shared_ptr<const latentd::Run> run,
          std::vector<LoraChoice> loras, std::vector<LockRequest> embeddings, PatchMode mode,
          TileChoice encode_tiles, TileChoice decode_tiles, int64_t file_bytes)
      : core_(core),
        model_(model),
        run_(std::move(run)),
        params_(run_->params()),
        loras_(std::move(loras)),
        embeddings_(std::move(embeddings)),
        mode_(mode),
        encode_tiles_(encode_tiles),
        decode_tiles_(decode_tiles),
        file_bytes_(file_bytes),
        stats_(core.cache->Stats()),
        ram_(stats_, &plan_) {
    for (const auto& executor : core.executors) {
      if (executor->device().uses_host_memory()) continue;
      devices_.emplace(&executor->device(), ImaginedDevice(executor->device(), stats_, &plan_));
    }
    for (const LoraChoice& lora : loras_) matches_.push_back(MatchOf(lora));
  }

  v1::PlanResponse Run() {
    Executor& home = core_.WouldPlace(model_);
    plan_.set_device(home.device().name());
    plan_.set_fits(RunAll(home));
    if (plan_.fits() && timed_) plan_.set_seconds(seconds_ + LoadSeconds());
    return std::move(plan_);
  }

 private:
  bool RunAll(Executor& home) {
    std::vector<LockRequest> loras;
    for (const LoraChoice& lora : loras_) loras.push_back(lora.request);
    if (!LockTogether(loras, "LoRAs") || !LockTogether(embeddings_, "embeddings")) return false;
    if (params_.has_pictures() && !ram_.Promise(PictureBytes(params_), "pictures of a request")) {
      return false;
    }
    bool embeddings_locked = true;
    for (size_t phase = 0; phase < run_->phases().size(); ++phase) {
      const PhaseKind kind = run_->phases()[phase].kind;
      if (kind != PhaseKind::kEncodeText && std::exchange(embeddings_locked, false)) {
        for (const LockRequest& embedding : embeddings_) ram_.Unlock(embedding.key.ToString());
      }
      if (kind == PhaseKind::kDecode && file_bytes_ == 0) continue;
      if (kind == PhaseKind::kDecode && !ram_.Promise(PicturesBytes(file_bytes_, params_), "pictures"))
        return false;
      const bool fits = kind == PhaseKind::kEncodeText ? EncodeText(phase, home) : RunComponents(phase, home);
      if (!fits) return false;
    }
    return true;
  }

  // Those of a phase one after the other; the first is taken to have the work.
  bool RunComponents(size_t phase, Executor& executor) {
    const std::vector<std::string>& components = run_->phases()[phase].components;
    for (size_t i = 0; i < components.size(); ++i) {
      if (!RunPhase(phase, components[i], executor, i == 0 ? run_->phases()[phase].units : 0)) return false;
    }
    return true;
  }

  // As ModelCache::LockAll does it: what is not there is promised together.
  bool LockTogether(const std::vector<LockRequest>& requests, absl::string_view what) {
    int64_t missing = 0;
    for (const LockRequest& request : requests) {
      if (!ram_.Has(request.key.ToString())) missing += request.loader.estimated_bytes;
    }
    if (missing > 0 && !ram_.Promise(missing, absl::StrCat("a set of ", requests.size(), " ", what)))
      return false;
    ram_.GiveBack(missing);
    return std::all_of(requests.begin(), requests.end(), [&](const LockRequest& request) {
      return ram_.Lock(request.key.ToString(), request.loader.kind, request.loader.estimated_bytes);
    });
  }

  bool EncodeText(size_t index, Executor& home) {
    const std::string& component = run_->phases()[index].components[0];
    Executor& executor = core_.PlaceEncoder(model_, component, home);
    std::vector<ConditioningSource> sources;
    for (size_t i = 0; i < loras_.size(); ++i) {
      const LoraChoice& lora = loras_[i];
      if (!lora.ActiveAt(0) || !Reaches(i, component)) continue;
      sources.push_back({lora.name, lora.request.key, StrengthText(lora.weight, lora.blocks, component)});
    }
    const std::string key =
        ConditioningKey(model_, *run_, index, std::move(sources), mode_, executor.device(),
                        core_.ComputeOf(executor.device(), model_.component(component)))
            .ToString();
    if (ram_.Has(key)) {
      ram_.Lock(key, "conditioning", 0);
      v1::PlanResponse::Phase& phase = *plan_.add_phases();
      phase.set_component(component);
      phase.set_cached(true);
      return true;
    }
    const int64_t bytes = run_->OutputBytes(index);
    if (!ram_.Promise(bytes, "conditioning")) return false;
    if (!RunComponents(index, executor)) return false;
    ram_.Keep(absl::StrCat("conditioning of ", component), kConditioning, bytes);
    ram_.BoundConditioning(core_.cache->conditioning_cap());
    return true;
  }

  // Of a LoRA that is in memory.
  std::shared_ptr<const PatchMatch> MatchOf(const LoraChoice& lora) const {
    const LockHandle handle = core_.cache->Peek(lora.request.key, "plan");
    if (!handle) return nullptr;
    const auto report = LayerPatcher::Match(handle.As<ModelPatch>(), lora.name, lora.weight,
                                            model_.patch_targets, lora.blocks, lora.only);
    return report.ok() ? report->match : nullptr;
  }

  // Whether a LoRA has layers for a component. One that is not in memory is taken to have some.
  bool Reaches(size_t index, const std::string& component) const {
    const LoraChoice& lora = loras_[index];
    if (lora.weight == 0) return false;
    if (matches_[index] != nullptr) return matches_[index]->count(component) != 0;
    return lora.only.empty() || std::find(lora.only.begin(), lora.only.end(), component) != lora.only.end();
  }

  // What patches add to a phase: a record of merged weights, bytes beside the weights, or both.
  struct Overlay {
    std::string record;  // empty = none
    int64_t record_bytes = 0;
    int64_t merging_bytes = 0;  // while the record is made
    bool record_first = false;  // applied before it is known which blocks are resident: copied in full
    int64_t beside_bytes = 0;
    int64_t rank = 0;  // of the widest patch beside a weight
  };

  bool RunPhase(size_t index, const std::string& name, Executor& executor, int64_t units) {
    const Component& component = model_.component(name);
    const LockRequest request = model_.ComponentRequest(name);
    const std::string key = request.key.ToString();
    Device& device = executor.device();
    const auto it = devices_.find(&device);
    const Overlay overlay = OverlayOf(component, request.key);
    PhaseOptions options;
    options.beside_rank = overlay.rank;
    const latentd::RunPhase& of = run_->phases()[index];
    const TileChoice tiles = !of.may_tile                         ? TileChoice{}
                             : of.kind == PhaseKind::kEncodeMedia ? encode_tiles_
                                                                  : decode_tiles_;
    options.tile = tiles.first;
    if (!ram_.Lock(key, component.name, request.loader.estimated_bytes, {model_.id})) return false;
    const auto slots = static_cast<int32_t>(core_.config.ring_blocks);
    const int64_t room =
        (it == devices_.end()
             ? ram_.Obtainable()
             : it->second.Obtainable() - PlanResidency(DescribeBlocks(model_, component), 0, slots).bytes()) -
        overlay.beside_bytes - (ram_.Has(overlay.record) ? 0 : overlay.record_bytes);
    ChooseTile(index, component, device, room, tiles.may_shrink, options);

    v1::PlanResponse::Phase phase;
    phase.set_component(name);
    phase.set_device(device.name());
    const auto measured = core_.measurements->Find(
        MeasurementKey(model_, component, *run_, index, options, device, core_.ComputeOf(device, component)));
    const WorkingPromise promise = PromiseFor(index, component, options, device);
    int64_t working = promise.bytes;
    phase.set_tiled(options.tile != 0);
    phase.set_working_bytes(working);
    phase.set_working_measured(promise.measured);
    if (working > room && promise.IsWorthATry(room, WorkingPromise::kLeastShare)) {
      working = room;
      phase.set_tried_bytes(room);
      plan_.set_uncertain(true);
    }
    if (measured && measured->seconds_per_unit > 0) {
      phase.set_seconds(measured->seconds_per_unit * static_cast<double>(units));
      seconds_ += phase.seconds();
    } else {
      timed_ = false;
    }
    const std::string what = absl::StrCat("working memory of ", name);
    if (!overlay.record.empty()) {
      const int64_t merging = ram_.Has(overlay.record) ? 0 : overlay.merging_bytes;
      if (!ram_.Promise(merging, "merging of patches") ||
          !ram_.Lock(overlay.record, "merged", overlay.record_bytes)) {
        return false;
      }
      ram_.GiveBack(merging);
    }
    if (it == devices_.end()) {
      if (!ram_.Promise(overlay.beside_bytes, "patches") || !ram_.Promise(working, what)) return false;
      ram_.GiveBack(working + overlay.beside_bytes);
    } else if (!RunOnDevice(it->second, component, key, working, overlay, &phase)) {
      return false;
    }
    if (!overlay.record.empty()) ram_.Unlock(overlay.record);
    *plan_.add_phases() = std::move(phase);
    ram_.Unlock(key);
    return true;
  }

  // As PhaseResources does it where nobody else is in the way: the largest tile for which half of what is
  // guessed can be had, else the largest that is worth a try at all.
  void ChooseTile(size_t index, const Component& component, const Device& device, int64_t room, bool may_tile,
                  PhaseOptions& options) const {
    const int64_t first = options.tile;
    for (const int64_t share : {WorkingPromise::kHalf, WorkingPromise::kLeastShare}) {
      options.tile = first;
      while (!PromiseFor(index, component, options, device).IsWorthATry(room, share)) {
        const int64_t smaller = may_tile ? run_->SmallerTile(options.tile) : 0;
        if (smaller == 0) break;
        options.tile = smaller;
      }
      if (PromiseFor(index, component, options, device).IsWorthATry(room, share)) return;
    }
  }

  WorkingPromise PromiseFor(size_t index, const Component& component, const PhaseOptions& options,
                            const Device& device) const {
    return core_.measurements->Promise(
        MeasurementKey(model_, component, *run_, index, options, device, core_.ComputeOf(device, component)),
        run_->WorkingBytes(index, component.name, options));
  }

  // As PhaseResources does it on a device with memory of its own: patches, working memory, weights.
  bool RunOnDevice(ImaginedDevice& device, const Component& component, const std::string& key,
                   int64_t working, const Overlay& overlay, v1::PlanResponse::Phase* phase) {
    const ResidencyMode mode = core_.config.residency == "stream" ? ResidencyMode::kStream
                               : core_.config.residency == "full" ? ResidencyMode::kFull
                                                                  : ResidencyMode::kAuto;
    const auto ring_slots = static_cast<int32_t>(core_.config.ring_blocks);
    v1::PlanResponse::Phase unused;
    int64_t ring = 0, none = 0;
    std::vector<std::string> copies;
    if (mode_ != PatchMode::kDirect || StoredAsFloat8(model_, component)) {
      for (size_t i = 0; i < loras_.size(); ++i) {
        if (!Reaches(i, component.name)) continue;
        const LoraChoice& lora = loras_[i];
        copies.push_back(lora.request.key.ToString());
        const std::vector<ResourceBlock> whole = {{lora.request.loader.estimated_bytes, true}};
        if (!device.Lock(copies.back(), "lora", whole, ResidencyMode::kFull, ring_slots, &unused, &none))
          return false;
      }
    }
    auto lock_merged = [&](double share) {
      copies.push_back(overlay.record);
      const auto resident = static_cast<int64_t>(share * static_cast<double>(overlay.record_bytes));
      return device.Lock(overlay.record, "merged", {{resident, true}}, ResidencyMode::kFull, ring_slots,
                         &unused, &none);
    };
    if (overlay.record_first && !lock_merged(1)) return false;
    if (!device.Promise(overlay.beside_bytes, "patches") ||
        !device.Promise(working, absl::StrCat("working memory of ", component.name)) ||
        !device.Lock(key, component.name, DescribeBlocks(model_, component), mode, ring_slots, phase,
                     &ring)) {
      return false;
    }
    // Of merged weights, those are copied whose blocks are resident.
    if (!overlay.record.empty() && !overlay.record_first &&
        !lock_merged(static_cast<double>(phase->resident_bytes()) /
                     static_cast<double>(phase->full_bytes()))) {
      return false;
    }
    device.GiveBack(working + ring + overlay.beside_bytes);
    for (const std::string& copy : copies) device.Unlock(copy);
    device.Unlock(key);
    return true;
  }

  // What patches take for a component, with those of a part of the steps as if they applied in all. Exact for
  // LoRAs that are in memory; from the files' sizes for others.
  Overlay OverlayOf(const Component& component, const ModelKey& key) const {
    Overlay overlay;
    if (!component.patch_target) return overlay;
    std::vector<PatchSpec> specs;
    int64_t unread_bytes = 0, unread_rank = 0;
    for (size_t i = 0; i < loras_.size(); ++i) {
      if (!Reaches(i, component.name)) continue;
      const LoraChoice& lora = loras_[i];
      PatchSpec spec;
      spec.name = lora.name;
      // Text encoders have what applies from the start.
      const bool applies = lora.ActiveAt(0) || component.name == model_.pipeline->denoiser_component();
      spec.weight = applies ? lora.weight : 0;
      spec.blocks = lora.blocks;
      spec.match = matches_[i];
      spec.handle = core_.cache->Peek(lora.request.key, "plan");
      if (!spec.handle) {
        unread_bytes += lora.request.loader.estimated_bytes;
        if (applies) unread_rank += RankInFile(lora.file.path, *component.patch_target);
        continue;
      }
      spec.patch = std::static_pointer_cast<const ModelPatch>(spec.handle.resource());
      specs.push_back(std::move(spec));
    }
    if (specs.empty() && unread_bytes == 0) return overlay;
    const double bytes_per_number = BytesPerNumber(model_, component);
    const bool direct = mode_ == PatchMode::kDirect && !StoredAsFloat8(model_, component);
    const bool all_read = unread_bytes == 0;
    // A file that was not read yet is taken for plain low-rank layers.
    const LockHandle loaded = core_.cache->Peek(key, "plan");
    auto form = [&](Slot slot) {
      if (loaded) return loaded.As<WeightSet>()[slot].form;
      return StoredAsFloat8(model_, component) ? StorageForm::kFloat8 : StorageForm::kPlain;
    };
    const auto size =
        LayerPatcher::OverlayBytes(*component.layout, bytes_per_number, form, *component.patch_target,
                                   std::move(specs), {.mode = mode_, .component = key})
            .value_or(LayerPatcher::OverlaySize{});
    overlay.record_bytes = size.merged;
    overlay.merging_bytes = size.merging;
    overlay.beside_bytes = size.beside;
    overlay.rank = size.rank;
    // A file holds its matrices in half the type's width, as a rule; merged, they touch the whole component.
    if (!all_read && direct) overlay.record_bytes = model_.part(component.name).bytes;
    if (!all_read && !direct) {
      overlay.beside_bytes += 2 * unread_bytes;
      overlay.rank += unread_rank;
    }
    if (overlay.record_bytes > 0) {
      overlay.record = all_read ? size.record.ToString() : absl::StrCat(key.ToString(), " with patches");
      overlay.record_first = !direct;
    }
    return overlay;
  }

  double LoadSeconds() const {
    double seconds = 0;
    for (const v1::PlanResponse::Load& load : plan_.loads()) {
      double known_seconds = 0, known_bytes = 0;
      for (const RecordStats& r : stats_.records) {
        if (r.kind != load.kind()) continue;
        known_seconds += r.load_seconds;
        known_bytes += static_cast<double>(r.bytes);
      }
      const auto bytes = static_cast<double>(load.bytes());
      seconds += known_bytes > 0 ? bytes * known_seconds / known_bytes : bytes * GreedyDual::Cost(0, 1);
    }
    return seconds;
  }

  ServerCore& core_;
  const OpenModel& model_;
  const std::shared_ptr<const latentd::Run> run_;
  const GenerateParams& params_;
  const std::vector<LoraChoice> loras_;
  std::vector<std::shared_ptr<const PatchMatch>>
      matches_;  // of each; null: it is not in memory, or does not fit
  const std::vector<LockRequest> embeddings_;
  const PatchMode mode_;
  const TileChoice encode_tiles_, decode_tiles_;
  const int64_t file_bytes_;  // of one picture; 0: it is not decoded
  const CacheStats stats_;
  v1::PlanResponse plan_;
  ImaginedCache ram_;
  std::map<const Device*, ImaginedDevice> devices_;
  double seconds_ = 0;
  bool timed_ = true;
};

// Those that LoRAs bring with them which may not have been read yet.
absl::StatusOr<std::vector<EmbeddingFile>> EmbeddingsOfChoices(const std::vector<LoraChoice>& loras) {
  std::vector<EmbeddingFile> all;
  for (const LoraChoice& lora : loras) {
    ASSIGN_OR_RETURN(const auto files, WeightFiles::Open(lora.file.path));
    for (EmbeddingFile& embedding : EmbeddingsOfLora(lora.name, files)) all.push_back(std::move(embedding));
  }
  return all;
}

}  // namespace

absl::StatusOr<v1::PlanResponse> PlanJob(ServerCore& core, const v1::PlanRequest& request) {
  const std::string& name = request.model().empty() ? core.config.default_model : request.model();
  if (name.empty()) return FieldError("model", "no model was named, and this server has no default");
  ASSIGN_OR_RETURN(const std::shared_ptr<const OpenModel> model, core.catalog->Model(name));
  ASSIGN_OR_RETURN(const PatchMode mode, PatchModeFromProto(request.patch_mode(), core.config));
  ASSIGN_OR_RETURN(std::vector<LoraChoice> loras,
                   ResolveLoras({request.loras().begin(), request.loras().end()}, *core.catalog));
  v1::GenerateParams folded = request.params();
  RETURN_IF_ERROR(FoldInputs(folded));
  ASSIGN_OR_RETURN(GenerateParams params, ParamsFromProto(folded, core.config));
  if (!loras.empty())
    params.grown_inputs = GenerateParams::kUnknownInputs;  // they may not have been read yet
  ASSIGN_OR_RETURN(const std::vector<EmbeddingFile> bundled, EmbeddingsOfChoices(loras));
  ASSIGN_OR_RETURN(std::vector<LockRequest> embeddings,
                   ResolveEmbeddings(*model->pipeline, *core.catalog, params, bundled));
  ASSIGN_OR_RETURN(std::shared_ptr<const Run> run, model->pipeline->Prepare(std::move(params)));
  RETURN_IF_ERROR(CheckPixels(run->params(), core.config));
  ASSIGN_OR_RETURN(const TileChoice encode, EncodeTiles(request.params(), *run));
  ASSIGN_OR_RETURN(const TileChoice decode, DecodeTiles(request.params(), *run));
  int64_t file_bytes = 0;
  if (request.params().image_format() != v1::IMAGE_FORMAT_LATENTS) {
    file_bytes = MaxFileBytes(*run->params().width, *run->params().height);
    if (WantsMetadata(request.params(), core.config)) file_bytes += MaxMetadataBytes(request);
  }
  return Planner(core, *model, std::move(run), std::move(loras), std::move(embeddings), mode, encode, decode,
                 file_bytes)
      .Run();
}

}  // namespace latentd
