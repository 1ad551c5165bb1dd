// Checks launch_quantize_rows() against plain loops, bit by bit: rows of every length, ordinary and not, in poisoned
// memory.
//
// Built by kernels/tests/check_cuda.sh. Exits 1 on any mismatch or CUDA error.

#include "sm90/prefill/prefill_fp8.h"
#include "tests/fp8.cuh"

namespace {

using namespace twell;

// What a row holds, by its index: ordinary values of several magnitudes, and everything that is not ordinary.
template <typename Half>
float element(int64_t row, int column, int columns, uint64_t seed) {
  const float x = checks::normal(seed + static_cast<uint64_t>(row) * 100003 + column);
  const bool chosen = column == static_cast<int>(row * 37 % columns);
  const bool half = std::is_same<Half, __half>::value;
  switch (row % 20) {
    case 3: return 0.f;
    case 4: return -0.f;
    case 5: return chosen ? NAN : x;
    case 6: return chosen ? INFINITY : x;
    case 7: return chosen ? -INFINITY : x;
    case 8: return chosen ? NAN : column == 0 ? INFINITY : x;
    case 9: return std::copysign(half ? 65504.f : 3e38f, x);  // the largest values
    case 10: return x * (half ? 1e-3f : 1e-30f);              // subnormal scales, in fp16
    case 11: return x * (half ? 6e-8f : 1e-39f);              // subnormal values: scales that would round to 0
    case 12: return chosen ? 300.f : x * 1e-3f;               // one value sets the scale, others are subnormal in e4m3
    case 13: return chosen ? -448.f : static_cast<float>(column % 255 - 127) * 0.5f;  // ties, at a scale of 1
    case 14: return chosen ? 7.f : static_cast<float>(column % 31 - 15) / 16.f;
    case 15: return x * 1e-20f;
    case 16: return column % 2 == 0 ? -0.f : x;
    case 17: return chosen ? 1.f : 0.f;
    default: return x;
  }
}

template <typename Half>
bool check(int64_t rows, int columns, int64_t stride) {
  static uint64_t seed = 1;
  seed += uint64_t{1} << 40;
  std::vector<Half> x(rows * columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) x[r * columns + c] = Half(element<Half>(r, c, columns, seed));
  }
  checks::Buffer<Half> input(x);
  checks::Guarded<uint8_t> values(rows * stride);
  checks::Guarded<float> scales(rows);
  bool ok = true;
  for (const int poison : {0xff, 0x7e}) {
    values.poison(poison), scales.poison(poison);
    const sm90::QuantizedRows to{values.data(), scales.data(), stride};
    CHECK(sm90::launch_quantize_rows(checks::dtype_of<Half>(), input.data, rows, columns, to, nullptr));
    CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> got = values.get();
    const std::vector<float> got_scales = scales.get();
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; ++r) {
      float largest = 0;
      bool nan = false;
      for (int c = 0; c < columns; ++c) {
        const float magnitude = std::fabs(static_cast<float>(x[r * columns + c]));
        nan |= std::isnan(magnitude);
        largest = std::fmax(largest, magnitude);
      }
      const float exact = nan ? NAN : largest * (1.f / 448.f), rounded = static_cast<float>(Half(exact));
      const float scale = rounded != 0.f ? rounded : exact;
      const bool right_scale =
          std::isnan(scale) ? std::isnan(got_scales[r]) : std::memcmp(&scale, &got_scales[r], sizeof(float)) == 0;
      if (!right_scale && wrong++ < 5) {
        std::printf("  row %lld: scale %a, should be %a\n", static_cast<long long>(r), got_scales[r], scale);
      }
      for (int c = 0; c < stride; ++c) {
        const float v = c < columns ? static_cast<float>(x[r * columns + c]) : 0.f;
        const uint8_t want = c >= columns ? 0 : checks::e4m3_code(scale == 0.f ? v : v / scale);
        const uint8_t code = got[r * stride + c];
        const bool both_nan = (want & 0x7f) == 0x7f && (code & 0x7f) == 0x7f;
        if (code != want && !both_nan && wrong++ < 5) {
          std::printf("  row %lld column %d: %a / %a is %02x, should be %02x\n", static_cast<long long>(r), c, v, scale,
                      code, want);
        }
      }
    }
    const bool intact = values.intact() && scales.intact();
    if (wrong == 0 && intact) continue;
    ok = false;
    std::printf("BAD %s %lld x %d, stride %lld: %lld wrong%s\n", checks::name_of<Half>(), static_cast<long long>(rows),
                columns, static_cast<long long>(stride), static_cast<long long>(wrong),
                intact ? "" : ", wrote past the end");
  }
  return ok;
}

}  // namespace

int main() {
  bool ok = true;
  int cases = 0;
  const auto both = [&](int64_t rows, int columns, int64_t stride) {
    ok &= check<__nv_bfloat16>(rows, columns, stride);
    ok &= check<__half>(rows, columns, stride);
    cases += 2;
  };
  for (const int columns : {8, 16, 24, 136, 200, 768, 2040, 2048, 2056, 4096, 4104, 8192, 8200, 16376, 16384}) {
    const int64_t stride = sm90::quantized_stride(columns);
    for (const int rows : {1, 2, 7, 8, 9, 63}) both(rows, columns, stride);
    if (columns <= 2056) both(300, columns, stride), both(41, columns, std::min<int64_t>(stride + 32, 2048 * 8));
  }
  const sm90::QuantizedRows none{nullptr, nullptr, 16};
  CHECK(sm90::launch_quantize_rows(DType::kBFloat16, nullptr, 0, 16, none, nullptr));
  for (const int columns : {12, 24, 16392}) {  // no multiple of 8; longer than the stride; too long
    if (sm90::launch_quantize_rows(DType::kBFloat16, nullptr, 1, columns, none, nullptr) != cudaErrorInvalidValue) {
      std::printf("BAD %d columns are not refused\n", columns);
      ok = false;
    }
  }
  std::printf("%d cases: %s\n", cases, ok ? "all right" : "FAILED");
  return ok ? 0 : 1;
}
