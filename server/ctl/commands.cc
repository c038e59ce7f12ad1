#include "server/ctl/commands.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cache/base/error.h"
#include "cache/base/sha256.h"
#include "google/protobuf/util/time_util.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "latentd/v1/cache.grpc.pb.h"
#include "latentd/v1/denoise.grpc.pb.h"
#include "latentd/v1/model.grpc.pb.h"
#include "latentd/v1/server.grpc.pb.h"
#include "server/ctl/ask.h"
#include "server/ctl/memory.h"
#include "server/ctl/text.h"

namespace latentd::ctl {
namespace {

constexpr size_t kUploadChunk = size_t{1} << 20;

void Print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void PrintJson(const google::protobuf::Message& message) { Print(MessageJson(message, false) + "\n"); }

std::string AgeText(const google::protobuf::Duration& age) { return HumanMs(ToMs(age)); }

template <typename Map>
std::string CountsText(const Map& map) {
  std::vector<std::string> parts;
  for (const auto& [key, count] : map) parts.push_back(Printable(absl::StrCat(key, " ", count)));
  std::sort(parts.begin(), parts.end());
  return absl::StrJoin(parts, ", ");
}

// A second table, of what cannot be used; none where all can.
template <typename Items>
void PrintProblems(const Items& items) {
  Rows rows = {{"CANNOT BE USED", "WHY"}};
  for (const auto& item : items) {
    if (!item.problem().empty()) rows.push_back({Printable(item.name()), Printable(item.problem())});
  }
  if (rows.size() > 1) Print("\n" + TableText(rows));
}

// "12 of 14 layers; not a.b, c.d".
std::string FitOf(const v1::Lora& lora) {
  if (!lora.has_match()) return "";
  const v1::LoraReport& match = lora.match();
  if (match.unmatched_count() == 0) return "all layers";
  return absl::StrCat(match.layers_in_file() - match.unmatched_count(), " of ", match.layers_in_file(),
                      " layers; not ", Printable(absl::StrJoin(match.unmatched_samples(), ", ")),
                      match.unmatched_count() > match.unmatched_samples_size() ? ", …" : "");
}

// A GenerateRequest or a PlanRequest, which have all but the priority in common.
template <typename Request>
absl::StatusOr<Request> JobRequest(const JobOptions& job, const std::string& prompt) {
  Request request;
  ASSIGN_OR_RETURN(*request.mutable_params(), Params(job));
  ASSIGN_OR_RETURN(std::vector<v1::LoraRef> loras, Loras(job));
  request.mutable_params()->set_prompt(prompt);
  request.set_model(job.model);
  request.mutable_loras()->Assign(loras.begin(), loras.end());
  request.set_patch_mode(PatchModeOf(job));
  return request;
}

absl::Status CannotRead(const std::string& file, absl::string_view why) {
  return MakeError(absl::StatusCode::kInternal, "LOCAL_FILE", absl::StrCat("cannot read '", file, "': ", why),
                   {{"file", file}});
}

// The bytes at `offset`, as many as a chunk takes; none at the end.
absl::Status ReadPiece(int fd, const std::string& file, int64_t offset, std::string& piece) {
  piece.resize(kUploadChunk);
  const ssize_t got = pread(fd, piece.data(), piece.size(), offset);
  if (got < 0) return CannotRead(file, std::strerror(errno));
  piece.resize(static_cast<size_t>(got));
  return absl::OkStatus();
}

}  // namespace

absl::Status RunGenerate(const GlobalOptions& global, const JobOptions& job, const std::string& prompt) {
  ASSIGN_OR_RETURN(v1::GenerateRequest request, JobRequest<v1::GenerateRequest>(job, prompt));
  request.set_priority(job.priority);

  JobOutput::Options options;
  options.out = job.out;
  if (job.out.empty() && !global.json && !job.show) {
    const v1::ImageFormat format = request.params().image_format();
    options.out = absl::StrCat("latentd-{seed}.", format == v1::IMAGE_FORMAT_JPEG      ? "jpg"
                                                  : format == v1::IMAGE_FORMAT_WEBP    ? "webp"
                                                  : format == v1::IMAGE_FORMAT_LATENTS ? "safetensors"
                                                                                       : "png");
  }
  options.count = job.count.value_or(1);
  options.quiet = global.json;
  options.show = job.show;
  options.verbose = job.verbose;
  JobOutput output(std::move(options));

  ASSIGN_OR_RETURN(auto channel, Connect(global));
  auto stub = v1::DenoiseService::NewStub(channel);
  Call call(global, std::nullopt);
  auto stream = stub->Generate(call.context(), request);
  v1::GenerateResponse response;
  absl::Status local;
  bool done = false;
  while (stream->Read(&response)) {
    if (global.json) Print(MessageJson(response, job.raw) + "\n");
    done |= response.event().has_done();
    if (local.ok()) local = output.OnEvent(response.event());
    // Nobody wants the rest.
    if (!local.ok()) call.context()->TryCancel();
  }
  output.ClearProgress();
  const absl::Status status = call.Result(stream->Finish());
  RETURN_IF_ERROR(local);
  RETURN_IF_ERROR(status);
  if (!done)
    return MakeError(absl::StatusCode::kDataLoss, "DAMAGED_DATA", "the stream ended before the job was done");
  return output.Finish();
}

absl::StatusOr<ExitCode> RunPlan(const GlobalOptions& global, const JobOptions& job,
                                 const std::string& prompt) {
  ASSIGN_OR_RETURN(const v1::PlanRequest request, JobRequest<v1::PlanRequest>(job, prompt));
  ASSIGN_OR_RETURN(auto plan, Ask<v1::DenoiseService>(global, &v1::DenoiseService::Stub::Plan, request));
  if (global.json) {
    PrintJson(plan);
  } else {
    Print(PlanText(plan));
  }
  return plan.fits() ? kExitOk : kExitFailed;
}

absl::Status RunModels(const GlobalOptions& global) {
  v1::ListModelsRequest request;
  request.set_include_problems(true);
  ASSIGN_OR_RETURN(const auto all, AskForAll(global, &v1::ModelService::Stub::ListModels, request));
  if (global.json) return PrintJson(all), absl::OkStatus();
  Rows rows = {{"NAME", "FAMILY", "VARIANT", "SIZE", "PARAMETERS", "DEFAULTS", "COMPONENTS"}};
  for (const v1::Model& model : all.models()) {
    if (!model.problem().empty()) continue;
    int64_t bytes = 0, parameters = 0;
    std::vector<std::string> parts;
    for (const v1::ModelComponent& component : model.components()) {
      bytes += component.bytes();
      parameters += component.parameters();
      parts.push_back(absl::StrCat(component.name(), " ", component.storage_type()));
    }
    const v1::ModelDefaults& defaults = model.defaults();
    rows.push_back({Printable(model.name()), Printable(model.family()), Printable(model.variant()),
                    HumanBytes(bytes), absl::StrFormat("%.1f M", static_cast<double>(parameters) / 1e6),
                    absl::StrCat(defaults.width(), "×", defaults.height(), ", ", defaults.steps(), " steps"),
                    Printable(absl::StrJoin(parts, ", "))});
  }
  Print(TableText(rows));
  PrintProblems(all.models());
  return absl::OkStatus();
}

absl::Status RunModel(const GlobalOptions& global, const std::string& name) {
  v1::GetModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(auto response, Ask<v1::ModelService>(global, &v1::ModelService::Stub::GetModel, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  const v1::Model& model = response.model();
  Rows rows = {{"name", Printable(model.name())},
               {"id", Printable(model.id())},
               {"family", Printable(absl::StrCat(model.family(), " ", model.variant()))}};
  for (const v1::ModelComponent& component : model.components()) {
    rows.push_back(
        {"component", Printable(absl::StrCat(component.name(), ": ", component.storage_type(), ", ",
                                             HumanBytes(component.bytes()), ", of ", component.source()))});
  }
  for (const v1::UnusedTensors& unused : model.unused()) {
    rows.push_back({"unused", Printable(absl::StrCat(unused.count(), " tensors of ", unused.component(), ": ",
                                                     absl::StrJoin(unused.samples(), ", ")))});
  }
  for (const v1::MediaUse& media : model.media()) {
    rows.push_back(
        {"picture", absl::StrCat(Printable(media.role()), media.required() ? ", required" : "",
                                 media.max_count() > 1 ? absl::StrCat(", up to ", media.max_count()) : "")});
  }
  Print(PairsText(rows));
  Rows fields = {{"FIELD", "DEFAULT", "WHAT IT DOES", "VALUES"}};
  for (const v1::RequestField& field : model.fields()) {
    fields.push_back({Printable(field.name()), Printable(UsualText(field)), Printable(field.description()),
                      Printable(ValuesText(field))});
  }
  Print(absl::StrCat("\n", TableText(fields)));
  return absl::OkStatus();
}

absl::Status RunLoras(const GlobalOptions& global, const std::optional<std::string>& model) {
  v1::ListLorasRequest request;
  request.set_include_problems(true);
  if (model) request.set_model(*model);
  ASSIGN_OR_RETURN(const auto all, AskForAll(global, &v1::ModelService::Stub::ListLoras, request));
  if (global.json) return PrintJson(all), absl::OkStatus();
  Rows rows = {{"NAME", "FORMAT", "FAMILY", "LAYERS", "SIZE", "BRINGS"}};
  if (model) rows[0].push_back("FITS");
  for (const v1::Lora& lora : all.loras()) {
    if (!lora.problem().empty()) continue;
    rows.push_back({Printable(lora.name()), Printable(lora.format()), Printable(lora.family()),
                    absl::StrCat(lora.layers()), HumanBytes(lora.bytes()),
                    Printable(absl::StrJoin(lora.embeddings(), ", "))});
    if (model) rows.back().push_back(FitOf(lora));
  }
  Print(TableText(rows));
  PrintProblems(all.loras());
  return absl::OkStatus();
}

absl::Status RunEmbeddings(const GlobalOptions& global) {
  v1::ListEmbeddingsRequest request;
  request.set_include_problems(true);
  ASSIGN_OR_RETURN(const auto all, AskForAll(global, &v1::ModelService::Stub::ListEmbeddings, request));
  if (global.json) return PrintJson(all), absl::OkStatus();
  Rows rows = {{"NAME", "IN PROMPTS", "FAMILY", "TOKENS", "SIZE"}};
  for (const v1::Embedding& embedding : all.embeddings()) {
    if (!embedding.problem().empty()) continue;
    rows.push_back({Printable(embedding.name()), Printable(embedding.trigger()),
                    Printable(embedding.family()), absl::StrCat(embedding.tokens()),
                    HumanBytes(embedding.bytes())});
  }
  Print(TableText(rows));
  PrintProblems(all.embeddings());
  return absl::OkStatus();
}

absl::Status RunInspectLora(const GlobalOptions& global, const std::string& name,
                            const std::optional<std::string>& model) {
  v1::InspectLoraRequest request;
  request.set_name(name);
  if (model) request.set_model(*model);
  ASSIGN_OR_RETURN(auto response,
                   Ask<v1::ModelService>(global, &v1::ModelService::Stub::InspectLora, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  const v1::Lora& lora = response.lora();
  Rows rows = {{"name", Printable(lora.name())},
               {"id", Printable(lora.id())},
               {"format", Printable(lora.format())},
               {"family", Printable(lora.family())},
               {"size", HumanBytes(lora.bytes())},
               {"layers", absl::StrCat(lora.layers(), ", ", response.layers_with_alpha(), " with alpha")},
               {"types", CountsText(response.layers_by_type())},
               {"for", CountsText(response.layers_by_target())},
               {"ranks", ""}};
  std::vector<std::string> ranks;
  for (const auto& [rank, layers] : response.layers_by_rank())
    ranks.push_back(absl::StrCat(layers, " of rank ", rank));
  rows.back()[1] = absl::StrJoin(ranks, ", ");
  for (const std::string& name : lora.embeddings()) rows.push_back({"brings", Printable(name)});
  for (const std::string& key : response.sample_keys()) rows.push_back({"key", Printable(key)});
  for (const auto& [key, value] : response.metadata()) {
    rows.push_back({"metadata", Printable(absl::StrCat(key, " = ", value))});
  }
  if (response.has_match()) {
    const v1::LoraReport& match = response.match();
    rows.push_back({"matched", CountsText(match.matched())});
    rows.push_back({"unmatched", absl::StrCat(match.unmatched_count())});
    for (const std::string& key : match.unmatched_samples()) rows.push_back({"unmatched", Printable(key)});
    for (const std::string& name : match.unused_embeddings()) {
      rows.push_back({"embedding", absl::StrCat(Printable(name), ", which this model cannot use")});
    }
  }
  Print(PairsText(rows));
  return absl::OkStatus();
}

absl::Status RunUpload(const GlobalOptions& global, const UploadOptions& options) {
  const Fd file(open(options.file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return CannotRead(options.file, std::strerror(errno));
  v1::UploadLoraRequest message;
  v1::UploadLoraRequest::Header& header = *message.mutable_header();
  const std::string base = options.file.substr(options.file.find_last_of('/') + 1);
  header.set_name(options.name.empty() ? std::string(absl::StripSuffix(base, ".safetensors")) : options.name);
  header.set_replace(options.replace);
  if (options.ttl) {
    *header.mutable_ttl() =
        google::protobuf::util::TimeUtil::MillisecondsToDuration(absl::ToInt64Milliseconds(*options.ttl));
  }
  std::string piece;
  Sha256 sum;
  while (true) {
    RETURN_IF_ERROR(ReadPiece(file.get(), options.file, header.size(), piece));
    if (piece.empty()) break;
    sum.Update(piece);
    header.set_size(header.size() + static_cast<int64_t>(piece.size()));
  }
  header.set_sha256(sum.Finish());
  const int64_t size = header.size();

  ASSIGN_OR_RETURN(auto channel, Connect(global));
  auto stub = v1::ModelService::NewStub(channel);
  Call call(global, std::nullopt);
  v1::UploadLoraResponse response;
  auto stream = stub->UploadLora(call.context(), &response);
  absl::Status local;
  // A server that wants no more, because it has the file or does not take it, ends the stream: Finish says
  // which.
  bool open = stream->Write(message);
  for (int64_t at = 0; open && at < size; at += static_cast<int64_t>(piece.size())) {
    local = ReadPiece(file.get(), options.file, at, piece);
    if (local.ok() && piece.empty()) local = CannotRead(options.file, "it became shorter");
    if (!local.ok()) {
      call.context()->TryCancel();
      break;
    }
    message.mutable_chunk()->set_offset(at);
    message.mutable_chunk()->set_data(piece);
    open = stream->Write(message);
  }
  stream->WritesDone();
  const absl::Status status = call.Result(stream->Finish());
  RETURN_IF_ERROR(local);
  RETURN_IF_ERROR(status);
  if (global.json) return PrintJson(response), absl::OkStatus();
  const v1::Lora& lora = response.lora();
  Print(absl::StrCat(
      Printable(lora.name()), response.existed() ? ", which was there already" : "", ": ",
      HumanBytes(lora.bytes()), ", ", lora.layers(), " layers, ",
      lora.has_expire_time()
          ? absl::StrCat("until ", absl::FormatTime("%Y-%m-%d %H:%M:%S %Ez",
                                                    absl::FromUnixSeconds(lora.expire_time().seconds()),
                                                    absl::LocalTimeZone()))
          : "until it is deleted",
      "\n"));
  return absl::OkStatus();
}

absl::Status RunDelete(const GlobalOptions& global, const std::string& name) {
  v1::DeleteLoraRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(auto response,
                   Ask<v1::ModelService>(global, &v1::ModelService::Stub::DeleteLora, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  Print(absl::StrCat("deleted ", Printable(name), "\n"));
  return absl::OkStatus();
}

absl::Status RunCache(const GlobalOptions& global) {
  ASSIGN_OR_RETURN(auto stats, Ask<v1::CacheService>(global, &v1::CacheService::Stub::GetCacheStats,
                                                     v1::GetCacheStatsRequest()));
  if (global.json) return PrintJson(stats), absl::OkStatus();
  Print(CacheText(stats, absl::Now()));
  return absl::OkStatus();
}

absl::Status RunTrim(const GlobalOptions& global, std::optional<int64_t> bytes) {
  v1::TrimCacheRequest request;
  if (bytes) request.set_bytes(*bytes);
  ASSIGN_OR_RETURN(auto response, Ask<v1::CacheService>(global, &v1::CacheService::Stub::TrimCache, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  Print(absl::StrCat("freed ", HumanBytes(response.freed_bytes()), "\n"));
  return absl::OkStatus();
}

absl::Status RunDrop(const GlobalOptions& global, const std::string& name) {
  v1::DropModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(auto response, Ask<v1::CacheService>(global, &v1::CacheService::Stub::DropModel, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  Print(absl::StrCat("evicted ", response.evicted_records(), " records, ",
                     HumanBytes(response.evicted_bytes()), "; ", response.stale_records(), " more, ",
                     HumanBytes(response.stale_bytes()), ", go when their holders let go\n"));
  return absl::OkStatus();
}

absl::Status RunLoad(const GlobalOptions& global, const v1::LoadModelRequest& request) {
  // A large model on a slow disk takes its time.
  ASSIGN_OR_RETURN(auto response,
                   Ask<v1::CacheService>(global, &v1::CacheService::Stub::LoadModel, request, std::nullopt));
  if (global.json) return PrintJson(response), absl::OkStatus();
  const bool device = !request.device().empty();
  Print(absl::StrCat("loaded ", response.loaded_records(), " of ", response.keys_size(), " records, ",
                     HumanBytes(response.bytes()), " in all", device ? ", also on " : "",
                     device ? Printable(request.device()) : "",
                     request.pin() ? "; pinned until they are unloaded" : "", "\n"));
  return absl::OkStatus();
}

absl::Status RunUnload(const GlobalOptions& global, const std::string& name) {
  v1::UnloadModelRequest request;
  request.set_name(name);
  ASSIGN_OR_RETURN(auto response,
                   Ask<v1::CacheService>(global, &v1::CacheService::Stub::UnloadModel, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  std::string text = absl::StrCat("evicted ", response.evicted_records(), " records, ",
                                  HumanBytes(response.evicted_bytes()));
  if (response.busy_records() > 0) absl::StrAppend(&text, "; ", response.busy_records(), " in use stay");
  Print(text + "\n");
  return absl::OkStatus();
}

absl::Status RunCap(const GlobalOptions& global, const std::string& budget, int64_t bytes) {
  v1::SetCapRequest request;
  request.set_budget(budget);
  request.set_cap_bytes(bytes);
  ASSIGN_OR_RETURN(auto response, Ask<v1::CacheService>(global, &v1::CacheService::Stub::SetCap, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  Print(absl::StrCat("cap of ", budget, " set to ", HumanBytes(bytes), ", was ",
                     HumanBytes(response.old_cap_bytes()), "; ", HumanBytes(response.in_use_bytes()),
                     " in use",
                     response.in_use_bytes() > bytes ? ", above the cap until they are let go" : "", "\n"));
  return absl::OkStatus();
}

absl::Status RunSessions(const GlobalOptions& global) {
  ASSIGN_OR_RETURN(auto response, Ask<v1::ServerService>(global, &v1::ServerService::Stub::ListSessions,
                                                         v1::ListSessionsRequest()));
  if (global.json) return PrintJson(response), absl::OkStatus();
  Rows rows = {{"SESSION", "JOB", "STATE", "STEP", "DEVICE", "AGE", "MODEL", "LORAS", "PEER"}};
  for (const v1::SessionInfo& session : response.sessions()) {
    std::vector<std::string> loras;
    for (const v1::LoraRef& lora : session.loras()) loras.push_back(LoraText(lora));
    rows.push_back({Printable(session.session()), "",
                    EnumText(v1::SessionInfo::State_Name(session.state()), "STATE_"), "", "",
                    AgeText(session.age()), Printable(session.model()), absl::StrJoin(loras, ", "),
                    Printable(session.peer())});
    for (const v1::JobInfo& job : session.jobs()) {
      rows.push_back({"", Printable(job.job_id()), EnumText(v1::JobInfo::Phase_Name(job.phase()), "PHASE_"),
                      job.steps() > 0 ? absl::StrCat(job.step(), "/", job.steps()) : "",
                      Printable(job.device()), AgeText(job.age())});
    }
  }
  Print(TableText(rows));
  return absl::OkStatus();
}

absl::Status RunCancel(const GlobalOptions& global, const std::string& session, const std::string& job) {
  v1::CancelJobRequest request;
  request.set_session(session);
  request.set_job_id(job);
  ASSIGN_OR_RETURN(auto response,
                   Ask<v1::ServerService>(global, &v1::ServerService::Stub::CancelJob, request));
  if (global.json) return PrintJson(response), absl::OkStatus();
  Print("the job will stop at its next step\n");
  return absl::OkStatus();
}

absl::Status RunInfo(const GlobalOptions& global) {
  ASSIGN_OR_RETURN(auto info, Ask<v1::ServerService>(global, &v1::ServerService::Stub::GetServerInfo,
                                                     v1::GetServerInfoRequest()));
  if (global.json) return PrintJson(info), absl::OkStatus();
  Rows rows = {{"version", Printable(info.version())},
               {"instance", Printable(info.instance())},
               {"started",
                absl::FormatTime("%Y-%m-%d %H:%M:%S %Ez", absl::FromUnixSeconds(info.start_time().seconds()),
                                 absl::LocalTimeZone())},
               {"state", info.draining() ? "draining" : "serving"},
               {"default model", info.default_model().empty() ? "none" : Printable(info.default_model())},
               {"families", Printable(absl::StrJoin(info.families(), ", "))},
               {"samplers", Printable(absl::StrJoin(info.samplers(), ", "))},
               {"schedules", Printable(absl::StrJoin(info.schedules(), ", "))}};
  for (const v1::DeviceInfo& device : info.devices()) {
    rows.push_back(
        {"device",
         absl::StrCat(
             Printable(device.name()), ", ", device.threads(), " threads",
             device.compute().empty() ? "" : absl::StrCat(", ", Printable(device.compute())),
             device.gemm().empty() ? "" : absl::StrCat(" by ", Printable(device.gemm())),
             device.memory_bytes() > 0 ? absl::StrCat(", ", HumanBytes(device.memory_bytes())) : "")});
  }
  // Servers of before this field say nothing.
  if (!info.device_choice().empty()) rows.push_back({"devices chosen", Printable(info.device_choice())});
  const v1::Limits& limits = info.limits();
  rows.push_back({"sessions", absl::StrCat("at most ", limits.max_sessions(), ", idle for ",
                                           AgeText(limits.session_idle_timeout()), ", of ",
                                           AgeText(limits.session_max_age()))});
  rows.push_back(
      {"jobs", absl::StrCat("at most ", limits.max_queued_jobs_per_session(), " waiting in a session, ",
                            limits.max_queued_jobs(), " in all, for ", AgeText(limits.job_timeout()))});
  rows.push_back({"pictures", absl::StrCat("at most ", limits.max_pixels(), " pixels, ",
                                           HumanBytes(limits.max_image_bytes()), " sent")});
  Print(PairsText(rows));
  return absl::OkStatus();
}

absl::Status RunHealth(const GlobalOptions& global, const std::string& service) {
  using grpc::health::v1::Health;
  using Response = grpc::health::v1::HealthCheckResponse;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  ASSIGN_OR_RETURN(auto response, Ask<Health>(global, &Health::Stub::Check, request));
  const std::string state = Response::ServingStatus_Name(response.status());
  if (global.json) {
    PrintJson(response);
  } else {
    Print(state + "\n");
  }
  if (response.status() == Response::SERVING) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_SERVING",
                   absl::StrCat("the server is ", state));
}

}  // namespace latentd::ctl
