// latentctl: a picture drawn again from what its file says.
#ifndef LATENTD_SERVER_CTL_REPLAY_H_
#define LATENTD_SERVER_CTL_REPLAY_H_

#include <string>

#include "absl/status/statusor.h"
#include "server/ctl/client.h"
#include "server/ctl/job.h"
#include "server/ctl/text.h"

namespace latentd::ctl {

// Draws the picture of `file` again, with what it was drawn with, and says whether the bytes are equal, and
// otherwise what else is not. Of `job` the pictures that the request brought are taken, and `out`.
// kExitFailed when the bytes differ, and without drawing when a model, LoRA or embedding is not there or a
// picture is another one. Errors: LOCAL_FILE; NO_RECORD, BAD_RECORD (picture_record.h); USAGE for pictures
// too few or too many; those of Generate.
absl::StatusOr<ExitCode> RunReplay(const GlobalOptions& global, const JobOptions& job,
                                   const std::string& file);

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_REPLAY_H_
