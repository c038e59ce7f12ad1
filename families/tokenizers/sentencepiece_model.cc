#include "families/tokenizers/sentencepiece_model.h"

#include <dlfcn.h>

#include <filesystem>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "families/tokenizers/sentencepiece_check.h"
#include "families/tokenizers/sentencepiece_plugin.h"

namespace latentd {
namespace {

// Sanitizers refuse the flag; their builds do not link gRPC into what they test.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(ABSL_HAVE_ADDRESS_SANITIZER)
constexpr int kScope = RTLD_LOCAL;
#else
constexpr int kScope = RTLD_LOCAL | RTLD_DEEPBIND;
#endif

struct Plugin {
  const LatentdSentencePieceApi* api = nullptr;
  std::string error;
};

// Beside the program, in its ../lib/latentd, or in the bin folder of a build tree. No path is fixed: one that
// was there when the program was built may be anybody's where it runs.
Plugin LoadPlugin() {
  std::error_code ec;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ec).parent_path();
  Plugin plugin;
  for (const std::filesystem::path& folder :
       {program, program.parent_path() / "lib" / "latentd", program.parent_path() / "bin"}) {
    void* library = dlopen((folder / kSentencePiecePlugin).c_str(), RTLD_NOW | kScope);
    if (library == nullptr) {
      plugin.error = dlerror();
      continue;
    }
    auto entry = reinterpret_cast<decltype(&latentd_sentencepiece_api)>(dlsym(library, kSentencePieceEntry));
    if (entry != nullptr) {
      plugin.api = entry();
      return plugin;
    }
  }
  return plugin;
}

const Plugin& ThePlugin() {
  static const Plugin plugin = LoadPlugin();
  return plugin;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const SentencePieceModel>> SentencePieceModel::Load(const std::string& bytes) {
  RETURN_IF_ERROR(CheckSentencePieceModel(bytes));
  const Plugin& plugin = ThePlugin();
  if (plugin.api == nullptr) {
    return MakeError(absl::StatusCode::kInternal, "PLUGIN_MISSING",
                     absl::StrCat(kSentencePiecePlugin, " is not beside the program; install it there"));
  }
  void* model = plugin.api->create(bytes.data(), bytes.size());
  if (model == nullptr) {
    return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                     "not a SentencePiece model: the library does not take it");
  }
  return std::unique_ptr<const SentencePieceModel>(new SentencePieceModel(model));
}

SentencePieceModel::~SentencePieceModel() { ThePlugin().api->destroy(model_); }

std::vector<int> SentencePieceModel::Encode(const std::string& text) const {
  std::vector<int> ids;
  ThePlugin().api->encode(
      model_, text.data(), text.size(),
      [](void* context, int id) { static_cast<std::vector<int>*>(context)->push_back(id); }, &ids);
  return ids;
}
int SentencePieceModel::size() const { return ThePlugin().api->piece_count(model_); }
int SentencePieceModel::IdOf(const std::string& piece) const {
  return ThePlugin().api->id_of(model_, piece.data(), piece.size());
}
int SentencePieceModel::unknown_id() const { return ThePlugin().api->unknown_id(model_); }

}  // namespace latentd
