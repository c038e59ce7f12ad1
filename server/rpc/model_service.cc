#include "server/rpc/model_service.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"
#include "google/protobuf/util/time_util.h"
#include "patcher/model_patch.h"
#include "patcher/patch_identity.h"
#include "server/catalog/embedding_set.h"
#include "server/logging.h"
#include "server/rpc/params.h"
#include "server/rpc/unary.h"
#include "server/rpc/upload_call.h"
#include "server/rpc/uses_message.h"
#include "server/runtime/tensor_guard.h"
#include "spdlog/spdlog.h"

namespace latentd {
namespace {

using google::protobuf::util::TimeUtil;

constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;
constexpr size_t kMaxMetadataValue = 512;
constexpr size_t kMaxMetadataEntries = 64;
constexpr size_t kMaxSamples = 10;

// A name, or what is shown of a file that has none.
bool IsPageToken(absl::string_view token) {
  return token.size() <= kMaxNameBytes && token[0] != '.' &&
         std::none_of(token.begin(), token.end(),
                      [](char c) { return absl::ascii_iscntrl(static_cast<unsigned char>(c)); });
}

// Answers with the page of `names`, which are sorted, that `request` asks for: calls `add` with the index of
// each name on it. Tokens are names: a page starts behind the name in its token, so that what comes and goes
// between two calls moves nothing.
template <typename Request, typename Response, typename Add>
absl::Status AnswerPage(const std::vector<std::string>& names, const Request& request, Response* response,
                        Add add) {
  if (request.page_size() < 0) return FieldError("page_size", "must not be negative");
  const int size = request.page_size() == 0 ? kDefaultPageSize : std::min(request.page_size(), kMaxPageSize);
  const std::string& token = request.page_token();
  if (!token.empty() && !IsPageToken(token))
    return FieldError("page_token", "is no token of an earlier page");
  const auto begin = token.empty() ? names.begin() : std::upper_bound(names.begin(), names.end(), token);
  const auto end = begin + std::min<std::ptrdiff_t>(size, names.end() - begin);
  for (auto it = begin; it != end; ++it) add(static_cast<size_t>(it - names.begin()));
  if (end != names.end()) response->set_next_page_token(*(end - 1));
  return absl::OkStatus();
}

template <typename File>
std::vector<std::string> NamesOf(const std::vector<File>& files) {
  std::vector<std::string> names;
  for (const File& file : files) names.push_back(file.name);
  return names;
}

// A row of a list: what is served, or what is not.
template <typename File>
struct Item {
  std::string name;
  const File* file = nullptr;
  const Unserved* unserved = nullptr;
};

// In order of name. They point into the vectors.
template <typename File>
std::vector<Item<File>> Items(const std::vector<File>& files, const std::vector<Unserved>& unserved) {
  std::vector<Item<File>> items;
  for (const File& file : files) items.push_back({.name = file.name, .file = &file});
  for (const Unserved& one : unserved) items.push_back({.name = one.name, .unserved = &one});
  std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return items;
}

template <typename Proto>
Proto UnservedToProto(const Unserved& unserved) {
  Proto proto;
  proto.set_name(unserved.name);
  if constexpr (!std::is_same_v<Proto, v1::Model>) proto.set_bytes(unserved.bytes);
  proto.set_problem(unserved.problem);
  return proto;
}

std::string StorageName(DType dtype) { return absl::AsciiStrToLower(DTypeName(dtype)); }

// What the model's files have and none of its components reads.
void AddUnused(const Pipeline& pipeline, v1::Model& proto) {
  std::map<const WeightFiles*, std::pair<std::string, std::set<std::string>>>
      by_files;  // first component, tensors read
  std::vector<const WeightFiles*> order;
  for (const Component& c : pipeline.components()) {
    const auto [it, fresh] = by_files.try_emplace(c.files.get(), c.name, std::set<std::string>());
    if (fresh) order.push_back(c.files.get());
    for (std::string& name : TensorsOf(*c.files, *c.layout, c.key_map, c.prefix))
      it->second.second.insert(std::move(name));
  }
  for (const WeightFiles* files : order) {
    const auto& [component, read] = by_files.at(files);
    v1::UnusedTensors unused;
    for (const auto& [name, entry] : files->tensors()) {
      if (read.count(name) != 0) continue;
      unused.set_count(unused.count() + 1);
      unused.set_bytes(unused.bytes() + entry.info->bytes);
      if (unused.samples_size() < static_cast<int>(kMaxSamples)) unused.add_samples(ValidUtf8(name));
    }
    if (unused.count() == 0) continue;
    unused.set_component(component);
    *proto.add_unused() = std::move(unused);
  }
}

v1::Model ToProto(const OpenModel& model) {
  v1::Model proto;
  proto.set_name(model.name);
  proto.set_id(model.id);
  proto.set_source(model.source);
  const Pipeline& pipeline = *model.pipeline;
  proto.set_family(std::string(pipeline.family()));
  proto.set_variant(std::string(pipeline.variant()));
  for (const Component& component : pipeline.components()) {
    v1::ModelComponent& out = *proto.add_components();
    out.set_name(component.name);
    out.set_bytes(model.part(component.name).bytes);
    out.set_parameters(component.layout->parameter_count());
    const std::map<DType, int64_t> bytes =
        WeightBytesByType(*component.files, *component.layout, component.key_map, component.prefix);
    auto most = std::max_element(bytes.begin(), bytes.end(),
                                 [](const auto& a, const auto& b) { return a.second < b.second; });
    if (most != bytes.end()) out.set_storage_type(StorageName(most->first));
    out.set_source(model.SourceOf(component));
  }
  AddUnused(pipeline, proto);
  const ModelDefaults& d = pipeline.defaults();
  v1::ModelDefaults& out = *proto.mutable_defaults();
  out.set_width(static_cast<int>(d.width));
  out.set_height(static_cast<int>(d.height));
  out.set_steps(static_cast<int>(d.steps));
  out.set_guidance(d.guidance);
  out.set_true_cfg_scale(d.true_cfg_scale);
  out.set_strength(d.strength);
  out.set_max_sequence_length(static_cast<int>(d.max_sequence_length));
  out.set_sampler(d.sampler);
  return proto;
}

// Reads the whole file, so that what it says of the layers is checked, but keeps nothing.
absl::StatusOr<std::shared_ptr<const ModelPatch>> ReadPatch(const LoraFile& lora) {
  ASSIGN_OR_RETURN(std::shared_ptr<const WeightFiles> files, WeightFiles::Open(lora.path));
  return ModelPatch::Load(files, LoadContext([] { return false; }, [](int64_t, int64_t) {}));
}

v1::Lora ToProto(const ServerCore& core, const LoraFile& lora, const PatchSummary& summary) {
  v1::Lora proto;
  proto.set_name(lora.name);
  proto.set_id(lora.id);
  proto.set_bytes(lora.bytes);
  proto.set_format(summary.format);
  proto.set_family(summary.family);
  proto.set_layers(summary.layers);
  for (const std::string& name : summary.embeddings) proto.add_embeddings(name);
  const auto upload = core.uploads == nullptr ? std::nullopt : core.uploads->Find(lora.name);
  if (upload && upload->expires != absl::InfiniteFuture()) {
    *proto.mutable_expire_time() = TimeUtil::MillisecondsToTimestamp(absl::ToUnixMillis(upload->expires));
  }
  return proto;
}

// What the file's header tells of it; `problem` is why it cannot be used.
PatchSummary Summary(const LoraFile& lora, absl::Status& problem) {
  auto files = WeightFiles::Open(lora.path);
  problem = files.status();
  if (!files.ok()) return {};
  auto summary = ModelPatch::Summarize(**files);
  problem = summary.status();
  return summary.ok() ? *summary : PatchSummary{};
}

// Sets what of the file fits the model, or why nothing does.
void Match(const LoraFile& lora, const OpenModel& model, v1::Lora& proto) {
  const auto match = [&]() -> absl::StatusOr<PatchReport> {
    ASSIGN_OR_RETURN(const auto files, WeightFiles::Open(lora.path));
    ASSIGN_OR_RETURN(const auto patch, ModelPatch::Outline(*files));
    return LayerPatcher::Match(*patch, lora.name, 1.0, model.patch_targets);
  };
  if (const auto report = match(); report.ok()) {
    *proto.mutable_match() = ReportToProto(*report);
  } else {
    proto.set_problem(std::string(report.status().message()));
  }
}

v1::Embedding ToProto(const EmbeddingFile& embedding, const std::string& short_name) {
  v1::Embedding proto;
  proto.set_name(embedding.name);
  proto.set_id(embedding.id);
  proto.set_bytes(embedding.bytes);
  proto.set_trigger(absl::StrCat("<", short_name, ">"));
  const auto opened = embedding.Open();
  if (!opened.ok()) {
    proto.set_problem(ValidUtf8(opened.status().message()));
    return proto;
  }
  proto.set_tokens(static_cast<int>(opened->shape.tokens));
  for (const EmbeddingEncoder encoder : {EmbeddingEncoder::kClipL, EmbeddingEncoder::kClipG}) {
    const int64_t columns = opened->shape.columns(encoder);
    if (columns > 0)
      (*proto.mutable_widths())[std::string(EmbeddingEncoderName(encoder))] = static_cast<int>(columns);
  }
  proto.set_family(std::string(opened->shape.family()));
  return proto;
}

// What `describe` says of an item of a list; of one that it fails on, its name and why. One file never takes
// a list from everybody.
template <typename Proto>
Proto Described(absl::string_view kind, const std::string& name,
                absl::FunctionRef<absl::StatusOr<Proto>()> describe) {
  Proto proto;
  const absl::Status status =
      GuardTensorCode(absl::StrCat("the description of ", kind, " ", name), [&]() -> absl::Status {
        ASSIGN_OR_RETURN(proto, describe());
        return absl::OkStatus();
      });
  if (!status.ok()) {
    spdlog::warn("{} {} cannot be used: {}", std::string(kind), LogField(name), LogField(status.message()));
    proto = Proto();
    proto.set_name(name);
    proto.set_problem(ValidUtf8(status.message()));
  }
  return proto;
}

}  // namespace

v1::Lora DescribeLora(const ServerCore& core, const LoraFile& lora) {
  absl::Status problem;
  v1::Lora proto = ToProto(core, lora, Summary(lora, problem));
  proto.set_problem(std::string(problem.message()));
  return proto;
}

grpc::ServerUnaryReactor* ModelServiceImpl::ListModels(grpc::CallbackServerContext* context,
                                                       const v1::ListModelsRequest* request,
                                                       v1::ListModelsResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    struct Named {
      std::string name;
    };
    std::vector<Named> models;
    for (std::string& name : core_->catalog->ModelNames()) models.push_back({std::move(name)});
    std::vector<Unserved> unserved;
    if (request->include_problems()) unserved = core_->catalog->UnservedModels();
    const auto items = Items(models, unserved);
    return AnswerPage(NamesOf(items), *request, response, [&](size_t i) {
      if (items[i].unserved != nullptr) {
        *response->add_models() = UnservedToProto<v1::Model>(*items[i].unserved);
        return;
      }
      const std::string& name = items[i].name;
      v1::Model proto = Described<v1::Model>("model", name, [&]() -> absl::StatusOr<v1::Model> {
        ASSIGN_OR_RETURN(std::shared_ptr<const OpenModel> model, core_->catalog->Model(name));
        return ToProto(*model);
      });
      if (proto.problem().empty() || request->include_problems()) *response->add_models() = std::move(proto);
    });
  });
}

grpc::ServerUnaryReactor* ModelServiceImpl::GetModel(grpc::CallbackServerContext* context,
                                                     const v1::GetModelRequest* request,
                                                     v1::GetModelResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    ASSIGN_OR_RETURN(std::shared_ptr<const OpenModel> model, core_->catalog->Model(request->name()));
    *response->mutable_model() = ToProto(*model);
    SetUses(model->pipeline->uses(), *response->mutable_model());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ModelServiceImpl::ListLoras(grpc::CallbackServerContext* context,
                                                      const v1::ListLorasRequest* request,
                                                      v1::ListLorasResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    const std::vector<LoraFile> loras = core_->catalog->Loras();
    std::shared_ptr<const OpenModel> model;
    if (request->has_model()) {
      ASSIGN_OR_RETURN(model, core_->catalog->Model(request->model()));
    }
    std::vector<Unserved> unserved;
    if (request->include_problems()) unserved = core_->catalog->UnservedLoras();
    const auto items = Items(loras, unserved);
    return AnswerPage(NamesOf(items), *request, response, [&](size_t i) {
      v1::Lora& lora = *response->add_loras();
      if (items[i].unserved != nullptr) {
        lora = UnservedToProto<v1::Lora>(*items[i].unserved);
        return;
      }
      const LoraFile& file = *items[i].file;
      lora = Described<v1::Lora>("LoRA", file.name, [&] {
        v1::Lora described = DescribeLora(*core_, file);
        if (model != nullptr && described.problem().empty()) Match(file, *model, described);
        return described;
      });
    });
  });
}

grpc::ServerUnaryReactor* ModelServiceImpl::ListEmbeddings(grpc::CallbackServerContext* context,
                                                           const v1::ListEmbeddingsRequest* request,
                                                           v1::ListEmbeddingsResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    const std::vector<EmbeddingFile> embeddings = core_->catalog->Embeddings();
    const auto by_last_segment = NamesByLastSegment(NamesOf(embeddings));
    std::vector<Unserved> unserved;
    if (request->include_problems()) unserved = core_->catalog->UnservedEmbeddings();
    const auto items = Items(embeddings, unserved);
    return AnswerPage(NamesOf(items), *request, response, [&](size_t i) {
      v1::Embedding& embedding = *response->add_embeddings();
      if (items[i].unserved != nullptr) {
        embedding = UnservedToProto<v1::Embedding>(*items[i].unserved);
        return;
      }
      const std::string& name = items[i].name;
      const std::string last = name.substr(name.rfind('/') + 1);
      const bool alone = by_last_segment.at(last).size() == 1;
      embedding = Described<v1::Embedding>("embedding", name,
                                           [&] { return ToProto(*items[i].file, alone ? last : name); });
    });
  });
}

grpc::ServerUnaryReactor* ModelServiceImpl::InspectLora(grpc::CallbackServerContext* context,
                                                        const v1::InspectLoraRequest* request,
                                                        v1::InspectLoraResponse* response) {
  return OnWorker(core_, context, response, [=, this]() -> absl::Status {
    ASSIGN_OR_RETURN(LoraFile lora, core_->catalog->Lora(request->name()));
    ASSIGN_OR_RETURN(std::shared_ptr<const ModelPatch> patch, ReadPatch(lora));
    *response->mutable_lora() = ToProto(*core_, lora,
                                        {.format = patch->format(),
                                         .family = patch->family(),
                                         .layers = static_cast<int64_t>(patch->layers().size()),
                                         .layer_types = {},
                                         .embeddings = patch->embeddings()});
    for (const PatchLayer& layer : patch->layers()) {
      if (layer.rank() > 0) ++(*response->mutable_layers_by_rank())[static_cast<int>(layer.rank())];
      ++(*response->mutable_layers_by_type())[layer.type];
      ++(*response->mutable_layers_by_target())[ComponentOf(layer.name)];
      if (layer.has_alpha) response->set_layers_with_alpha(response->layers_with_alpha() + 1);
      if (response->sample_keys_size() < static_cast<int>(kMaxSamples)) response->add_sample_keys(layer.name);
    }
    for (const auto& [key, value] : patch->metadata()) {
      if (response->metadata().size() >= kMaxMetadataEntries) break;
      (*response->mutable_metadata())[std::string(CutUtf8(key, kMaxMetadataValue))] =
          value.size() <= kMaxMetadataValue ? value : absl::StrCat(CutUtf8(value, kMaxMetadataValue), "…");
    }
    if (request->has_model()) {
      ASSIGN_OR_RETURN(std::shared_ptr<const OpenModel> model, core_->catalog->Model(request->model()));
      ASSIGN_OR_RETURN(PatchReport report, LayerPatcher::Match(*patch, lora.name, 1.0, model->patch_targets));
      NoteUnusedEmbeddings(*model->pipeline, *patch, report);
      *response->mutable_match() = ReportToProto(report);
    }
    return absl::OkStatus();
  });
}

grpc::ServerReadReactor<v1::UploadLoraRequest>* ModelServiceImpl::UploadLora(
    grpc::CallbackServerContext* context, v1::UploadLoraResponse* response) {
  return NewUploadCall(core_, context, response);
}

grpc::ServerUnaryReactor* ModelServiceImpl::DeleteLora(grpc::CallbackServerContext* context,
                                                       const v1::DeleteLoraRequest* request,
                                                       v1::DeleteLoraResponse* response) {
  return OnWorkerForAdmin(core_, context, response, "DeleteLora", [=, this]() -> absl::Status {
    RETURN_IF_ERROR(CheckUploadsOn(*core_));
    const std::string& name = request->name();
    // An upload that is being placed is not known to the store yet, but lies in its folder; Delete waits for
    // it.
    const auto is_uploaded = [&](const LoraFile& file) {
      std::error_code ec;
      const std::filesystem::path folder = std::filesystem::canonical(core_->uploads->folder(), ec);
      return !ec && absl::StartsWith(file.path, absl::StrCat(folder.string(), "/"));
    };
    const auto file = core_->catalog->Lora(name);
    if (!core_->uploads->Find(name) && file.ok() && !is_uploaded(*file)) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_AN_UPLOAD",
                       absl::StrCat(name, " is a file of the server's own; only uploads can be deleted"),
                       {{"resource_type", "lora"}, {"resource_name", name}, {"field", "name"}});
    }
    RETURN_IF_ERROR(core_->uploads->Delete(name));
    spdlog::info("upload {} was deleted", name);
    return absl::OkStatus();
  });
}

}  // namespace latentd
