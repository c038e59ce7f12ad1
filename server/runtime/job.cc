#include "server/runtime/job.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/finite_watch.h"
#include "families/request_checks.h"
#include "server/catalog/embedding_set.h"
#include "server/logging.h"
#include "server/media/image_codec.h"
#include "server/media/picture_memory.h"
#include "server/media/picture_record.h"
#include "server/rpc/field_messages.h"
#include "server/rpc/params.h"
#include "server/runtime/conditioning_key.h"
#include "server/runtime/job_record.h"
#include "server/runtime/measurements.h"
#include "server/runtime/memory_meter.h"
#include "server/runtime/tensor_guard.h"
#include "server/server_core.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

constexpr absl::Duration kLoadingEventInterval = absl::Milliseconds(100);
// A phase's code does not know what the component that it computes with is called.
absl::Status WithComponent(const absl::Status& status, const std::string& component) {
  if (ErrorReason(status) != "NON_FINITE") return status;
  ErrorDetails details = GetErrorDetails(status);
  details["component"] = component;
  return MakeError(status.code(), ErrorReason(status), absl::StrCat(component, ": ", status.message()),
                   details);
}

double Ms(absl::Duration d) { return absl::ToDoubleMilliseconds(d); }

v1::TokenCount ToProto(const TokenCount& tokens) {
  v1::TokenCount proto;
  proto.set_field(tokens.field);
  proto.set_component(tokens.component);
  proto.set_read(static_cast<int>(tokens.read));
  proto.set_total(static_cast<int>(tokens.total));
  return proto;
}

v1::Warning CutWarning(const TokenCount& tokens) {
  v1::Warning warning;
  warning.set_reason("PROMPT_CUT");
  warning.set_field(tokens.field);
  warning.set_message(absl::StrCat(tokens.component, " read ", tokens.read, " of ", tokens.total,
                                   " tokens; what is behind them does nothing"));
  return warning;
}

// Adds the time until its end to a field of the timings.
class Stopwatch {
 public:
  explicit Stopwatch(std::function<void(double)> add) : add_(std::move(add)) {}
  ~Stopwatch() { add_(ms()); }
  double ms() const { return Ms(absl::Now() - start_); }

 private:
  std::function<void(double)> add_;
  absl::Time start_ = absl::Now();
};

}  // namespace

Job::Job(ServerCore* core, JobSetup setup) : core_(core), setup_(std::move(setup)) {
  for (const HeldLora& lora : *setup_.loras) reports_.push_back(lora.report);
  // Apply reports in order of name.
  std::stable_sort(reports_.begin(), reports_.end(),
                   [](const PatchReport& a, const PatchReport& b) { return a.name < b.name; });
}

Job::~Job() = default;

void Job::Start() { OnWorker(&Job::Prepare); }

void Job::Cancel(absl::Status why) {
  {
    MutexLock lock(&mu_);
    if (cancel_status_.ok()) cancel_status_ = std::move(why);
  }
  stop_.request_stop();
  Resume();
}

absl::Status Job::StopReason() const {
  if (!stop_.stop_requested()) return absl::OkStatus();
  MutexLock lock(&mu_);
  return cancel_status_;
}

void Job::OnWorker(absl::Status (Job::*what)()) {
  core_->workers->Submit([self = shared_from_this(), what] {
    absl::Status status = self->StopReason();
    if (status.ok()) status = GuardTensorCode("job", [&] { return (self.get()->*what)(); });
    if (!status.ok()) self->Finish(status);
  });
}

std::string Job::device() const {
  const Executor* home = home_;
  return home == nullptr ? "" : home->device().name();
}

absl::Status Job::Prepare() {
  phase_ = v1::JobInfo::PHASE_LOADING;
  const Pipeline& pipeline = *setup_.model->pipeline;
  RETURN_IF_ERROR(FoldInputs(setup_.request));
  ASSIGN_OR_RETURN(GenerateParams params, ParamsFromProto(setup_.request, core_->config));
  for (const PatchReport& report : reports_)
    params.grown_inputs = std::max(params.grown_inputs, GrownInputs(report));
  RETURN_IF_ERROR(LockEmbeddings(params));
  ASSIGN_OR_RETURN(run_, pipeline.Prepare(std::move(params)));
  RETURN_IF_ERROR(CheckPixels(run_->params(), core_->config));
  ASSIGN_OR_RETURN(encode_tiles_, EncodeTiles(setup_.request, *run_));
  ASSIGN_OR_RETURN(decode_tiles_, DecodeTiles(setup_.request, *run_));
  notices_ = LoraTagNotices(run_->params());
  if (core_->config.log_prompts) {
    spdlog::info("prompt session={} job={} prompt={} negative={}", setup_.owner, LogField(setup_.job_id),
                 LogField(run_->params().prompt), LogField(run_->params().negative_prompt.value_or("")));
  }
  if (WantsMetadata(setup_.request, core_->config)) {
    record_ = RecordOfJob(*setup_.model, *setup_.loras, setup_.patch_mode, setup_.request, run_->params());
  }
  // What is kept for the echo needs no picture.
  ClearPictureFiles(setup_.request);
  const int64_t decoded = PictureBytes(run_->params());
  setup_.request_memory.ShrinkTo(decoded);
  if (decoded > setup_.request_memory.bytes()) {
    ASSIGN_OR_RETURN(decoded_memory_,
                     core_->ram->Reserve({.bytes = decoded - setup_.request_memory.bytes(),
                                          .use = MemoryUse::kImages,
                                          .owner = setup_.owner,
                                          .what = "decoded pictures of a request",
                                          .deadline = absl::Now() + core_->config.memory_wait_timeout,
                                          .stop = stop_.get_token()}));
  }
  steps_ = static_cast<int>(*run_->params().steps);
  const bool decodes = setup_.request.image_format() != v1::IMAGE_FORMAT_LATENTS;
  while (phases_ < run_->phases().size() && (decodes || run_->phases()[phases_].kind != PhaseKind::kDecode)) {
    ++phases_;
  }
  home_ = &core_->Place(*setup_.model);  // counts this job; Finish takes it off
  if (record_) {
    const Device& device = home_.load()->device();
    const std::string denoiser = pipeline.denoiser_component();
    record_->set_compute(
        absl::StrCat(ComputeTypeName(core_->ComputeOf(device, setup_.model->component(denoiser))), " on ",
                     device.kind() == DeviceKind::kCuda ? "cuda" : "cpu", ", ", GemmName(device)));
  }
  return AcquirePhase();
}

absl::Status Job::CheckFiles() const {
  RETURN_IF_ERROR(setup_.model->Check());
  for (const HeldLora& lora : *setup_.loras) RETURN_IF_ERROR(lora.handle.resource()->Check());
  for (const auto& [key, files] : embedding_files_) RETURN_IF_ERROR(files->Check());
  return absl::OkStatus();
}

absl::Status Job::LockEmbeddings(GenerateParams& params) {
  ASSIGN_OR_RETURN(
      const std::vector<LockRequest> requests,
      ResolveEmbeddings(*setup_.model->pipeline, *core_->catalog, params, EmbeddingsOfLoras(*setup_.loras)));
  if (requests.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(
      embedding_locks_,
      core_->cache->LockAll(requests, {.owner = setup_.owner,
                                       .deadline = absl::Now() + core_->config.memory_wait_timeout,
                                       .stop = stop_.get_token()}));
  for (const LockHandle& handle : embedding_locks_) {
    embedding_files_.emplace_back(handle.key(), handle.As<TextEmbedding>().files());
  }
  ASSIGN_OR_RETURN(encoded_.embeddings, VectorsOf(*setup_.model->pipeline, embedding_locks_, params));
  return absl::OkStatus();
}

void Job::ReleaseEmbeddings() {
  encoded_.embeddings.clear();
  embedding_locks_.clear();
}

ModelKey Job::CurrentConditioningKey() const {
  const std::string& component = phase_now().components[0];
  std::vector<ConditioningSource> sources;
  for (const HeldLora& lora : *setup_.loras) {
    if (!lora.ActiveAt(0) || lora.report.matched.count(component) == 0) continue;
    sources.push_back({lora.name, lora.handle.key(), StrengthText(lora.weight, lora.blocks, component)});
  }
  const Device& device = core_->PlaceEncoder(*setup_.model, component, *home_.load()).device();
  return ConditioningKey(*setup_.model, *run_, current_, std::move(sources), setup_.patch_mode, device,
                         core_->ComputeOf(device, setup_.model->component(component)));
}

bool Job::TakeCachedConditioning() {
  const std::string& component = phase_now().components[0];
  LockHandle handle = core_->cache->TryLock(CurrentConditioningKey(), setup_.owner);
  if (!handle) return false;
  for (const auto& [name, tensor] : handle.As<ConditioningRecord>().tensors())
    state_.conditioning[name] = tensor;
  conditioning_locks_.push_back(std::move(handle));
  v1::PhaseReport report;
  report.set_component(component);
  report.set_cached(true);
  const Device& device = core_->PlaceEncoder(*setup_.model, component, *home_.load()).device();
  report.set_gemm(std::string(GemmName(device)));
  report.set_compute(
      std::string(ComputeTypeName(core_->ComputeOf(device, setup_.model->component(component)))));
  phase_reports_.push_back(std::move(report));
  return true;
}

absl::Status Job::KeepConditioning(Conditioning part, double seconds) {
  for (const auto& [name, tensor] : part) state_.conditioning[name] = tensor;
  std::vector<std::string> sources;
  for (const HeldLora& lora : *setup_.loras) sources.push_back(lora.handle.key().id);
  for (const LockHandle& embedding : embedding_locks_) sources.push_back(embedding.key().id);
  sources.push_back(setup_.model->part(phase_now().components[0]).key.id);
  ASSIGN_OR_RETURN(
      LockHandle handle,
      core_->cache->Insert(CurrentConditioningKey(), "conditioning",
                           std::make_shared<const ConditioningRecord>(std::move(part)),
                           std::move(conditioning_memory_), seconds, setup_.owner, std::move(sources)));
  conditioning_locks_.push_back(std::move(handle));
  return absl::OkStatus();
}

std::vector<std::string> Job::Reads() const {
  if (work_ != nullptr) return work_->reads();
  const RunPhase& phase = phase_now();
  return {phase.components.begin(),
          phase.components.begin() + static_cast<std::ptrdiff_t>(phase.first_reads)};
}

std::unique_ptr<PhaseResources> Job::MakeResources(const std::string& component, bool works) {
  const RunPhase& phase = phase_now();
  return std::make_unique<PhaseResources>(PhaseResources::Setup{
      .core = core_,
      .model = setup_.model.get(),
      .run = run_.get(),
      .phase = current_,
      .component = component,
      .works = works,
      .device = &phase_executor_->device(),
      .loras = setup_.loras,
      .patch_mode = setup_.patch_mode,
      .owner = setup_.owner,
      .priority = setup_.priority,
      .stop = stop_.get_token(),
      .tiles = !phase.may_tile                         ? TileChoice{}
               : phase.kind == PhaseKind::kEncodeMedia ? encode_tiles_
                                                       : decode_tiles_,
      .on_loading = [this, component](int64_t done, int64_t total) { SendLoading(component, done, total); },
      .on_adapted =
          [this](v1::JobEvent::Adapted adapted) {
            v1::JobEvent event;
            *event.mutable_adapted() = std::move(adapted);
            Send(std::move(event));
          }});
}

void Job::HoldWhatIsRead() {
  const std::vector<std::string> reads = Reads();
  const auto is_read = [&](const std::unique_ptr<PhaseResources>& held) {
    return std::find(reads.begin(), reads.end(), held->component()) != reads.end();
  };
  // The one that is left has its pins, patches and bytes let go before the next one takes any.
  const bool main_stays = !resources_.empty() && resources_.front()->component() == reads.front();
  bool first = true;
  for (auto it = resources_.begin(); it != resources_.end(); first = false) {
    if (main_stays && is_read(*it)) {
      ++it;
      continue;
    }
    Report(**it, first);
    it = resources_.erase(it);
  }
  if (resources_.empty()) {
    net_bytes_ = peak_bytes_ = slices_ = 0;
    slice_seconds_ = 0;
    const RunPhase& phase = phase_now();
    phase_executor_ = phase.kind == PhaseKind::kEncodeText
                          ? &core_->PlaceEncoder(*setup_.model, reads.front(), *home_.load())
                          : home_.load();
  }
  for (const std::string& component : reads) {
    const bool held = std::any_of(resources_.begin(), resources_.end(),
                                  [&](const auto& one) { return one->component() == component; });
    if (held) continue;
    resources_.push_back(MakeResources(component, /*works=*/resources_.empty()));
    if (phase_now().kind == PhaseKind::kDenoise && steps_ > 0) {
      resources_.back()->SetProgress(static_cast<double>(step_) / static_cast<double>(steps_));
    }
  }
}

bool Job::more_text() const {
  return current_ + 1 < phases_ && run_->phases()[current_ + 1].kind == PhaseKind::kEncodeText;
}

absl::Status Job::AcquirePhase() {
  RecordMeasurement();
  while (resources_.empty() && phase_now().kind == PhaseKind::kEncodeText && TakeCachedConditioning()) {
    if (!more_text()) SendEncoded();
    ++current_;
  }
  RETURN_IF_ERROR(CheckFiles());
  const RunPhase& phase = phase_now();
  if (phase.kind != PhaseKind::kEncodeText) ReleaseEmbeddings();
  std::optional<Stopwatch> watch([&](double ms) { timings_.set_load_ms(timings_.load_ms() + ms); });
  if (phase.kind == PhaseKind::kEncodeText && conditioning_memory_.bytes() == 0) {
    ASSIGN_OR_RETURN(conditioning_memory_,
                     core_->ram->Reserve({.bytes = run_->OutputBytes(current_),
                                          .use = MemoryUse::kConditioning,
                                          .owner = setup_.owner,
                                          .what = "conditioning",
                                          .deadline = absl::Now() + core_->config.memory_wait_timeout,
                                          .stop = stop_.get_token()}));
  }
  if (phase.kind == PhaseKind::kDecode) {
    constexpr int64_t kOtherSeed = 64;  // and tile: digits more than those of the first picture
    RETURN_IF_ERROR(PromisePictures(MaxFileBytes(*run_->params().width, *run_->params().height) +
                                    (record_ ? MaxNotesBytes(NotesOfPicture(0)) + kOtherSeed : 0)));
  }
  HoldWhatIsRead();
  for (const auto& held : resources_) {
    if (!held->ready()) RETURN_IF_ERROR(held->Acquire(&reports_));
  }
  SampleMemory();
  switch (phase.kind) {
    case PhaseKind::kEncodeText:
    case PhaseKind::kEncodeMedia:
      phase_ = v1::JobInfo::PHASE_ENCODING;
      break;
    case PhaseKind::kDenoise:
      phase_ = v1::JobInfo::PHASE_DENOISING;
      break;
    case PhaseKind::kDecode:
      phase_ = v1::JobInfo::PHASE_DECODING;
      break;
  }
  watch.reset();  // from here on the job is the executor's
  phase_executor_->Submit(shared_from_this());
  return absl::OkStatus();
}

bool Job::ShouldGiveWay() const {
  return std::any_of(resources_.begin(), resources_.end(),
                     [](const auto& held) { return held->ShouldGiveWay(); });
}

void Job::LetGoOfWork() {
  if (work_ == nullptr) return;
  std::optional<MemoryMeter> meter;  // what slices left behind is no longer there
  if (main().meters()) meter.emplace();
  work_->LetGo();
  if (meter) net_bytes_ += meter->net_bytes();
}

void Job::GiveWay() {
  LetGoOfWork();
  for (const auto& held : resources_) held->GiveWay();
}

bool Job::RunSlice() {
  absl::Status status = StopReason();
  const bool ready =
      std::all_of(resources_.begin(), resources_.end(), [](const auto& held) { return held->ready(); });
  if (status.ok() && !ready) {  // it gave way; now it is its turn again
    next_ = &Job::AcquirePhase;
    return false;
  }
  bool phase_over = false;
  if (status.ok()) {
    std::optional<MemoryMeter> meter;
    if (main().meters()) meter.emplace();
    const MemoryAccount::Scope scope(main().account());
    Stopwatch watch([&](double ms) { slice_seconds_ += ms / 1000; });
    status = GuardTensorCode("slice", [&]() -> absl::Status {
      ASSIGN_OR_RETURN(phase_over, RunPhaseSlice());
      return absl::OkStatus();
    });
    // What was read out of files that changed meanwhile is not weights, and its errors are not the job's.
    if (absl::Status files = CheckFiles(); !files.ok()) status = files;
    if (meter) {
      peak_bytes_ = std::max(peak_bytes_, net_bytes_ + meter->peak_bytes());
      net_bytes_ += meter->net_bytes();
    }
    ++slices_;
    SampleMemory();
  }
  if (!status.ok() && IsOutOfMemory(status)) {
    LetGoOfWork();
    status = main().Adapt(status);
    if (status.ok()) {  // once more, with less
      next_ = &Job::AcquirePhase;
      return false;
    }
  }
  if (!status.ok()) {
    Finish(WithComponent(status, main().component()));
    return false;
  }
  if (!phase_over) {
    const bool same = SameAsBefore();
    if (!same) next_ = &Job::AcquirePhase;
    return same;
  }
  EndPhase();
  next_ = ++current_ < phases_ ? &Job::AcquirePhase : &Job::EncodePictures;
  return false;
}

void Job::Parked() {
  if (next_ != nullptr) OnWorker(std::exchange(next_, nullptr));
}

void Job::SendEncoded() {
  v1::JobEvent event;
  for (const TokenCount& tokens : run_->tokens()) *event.mutable_encoded()->add_tokens() = ToProto(tokens);
  event.mutable_encoded();
  Send(std::move(event));
}

bool Job::SameAsBefore() {
  bool same = true;
  if (phase_now().kind == PhaseKind::kDenoise) {
    for (const auto& held : resources_) {
      // The next step has another set of LoRAs.
      if (held->SetProgress(static_cast<double>(step_) / static_cast<double>(steps_))) same = false;
    }
  }
  const std::vector<std::string> reads = work_->reads();
  return same && std::equal(reads.begin(), reads.end(), resources_.begin(), resources_.end(),
                            [](const std::string& component, const auto& held) {
                              return held->component() == component;
                            });
}

void Job::AddTime(double ms) {
  switch (phase_now().kind) {
    case PhaseKind::kEncodeText:
    case PhaseKind::kEncodeMedia:
      return timings_.set_encode_ms(timings_.encode_ms() + ms);
    case PhaseKind::kDenoise:
      step_ms_ += ms;
      return timings_.set_denoise_ms(timings_.denoise_ms() + ms);
    case PhaseKind::kDecode:
      return timings_.set_decode_ms(timings_.decode_ms() + ms);
  }
}

absl::StatusOr<bool> Job::RunPhaseSlice() {
  const Stopwatch watch([this](double ms) { AddTime(ms); });
  const bool encodes_text = phase_now().kind == PhaseKind::kEncodeText;
  if (work_ == nullptr) {
    ASSIGN_OR_RETURN(work_, run_->Begin(current_, encodes_text ? encoded_ : state_));
    if (phase_now().kind == PhaseKind::kDenoise) steps_ = static_cast<int>(work_->step_count());
  }
  WeightViews views;
  for (const auto& held : resources_) views.Add(held->component(), held->view());
  const size_t pictures = state_.pictures.size();
  ASSIGN_OR_RETURN(const SliceReport report, work_->Slice(views, main().options()));
  if (report.step) RETURN_IF_ERROR(AfterStep(*report.step, step_ms_ + watch.ms(), report.phase_over));
  if (report.step) step_ms_ = -watch.ms();  // the rest of this slice is of the next step
  if (state_.pictures.size() > pictures) {
    MemoryAccount::Exempt(state_.pictures.back().storage().data());  // promised as a picture
    decode_tiles_used_.push_back(main().options().tile);
  }
  if (!report.phase_over) return false;
  if (phase_now().kind == PhaseKind::kEncodeMedia) encode_tile_ = main().options().tile;
  if (encodes_text) {
    RETURN_IF_ERROR(CheckFiles());
    RETURN_IF_ERROR(
        KeepConditioning(std::exchange(encoded_.conditioning, {}), slice_seconds_ + watch.ms() / 1000));
    if (!more_text()) SendEncoded();
  }
  return true;
}

absl::Status Job::AfterStep(const StepReport& report, double ms, bool last) {
  step_ = static_cast<int>(report.index);
  v1::JobEvent event;
  auto& step = *event.mutable_step();
  step.set_index(static_cast<int>(report.index));
  step.set_count(static_cast<int>(report.count));
  step.set_sigma(report.sigma);
  step.set_ms(ms);
  Send(std::move(event));
  return last ? absl::OkStatus() : SendPreviews(step_);
}

void Job::SendDone() {
  timings_.set_total_ms(Ms(absl::Now() - setup_.created));
  timings_.set_queue_ms(std::max(0.0, timings_.total_ms() - timings_.load_ms() - timings_.encode_ms() -
                                          timings_.denoise_ms() - timings_.decode_ms()));
  v1::JobEvent event;
  auto& done = *event.mutable_done();
  *done.mutable_timings() = timings_;
  done.set_peak_ram_bytes(peak_ram_bytes_);
  for (const PatchReport& report : reports_) *done.add_loras() = ReportToProto(report);
  for (const PromptEmbedding& embedding : run_->params().embeddings) {
    v1::EmbeddingReport& report = *done.add_embeddings();
    report.set_name(embedding.name);
    report.set_tokens(static_cast<int>(embedding.tokens));
  }
  *done.mutable_params() = EchoParams(setup_.request, run_->params());
  for (const v1::PhaseReport& report : phase_reports_) *done.add_phases() = report;
  for (uint64_t seed : run_->params().seeds) done.add_seeds(seed);
  for (const Component& component : setup_.model->pipeline->components()) {
    (*done.mutable_sources())[component.name] = setup_.model->SourceOf(component);
  }
  for (const TokenCount& tokens : run_->tokens()) {
    *done.add_tokens() = ToProto(tokens);
    if (tokens.read < tokens.total) *done.add_warnings() = CutWarning(tokens);
  }
  for (const PromptNotice& notice : notices_) {
    v1::Warning& warning = *done.add_warnings();
    warning.set_reason(notice.reason);
    warning.set_field(notice.field);
    warning.set_message(notice.message);
  }
  Send(std::move(event));
}

void Job::SendLoading(const std::string& component, int64_t done, int64_t total) {
  const absl::Time now = absl::Now();
  if (now - last_loading_event_ < kLoadingEventInterval && done < total) return;
  last_loading_event_ = now;
  v1::JobEvent event;
  auto& loading = *event.mutable_loading();
  loading.set_component(component);
  loading.set_bytes_done(done);
  loading.set_bytes_total(total);
  Send(std::move(event));
}

void Job::SampleMemory() {
  const MemoryBudget::Stats stats = core_->ram->stats();
  peak_ram_bytes_ = std::max(peak_ram_bytes_, stats.in_use_bytes + stats.reserved_bytes);
}

void Job::Report(PhaseResources& resources, bool measured) {
  v1::PhaseReport report = resources.report();
  if (measured) {
    peak_bytes_ = std::max(peak_bytes_, resources.account()->peak_bytes());
    report.set_working_peak_bytes(peak_bytes_);
  }
  phase_reports_.push_back(std::move(report));
  if (!measured || slices_ == 0) return;
  // A step's slices are as many as it has pictures; what else is cut into slices is, by the network's layers.
  const RunPhase& phase = phase_now();
  const bool by_slices = phase.kind == PhaseKind::kDenoise || phase.components.size() > 1;
  const auto units = static_cast<double>(by_slices ? slices_ : phase.units);
  measured_ = Measured{resources.measurement_key(), peak_bytes_, slice_seconds_ / units};
}

void Job::EndPhase() {
  work_ = nullptr;
  for (const auto& held : resources_) Report(*held, held == resources_.front());
  if (phase_now().kind == PhaseKind::kEncodeMedia) {
    image_latents_memory_ = main().ReleaseAllBut(static_cast<int64_t>(state_.media_latents.nbytes()));
  } else if (phase_now().kind == PhaseKind::kDenoise) {
    latents_memory_ = main().ReleaseAllBut(static_cast<int64_t>(state_.latents.nbytes()));
    conditioning_locks_.clear();
    state_.media_latents.reset();
    image_latents_memory_.Release();
  }
  resources_.clear();
}

void Job::RecordMeasurement() {
  if (!measured_) return;
  core_->measurements->Record(measured_->key, measured_->working_bytes, measured_->seconds_per_unit);
  measured_.reset();
}

void Job::Finish(absl::Status status) {
  if (finished_.exchange(true)) return;
  if (const absl::Status stopped = StopReason(); !status.ok() && !stopped.ok()) status = stopped;
  if (Executor* home = home_) home->RemoveJob();
  work_ = nullptr;
  resources_.clear();
  state_ = {};
  run_ = nullptr;
  ReleaseEmbeddings();
  conditioning_locks_.clear();
  conditioning_memory_.Release();
  picture_memory_.Release();
  image_latents_memory_.Release();
  latents_memory_.Release();
  if (const std::string reason = ErrorReason(status);
      reason == "FILE_CHANGED" || reason == "FILE_TRUNCATED") {
    core_->DropChanged(*setup_.model);
    for (const auto& [key, files] : embedding_files_) {
      if (!files->Check().ok()) core_->cache->Drop(key);
    }
  }
  setup_.request_memory.Release();
  decoded_memory_.Release();
  if (status.ok()) {
    spdlog::info("job done session={} job={} steps={} total_ms={:.0f}", setup_.owner, LogField(setup_.job_id),
                 steps_.load(), timings_.total_ms());
  } else {
    spdlog::info("job ended session={} job={} reason={}", setup_.owner, LogField(setup_.job_id),
                 ErrorReason(status).empty() ? absl::StatusCodeToString(status.code()) : ErrorReason(status));
  }
  setup_.on_end(std::move(status));
}

}  // namespace latentd
