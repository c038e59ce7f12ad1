// CLIP's and T5's tokenizers from their files. An input is a tokenizer_config.json, a tokenizer.json and a
// text, with a NUL between them.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "families/tokenizers/clip_tokenizer.h"
#include "families/tokenizers/t5_tokenizer.h"

namespace {

constexpr int64_t kVocabulary = 1000;

const std::string& Folder() {
  static const std::string& folder = *new std::string([] {
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() / absl::StrCat("tokenizer_fuzz_", getpid());
    std::filesystem::create_directories(path);
    std::filesystem::copy_file("tests/fuzz/corpus/spiece/rules.model", path / "spiece.model",
                               std::filesystem::copy_options::overwrite_existing);
    std::atexit([] { std::filesystem::remove_all(Folder()); });
    return path.string();
  }());
  return folder;  // never ended: the program removes the folder after that
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const std::vector<absl::string_view> parts = absl::StrSplit(input, absl::MaxSplits('\0', 2));
  if (parts.size() < 3) return 0;
  std::ofstream(Folder() + "/tokenizer_config.json") << parts[0];
  std::ofstream(Folder() + "/tokenizer.json") << parts[1];
  if (const auto clip = latentd::ClipTokenizer::Load(Folder()); clip.ok()) {
    for (const int64_t id : (*clip)->Tokenize(parts[2])) {
      (*clip)->EndsWord(id);
      (*clip)->IsOneOf(id, ",;:.");
    }
    if ((*clip)->Encode(parts[2], 77).size() != 77) std::abort();
  }
  if (const auto t5 = latentd::T5Tokenizer::Load(Folder(), kVocabulary); t5.ok()) {
    const std::vector<int64_t> ids = (*t5)->Encode(parts[2], 20);
    if (ids.size() != 20) std::abort();
    for (const int64_t id : ids) {
      if (id < 0 || id >= kVocabulary) std::abort();
    }
  }
  return 0;
}
