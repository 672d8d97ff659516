// The work items compiled for: AVX-512 with BF16.
#include "simd_avx512.h"
// clang-format off
#include "math.inl"
#include "attend.inl"
#include "quantised.inl"
#include "pages.inl"
#include "rows.inl"
#include "dot.inl"
// clang-format on

namespace leanroll {

const IsaTable* avx512_table() {
  static const IsaTable table = {
      "avx512_bf16",        attend_entry,   score_entry,    select_entry, landmark_entry, convert_entry,     prepare_rows_entry,
      dot_entry,       expand_entry,   finish_entry,
      rms_norm_entry, silu_mul_entry, rope_entry,   exp_sum_entry,  exp_values_entry,
  };
  return &table;
}

}  // namespace leanroll
