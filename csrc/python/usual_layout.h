// How batches of what levels below memory have are laid out, as long as they are alike.
#pragma once

#include <cstdint>
#include <memory>

#include "codec/codec.h"
#include "stocache-torch/src/bridge.rs.h"

namespace stocache {

// The columns of a batch follow from its first records. Who knows them before has all records of
// the batch come in one go, each to its row. Whoever was wrong makes the batch in another way, so
// this is said only after several batches in a row were alike, of more the more often it was wrong.
class UsualLayout {
 public:
  using Schema = std::shared_ptr<const codec::Schema>;

  struct Known {
    Schema schema;
    std::shared_ptr<const ::rust::Box<bridge::Layout>> columns;  // none if they are not known
  };

  // For whoever asked to keep: as soon as Python runs, another thread may find it wrong.
  Known get() const {
    return in_a_row_ >= needed_ && columns_ ? Known{schema_, columns_} : Known{};
  }

  // Takes note of a batch that is whole.
  void note(const Schema& schema, const bridge::Batch& batch) {
    if (columns_ && schema == schema_ && batch.is_laid_out_like(**columns_)) {
      in_a_row_ += in_a_row_ < needed_ ? 1 : 0;
      return;
    }
    in_a_row_ = 0;
    columns_.reset();
    try {
      columns_ = std::make_shared<const ::rust::Box<bridge::Layout>>(batch.layout());
      schema_ = schema;
    } catch (const ::rust::Error&) {  // it has none that another batch could have
    }
  }

  void was_wrong() {
    in_a_row_ = 0;
    needed_ = needed_ < kMost ? 2 * needed_ : kMost;
  }

 private:
  static constexpr uint32_t kMost = 1024;

  Schema schema_;
  std::shared_ptr<const ::rust::Box<bridge::Layout>> columns_;
  uint32_t in_a_row_ = 0, needed_ = 2;
};

}  // namespace stocache
