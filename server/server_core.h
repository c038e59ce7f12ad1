// What all sessions of a server share. Free of gRPC.
#ifndef LATENTD_SERVER_SERVER_CORE_H_
#define LATENTD_SERVER_SERVER_CORE_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"
#include "cache/device.h"
#include "cache/model_cache.h"
#include "cache/weights/mapped_file.h"
#include "families/compute_type.h"
#include "families/family.h"
#include "patcher/layer_patcher.h"
#include "server/catalog/catalog.h"
#include "server/catalog/pin_board.h"
#include "server/catalog/upload_store.h"
#include "server/config.h"
#include "server/rpc/answer_watch.h"
#include "server/rpc/request_memory.h"
#include "server/rpc/upload_watch.h"
#include "server/runtime/executor.h"
#include "server/runtime/measurements.h"
#include "server/runtime/memory_wants.h"
#include "server/runtime/worker_pool.h"

namespace latentd {

class SessionRegistry;

// Members are declared in the order in which they depend on each other, so that they end in the reverse:
// first who runs work, then the cache, last the budgets.
struct ServerCore {
  // Devices and cap from the config. Errors: INVALID_ARGUMENT for a device that cannot be made;
  // RESOURCE_EXHAUSTED NO_THREADS; those of UploadStore::Open.
  static absl::StatusOr<std::unique_ptr<ServerCore>> Create(const Config& config);
  ~ServerCore();

  // The executor for a job on this model: one whose device holds the denoiser, else the least loaded; lost
  // devices come last. Place counts the job there (Executor::AddJob), in one step with the choice, so that
  // jobs that come at once are spread.
  Executor& Place(const OpenModel& model);
  Executor& WouldPlace(const OpenModel& model) const;

  // What the component computes in on the device, by the config.
  ComputeType ComputeOf(const Device& device, const Component& component) const {
    return ComputeTypeFor(config.compute, device, component.leaves_fp16);
  }

  // The executor for a text encoder of a job that denoises on `home`: an idle one, best one whose device has
  // the encoder; else `home`.
  Executor& PlaceEncoder(const OpenModel& model, const std::string& component, Executor& home);

  // After a job on `model` failed for files that changed: nothing that was made of them is kept.
  void DropChanged(const OpenModel& model);
  // Lets go of what nobody can ask for any more: records of files that changed or went away, and of models
  // that were replaced and that no session has. Looks at the files of everything in memory.
  void LookAtFiles();
  void LookAtFilesOnWorker();  // the disk may be slow; does nothing while one looks
  // Lets parked jobs of lower priority than some want's let go of what they hold (MemoryWants). How many did.
  int LetParkedGiveWay();

  // UNAVAILABLE SERVER_DRAINING while going down.
  absl::Status CheckAccepting() const;

  Config config;
  std::string instance;  // random, 128 bit in hex
  absl::Time start_time;
  std::atomic<bool> draining = false;
  std::atomic<bool> looking_at_files = false;
  std::atomic<int64_t> queued_jobs = 0;  // sent and not finished, of all sessions

  std::unique_ptr<RamBudget> ram;
  std::unique_ptr<RequestMemory> requests;
  AnswerWatch answers;
  std::string device_choice;  // why those; see DeviceChoice
  std::vector<std::unique_ptr<Device>> devices;
  std::unique_ptr<ModelCache> cache;
  std::unique_ptr<MappingReliever> mapping_reliever;  // evicts what nobody uses
  std::unique_ptr<UploadStore> uploads;               // null: uploads are off
  std::unique_ptr<Catalog> catalog;
  std::unique_ptr<Measurements> measurements;
  MemoryWants wants;
  std::unique_ptr<PinBoard> pins;
  std::vector<std::unique_ptr<Executor>> executors;  // one per device, same order
  std::unique_ptr<WorkerPool> workers;
  std::unique_ptr<UploadWatch> upload_watch;
  Mutex placing;  // held by Place
  std::unique_ptr<SessionRegistry> sessions;

 private:
  static absl::StatusOr<std::unique_ptr<ServerCore>> Make(const Config& config);
};

// "auto" of the config: half of the machine's RAM and what goes with it; see machine_memory.h.
PatchMode DefaultPatchMode(const Config& config);

// Where the server keeps what it learns: the config's state_dir, "auto" resolved. Empty: nowhere.
std::string StateFolder(const Config& config);

// 128 random bits as 32 hex digits.
std::string RandomId();

}  // namespace latentd

#endif  // LATENTD_SERVER_SERVER_CORE_H_
