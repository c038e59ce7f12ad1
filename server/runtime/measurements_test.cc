#include "server/runtime/measurements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/catalog/garbage_files.h"

namespace latentd {
namespace {

namespace fs = std::filesystem;

class MeasurementsTest : public ::testing::Test {
 protected:
  MeasurementsTest()
      : folder_(fs::path(::testing::TempDir()) / absl::StrCat("measurements_", getpid())),
        file_(folder_ / "measurements.json") {
    fs::create_directories(folder_);
  }
  ~MeasurementsTest() override { fs::remove_all(folder_); }
  void Write(const std::string& text) const { std::ofstream(file_, std::ios::trunc) << text; }

  // Whatever was there: what is measured from now on is kept.
  void ExpectThatItGoesOn(const std::string& before) const {
    SCOPED_TRACE(before);
    {
      Measurements measurements(folder_.string());
      measurements.Record("new", 5000, 0.25);
    }
    const auto kept = Measurements(folder_.string()).Find("new");
    ASSERT_TRUE(kept);
    EXPECT_EQ(kept->working_bytes, 5000);
    EXPECT_EQ(kept->seconds_per_unit, 0.25);
  }

  const fs::path folder_, file_;
};

TEST_F(MeasurementsTest, AreKeptAcrossRestarts) {
  Measurements(folder_.string()).Record("a", 1 << 30, 2);
  Measurements again(folder_.string());
  EXPECT_EQ(again.Find("a")->seconds_per_unit, 2);
  EXPECT_GT(again.Promise("a", 7).bytes, 1 << 30);
  EXPECT_EQ(again.Promise("b", 7).bytes, 7);
  EXPECT_FALSE(fs::exists(folder_ / "measurements.json.broken"));
}

TEST_F(MeasurementsTest, WithoutAFileThereIsNothingToSay) {
  EXPECT_FALSE(Measurements(folder_.string()).Find("a"));
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_FALSE(Measurements("").Find("a"));
}

TEST_F(MeasurementsTest, WhatIsNoFileOfMeasurementsIsSetAside) {
  for (const char* text :
       {"", "nonsense", "[]", "3", "null", R"({"version": "1"})", R"({"version": 1, "phases": {}})",
        R"({"version": 2})", R"({"version": 2, "phases": []})", R"({"version": [], "phases": {}})"}) {
    Write(text);
    ExpectThatItGoesOn(text);
    EXPECT_TRUE(fs::exists(folder_ / "measurements.json.broken")) << text;
    fs::remove(folder_ / "measurements.json.broken");
  }
}

TEST_F(MeasurementsTest, WhatIsNoFileAtAllIsSetAside) {
  for (const auto& [name, make] : ThingsThatAreNoFile()) {
    fs::remove_all(file_);
    make(file_);
    ExpectThatItGoesOn(name);
    EXPECT_TRUE(fs::exists(fs::symlink_status(folder_ / "measurements.json.broken"))) << name;
    fs::remove_all(folder_ / "measurements.json.broken");
  }
}

TEST_F(MeasurementsTest, EntriesThatMakeNoSenseAreLeftOut) {
  Write(R"({"version": 2, "phases": {
    "good": {"working_bytes": 7, "seconds": 1}, "float": {"working_bytes": 1e308, "seconds": 1},
    "huge": {"working_bytes": 9223372036854775807, "seconds": 1}, "less": {"working_bytes": -1, "seconds": 1},
    "more": {"working_bytes": 18446744073709551615, "seconds": 1}, "slow": {"working_bytes": 7, "seconds": 1e300},
    "back": {"working_bytes": 7, "seconds": -1}, "text": {"working_bytes": "7", "seconds": 1},
    "half": {"working_bytes": 7}, "list": [7, 1], "null": null}})");
  Measurements measurements(folder_.string());
  EXPECT_TRUE(measurements.Find("good"));
  for (const char* key : {"float", "huge", "less", "more", "slow", "back", "text", "half", "list", "null"}) {
    EXPECT_FALSE(measurements.Find(key)) << key;
  }
}

TEST_F(MeasurementsTest, AFolderThatCannotBeWrittenToCostsTheFileAlone) {
  std::ofstream(folder_ / "file") << "x";
  Measurements measurements((folder_ / "file").string());
  measurements.Record("a", 5, 1);
  EXPECT_TRUE(measurements.Find("a"));
}

TEST_F(MeasurementsTest, RandomDamageNeverEndsTheProcess) {
  const nlohmann::json good = {
      {"version", 2},
      {"phases",
       {{"a", {{"working_bytes", 7}, {"seconds", 1.5}}}, {"b", {{"working_bytes", 8}, {"seconds", 2}}}}}};
  std::mt19937 random(5);
  for (int i = 0; i < 1000; ++i) {
    const std::string text = DamagedJson(good, random);
    Write(text);
    ExpectThatItGoesOn(text);
  }
}

}  // namespace
}  // namespace latentd
