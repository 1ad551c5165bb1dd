// Rows of 16-bit values as e4m3 with a scale a row (prefill_fp8.h has the formula).
//
// A row stays in the registers of one warp, or of two, four or eight where it is longer: it is read once, and nothing
// but the bytes moved bounds the kernel.

#include "sm90/common/launch.h"
#include "sm90/common/primitives.cuh"
#include "sm90/prefill/prefill_fp8.h"

namespace twell::sm90 {
namespace {

constexpr int kThreads = 256, kVectors = 8;  // of 8 values each, a lane
constexpr int kWarpColumns = 32 * 8 * kVectors;

// x / scale to the last bit, by multiplications: the quotient's error is exact as a fused sum, so one step mends it
// (Markstein). Scales of 0 and infinity leave x * 0.
struct Divisor {
  float lift, scale, reciprocal;

  __device__ __forceinline__ explicit Divisor(float of) {
    // Numbers so small would lose bits on the way; a power of two loses none.
    lift = of < 0x1p-60f ? 0x1p100f : 1.0f;
    const bool plain = of != 0.0f && of != __int_as_float(0x7f800000);  // or NaN
    scale = plain ? of * lift : 0.0f;
    reciprocal = plain ? __frcp_rn(scale) : 0.0f;
  }
  __device__ __forceinline__ float divide(float x) const {
    x *= lift;
    const float quotient = x * reciprocal;
    return __fmaf_rn(__fmaf_rn(quotient, scale, -x), -reciprocal, quotient);  // of these signs -0 stays -0
  }
};

// Rounded to nearest even, at most 448; NaN is 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

template <typename T>
__device__ __forceinline__ float scale_of(uint32_t largest) {
  const float exact = unpack<T>(largest).x * (1.0f / 448.0f);
  const float rounded = unpack<T>(pack<T>(exact, 0.0f)).x;
  return rounded != 0.0f ? rounded : exact;
}

template <typename T, int kWarps>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const T* x, int64_t rows, int columns, const QuantizedRows to) {
#if defined(TWELL_SM90_DEVICE)
  __shared__ uint32_t maxima[kThreads / 32];
  constexpr int kRows = kThreads / 32 / kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + warp / kWarps;
  const int first = (warp % kWarps * 32 + lane) * 8;
  launch_dependents();
  wait_for_previous();
  uint4 kept[kVectors];
  const T* from = x + row * columns;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * kWarps * 256;
    kept[v] = row < rows && column < columns ? *reinterpret_cast<const uint4*>(from + column) : uint4{};
  }
  // Without its sign a 16-bit value is ordered as an integer is, infinity and then NaN above all others.
  uint32_t largest = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t words[4] = {kept[v].x, kept[v].y, kept[v].z, kept[v].w};
#pragma unroll
    for (const uint32_t word : words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
  }
  largest = __reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16));
  if constexpr (kWarps > 1) {
    if (lane == 0) maxima[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = max(largest, maxima[warp / kWarps * kWarps + w]);
  }
  if (row >= rows) return;
  const float scale = scale_of<T>(largest);
  const Divisor divisor(scale);
  uint8_t* values = to.values + row * to.stride;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * kWarps * 256;
    if (column >= to.stride) break;
    const uint32_t words[4] = {kept[v].x, kept[v].y, kept[v].z, kept[v].w};
    uint32_t halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<T>(words[i]);
      halves[i] = pack_e4m3(divisor.divide(pair.x), divisor.divide(pair.y));
    }
    const uint2 packed{halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
    *reinterpret_cast<uint2*>(values + column) = column < columns ? packed : uint2{};
  }
  if (warp % kWarps == 0 && lane == 0) to.scales[row] = scale;
#endif
}

template <typename T, int kWarps>
cudaError_t launch(const void* x, int64_t rows, int columns, const QuantizedRows& to, cudaStream_t stream) {
  constexpr int kRows = kThreads / 32 / kWarps;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  return launch_kernel(quantize_rows_kernel<T, kWarps>, static_cast<int>(blocks), kThreads, 1, 0, stream,
                       static_cast<const T*>(x), rows, columns, to);
}

template <typename T>
cudaError_t launch_type(const void* x, int64_t rows, int columns, const QuantizedRows& to, cudaStream_t stream) {
  if (to.stride <= kWarpColumns) return launch<T, 1>(x, rows, columns, to, stream);
  if (to.stride <= 2 * kWarpColumns) return launch<T, 2>(x, rows, columns, to, stream);
  if (to.stride <= 4 * kWarpColumns) return launch<T, 4>(x, rows, columns, to, stream);
  return launch<T, 8>(x, rows, columns, to, stream);
}

}  // namespace

cudaError_t launch_quantize_rows(DType dtype, const void* x, int64_t rows, int columns, const QuantizedRows& to,
                                 cudaStream_t stream) {
  static_assert(8 * kWarpColumns == kQuantizeMaxColumns);
  if (rows == 0) return cudaSuccess;
  const bool fits = columns <= to.stride && to.stride <= kQuantizeMaxColumns;
  if (!fits || columns % 8 != 0 || to.stride % kE4m3Border != 0) return cudaErrorInvalidValue;
  return dtype == DType::kBFloat16 ? launch_type<__nv_bfloat16>(x, rows, columns, to, stream)
                                   : launch_type<__half>(x, rows, columns, to, stream);
}

}  // namespace twell::sm90
