// latentd's side of the benchmarks: does what bench.py asks for and says how long it took.
//
//   latentd_bench                            commands on standard input, one a line, words parted by tabs
//   latentd_bench noop-daemon ADDRESS FILE   see noop_daemon.h
//
// Each command is answered by one line of JSON. Times are wall-clock milliseconds where nothing else is said.
//
// clang-format off
//   threads N                         of all that follows
//   open KEY FOLDER INPUTS            loads a model
//   begin KEY SIDE STEPS              starts a run with the LoRA that is set
//   step KEY COUNT                    → {"wall": [one per step], "cpu": [the same]}
//   latents KEY                       → {"latents": [...]}
//   lora KEY MODE COUNT SET…          takes one set after the other, COUNT times → the same, one per change. A set is
//                                     files joined by '+'; mode sidecar, direct (merged anew each time) or merged
//                                     (kept in the cache)
//   copy-weights KEY COUNT            copies all linear weights to new memory, COUNT times → the same
//   no-lora KEY
//   to-device KEY resident|streamed BANDWIDTH   → {"bytes": that each pass copies}; see BenchModel::MoveToDevice
//   close KEY
//   open-unet KEY FOLDER, open-vae KEY FOLDER   loads a network alone; see network_bench.h
//   inputs KEY FILE                   what its calls take
//   lora KEY FILE, no-lora KEY        what its calls have beside the weights
//   call KEY COUNT                    → {"wall": [one per call], "cpu": [the same]}
//   slice KEY                         → {"ms": of the last call's longest slice}
//   result KEY FILE                   writes what the last call gave, as plain fp32
//   peak                              → {"bytes": the most that were ever resident}
//   load FOLDER                       → {"load": ms, "mmap": ms, "pread": ms, "bytes": n}
//   noop ADDRESS STEPS                → {"ms": of the whole call}
// clang-format on
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/bench/bench_model.h"
#include "tests/bench/load_bench.h"
#include "tests/bench/network_bench.h"
#include "tests/bench/noop_daemon.h"

namespace latentd::bench {
namespace {

[[noreturn]] void Refuse(const std::string& message) {
  std::fprintf(stderr, "latentd_bench: %s\n", message.c_str());
  std::exit(2);
}

// The commands on standard input, and the words that each has behind it at least.
const std::map<std::string, size_t>& KnownCommands() {
  static const auto* const commands = new std::map<std::string, size_t>{
      {"begin", 3},   {"call", 2},      {"close", 1},    {"copy-weights", 2}, {"inputs", 2},
      {"latents", 1}, {"load", 1},      {"lora", 2},     {"no-lora", 1},      {"noop", 2},
      {"open", 3},    {"open-unet", 2}, {"open-vae", 2}, {"peak", 0},         {"result", 2},
      {"slice", 1},   {"step", 2},      {"threads", 1},  {"to-device", 3}};
  return *commands;
}

template <typename Map>
std::string NamesOf(const Map& map) {
  return absl::StrJoin(map, ", ", [](std::string* out, const auto& entry) { out->append(entry.first); });
}

class Commands {
 public:
  // The answer to one command. Ends the program where there is none.
  std::string Run(const std::vector<std::string>& words) {
    const std::string& what = words[0];
    const auto known = KnownCommands().find(what);
    if (known == KnownCommands().end()) {
      Refuse(absl::StrCat("unknown command '", what, "'; there is ", NamesOf(KnownCommands())));
    }
    if (words.size() <= known->second) {
      Refuse(absl::StrCat("'", what, "' takes at least ", known->second, " words, parted by tabs"));
    }
    if (what == "threads") {
      at::set_num_threads(Int(words.at(1)));
      return "{}";
    }
    if (what == "open") {
      models_[words.at(1)] = std::make_unique<BenchModel>(&host_, words.at(2), words.at(3));
      return "{}";
    }
    if (what == "load") {
      const LoadTimes times = MeasureLoad(words.at(1));
      return absl::StrCat("{\"load\": ", times.load, ", \"mmap\": ", times.mmap, ", \"pread\": ", times.pread,
                          ", \"bytes\": ", times.bytes, "}");
    }
    if (what == "peak") return absl::StrCat("{\"bytes\": ", PeakResidentBytes(), "}");
    if (what == "open-unet" || what == "open-vae") {
      networks_[words.at(1)] = what == "open-unet" ? OpenUNet(words.at(2)) : OpenVaeDecoder(words.at(2));
      return "{}";
    }
    if (words.size() > 1 && networks_.count(words.at(1)) != 0) return RunOnNetwork(what, words.at(1), words);
    if (what == "noop") return absl::StrCat("{\"ms\": ", RunNoopJob(words.at(1), Int(words.at(2))), "}");
    return RunOnModel(what, words.at(1), words);
  }

 private:
  static int Int(const std::string& word) {
    int value = 0;
    if (!absl::SimpleAtoi(word, &value)) Refuse("no number: " + word);
    return value;
  }

  static PatchMode Mode(const std::string& word) {
    if (word == "direct" || word == "merged") return PatchMode::kDirect;
    return word == "sidecar" ? PatchMode::kSidecar : PatchMode::kAuto;
  }

  static std::string ToJson(const std::vector<Elapsed>& times) {
    const auto wall = [](std::string* out, const Elapsed& e) { absl::StrAppend(out, e.wall); };
    const auto cpu = [](std::string* out, const Elapsed& e) { absl::StrAppend(out, e.cpu); };
    return absl::StrCat("{\"wall\": [", absl::StrJoin(times, ", ", wall), "], \"cpu\": [",
                        absl::StrJoin(times, ", ", cpu), "]}");
  }

  std::string RunOnNetwork(const std::string& what, const std::string& key,
                           const std::vector<std::string>& words) {
    NetworkBench& network = *networks_.at(key);
    if (what == "inputs") {
      network.SetInputs(words.at(2));
    } else if (what == "lora") {
      network.SetLora(words.at(2));
    } else if (what == "no-lora") {
      network.SetLora("");
    } else if (what == "call") {
      std::vector<Elapsed> times;
      for (int i = 0; i < Int(words.at(2)); ++i) times.push_back(network.Call());
      return ToJson(times);
    } else if (what == "slice") {
      return absl::StrCat("{\"ms\": ", network.longest_slice(), "}");
    } else if (what == "result") {
      network.WriteResult(words.at(2));
    } else if (what == "close") {
      networks_.erase(key);
    } else {
      Refuse(absl::StrCat("'", what, "' is not for a network such as '", key, "'"));
    }
    return "{}";
  }

  std::string RunOnModel(const std::string& what, const std::string& key,
                         const std::vector<std::string>& words) {
    const auto found = models_.find(key);
    if (found == models_.end()) {
      Refuse(absl::StrCat("'", what, "' of '", key, "', which is not open; models that are: ",
                          NamesOf(models_), "; networks: ", NamesOf(networks_)));
    }
    BenchModel& model = *found->second;
    std::vector<Elapsed> times;
    if (what == "begin") {
      model.Begin(Int(words.at(2)), Int(words.at(3)));
    } else if (what == "step") {
      for (int i = 0; i < Int(words.at(2)); ++i) times.push_back(model.Step());
      return ToJson(times);
    } else if (what == "latents") {
      return absl::StrCat("{\"latents\": [", absl::StrJoin(model.Latents(), ", "), "]}");
    } else if (what == "lora") {
      if (words.size() < 5) Refuse("'lora' of a model takes KEY MODE COUNT SET…");
      const size_t files = words.size() - 4;
      for (int i = 0; i < Int(words.at(3)); ++i) {
        const std::vector<std::string> set =
            absl::StrSplit(words.at(4 + static_cast<size_t>(i) % files), '+');
        times.push_back(model.SwitchLoras(set, Mode(words.at(2)), /*keep_merged=*/words.at(2) == "merged"));
      }
      return ToJson(times);
    } else if (what == "copy-weights") {
      for (int i = 0; i < Int(words.at(2)); ++i) times.push_back(model.CopyWeights());
      return ToJson(times);
    } else if (what == "to-device") {
      double bandwidth = 0;
      if (!absl::SimpleAtod(words.at(3), &bandwidth)) Refuse("no number: " + words.at(3));
      return absl::StrCat("{\"bytes\": ", model.MoveToDevice(words.at(2) == "streamed", bandwidth), "}");
    } else if (what == "no-lora") {
      model.DropLoras();
    } else if (what == "close") {
      models_.erase(key);
    } else {
      Refuse(absl::StrCat("'", what, "' is not for a model such as '", key, "'"));
    }
    return "{}";
  }

  BenchHost host_;
  std::map<std::string, std::unique_ptr<BenchModel>> models_;
  std::map<std::string, std::unique_ptr<NetworkBench>> networks_;
};

}  // namespace
}  // namespace latentd::bench

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "noop-daemon") {
    latentd::bench::ServeNoop(argv[2], argv[3]);
    return 0;
  }
  if (argc > 1) {
    latentd::bench::Refuse(absl::StrCat("unknown call '", argv[1],
                                        "'; there is 'noop-daemon ADDRESS FILE', or nothing and commands on "
                                        "standard input"));
  }
  latentd::bench::Commands commands;
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << commands.Run(absl::StrSplit(line, '\t')) << std::endl;
  }
  return 0;
}
