// The vector kernels of one instruction set and element type, as plain functions over raw pointers.
//
// Shapes: x (T, D) rows of `ld_x` elements; w (F, D). fp32 accumulation throughout. Strides count elements.
#pragma once

#include <cstdint>

namespace twell {

enum class DType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum class Isa {
  kPortable = 0,
  kAvx2 = 1,
  kAvx512 = 2,
  kAvx512Vnni = 3,
  kAvx512Bf16 = 4,
  kAvx512Bf16Wide = 5,  // whose panels are multiplied in fp32
  kAmx = 6
};

// Tokens that share one pass over the gate matrix are handed over as panels of this many.
constexpr int kPanel = 64;

// Columns of rows that lie in pairs for a matrix unit.
constexpr int64_t kPairColumns = 64;

// Size of a panel whose rows have `row_bytes`: whole cache lines of each.
static inline int64_t panel_bytes(int64_t row_bytes) { return kPanel * ((row_bytes + 63) / 64 * 64); }

// One token of a dense block's activation, elements behind one another; the outputs may be the inputs.
struct ActivationRow {
  const void* gate;  // before relu
  const void* up;    // null without a gate
  const void* grad_h;
  void* grad_gate;
  void* grad_up;              // unused where `up` is null
  void* h;                    // receives the activation again; null where not wanted
  float l1_pull, count_pull;  // of common/terms.h
  float weight;               // added to `active` where h is not zero
  float* active;              // null where nothing is counted
};

// What a token's digits mean: an element is step * (base * (high - 128) + low), and the largest step * beyond more.
struct FixedScale {
  float step;
  float base;       // a whole number, at most 256
  float low_norm;   // no less than the Euclidean norm of (low - base / 2, rounded down)
  int32_t largest;  // its column
  int32_t beyond;
};

// Tokens in fixed point: two rows of digits for each, high and low, `ld` bytes from one to the next; all else is (T,).
struct FixedRows {
  const uint8_t* digits = nullptr;
  int64_t ld = 0;
  const float *step = nullptr, *base = nullptr, *low_norm = nullptr;
  const int32_t *largest = nullptr, *beyond = nullptr;

  FixedRows from(int64_t token) const {
    return {digits + 2 * token * ld, ld, step + token, base + token, low_norm + token, largest + token, beyond + token};
  }
};

// Of int8 weights and tokens in fixed point. hidden <= kFixedColumns.
struct FixedPointKernels {
  // False where the digits are not as good as the elements. `small_low`: with a base for `screened_gate`, which keeps
  // low digits small; else with 256, and nothing beyond.
  bool (*digits)(const void* x, int64_t hidden, bool small_low, uint8_t* high, uint8_t* low, FixedScale* scale);
  // As `gate_int8`; `next` as of `gate`. The base is 256.
  void (*gate)(const FixedRows& x, int tokens, const int8_t* w, int64_t ld_w, int neurons, int64_t hidden,
               const int8_t* next, float* out, int64_t ld_out);
  // The same for any base, but an element that high digits alone show to be negative is some negative number (or zero).
  // Returns how many others there were.
  int64_t (*screened_gate)(const FixedRows& x, int tokens, const int8_t* w, int64_t ld_w, int neurons, int64_t hidden,
                           const int8_t* next, float* out, int64_t ld_out);
};
constexpr int64_t kFixedColumns = 65536;  // 255 * 128 * 65,536 < 2^31

struct Kernels {
  // out[f * ld_out + t] = bias[f] + sum_d w[f, d] * x[t, d], for f < neurons and t < tokens; bias may be null. `next`:
  // the rows from which this thread is likely to go on, or null.
  void (*gate)(const void* x, int64_t ld_x, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
               const float* bias, const void* next, float* out, int64_t ld_out);

  // The same from panels that `pack_panel` made of kPanel tokens each; null where this set has no use for panels. Tiles
  // alone fetch `next`.
  void (*gate_panels)(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
                      const float* bias, const void* next, float* out, int64_t ld_out);
  // Reorders up to kPanel tokens for gate_panels, zero-filled to `panel_bytes`.
  void (*pack_panel)(const void* x, int64_t ld_x, int tokens, int64_t hidden, void* panel);

  // Writes position and value of every element that relu keeps (positive or NaN); returns how many.
  int (*pack)(const float* values, int count, uint32_t first_position, uint32_t* positions, float* kept);

  // out[i] = sum_d row[d] * x[tokens[i], d]
  void (*gather_dot)(const void* row, const void* x, int64_t ld_x, const uint32_t* tokens, int64_t count,
                     int64_t hidden, float* out);

  // sums[d] += sum_i scale[i] * rows[index[i], d] for d < width; the second form feeds two sums from the same rows.
  void (*gather_sum)(const void* rows, int64_t ld_rows, const uint32_t* index, const float* scale, int64_t count,
                     int64_t width, float* sums);
  void (*gather_sum2)(const void* rows, int64_t ld_rows, const uint32_t* index, const float* scale_a,
                      const float* scale_b, int64_t count, int64_t width, float* sums_a, float* sums_b);

  // Of int8 weights, whose scales are the caller's to apply. As `gate`, for few tokens and without a bias; as
  // `gather_sum`; and int8 in the element type, which holds it exactly. `ahead`: fetches also what lies so many bytes
  // behind each value.
  void (*gate_int8)(const void* x, int64_t ld_x, int tokens, const int8_t* w, int64_t ld_w, int neurons, int64_t hidden,
                    float* out, int64_t ld_out);
  void (*gather_sum_int8)(const int8_t* rows, int64_t ld_rows, const uint32_t* index, const float* scale, int64_t count,
                          int64_t width, float* sums);
  void (*widen_int8)(const int8_t* values, int64_t count, void* out, int64_t ahead);
  // gate_panels of rows that were widened, without a bias; fetches meanwhile the int8 rows `next`. Null where the set's
  // gate_panels serves them as well.
  void (*gate_panels_widened)(const void* panels, int tokens, const void* w, int64_t ld_w, int neurons, int64_t hidden,
                              const int8_t* next, int64_t ld_next, float* out, int64_t ld_out);

  // sums[t, d] += sum_i scale[t, i] * rows[i, d] as a product, for up to kPairColumns columns d; null where this set
  // has none. `pair_rows` puts rows (index[i], or i where index is null) into the form that `matmul_pairs` takes: count
  // padded to 32 rows x kPairColumns, each of `scale_element` bytes. `scale` lies at [i / 32][t][i % 32], t padded to a
  // multiple of 16, with zeros beyond `count`; `sums` is padded to 16 rows and kPairColumns columns.
  void (*pair_rows)(const void* rows, int64_t ld_rows, const uint32_t* index, int64_t count, int64_t width,
                    void* pairs);
  void (*matmul_pairs)(const void* pairs, int64_t count, int64_t width, const void* scale, int outputs, float* sums,
                       int64_t ld_sums);

  // Rounds fp32 to the element type, and back.
  void (*round)(const float* values, int64_t count, void* out);
  void (*widen)(const void* values, int64_t count, float* out);

  // h = relu(gate) * up, or relu(gate) where `up` is null; may write over either.
  void (*activation)(const void* gate, const void* up, int64_t count, void* h);
  // With dh = grad_h + L1's gradient: grad_gate = dh * up + the count's where the gate is active, grad_up = dh *
  // relu(gate). Returns the sum of |h| where `active` is given.
  float (*activation_backward)(const ActivationRow& row, int64_t count);

  // out[c, r] = in[r, c]; `past_caches`, where the set can do that, when `out` is large and not read soon.
  void (*transpose)(const void* in, int64_t ld_in, int64_t rows, int64_t columns, void* out, int64_t ld_out,
                    bool past_caches);

  const FixedPointKernels* fixed;  // null where this set or element type has none
  int64_t fixed_until;             // tokens from which the other kernels are faster than `gate`
  int64_t screened_until;          // the same for `screened_gate`

  bool matrix_unit;          // whether `gate_panels` and `matmul_pairs` run on one
  int64_t sums_from;         // tokens from which `matmul_pairs` pays
  int64_t scale_element;     // bytes of its `scale`
  int64_t pair_cells;        // what one gathered pair costs, in cells of a product
  int64_t panel_element;     // bytes that an element takes in a panel
  int64_t panels_from;       // tokens from which panels are faster than rows
  int64_t int8_panels_from;  // the same for int8 weights
  int64_t tile_neurons;      // neurons of one work item
  int64_t few_tile_neurons;  // the same in calls of up to kPanel tokens: each item starts its stream of weights anew
  int64_t block_bytes;       // of x that the items of one block share in the second-level cache
};

// Null where this build or processor lacks the instruction set.
const Kernels* kernels_portable(DType dtype);
const Kernels* kernels_avx2(DType dtype);
const Kernels* kernels_avx512(DType dtype);
const Kernels* kernels_avx512_vnni(DType dtype);
const Kernels* kernels_avx512_bf16(DType dtype);
const Kernels* kernels_avx512_bf16_wide(DType dtype);
const Kernels* kernels_amx(DType dtype);

// The best set for this processor, or the one that HF_TWELL_CPU_ISA names; throws if that one cannot run here.
const Kernels& select_kernels(DType dtype);

inline int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace twell
