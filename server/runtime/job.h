// One generation, from parameters to pictures, as slices of an executor.
//
// A job alternates between two kinds of threads. On a worker it locks what its next phase needs (this may
// read files and wait for memory); on the executor it runs that phase, a slice at a time: a text encoder, one
// picture's step, one picture of the VAE. Components are locked per phase and let go after it; LoRAs are
// locked by the session, and again by each overlay; textual inversions that the prompts name, by the job
// until they are encoded.
//
//   Start → prepare → (acquire → slices …)* → encode pictures → done
//
// Cancel() takes effect when the network next asks for a weight, at a slice boundary, or at once where a wait
// can be broken. Picture files are made as the client reads them: while it has much to read, the job holds
// pixels and no thread.
//
// Thread-safe: Start, Cancel, phase, step. Events come one at a time, in order.
#ifndef LATENTD_SERVER_RUNTIME_JOB_H_
#define LATENTD_SERVER_RUNTIME_JOB_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"
#include "cache/model_cache.h"
#include "families/family.h"
#include "families/request_checks.h"
#include "latentd/v1/denoise.pb.h"
#include "latentd/v1/server.pb.h"
#include "patcher/layer_patcher.h"
#include "server/catalog/catalog.h"
#include "server/media/image_codec.h"
#include "server/rpc/params.h"
#include "server/runtime/executor.h"
#include "server/runtime/phase_resources.h"

namespace latentd {

struct ServerCore;

struct JobSetup {
  std::string job_id;
  std::string owner;  // the session: holder of all locks
  std::shared_ptr<const OpenModel> model;
  v1::GenerateParams request;
  Reservation request_memory;                    // of the pictures in `request`, if there are any
  const std::vector<HeldLora>* loras = nullptr;  // unchanged and alive until on_end
  PatchMode patch_mode = PatchMode::kAuto;
  int priority = 0;
  absl::Time created;

  // `memory` is a promise of the event's bytes, to be kept until the client has taken them; often empty.
  std::function<void(v1::JobEvent, Reservation memory)> on_event;
  // Bytes that the client has not taken, and a call when at most so many are left; SessionClient says how.
  std::function<int64_t()> unread_bytes;
  std::function<void(int64_t bytes, std::function<void()> then)> when_read;
  // Once, last, with everything released. OK after the `done` event.
  std::function<void(absl::Status)> on_end;
};

class Job : public SlicedTask, public std::enable_shared_from_this<Job> {
 public:
  Job(ServerCore* core, JobSetup setup);
  ~Job() override;

  void Start();

  // The job ends with `why` instead of its pictures. The first call counts.
  void Cancel(absl::Status why);

  v1::JobInfo::Phase phase() const { return phase_; }
  // Where it denoises; empty until that is decided.
  std::string device() const;
  int step() const { return step_; }
  int steps() const { return steps_; }

  bool RunSlice() override;
  void Parked() override;
  int priority() const override { return setup_.priority; }
  bool ShouldGiveWay() const override;
  void GiveWay() override;

 private:
  // Runs on a worker; the job ends when the returned status is not OK.
  void OnWorker(absl::Status (Job::*what)());
  absl::Status Prepare();
  // What the prompts name, locked. Until ReleaseEmbeddings.
  absl::Status LockEmbeddings(GenerateParams& params);
  void ReleaseEmbeddings();
  absl::Status AcquirePhase();
  // Makes files of what is finished and sends them, as far as the client reads; then ends the job.
  absl::Status EncodePictures();
  // True when the client has much to read: EncodePictures is called again when it has not, or on Cancel.
  bool PauseForReader();
  void Resume();
  absl::StatusOr<std::string> MakeFile(size_t index) const;
  // What the file of a picture says beside it; empty where nothing is wanted.
  PictureNotes NotesOfPicture(size_t index) const;
  void SendDone();

  // Whether all files that this job is of are what they were when they were opened: the model's, its LoRAs',
  // and the embeddings'. Before anything is computed from them, and before what was computed is kept or sent.
  absl::Status CheckFiles() const;

  // One slice of the current phase; true when the phase is over. Executor only.
  absl::StatusOr<bool> RunPhaseSlice();
  // `ms`: of the step; `last`: of the phase.
  absl::Status AfterStep(const StepReport& report, double ms, bool last);
  // Of what is half done on the device; no slice is under way.
  void LetGoOfWork();
  // Whether the next slice reads what is held, with the same patches.
  bool SameAsBefore();
  const RunPhase& phase_now() const { return run_->phases()[current_]; }
  // Whether the phase after this one encodes text, too.
  bool more_text() const;
  void AddTime(double ms);  // of the phase, to the job's timings
  absl::Status SendPreviews(int64_t step);
  void Send(v1::JobEvent event) { setup_.on_event(std::move(event), {}); }

  // Takes the conditioning of the current phase's encoder from the cache; false when it is not there.
  bool TakeCachedConditioning();
  absl::Status KeepConditioning(Conditioning part, double seconds);
  ModelKey CurrentConditioningKey() const;

  void SendEncoded();
  // Who holds what the client has not read: not the session, which may wait for memory meanwhile.
  std::string Reader() const { return "the reader of " + setup_.owner; }
  // A header and its chunks, which take their promise with them.
  void SendFile(size_t index, const std::string& file, Reservation memory);
  // Promises what files of all pictures take, and the pixels that they are made of until they are.
  absl::Status PromisePictures(int64_t file_bytes);
  // What the next slice reads, in the order of the phase.
  std::vector<std::string> Reads() const;
  // Holds what the next slice reads and nothing else: what it does not read is let go first. Not acquired
  // yet.
  void HoldWhatIsRead();
  std::unique_ptr<PhaseResources> MakeResources(const std::string& component, bool works);
  PhaseResources& main() { return *resources_.front(); }
  // Writes down what one component's slices took.
  void Report(PhaseResources& resources, bool measured);
  // Lets what the phase held go, but for the promise of its result.
  void EndPhase();
  void RecordMeasurement();
  void Finish(absl::Status status);
  absl::Status StopReason() const;
  void SendLoading(const std::string& component, int64_t done, int64_t total);
  void SampleMemory();

  ServerCore* const core_;
  JobSetup setup_;
  std::atomic<Executor*> home_ = nullptr;  // where it denoises
  std::stop_source stop_;
  mutable Mutex mu_;
  absl::Status cancel_status_ ABSL_GUARDED_BY(mu_);
  bool paused_ ABSL_GUARDED_BY(mu_) = false;  // for the reader
  std::atomic<bool> finished_ = false;

  // What follows is touched by one thread at a time: the worker or the executor that has the job.
  std::shared_ptr<const Run> run_;
  size_t phases_ = 0;  // that are run: none that decodes where latents are wanted
  size_t current_ = 0;
  std::vector<PatchReport> reports_;
  std::vector<LockHandle> embedding_locks_;  // of the run's embeddings
  std::vector<std::pair<ModelKey, std::shared_ptr<const WeightFiles>>> embedding_files_;  // to the job's end
  RunState state_;
  RunState encoded_;                            // of the phase that encodes text: what it alone puts out
  std::vector<LockHandle> conditioning_locks_;  // of what is a record
  Reservation conditioning_memory_;             // of the encoder that runs
  Reservation decoded_memory_;                  // of the request's pictures, beyond what their files took
  Reservation picture_memory_;                  // of pictures on their way out
  Reservation image_latents_memory_, latents_memory_;  // on the device of the phase that made them
  std::unique_ptr<PhaseWork> work_;                    // null until its first slice
  size_t files_ = 0;                                   // that were made and sent
  int64_t file_bytes_ = 0;                   // of a picture, at most; what picture_memory_ is made of
  std::optional<v1::PictureRecord> record_;  // without params; absent: pictures say nothing
  TileChoice encode_tiles_, decode_tiles_;
  int64_t encode_tile_ = 0;                 // that was used
  std::vector<int64_t> decode_tiles_used_;  // by picture
  std::vector<PromptNotice> notices_;
  double step_ms_ = 0;  // of the step that is under way

  // Of the current phase.
  std::vector<std::unique_ptr<PhaseResources>> resources_;  // of what the next slice reads
  Executor* phase_executor_ = nullptr;
  absl::Status (Job::*next_)() = nullptr;   // what a worker does next, set by the slice that ends a phase
  int64_t net_bytes_ = 0, peak_bytes_ = 0;  // by LibTorch's own count, where that is wanted
  double slice_seconds_ = 0;
  int64_t slices_ = 0;
  struct Measured {
    std::string key;
    int64_t working_bytes;
    double seconds_per_unit;
  };
  std::optional<Measured> measured_;  // of the last phase, to be written down on a worker

  std::vector<v1::PhaseReport> phase_reports_;
  v1::Timings timings_;
  int64_t peak_ram_bytes_ = 0;
  absl::Time last_loading_event_ = absl::InfinitePast();
  std::atomic<v1::JobInfo::Phase> phase_ = v1::JobInfo::PHASE_QUEUED;
  std::atomic<int> step_ = 0;
  std::atomic<int> steps_ = 0;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_RUNTIME_JOB_H_
