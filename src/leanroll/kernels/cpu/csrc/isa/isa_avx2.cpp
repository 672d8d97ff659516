// The work items compiled for: AVX2 + FMA.
#include "simd_avx2.h"
// clang-format off
#include "math.inl"
#include "attend.inl"
#include "quantised.inl"
#include "pages.inl"
#include "rows.inl"
#include "dot.inl"
// clang-format on

namespace leanroll {

const IsaTable* avx2_table() {
  static const IsaTable table = {
      "avx2",        attend_entry,   score_entry,    select_entry, landmark_entry, convert_entry,     prepare_rows_entry,
      dot_entry,       expand_entry,   finish_entry,
      rms_norm_entry, silu_mul_entry, rope_entry,   exp_sum_entry,  exp_values_entry,
  };
  return &table;
}

}  // namespace leanroll
