#include "families/tokenizers/sentencepiece_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "cache/base/error.h"
#include "cache/base/utf8.h"

namespace latentd {
namespace {

// Numbers of fields, of sentencepiece_model.proto.
enum ModelField {
  kPieces = 1,
  kTrainerSpec = 2,
  kNormalizerSpec = 3,
  kSelfTestData = 4,
  kDenormalizerSpec = 5
};
enum PieceField { kPieceText = 1, kPieceScore = 2, kPieceKind = 3 };
enum PieceKind { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
constexpr uint32_t kModelType = 3;  // of the trainer's spec
constexpr uint64_t kUnigram = 1;
constexpr uint32_t kPrecompiledCharsmap = 2;  // of a normaliser's spec

constexpr size_t kMaxPieces = 1'000'000;
constexpr size_t kMaxPieceBytes = 512;
// The library keeps 64 matches of those on its stack; each is longer than the one before.
constexpr size_t kMaxUserDefinedBytes = 64;
constexpr float kMaxScore = 1e6f;
// Texts that the library encodes while it loads.
constexpr size_t kMaxSelfTestBytes = 1 << 20;

constexpr size_t kMaxTrieBytes = 4 << 20;  // Unicode's NFKC takes a quarter of a megabyte
constexpr int kMaxRulesOnAPath = 32;       // matches of one text that the library keeps on its stack
constexpr int kMaxRuleBytes = 128;
// A text's character becomes at most this much; Unicode's longest has 33.
constexpr size_t kMaxNormalizedBytes = 256;

absl::Status Corrupt(absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "CORRUPT_FILE",
                   absl::StrCat("not a SentencePiece model: ", what));
}

// ---------------------------------------------------------------------------------------------- messages

struct Field {
  uint32_t number = 0;
  uint32_t type = 0;
  uint64_t value = 0;           // of a number, as it is stored
  absl::string_view text = {};  // of a text, bytes or a message
};

constexpr uint32_t kVarint = 0, kFixed64 = 1, kText = 2, kFixed32 = 5;

bool TakeVarint(absl::string_view& bytes, uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 64 && !bytes.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes[0]);
    bytes.remove_prefix(1);
    value |= uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

bool TakeFixed(absl::string_view& bytes, size_t size, uint64_t& value) {
  if (bytes.size() < size) return false;
  value = 0;
  std::memcpy(&value, bytes.data(), size);
  bytes.remove_prefix(size);
  return true;
}

// Shows `take` each field. Groups are in no version of this format.
absl::Status ForEachField(absl::string_view message, absl::FunctionRef<absl::Status(const Field&)> take) {
  while (!message.empty()) {
    uint64_t tag = 0, size = 0;
    if (!TakeVarint(message, tag) || tag > UINT32_MAX || tag < 8) return Corrupt("a field has no valid tag");
    Field field{.number = static_cast<uint32_t>(tag >> 3), .type = static_cast<uint32_t>(tag & 7)};
    bool good = false;
    switch (field.type) {
      case kVarint:
        good = TakeVarint(message, field.value);
        break;
      case kFixed64:
        good = TakeFixed(message, 8, field.value);
        break;
      case kFixed32:
        good = TakeFixed(message, 4, field.value);
        break;
      case kText:
        good = TakeVarint(message, size) && size <= message.size();
        if (!good) break;
        field.text = message.substr(0, size);
        message.remove_prefix(size);
        break;
      default:
        break;
    }
    if (!good) return Corrupt("it is cut short");
    RETURN_IF_ERROR(take(field));
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------ pieces

struct Piece {
  absl::string_view text;
  float score = 0;
  uint64_t kind = kNormal;
};

absl::StatusOr<Piece> ReadPiece(absl::string_view message) {
  Piece piece;
  RETURN_IF_ERROR(ForEachField(message, [&](const Field& field) {
    const uint32_t wanted = field.number == kPieceText    ? kText
                            : field.number == kPieceScore ? kFixed32
                                                          : kVarint;
    if (field.number <= kPieceKind && field.type != wanted)
      return Corrupt("a field of a piece has another type");
    if (field.number == kPieceText) piece.text = field.text;
    if (field.number == kPieceKind) piece.kind = field.value;
    if (field.number == kPieceScore) {
      const auto bits = static_cast<uint32_t>(field.value);
      std::memcpy(&piece.score, &bits, sizeof bits);
      if (!(std::abs(piece.score) <= kMaxScore))
        return Corrupt("the score of a piece is no reasonable number");
    }
    return absl::OkStatus();
  }));
  return piece;
}

class PieceChecker {
 public:
  absl::Status Add(absl::string_view message) {
    ASSIGN_OR_RETURN(const Piece piece, ReadPiece(message));
    if (texts_.size() == kMaxPieces) return Corrupt("it has too many pieces");
    if (piece.kind < kNormal || piece.kind > kByte) return Corrupt("a piece is of no known kind");
    if (piece.text.empty() || piece.text.size() > kMaxPieceBytes ||
        (piece.kind == kUserDefined && piece.text.size() > kMaxUserDefinedBytes)) {
      return Corrupt("a piece is empty or too long");
    }
    if (piece.text.find('\0') != absl::string_view::npos) return Corrupt("a piece holds a NUL");
    for (absl::string_view rest = piece.text; !rest.empty();) {
      if (TakeCharacter(rest) < 0) return Corrupt("a piece is no UTF-8");
    }
    if (!texts_.insert(piece.text).second) return Corrupt("two pieces are the same");
    unknown_ += piece.kind == kUnknown ? 1 : 0;
    normal_ += piece.kind == kNormal ? 1 : 0;
    return absl::OkStatus();
  }

  absl::Status Finish() const {
    if (normal_ == 0) return Corrupt("it has no piece");
    return unknown_ == 1 ? absl::OkStatus() : Corrupt("it has not one piece for what is unknown");
  }

 private:
  absl::flat_hash_set<absl::string_view> texts_;
  int unknown_ = 0;
  size_t normal_ = 0;
};

// ------------------------------------------------------------------------------------------ normalisation

// A double array: states are positions of units, and a byte leads from a state to the unit at position ^
// byte, if that one has the byte for its label.
class CharsmapChecker {
 public:
  // `blob`: the array's size in bytes (32 bits), the array, and the texts that replace others, each ended by
  // a NUL.
  absl::Status Check(absl::string_view blob) {
    uint64_t size = 0;
    if (!TakeFixed(blob, 4, size) || size >= blob.size() || size > kMaxTrieBytes || size % 4 != 0 ||
        size < 4) {
      return Corrupt("its table of normalisations has no valid size");
    }
    units_.resize(size / 4);
    std::memcpy(units_.data(), blob.data(), size);
    texts_ = blob.substr(size);
    if (texts_.back() != '\0') return Corrupt("its last normalised text has no end");
    Below whole;
    RETURN_IF_ERROR(Visit(uint64_t{Offset(units_[0])}, 0, whole));
    if (whole.rules > kMaxRulesOnAPath) return Corrupt("too many normalisations begin alike");
    return absl::OkStatus();
  }

 private:
  // The longest way on from a state.
  struct Below {
    int rules = 0;
    int bytes = 0;
  };

  static bool HasLeaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
  static uint32_t Value(uint32_t unit) { return unit & 0x7FFFFFFF; }
  static uint32_t Label(uint32_t unit) { return unit & 0x800000FF; }
  static uint32_t Offset(uint32_t unit) { return (unit >> 10) << ((unit & 0x200) >> 6); }

  absl::Status Visit(uint64_t state, int depth, Below& below) {
    // Whatever byte comes next, its unit is looked at.
    if ((state | 0xFF) >= units_.size()) return Corrupt("its table of normalisations leads out of itself");
    const auto [it, fresh] = visited_.insert({state, Below{-1, -1}});
    if (!fresh) {
      below = it->second;
      if (below.rules < 0) return Corrupt("its table of normalisations goes round in a circle");
      if (depth + below.bytes <= kMaxRuleBytes) return absl::OkStatus();
      return Corrupt("a normalisation is too long");
    }
    if (depth > kMaxRuleBytes) return Corrupt("a normalisation is too long");
    below = {};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint64_t at = state ^ byte;
      const uint32_t unit = units_[at];
      if (Label(unit) != byte) continue;
      const uint64_t next = at ^ Offset(unit);
      Below child;
      RETURN_IF_ERROR(Visit(next, depth + 1, child));
      if (HasLeaf(unit)) {
        RETURN_IF_ERROR(CheckText(Value(units_[next])));
        ++child.rules;
      }
      below.rules = std::max(below.rules, child.rules);
      below.bytes = std::max(below.bytes, child.bytes + 1);
    }
    visited_[state] = below;
    return absl::OkStatus();
  }

  absl::Status CheckText(uint32_t begin) {
    if (begin >= texts_.size()) return Corrupt("a normalised text lies outside of its table");
    if (!good_texts_.insert(begin).second) return absl::OkStatus();
    absl::string_view text = texts_.substr(begin, kMaxNormalizedBytes + 1);
    const size_t end = text.find('\0');
    if (end == absl::string_view::npos) return Corrupt("a normalised text is too long");
    for (text = text.substr(0, end); !text.empty();) {
      if (TakeCharacter(text) < 0) return Corrupt("a normalised text is no UTF-8");
    }
    return absl::OkStatus();
  }

  std::vector<uint32_t> units_;
  absl::string_view texts_;
  absl::flat_hash_map<uint64_t, Below> visited_;  // rules are -1 while it is being visited
  absl::flat_hash_set<uint32_t> good_texts_;
};

absl::Status CheckNormalizer(absl::string_view message) {
  return ForEachField(message, [](const Field& field) {
    if (field.number != kPrecompiledCharsmap) return absl::OkStatus();
    if (field.type != kText) return Corrupt("its table of normalisations has another type");
    return field.text.empty() ? absl::OkStatus() : CharsmapChecker().Check(field.text);
  });
}

absl::Status CheckTrainer(absl::string_view message) {
  return ForEachField(message, [](const Field& field) {
    if (field.number != kModelType || (field.type == kVarint && field.value == kUnigram))
      return absl::OkStatus();
    return MakeError(absl::StatusCode::kFailedPrecondition, "UNSUPPORTED_MODEL",
                     "is a SentencePiece model of another kind than unigram");
  });
}

}  // namespace

absl::Status CheckSentencePieceModel(absl::string_view bytes) {
  PieceChecker pieces;
  size_t self_test_bytes = 0;
  RETURN_IF_ERROR(ForEachField(bytes, [&](const Field& field) {
    if (field.number > kDenormalizerSpec) return absl::OkStatus();
    if (field.type != kText) return Corrupt("a field has another type");
    switch (field.number) {
      case kPieces:
        return pieces.Add(field.text);
      case kTrainerSpec:
        return CheckTrainer(field.text);
      case kSelfTestData:
        self_test_bytes += field.text.size();
        return self_test_bytes <= kMaxSelfTestBytes ? absl::OkStatus() : Corrupt("its self test is too long");
      default:
        return CheckNormalizer(field.text);
    }
  }));
  return pieces.Finish();
}

}  // namespace latentd
