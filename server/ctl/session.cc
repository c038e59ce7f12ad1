// Two threads: the main one reads stdin and writes to the stream, the other reads from the stream. They share
// the set of jobs that are not over.
#include "server/ctl/session.h"

#include <google/protobuf/util/json_util.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "cache/base/error.h"
#include "latentd/v1/denoise.grpc.pb.h"
#include "server/rpc/grpc_errors.h"
#include "server/rpc/listener.h"

namespace latentd::ctl {
namespace {

namespace pb = google::protobuf;

constexpr char kHelp[] =
    "lines are: generate PROMPT, set FIELD [VALUE], loras [NAME[:WEIGHT] …], cancel [JOB], wait, close, or a "
    "SessionRequest as JSON";

absl::Status Usage(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "USAGE", message);
}

// Lines of stdin, until it or the stream ends.
class Lines {
 public:
  Lines() : ended_(eventfd(0, EFD_CLOEXEC)) {}

  // Any thread: nobody wants more lines.
  void Stop() { eventfd_write(ended_.get(), 1); }

  std::optional<std::string> Next() {
    while (true) {
      if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
        std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return line;
      }
      pollfd wait[] = {{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                       {.fd = ended_.get(), .events = POLLIN, .revents = 0}};
      if (poll(wait, 2, -1) < 0 && errno == EINTR) continue;
      if (wait[1].revents != 0) return std::nullopt;
      char bytes[4096];
      const ssize_t size = read(STDIN_FILENO, bytes, sizeof(bytes));
      if (size > 0) {
        buffer_.append(bytes, size);
      } else if (size == 0 || errno != EINTR) {
        if (buffer_.empty()) return std::nullopt;
        return std::exchange(buffer_, "");
      }
    }
  }

 private:
  Fd ended_;
  std::string buffer_;
};

class SessionRun {
 public:
  using Stream = grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>;

  SessionRun(const GlobalOptions& global, const JobOptions& job, Stream* stream)
      : global_(global), job_(job), stream_(stream) {}

  // Main thread.
  void Write(SessionScript& script) {
    while (std::optional<std::string> line = lines_.Next()) {
      absl::StatusOr<SessionCommand> command = script.Parse(*line);
      if (!command.ok()) {
        Fail(command.status());
      } else if (command->kind == SessionCommand::Kind::kWait) {
        absl::MutexLock lock(&mu_);
        mu_.Await(absl::Condition(this, &SessionRun::NothingToWaitFor));
      } else if (command->kind == SessionCommand::Kind::kRequest) {
        if (command->request.has_denoise()) Begin(command->request);
        if (!stream_->Write(command->request)) return;
      }
    }
    stream_->WritesDone();
  }

  // The other thread.
  void Read() {
    v1::SessionResponse response;
    while (stream_->Read(&response)) {
      if (global_.json) {
        std::printf("%s\n", MessageJson(response, job_.raw).c_str());
        std::fflush(stdout);
      }
      On(response);
    }
    lines_.Stop();
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }

  absl::Status failure() const {
    absl::MutexLock lock(&mu_);
    return failure_;
  }

 private:
  bool NothingToWaitFor() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return jobs_.empty() || ended_; }

  void Begin(const v1::SessionRequest& request) {
    JobOutput::Options options;
    options.out = job_.out;
    options.job = request.denoise().job_id();
    options.count = request.denoise().params().has_count() ? request.denoise().params().count() : 1;
    options.quiet = global_.json;
    options.show = job_.show;
    options.verbose = job_.verbose;
    absl::MutexLock lock(&mu_);
    jobs_[request.denoise().job_id()] = {request.request_id(),
                                         std::make_unique<JobOutput>(std::move(options))};
  }

  void Fail(const absl::Status& status) {
    std::fputs(ErrorText(status, global_.json).c_str(), stderr);
    absl::MutexLock lock(&mu_);
    failure_ = status;
  }

  void Say(const std::string& text) {
    if (global_.json) return;
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  }

  void On(const v1::SessionResponse& response) {
    switch (response.response_case()) {
      case v1::SessionResponse::kOpened:
        Say(absl::StrCat("session ", Printable(response.opened().session()), " with ",
                         Printable(response.opened().model()), ", ", response.opened().loras_size(),
                         " LoRAs"));
        break;
      case v1::SessionResponse::kLorasSet:
        Say(absl::StrCat("LoRAs set: ", response.loras_set().loras_size()));
        break;
      case v1::SessionResponse::kJobEvent:
        OnJob(response.job_event().job_id(), response.job_event().event());
        break;
      case v1::SessionResponse::kError:
        Fail(WithPrefix(FromRpcStatus(response.error().status()), absl::StrCat(response.request_id(), ": ")));
        EndJobs([&](const std::string& id, const Job& job) {
          return id == response.error().job_id() || job.request_id == response.request_id();
        });
        break;
      case v1::SessionResponse::kClosed:
        Say("closed");
        break;
      default:
        break;
    }
  }

  void OnJob(const std::string& id, const v1::JobEvent& event) {
    JobOutput* output = nullptr;
    {
      absl::MutexLock lock(&mu_);
      if (auto it = jobs_.find(id); it != jobs_.end()) output = it->second.output.get();
    }
    // Only this thread ends jobs, so the output stays.
    if (output == nullptr) return;
    if (absl::Status status = output->OnEvent(event); !status.ok()) Fail(status);
    if (event.has_failed()) Fail(WithPrefix(FromRpcStatus(event.failed().status()), absl::StrCat(id, ": ")));
    if (event.has_cancelled()) Say(absl::StrCat(id, ": cancelled"));
    if (event.has_done()) {
      if (absl::Status status = output->Finish(); !status.ok()) Fail(status);
    }
    if (event.has_done() || event.has_failed() || event.has_cancelled()) {
      output->ClearProgress();
      EndJobs([&](const std::string& other, const Job&) { return other == id; });
    }
  }

  struct Job {
    std::string request_id;
    std::unique_ptr<JobOutput> output;
  };

  template <typename Predicate>
  void EndJobs(const Predicate& is_over) {
    absl::MutexLock lock(&mu_);
    for (auto it = jobs_.begin(); it != jobs_.end();) {
      it = is_over(it->first, it->second) ? jobs_.erase(it) : std::next(it);
    }
  }

  const GlobalOptions& global_;
  const JobOptions& job_;
  Stream* const stream_;
  Lines lines_;

  mutable absl::Mutex mu_;
  std::map<std::string, Job> jobs_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<SessionCommand> SessionScript::Parse(absl::string_view line) {
  line = absl::StripAsciiWhitespace(line);
  SessionCommand command;
  if (line.empty() || line[0] == '#') return command;
  command.kind = SessionCommand::Kind::kRequest;
  v1::SessionRequest& request = command.request;
  if (line[0] == '{') {
    const auto status = pb::util::JsonStringToMessage(pb::StringPiece(line.data(), line.size()), &request);
    if (!status.ok()) return Usage(absl::StrCat("no SessionRequest: ", std::string(status.message())));
    if (request.has_denoise()) {
      // A name of the server's making would come too late to know the job's events by.
      if (request.denoise().job_id().empty()) request.mutable_denoise()->set_job_id(NextJob());
      last_job_ = request.denoise().job_id();
    }
    return command;
  }

  const std::pair<std::string, std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 1));
  const std::string& verb = words.first;
  const std::string rest(absl::StripAsciiWhitespace(words.second));
  request.set_request_id(absl::StrCat("request-", ++requests_));
  if (verb == "generate" && !rest.empty()) {
    last_job_ = NextJob();
    request.mutable_denoise()->set_job_id(last_job_);
    *request.mutable_denoise()->mutable_params() = params_;
    request.mutable_denoise()->mutable_params()->set_prompt(rest);
  } else if (verb == "set" && !rest.empty()) {
    const std::pair<std::string, std::string> field = absl::StrSplit(rest, absl::MaxSplits(' ', 1));
    RETURN_IF_ERROR(SetParam(field.first, std::string(absl::StripAsciiWhitespace(field.second))));
    command.kind = SessionCommand::Kind::kNothing;
  } else if (verb == "loras") {
    request.mutable_set_loras()->set_patch_mode(patch_mode_);
    for (absl::string_view text : absl::StrSplit(rest, ' ', absl::SkipEmpty())) {
      ASSIGN_OR_RETURN(*request.mutable_set_loras()->add_loras(), ParseLora(text));
    }
  } else if (verb == "cancel") {
    const std::string& job = rest.empty() ? last_job_ : rest;
    if (job.empty()) return Usage("no job to cancel");
    request.mutable_cancel()->set_job_id(job);
  } else if (verb == "close" && rest.empty()) {
    request.mutable_close();
  } else if (verb == "wait" && rest.empty()) {
    command.kind = SessionCommand::Kind::kWait;
  } else {
    return Usage(absl::StrCat("cannot read '", Printable(line), "'; ", kHelp));
  }
  return command;
}

absl::Status SessionScript::SetParam(const std::string& name, const std::string& value) {
  using Field = pb::FieldDescriptor;
  const Field* field = v1::GenerateParams::descriptor()->FindFieldByName(name);
  if (field == nullptr || field->cpp_type() == Field::CPPTYPE_MESSAGE) {
    return Usage(absl::StrCat("'", Printable(name), "' is no field of GenerateParams that can be set here"));
  }
  const pb::Reflection& reflection = *params_.GetReflection();
  if (value.empty()) {
    reflection.ClearField(&params_, field);
    return absl::OkStatus();
  }
  bool valid = true;
  int32_t int32 = 0;
  uint64_t uint64 = 0;
  double number = 0;
  switch (field->cpp_type()) {
    case Field::CPPTYPE_STRING:
      reflection.SetString(&params_, field, value);
      break;
    case Field::CPPTYPE_INT32:
      if ((valid = absl::SimpleAtoi(value, &int32))) reflection.SetInt32(&params_, field, int32);
      break;
    case Field::CPPTYPE_UINT64:
      if ((valid = absl::SimpleAtoi(value, &uint64))) reflection.SetUInt64(&params_, field, uint64);
      break;
    case Field::CPPTYPE_DOUBLE:
      if ((valid = absl::SimpleAtod(value, &number))) reflection.SetDouble(&params_, field, number);
      break;
    case Field::CPPTYPE_ENUM: {
      const auto* entry = field->enum_type()->FindValueByName(value);
      if ((valid = entry != nullptr)) reflection.SetEnum(&params_, field, entry);
      break;
    }
    default:
      valid = false;
  }
  if (!valid) return Usage(absl::StrCat("'", Printable(value), "' is no value for ", name));
  return absl::OkStatus();
}

absl::StatusOr<ExitCode> RunSession(const GlobalOptions& global, const JobOptions& job,
                                    std::optional<absl::Duration> idle_timeout) {
  ASSIGN_OR_RETURN(v1::GenerateParams params, Params(job));
  ASSIGN_OR_RETURN(std::vector<v1::LoraRef> loras, Loras(job));
  v1::SessionRequest open;
  open.set_request_id("open");
  open.mutable_open()->set_model(job.model);
  open.mutable_open()->mutable_loras()->Assign(loras.begin(), loras.end());
  open.mutable_open()->set_patch_mode(PatchModeOf(job));
  open.mutable_open()->set_priority(job.priority);
  if (idle_timeout) {
    open.mutable_open()->mutable_idle_timeout()->set_seconds(absl::ToInt64Seconds(*idle_timeout));
  }

  ASSIGN_OR_RETURN(auto channel, Connect(global));
  auto stub = v1::DenoiseService::NewStub(channel);
  Call call(global, std::nullopt);
  auto stream = stub->Session(call.context());
  SessionRun run(global, job, stream.get());
  std::thread reader([&] { run.Read(); });
  SessionScript script(std::move(params), PatchModeOf(job));
  if (stream->Write(open)) run.Write(script);
  reader.join();
  RETURN_IF_ERROR(call.Result(stream->Finish()));
  return ExitCodeOf(run.failure());
}

}  // namespace latentd::ctl
