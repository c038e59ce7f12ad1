// Settings: every getter on every kind of value, under keys that the corpus uses.
#include <cstdint>
#include <string>

#include "cache/base/bounded_json.h"
#include "families/config/json_config.h"

namespace {

void ReadAll(latentd::JsonConfig& json, int depth) {
  for (const char* key :
       {"a", "b", "version", "num_layers", "block_out_channels", "eos_token", "merges", "vocab"}) {
    json.Has(key);
    json.Int(key, 1, -5, 100);
    json.Double(key, 1, -5, 100);
    json.Bool(key, false);
    json.String(key, "");
    json.Ints(key, {}, 0, 100);
    json.IntOrInts(key, 1, 2, 0, 100);
    json.Strings(key, {});
    json.Doubles(key);
    json.IntMap(key);
    json.StringPairs(key);
    json.Token(key, "");
    if (depth == 0) continue;
    latentd::JsonConfig inner = json.Object(key);
    ReadAll(inner, depth - 1);
  }
  json.IntMap("");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  auto json = latentd::JsonConfig::Parse(text, "config.json");
  if (json.ok()) ReadAll(*json, 2);
  return 0;
}
