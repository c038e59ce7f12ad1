// latentctl: the commands other than `session`. Each makes one call, prints its answer and returns the error.
#ifndef LATENTD_SERVER_CTL_COMMANDS_H_
#define LATENTD_SERVER_CTL_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "latentd/v1/cache.pb.h"
#include "server/ctl/client.h"
#include "server/ctl/job.h"
#include "server/ctl/text.h"

namespace latentd::ctl {

absl::Status RunGenerate(const GlobalOptions& global, const JobOptions& job, const std::string& prompt);
// kExitFailed when the job does not fit, which is an answer and no error.
absl::StatusOr<ExitCode> RunPlan(const GlobalOptions& global, const JobOptions& job,
                                 const std::string& prompt);
absl::Status RunModels(const GlobalOptions& global);
absl::Status RunModel(const GlobalOptions& global, const std::string& name);
// `model`: whose fit is shown.
absl::Status RunLoras(const GlobalOptions& global, const std::optional<std::string>& model);
absl::Status RunEmbeddings(const GlobalOptions& global);
absl::Status RunInspectLora(const GlobalOptions& global, const std::string& name,
                            const std::optional<std::string>& model);

struct UploadOptions {
  std::string file;
  std::string name;  // empty: the file's, without .safetensors
  std::optional<absl::Duration> ttl;
  bool replace = false;
};

// Reads the file twice: for its SHA-256, and to send it. Errors besides the server's: LOCAL_FILE.
absl::Status RunUpload(const GlobalOptions& global, const UploadOptions& options);
absl::Status RunDelete(const GlobalOptions& global, const std::string& name);
absl::Status RunCache(const GlobalOptions& global);
absl::Status RunTrim(const GlobalOptions& global, std::optional<int64_t> bytes);
absl::Status RunDrop(const GlobalOptions& global, const std::string& name);
absl::Status RunLoad(const GlobalOptions& global, const v1::LoadModelRequest& request);
absl::Status RunUnload(const GlobalOptions& global, const std::string& name);
absl::Status RunCap(const GlobalOptions& global, const std::string& budget, int64_t bytes);
absl::Status RunSessions(const GlobalOptions& global);
absl::Status RunCancel(const GlobalOptions& global, const std::string& session, const std::string& job);
absl::Status RunInfo(const GlobalOptions& global);
// Errors: FAILED_PRECONDITION NOT_SERVING.
absl::Status RunHealth(const GlobalOptions& global, const std::string& service);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_COMMANDS_H_
