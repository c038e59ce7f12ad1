// The scope of one client's session: what it holds, what it has asked for, and its one way to end.
//
// No gRPC in it. A service makes a scope, hands it the client's requests, and is told what happens through a
// SessionClient. Requests are carried out one after the other in the order they came: opening, changes of the
// LoRA set, and jobs. The scope holds the lock handles of its LoRAs from `opened` to its end.
//
// Every cause of an end (close, half-close, cancel, client death, idle, too old, drain) only asks for it; the
// first to ask decides the status. The end itself happens once, on a worker, when the work in progress has
// reached a slice boundary: handles go, then the client is told, and nothing comes after that.
//
// Thread-safe; never blocks its caller.
#ifndef LATENTD_SERVER_SESSION_SESSION_SCOPE_H_
#define LATENTD_SERVER_SESSION_SESSION_SCOPE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache/base/mutex.h"
#include "cache/memory_budget.h"
#include "latentd/v1/denoise.pb.h"
#include "latentd/v1/server.pb.h"
#include "server/runtime/job.h"
#include "server/server_core.h"

namespace latentd {

enum class EndReason {
  kClosed,      // the client asked
  kHalfClosed,  // the client has nothing more to say, and all is done
  kCancelled,   // the client cancelled or is gone
  kFailed,      // see the status
};

// What a scope tells its client. Called from any thread; two calls may overlap only where a request is
// refused at once (OnError). Must not block or call back into the scope while holding a lock that the scope's
// callers hold.
class SessionClient {
 public:
  virtual ~SessionClient() = default;
  virtual void OnOpened(const std::string& request_id, const OpenModel& model,
                        const std::vector<PatchReport>& loras) = 0;
  virtual void OnLorasSet(const std::string& request_id, const std::vector<PatchReport>& loras) = 0;
  // A request failed; the session goes on. `job_id` is empty when no job is concerned.
  virtual void OnError(const std::string& request_id, const std::string& job_id,
                       const absl::Status& status) = 0;
  // `memory` is a promise of the event's bytes, to be kept until the client has taken them; often empty.
  virtual void OnJobEvent(const std::string& request_id, const std::string& job_id, v1::JobEvent event,
                          Reservation memory) = 0;
  virtual void OnJobFailed(const std::string& request_id, const std::string& job_id,
                           const absl::Status& status) = 0;
  virtual void OnJobCancelled(const std::string& request_id, const std::string& job_id) = 0;
  // Once, last, with everything released but what the client has not taken yet.
  virtual void OnEnded(EndReason reason, const absl::Status& status) = 0;

  // How the client takes what it was told; by default at once.

  // Bytes that it has not taken.
  virtual int64_t UnreadBytes() const { return 0; }
  // Calls `then` once, when at most `bytes` are not taken: before it returns, or from another thread.
  virtual void WhenRead(int64_t bytes, std::function<void()> then) { then(); }
  // True when it took too little for too long, while something waited for it; the scope then ends. Asked
  // again and again.
  virtual bool TooSlow(absl::Duration window, int64_t bytes_per_second) { return false; }
  // Forgets what it has not taken.
  virtual void DropUnread() {}
  // Ends its call whatever it does. After OnEnded.
  virtual void BreakOff() {}
  // True when nothing is kept for it any more. After OnEnded.
  virtual bool Gone() const { return true; }
};

struct OpenRequest {
  std::string request_id;
  std::string model;
  std::vector<v1::LoraRef> loras;
  v1::PatchMode patch_mode = v1::PATCH_MODE_UNSPECIFIED;
  int priority = 0;
  absl::Duration idle_timeout;  // of this session
};

class SessionScope : public std::enable_shared_from_this<SessionScope> {
 public:
  // Opens at once. Use SessionRegistry::Open, which counts and lists sessions.
  SessionScope(ServerCore* core, std::shared_ptr<SessionClient> client, std::string peer,
               OpenRequest request);
  ~SessionScope();

  void Start();

  const std::string& id() const { return id_; }
  absl::Duration idle_timeout() const { return open_.idle_timeout; }
  int priority() const { return open_.priority; }

  void Denoise(std::string request_id, std::string job_id, v1::GenerateParams params);
  void SetLoras(std::string request_id, std::vector<v1::LoraRef> loras, v1::PatchMode mode);
  // NOT_FOUND JOB_NOT_FOUND when no such job is queued or running.
  absl::Status CancelJob(const std::string& job_id);

  // Asks for the end. The first call counts.
  void RequestEnd(EndReason reason, absl::Status status);
  // Asks for the end once everything that was asked for is done.
  void EndWhenDone();

  // Looks at the clocks; the registry calls it about once a second.
  void Tick(absl::Time now);
  // True when nothing runs or waits; for draining.
  bool idle() const;

  v1::SessionInfo Info() const;

 private:
  struct Request {
    enum class Kind { kOpen, kSetLoras, kDenoise } kind;
    std::string request_id;
    std::string job_id;
    std::vector<v1::LoraRef> loras;
    v1::PatchMode patch_mode = v1::PATCH_MODE_UNSPECIFIED;
    v1::GenerateParams params;
    Reservation memory;          // of the pictures in `params`, and of its text where that is long
    RequestMemory::Charge refs;  // of `loras`, where those are many
    absl::Time created;
    bool announced = true;  // false until the client was told that the job is queued; not started before
  };

  // Starts the next request, or the end, when nothing is in progress.
  void Pump();
  void RunOpen(Request& request);
  void RunSetLoras(Request& request);
  // Of a set that waits, and of the one that is held. Errors: RESOURCE_EXHAUSTED QUEUE_FULL.
  absl::StatusOr<RequestMemory::Charge> ChargeRefs(const std::vector<v1::LoraRef>& refs) const;
  // A job on the LoRAs that are held now. Its end is the request's.
  std::shared_ptr<Job> MakeJob(Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether another job may be queued; counts it in the server's when so.
  absl::Status Admit(const std::string& job_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RequestDone();
  void End();
  // Whether the session ends without another word of its client: then what it holds is let go of.
  bool EndsByItself() const;

  absl::StatusOr<std::vector<HeldLora>> LockLoras(const std::vector<v1::LoraRef>& refs,
                                                  const OpenModel& model);

  ServerCore* const core_;
  const std::string id_;
  const std::string peer_;
  const absl::Time created_ = absl::Now();
  OpenRequest open_;  // its LoRAs go to the request that opens
  const std::shared_ptr<SessionClient> client_;
  std::stop_source stop_;  // of waits and loads outside of jobs

  mutable Mutex mu_;
  std::deque<Request> queue_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // a request is being carried out
  bool opened_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool end_when_done_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  EndReason end_reason_ ABSL_GUARDED_BY(mu_) = EndReason::kClosed;
  absl::Status end_status_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Job> job_ ABSL_GUARDED_BY(mu_);
  Request current_ ABSL_GUARDED_BY(mu_);
  absl::Time last_active_ ABSL_GUARDED_BY(mu_) = absl::Now();
  std::vector<v1::LoraRef> lora_refs_ ABSL_GUARDED_BY(mu_);  // of the set that is held, as Info shows them
  RequestMemory::Charge refs_charge_ ABSL_GUARDED_BY(mu_);   // of that set
  int next_job_ ABSL_GUARDED_BY(mu_) = 1;

  // Touched only by the request in progress, and by End.
  std::shared_ptr<const OpenModel> model_;
  std::vector<HeldLora> loras_;
  PatchMode patch_mode_ = PatchMode::kAuto;
};

// All sessions of a server, and the clock that watches them.
class SessionRegistry {
 public:
  explicit SessionRegistry(ServerCore* core);
  // REQUIRES: all sessions have ended.
  ~SessionRegistry();

  // Errors: UNAVAILABLE SERVER_DRAINING; RESOURCE_EXHAUSTED TOO_MANY_SESSIONS.
  absl::StatusOr<std::shared_ptr<SessionScope>> Open(std::shared_ptr<SessionClient> client, std::string peer,
                                                     OpenRequest request);

  // Errors: NOT_FOUND SESSION_NOT_FOUND, JOB_NOT_FOUND.
  absl::Status CancelJob(const std::string& session, const std::string& job_id);

  // Oldest first, those behind `after`, at most `limit`; `more` is set to what `after` is for the next ones,
  // 0 when there are none. The first ones are behind 0.
  std::vector<v1::SessionInfo> List(uint64_t after, size_t limit, uint64_t* more) const;

  // Ends idle sessions, lets jobs finish until `deadline`, then ends the rest, and waits for all ends.
  void Drain(absl::Time deadline);

 private:
  friend class SessionScope;
  // The session is none any more; its client is watched until it has taken what it was told.
  void Remove(const std::string& id, std::shared_ptr<SessionClient> client);
  // Breaks off clients of ended sessions that do not read.
  void WatchLeaving();
  void Watch();
  void GiveBackMemory(absl::Time now);
  std::vector<std::shared_ptr<SessionScope>> All() const;

  ServerCore* const core_;
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<std::string, std::pair<uint64_t, std::shared_ptr<SessionScope>>> sessions_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<SessionClient>> leaving_ ABSL_GUARDED_BY(mu_);
  // The watcher's.
  int64_t trimmed_at_ = 0;
  absl::Time trimmed_ = absl::InfinitePast(), busy_until_ = absl::InfinitePast();
  std::thread watcher_;
};

}  // namespace latentd

#endif  // LATENTD_SERVER_SESSION_SESSION_SCOPE_H_
