// What one phase of a job holds while it runs: its component in memory and on a device, the patches on it,
// the stream that brings what is not resident, and the view that network code reads all that through. And
// what is done when memory is short.
//
// A phase has ways to run that take less and less: whole, streamed, in ever smaller tiles. The best one that
// can be had at once is taken; before another than the best is, parked jobs of lower priority give way. Where
// none can be had at once, the best one is waited for, then the next one, until one deadline for them all.
// Streaming changes no byte of a result; tiling does, and is among the ways only where the request allows it.
//
// How much working memory a way takes is measured, or else guessed from shapes. A guess is no limit: where it
// cannot be had, the phase is tried with what can be had. Host memory that it takes is counted against what
// was promised (MemoryAccount), so that a wrong guess fails a slice and never overshoots; then it is tried
// with more, or otherwise.
//
// Acquire() runs on a worker, the rest where the job is. One thread at a time.
#ifndef LATENTD_SERVER_RUNTIME_PHASE_RESOURCES_H_
#define LATENTD_SERVER_RUNTIME_PHASE_RESOURCES_H_

#include <functional>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache/memory_account.h"
#include "cache/model_cache.h"
#include "cache/weights/weight_stream.h"
#include "families/compute_type.h"
#include "families/family.h"
#include "latentd/v1/denoise.pb.h"
#include "patcher/layer_patcher.h"
#include "patcher/weight_view.h"
#include "server/catalog/catalog.h"
#include "server/catalog/lora_set.h"
#include "server/rpc/params.h"
#include "server/runtime/measurements.h"

namespace latentd {

struct ServerCore;

// True for errors that say that memory, of whatever kind, was not there: for those of a wait that could not
// end too.
bool IsOutOfMemory(const absl::Status& status);

class PhaseResources {
 public:
  struct Setup {
    ServerCore* core = nullptr;
    const OpenModel* model = nullptr;
    const Run* run = nullptr;
    size_t phase = 0;       // of the run
    std::string component;  // that it reads
    bool works = true;      // has the phase's working memory; of several components, one does
    Device* device = nullptr;
    const std::vector<HeldLora>* loras = nullptr;
    PatchMode patch_mode = PatchMode::kAuto;
    std::string owner;
    int priority = 0;
    std::stop_token stop;
    TileChoice tiles = {};  // of a phase that can be tiled
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

  // Whether slices can run: Acquire was OK, and nothing was let go since.
  bool ready() const { return view_ != nullptr; }

  // Whether a job of a higher priority waits for memory that this holds. Then GiveWay lets that go; what the
  // phase has computed stays, and stays promised.
  bool ShouldGiveWay() const;
  void GiveWay();

  // Lets everything go.
  void Release();
  // The same, but for the promise of a result that stays: so many bytes on the phase's device.
  Reservation ReleaseAllBut(int64_t bytes);

  const std::string& component() const { return setup_.component; }
  const WeightView& view() const { return *view_; }
  const PhaseOptions& options() const { return options_; }
  // Slices run under it.
  const std::shared_ptr<MemoryAccount>& account() const { return account_; }

  // The key of this phase's measurements, and whether LibTorch's own count of a device's memory is wanted for
  // them: where the account does not see it.
  const std::string& measurement_key() const { return measurement_key_; }
  bool meters() const { return meters_; }
  // Without peak; stays good after Release.
  const v1::PhaseReport& report() const { return report_; }

 private:
  // A way to run the phase with the memory there is.
  struct Way {
    bool streams = false;
    int64_t tile = 0;
  };
  enum class Patience { kNone, kWaits };

  // One way, in the order that stands above; an error without a budget's name where memory itself was not
  // there.
  absl::Status AcquireOneWay(std::vector<PatchReport>* reports);
  absl::Status LockComponent();
  // Takes everything for a way. Nothing of the device is held when that fails.
  absl::Status Try(const Way& way, Patience patience, std::vector<PatchReport>* reports);
  absl::Status TryAcquire(Patience patience, std::vector<PatchReport>* reports);
  // From `first` on, the first of the ways that can be had. `reason`: why the best one cannot, for the
  // client.
  absl::Status TryFrom(const Way& first, Patience patience, std::vector<PatchReport>* reports,
                       const absl::Status& reason);
  // The next way that may help, where `way` failed with `status`. False when there is none.
  bool Next(Way& way, const absl::Status& status) const;

  absl::StatusOr<std::vector<PatchSpec>> Specs(Patience patience);
  absl::StatusOr<DeviceLock> LockWorking(Patience patience);
  absl::StatusOr<DeviceLock> LockWith(int64_t working_bytes, Patience patience);
  int64_t LeastOfWeights() const;  // on the device, that work needs room beside
  int64_t KeptBytes() const;
  // A guess was tried, and it is known that there is too little for it.
  absl::Status TooLittleRoom(const WorkingPromise& promise, int64_t room) const;

  void ReleaseDevice();
  void Announce(v1::JobEvent::Adapted::Measure measure, const absl::Status& reason);
  // Says what `way` does otherwise than the last one that was had.
  void AnnounceWay(const Way& way, const absl::Status& reason);
  absl::Time Until(Patience patience) const {
    return patience == Patience::kNone ? absl::InfinitePast() : deadline_;
  }

  // Whether a LoRA changes this component now.
  bool Applies(const HeldLora& lora) const {
    return lora.ActiveAt(progress_) && lora.report.matched.count(component_.name) != 0;
  }

  const Setup setup_;
  const Component& component_;
  const ComputeType compute_;
  const std::shared_ptr<MemoryAccount> account_ = MemoryAccount::Open();
  double progress_ = 0;
  std::set<std::string> counted_;  // LoRAs whose tensors are in the reports
  Way way_;                        // the first that is tried
  Way had_;                        // the last that was had, or announced
  PhaseOptions options_;
  bool streams_ = false;  // of the way that is tried
  bool evicted_ = false, gave_way_ = false;
  absl::Time deadline_;        // of Acquire's waits
  int64_t working_bytes_ = 0;  // that were asked for last
  std::string measurement_key_;
  bool meters_ = false;
  v1::PhaseReport report_;

  // Declared so that what borrows goes first.
  std::vector<Reservation> kept_;  // for what slices have computed; a part of the next promise
  LockHandle handle_;
  DeviceLock residency_;
  std::shared_ptr<const Overlay> overlay_;
  std::unique_ptr<WeightStream> stream_;
  std::unique_ptr<WeightView> view_;
};

// Names what measurements of a phase have in common: family, component and how it is stored, shapes, what is
// computed beside the weights, kind of device.
std::string MeasurementKey(const OpenModel& model, const Component& component, const Run& run, size_t phase,
                           const PhaseOptions& options, const Device& device, ComputeType compute);

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_PHASE_RESOURCES_H_
