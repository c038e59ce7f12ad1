// latentctl: what a job is asked to do, and what is shown and kept of its events.
#ifndef LATENTD_SERVER_CTL_JOB_H_
#define LATENTD_SERVER_CTL_JOB_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "families/request_fields.h"
#include "latentd/v1/denoise.pb.h"
#include "server/ctl/images.h"

namespace latentd::ctl {

// The flags that `generate` and `session` share, as they were given.
struct JobOptions {
  std::string model;
  std::vector<std::string> loras;
  std::string patch_mode;
  int priority = 0;

  RequestScalars fields;  // those of the table of request fields; the prompt has a place of its own
  std::optional<int> count;
  std::optional<uint64_t> seed;
  std::string image, control, mask, latents;
  std::optional<bool> metadata;
  std::string format;
  std::string vae_tiling;
  int preview_every = 0;

  std::string out;
  bool show = false;
  bool verbose = false;
  bool raw = false;
};

// Errors: LOCAL_FILE, NOT_FOUND where it is not there. Writing to "-" is to stdout.
absl::StatusOr<std::string> ReadLocalFile(const std::string& file);
absl::Status WriteLocalFile(const std::string& file, const std::string& data);

// --image, --mask, --latents and --control: the pictures that a request brings.
void AddInputFlags(CLI::App& app, JobOptions& options);
void AddJobFlags(CLI::App& app, JobOptions& options);

absl::StatusOr<std::vector<v1::LoraRef>> Loras(const JobOptions& options);
v1::PatchMode PatchModeOf(const JobOptions& options);

// Reads the init image's file. Errors: NOT_FOUND LOCAL_FILE.
absl::StatusOr<v1::GenerateParams> Params(const JobOptions& options);

// Shows one job's progress on a terminal and saves its pictures. Pictures and their names go to stdout,
// everything else to stderr.
class JobOutput {
 public:
  struct Options {
    std::string out;       // pattern for files, see ExpandOutput; "-": stdout; empty: no files
    std::string job;       // fills {job} in, and stands before each line; may be empty
    int count = 1;         // pictures that are expected
    bool quiet = false;    // no text (--json)
    bool show = false;     // draw pictures and previews
    bool verbose = false;  // the phases of a job that is done
  };

  explicit JobOutput(Options options) : options_(std::move(options)) {}

  // Errors: DATA_LOSS DAMAGED_DATA; INTERNAL LOCAL_FILE.
  absl::Status OnEvent(const v1::JobEvent& event);

  // At the end of a job that was done. Errors: DATA_LOSS DAMAGED_DATA.
  absl::Status Finish() const { return receiver_.Finish(); }

  // Takes the progress line away, so that something else can be printed.
  void ClearProgress();

 private:
  absl::Status OnImage(const ReceivedImage& image);
  void OnDone(const v1::JobEvent::Done& done);
  void Progress(const std::string& text);
  // Draws a picture over the one before.
  void Draw(const std::string& file, bool final);
  std::string Prefix() const;

  const Options options_;
  ImageReceiver receiver_;
  bool progress_shown_ = false;
  size_t drawn_lines_ = 0;
};

}  // namespace latentd::ctl

#endif  // LATENTD_SERVER_CTL_JOB_H_
