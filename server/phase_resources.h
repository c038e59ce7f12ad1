// What one phase of a job holds while it runs: its component in memory and on a device, the patches on it,
// the stream that brings what is not resident, and the view that network code reads all that through. And
// what is done when memory is short: evict, then stream, then tile, then fail this job only.
//
// Acquire() runs on a worker, the rest where the job is. One thread at a time.
#ifndef LATENTD_SERVER_PHASE_RESOURCES_H_
#define LATENTD_SERVER_PHASE_RESOURCES_H_

#include <functional>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache/model_cache.h"
#include "cache/weight_stream.h"
#include "families/family.h"
#include "latentd/v1/denoise.pb.h"
#include "patcher/layer_patcher.h"
#include "patcher/weight_view.h"
#include "server/catalog.h"
#include "server/lora_set.h"

namespace latentd {

struct ServerCore;

// True for errors that say that memory, of whatever kind, was not there.
bool IsOutOfMemory(const absl::Status& status);

class PhaseResources {
 public:
  struct Setup {
    ServerCore* core = nullptr;
    const OpenModel* model = nullptr;
    std::string component;
    const GenerateParams* params = nullptr;
    Device* device = nullptr;
    const std::vector<HeldLora>* loras = nullptr;
    PatchMode patch_mode = PatchMode::kAuto;
    std::string owner;
    std::stop_token stop;
    bool may_tile = false;   // the request allows it, and the phase is one that can
    bool must_tile = false;  // the request asks for it
    std::function<void(int64_t done, int64_t total)> on_loading;
    std::function<void(v1::JobEvent::Adapted)> on_adapted;
  };

  explicit PhaseResources(Setup setup);

  // Takes everything, adapting as far as it must and may. Errors: those of the cache, the budgets and Apply.
  absl::Status Acquire(std::vector<PatchReport>* reports);

  // A slice failed for want of memory: lets everything go and takes the next measure. The caller acquires
  // again, and repeats the slice. Returns `status` when there is no further measure.
  absl::Status Adapt(const absl::Status& status);

  // The share of the steps that are done, from 0 on. True when that changes which LoRAs apply: then
  // everything but the component's lock is let go, and the caller acquires again.
  bool SetProgress(double progress);

  // Lets everything go.
  void Release();

  const WeightView& view() const { return *view_; }
  const PhaseOptions& options() const { return options_; }
  // The key of this phase's measurements, and whether they are wanted.
  const std::string& measurement_key() const { return measurement_key_; }
  bool measures() const { return measures_; }
  // Without peak; stays good after Release.
  const v1::PhaseReport& report() const { return report_; }

 private:
  void ReleaseDevice();
  absl::Status TryAcquire(std::vector<PatchReport>* reports);
  absl::StatusOr<std::vector<PatchSpec>> Specs();
  void Announce(v1::JobEvent::Adapted::Measure measure, const absl::Status& reason);

  // Whether a LoRA changes this component now.
  bool Applies(const HeldLora& lora) const {
    return lora.ActiveAt(progress_) && lora.report.matched.count(component_.name) != 0;
  }

  const Setup setup_;
  const Component& component_;
  double progress_ = 0;
  std::set<std::string> counted_;  // LoRAs whose tensors are in the reports
  PhaseOptions options_;
  bool evicted_ = false;
  bool streams_ = false;
  int64_t working_bytes_ = 0;  // that were asked for last
  std::string measurement_key_;
  bool measures_ = false;
  v1::PhaseReport report_;

  // Declared so that what borrows goes first.
  LockHandle handle_;
  DeviceLock residency_;
  std::shared_ptr<const Overlay> overlay_;
  std::unique_ptr<WeightStream> stream_;
  std::unique_ptr<WeightView> view_;
};

// Names what measurements of a phase have in common: family, component with its size, shapes, device.
std::string MeasurementKey(const OpenModel& model, const Component& component, const GenerateParams& params,
                           const PhaseOptions& options, const Device& device);

}  // namespace latentd

#endif  // LATENTD_SERVER_PHASE_RESOURCES_H_
