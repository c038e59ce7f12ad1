// latentctl session: one session, driven by lines on stdin.
#ifndef LATENTD_SERVER_CTL_SESSION_H_
#define LATENTD_SERVER_CTL_SESSION_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "latentd/v1/denoise.pb.h"
#include "server/ctl/client.h"
#include "server/ctl/job.h"
#include "server/ctl/text.h"

namespace latentd::ctl {

struct SessionCommand {
  enum class Kind { kNothing, kRequest, kWait };
  Kind kind = Kind::kNothing;
  v1::SessionRequest request;
};

// Turns lines into requests:
//   generate PROMPT       queue a job
//   set FIELD [VALUE]     a field of GenerateParams, for the jobs that follow; without a value: the default
//   loras [NAME[:W] …]    replace the set of LoRAs
//   cancel [JOB]          stop a job, the last one when left out
//   wait                  read on when no job is left
//   close                 end the session
//   { … }                 a SessionRequest in JSON
// Empty lines and lines that start with # are nothing. Jobs are named job-1, job-2, …
class SessionScript {
 public:
  explicit SessionScript(v1::GenerateParams params, v1::PatchMode patch_mode = v1::PATCH_MODE_UNSPECIFIED)
      : params_(std::move(params)), patch_mode_(patch_mode) {}

  // Errors: INVALID_ARGUMENT USAGE.
  absl::StatusOr<SessionCommand> Parse(absl::string_view line);

 private:
  std::string NextJob() { return "job-" + std::to_string(++jobs_); }
  absl::Status SetParam(const std::string& field, const std::string& value);

  v1::GenerateParams params_;
  const v1::PatchMode patch_mode_;
  int jobs_ = 0;
  int requests_ = 0;
  std::string last_job_;
};

// Opens a session, sends what the lines of stdin say and shows what comes back. The end of stdin lets the
// queued jobs finish. Errors: what ended the stream. Requests that failed in between have been shown; the
// exit code is that of the last of them.
absl::StatusOr<ExitCode> RunSession(const GlobalOptions& global, const JobOptions& job,
                                    std::optional<absl::Duration> idle_timeout);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_SESSION_H_
