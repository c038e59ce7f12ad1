// Rows of textual inversions among an encoder's ids.
#include "ATen/ATen.h"
#include "families/encoders/clip_text_model.h"
#include "families/prompt/embedding_triggers.h"
#include "gtest/gtest.h"

namespace latentd {
namespace {

// A tiny encoder with random weights.
class RowsTest : public testing::TestWithParam<int64_t> {
 protected:
  static constexpr int64_t kEnd = 63;
  RowsTest() {
    at::manual_seed(3);
    std::vector<Weight> weights;
    for (const TensorDecl& tensor : model_.layout()->tensors()) weights.push_back({at::randn(tensor.shape)});
    weights_ = std::make_unique<WeightSet>(model_.layout(), std::move(weights));
    view_ = std::make_unique<WeightView>(*weights_, nullptr);
    for (size_t i = 0; i < model_.layout()->tensors().size(); ++i) {
      if (model_.layout()->tensors()[i].name == "embeddings.token_embedding.weight")
        vocabulary_ = (*weights_)[Slot{static_cast<int32_t>(i)}].data;
    }
  }
  ClipTextModel model_{ClipTextConfig{
      .vocabulary = 64, .positions = 8, .dim = 16, .hidden = 32, .layers = 2, .heads = 2, .eos = GetParam()}};
  std::unique_ptr<WeightSet> weights_;
  std::unique_ptr<WeightView> view_;
  at::Tensor vocabulary_;
};

TEST_P(RowsTest, RowsOfTheVocabularyAreItsWords) {
  const at::Tensor rows = vocabulary_.index_select(0, at::tensor({5, 11, 40}, at::kLong));
  const auto words = model_(*view_, {62, 11, 7, 5, 11, 40, kEnd, 0});
  const auto marked = model_(
      *view_, {62, kFirstRowId + 1, 7, kFirstRowId, kFirstRowId + 1, kFirstRowId + 2, kEnd, 0}, {}, {}, rows);
  EXPECT_TRUE(at::equal(marked.hidden, words.hidden));
  EXPECT_TRUE(at::equal(marked.pooled, words.pooled)) << "rows are not taken for the end";
  EXPECT_FALSE(at::equal(model_(*view_, {62, 5, 7, 5, 11, 40, kEnd, 0}).hidden, words.hidden));
}
INSTANTIATE_TEST_SUITE_P(Ends, RowsTest, testing::Values(63, 2));

}  // namespace
}  // namespace latentd
