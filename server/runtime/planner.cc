#include "server/runtime/planner.h"

#include <algorithm>
#include <optional>
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
#include "server/runtime/imagined_memory.h"
#include "server/runtime/job_record.h"
#include "server/runtime/phase_resources.h"

namespace latentd {
namespace {

constexpr char kHost[] = "";  // ImaginedMemory's name of it

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

// What `bytes` of a component's weights are on a device, by its description: shapes, and all numbers of the
// same size.
std::vector<ResourceBlock> DescribeBlocks(const Component& component, int64_t bytes) {
  const ComponentLayout& layout = *component.layout;
  const double bytes_per_number =
      static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(layout.parameter_count(), 1));
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
        memory_(stats_,
                [this](const std::string& kind, int64_t bytes) { return SecondsToLoad(kind, bytes); }) {
    for (const LoraChoice& lora : loras_) matches_.push_back(MatchOf(lora));
  }

  v1::PlanResponse Run() {
    Executor& home = core_.WouldPlace(model_);
    plan_.set_device(home.device().name());
    plan_.set_fits(RunAll(home));
    TellWhatHappened();
    if (plan_.fits() && timed_) plan_.set_seconds(seconds_ + LoadSeconds());
    return std::move(plan_);
  }

 private:
  bool RunAll(Executor& home) {
    std::vector<LockRequest> loras;
    for (const LoraChoice& lora : loras_) loras.push_back(lora.request);
    if (!Can(memory_.LockAll(loras)) || !Can(memory_.LockAll(embeddings_))) return false;
    if (params_.has_pictures() &&
        !Can(memory_.Promise(kHost, PictureBytes(params_), "pictures of a request"))) {
      return false;
    }
    bool embeddings_locked = true;
    for (size_t phase = 0; phase < run_->phases().size(); ++phase) {
      const PhaseKind kind = run_->phases()[phase].kind;
      if (kind != PhaseKind::kEncodeText && std::exchange(embeddings_locked, false)) {
        for (const LockRequest& embedding : embeddings_) memory_.Unlock(embedding.key);
      }
      if (kind == PhaseKind::kDecode && file_bytes_ == 0) continue;
      if (kind == PhaseKind::kDecode &&
          !Can(memory_.Promise(kHost, PicturesBytes(file_bytes_, params_), "pictures"))) {
        return false;
      }
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

  // False, with the reason in the plan, when memory was refused.
  bool Can(const absl::Status& status) {
    if (!status.ok()) *plan_.mutable_reason() = ToRpcStatus(status);
    return status.ok();
  }

  void TellWhatHappened() {
    plan_.set_peak_ram_bytes(memory_.peak_ram_bytes());
    for (const ImaginedMemory::Load& from : memory_.loads()) {
      v1::PlanResponse::Load& load = *plan_.add_loads();
      load.set_key(from.key.ToString());
      load.set_kind(from.kind);
      load.set_bytes(from.bytes);
      for (const std::string& name : from.names) load.add_names(name);
    }
    for (const ImaginedMemory::Eviction& from : memory_.evictions()) {
      v1::PlanResponse::Eviction& eviction = *plan_.add_evictions();
      eviction.set_key(from.key.ToString());
      eviction.set_kind(from.kind);
      eviction.set_bytes(from.bytes);
      eviction.set_device(from.device);
      for (const std::string& name : from.names) eviction.add_names(name);
    }
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
    const ModelKey key = ConditioningKey(model_, *run_, index, std::move(sources), mode_, executor.device(),
                                         core_.ComputeOf(executor.device(), model_.component(component)));
    if (memory_.TryLock(key)) {
      v1::PlanResponse::Phase& phase = *plan_.add_phases();
      phase.set_component(component);
      phase.set_cached(true);
      return true;
    }
    const int64_t bytes = run_->OutputBytes(index);
    if (!Can(memory_.Promise(kHost, bytes, "conditioning"))) return false;
    if (!RunComponents(index, executor)) return false;
    memory_.Insert(key, "conditioning", MemoryUse::kConditioning, bytes, 0);
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
    std::optional<LockRequest> record;
    int64_t record_bytes = 0;
    int64_t merging_bytes = 0;  // while the record is made
    bool record_first = false;  // applied before it is known which blocks are resident: copied in full
    int64_t beside_bytes = 0;
    int64_t rank = 0;  // of the widest patch beside a weight
  };

  bool RunPhase(size_t index, const std::string& name, Executor& executor, int64_t units) {
    const Component& component = model_.component(name);
    const LockRequest request = model_.ComponentRequest(name);
    Device& device = executor.device();
    const std::string memory = device.uses_host_memory() ? kHost : device.name();
    const Overlay overlay = OverlayOf(component, request.key);
    PhaseOptions options;
    options.beside_rank = overlay.rank;
    const latentd::RunPhase& of = run_->phases()[index];
    const TileChoice tiles = !of.may_tile                         ? TileChoice{}
                             : of.kind == PhaseKind::kEncodeMedia ? encode_tiles_
                                                                  : decode_tiles_;
    options.tile = tiles.first;
    if (!Can(memory_.Lock(request))) return false;
    const bool makes_record = overlay.record && !memory_.Has(overlay.record->key);
    const auto slots = static_cast<int32_t>(core_.config.ring_blocks);
    const int64_t least_of_weights =
        device.uses_host_memory() ? 0 : PlanResidency(BlocksOf(component, request.key), 0, slots).bytes();
    const int64_t room = memory_.ObtainableBytes(memory) - least_of_weights - overlay.beside_bytes -
                         (makes_record ? overlay.record_bytes : 0);
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
    if (!RunOnDevice(memory, component, request.key, working, overlay, &phase)) return false;
    *plan_.add_phases() = std::move(phase);
    memory_.Unlock(request.key);
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

  // As PhaseResources does it: patches, working memory, weights; and lets them go. `memory`: a device's, or
  // the host's.
  bool RunOnDevice(const std::string& memory, const Component& component, const ModelKey& key,
                   int64_t working, const Overlay& overlay, v1::PlanResponse::Phase* phase) {
    const bool host = memory == kHost;
    std::vector<ImaginedMemory::OnDevice> patches, merged, weights;
    auto lock = [&](const ModelKey& record, ResidencyWish wish,
                    std::vector<ImaginedMemory::OnDevice>* locks) {
      wish.ring_slots = static_cast<int32_t>(core_.config.ring_blocks);
      auto locked = memory_.LockOnDevice(record, memory, std::move(wish));
      if (locked.ok()) locks->push_back(*std::move(locked));
      return Can(locked.status());
    };
    if (!host && (mode_ != PatchMode::kDirect || StoredAsFloat8(model_, component))) {
      for (size_t i = 0; i < loras_.size(); ++i) {
        if (!Reaches(i, component.name)) continue;
        const LoraChoice& lora = loras_[i];
        const std::vector<ResourceBlock> whole = {{lora.request.loader.estimated_bytes, true}};
        if (!lock(lora.request.key, {.blocks = whole, .mode = ResidencyMode::kFull}, &patches)) return false;
      }
    }
    // Of merged weights, those are copied whose blocks are resident.
    auto lock_merged = [&](std::vector<bool> resident) {
      if (!overlay.record) return true;
      if (!Can(memory_.Lock(*overlay.record, overlay.record_bytes))) return false;
      return host || lock(overlay.record->key,
                          {.blocks = DescribeBlocks(component, overlay.record_bytes),
                           .mode = ResidencyMode::kFull,
                           .chosen = std::move(resident)},
                          &merged);
    };
    if (overlay.record_first && !lock_merged({})) return false;
    if (!Can(memory_.Promise(memory, overlay.beside_bytes, "patches"))) return false;
    const ResidencyMode mode = core_.config.residency == "stream" ? ResidencyMode::kStream
                               : core_.config.residency == "full" ? ResidencyMode::kFull
                                                                  : ResidencyMode::kAuto;
    if (!lock(key, {.blocks = BlocksOf(component, key), .working_bytes = working, .mode = mode}, &weights)) {
      return false;
    }
    if (!host) {
      phase->set_full_bytes(weights[0].full_bytes);
      phase->set_resident_bytes(weights[0].plan.resident_bytes);
    }
    if (!overlay.record_first && !lock_merged(weights[0].plan.resident)) return false;
    for (const ImaginedMemory::OnDevice& copy : merged) memory_.Unlock(copy);
    if (overlay.record) memory_.Unlock(overlay.record->key);
    memory_.GiveBack(memory, overlay.beside_bytes);
    for (const ImaginedMemory::OnDevice& patch : patches) memory_.Unlock(patch);
    memory_.Unlock(weights[0]);
    return true;
  }

  // What the weights are on a device.
  std::vector<ResourceBlock> BlocksOf(const Component& component, const ModelKey& key) const {
    const LockHandle loaded = core_.cache->Peek(key, "plan");
    return loaded ? loaded.resource()->device_blocks()
                  : DescribeBlocks(component, model_.part(component.name).bytes);
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
      overlay.record = {
          .key = all_read ? size.record : ModelKey{absl::StrCat(key.ToString(), " with patches"), ""},
          .loader = {.kind = "merged",
                     .estimated_bytes = overlay.record_bytes + overlay.merging_bytes,
                     .use = MemoryUse::kMerged,
                     .name = model_.id}};
      overlay.record_first = !direct;
    }
    return overlay;
  }

  // As what is there of a kind took; else as a good disk would.
  double SecondsToLoad(const std::string& kind, int64_t bytes) const {
    double known_seconds = 0, known_bytes = 0;
    for (const RecordStats& r : stats_.records) {
      if (r.kind != kind) continue;
      known_seconds += r.load_seconds;
      known_bytes += static_cast<double>(r.bytes);
    }
    return static_cast<double>(bytes) *
           (known_bytes > 0 ? known_seconds / known_bytes : GreedyDual::Cost(0, 1));
  }

  double LoadSeconds() const {
    double seconds = 0;
    for (const ImaginedMemory::Load& load : memory_.loads()) seconds += SecondsToLoad(load.kind, load.bytes);
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
  ImaginedMemory memory_;
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
