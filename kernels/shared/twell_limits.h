// Every number by which a call is decided, for C++ and for Python. hf_twell/dispatch/limits.py reads these lines, so a
// constant is `constexpr TYPE NAME = NUMBER;`, where a number may be `1 << 20`, and a table `constexpr TYPE NAME[] = {`
// with a row of numbers a line and `};`.
#pragma once
// clang-format off: a row of a table is one line.

#include <cstdint>
#include <limits>

namespace twell {

// ---- Sizes that kernels take

constexpr int64_t kMaxHidden = 16384;  // D
constexpr int64_t kMaxWidth = 65536;   // F: a neuron's index takes 16 bits

// "Few" tokens on a GPU: bound by the bytes of the weights, so that decode kernels read 8-bit ones as they lie, and
// nothing is gained by quantizing x. Above, x is quantized where that is asked for.
constexpr int64_t kDecodeMaxTokens = 64;

// ---- How a block's activity is sampled

// Neighbouring tokens whose union counts, as many as share a list in a GPU's kernels.
constexpr int64_t kNeighbours = 128;
// Of an eager block in evaluation: tokens and neurons, at most, and how many calls a sample decides. A CPU's takes 1 to
// 45 % of the time of up to 128 tokens, and 0.1 to 2 % of 1,024, for which the slower way may take four times the other.
// So a call counts as one for each kCpuSampleCallTokens tokens. (kernels/twell_cpu/LOG.md, "What a sample costs")
constexpr int64_t kCpuSampleTokens = 16;
constexpr int64_t kCpuSampleNeurons = 256;
constexpr int64_t kCpuSampleCalls = 32;
constexpr int64_t kCpuSampleCallTokens = 128;
constexpr int64_t kCpuSampleExpertNeurons = 64;  // of each (token, expert) in a sample, whose rows are copied
constexpr int64_t kCudaSampleTokens = 64;
constexpr int64_t kCudaSampleNeurons = 1024;
constexpr int64_t kCudaSampleCalls = 64;
constexpr int64_t kCudaSampleRuns = 2;  // of kNeighbours tokens, in calls of so many
// Of a block that trains on a GPU: steps of the optimizer between two samples.
constexpr int64_t kCudaSampleSteps = 8;
// Of the operator on a CPU in each call, however it came to be called: groups of neurons, in calls of fewer tokens than
// kCpuGroupsTokens and in others.
constexpr int64_t kCpuGroupNeurons = 8;
constexpr int64_t kCpuGroupsFew = 18;
constexpr int64_t kCpuGroupsMany = 36;
constexpr int64_t kCpuGroupsTokens = 64;
// Then it counts what it finds, and gives up above the limit's share of what it has seen and this: a share of all
// neurons, or those of one work item where that is more, and so many pairs a token.
constexpr double kCpuCountSpare = 0.02;
constexpr int64_t kCpuCountSparePairs = 4;

// ---- Up to which density kernels are faster than plain matmuls

// A table's first row with at least a call's tokens holds the limit; 0: kernels are never faster.
constexpr int64_t kMany = std::numeric_limits<int64_t>::max();
struct DensityLimit {
  int64_t tokens;  // at most
  double density;  // at most
};

// A CPU in evaluation. Few tokens are bound by the weights' traffic, which active rows always save; many by arithmetic,
// which matmuls do about five times as fast for each pair. (kernels/twell_cpu/LOG.md, "Where the limits come from")
constexpr DensityLimit kCpuLimits[] = {
    {2, 1.0},
    {8, 0.3},
    {32, 0.2},
    {kMany, 0.18},
};
// The same in float32, where many tokens gather a down_proj by columns as slowly as matmuls run from 14 % on.
constexpr DensityLimit kCpuLimitsFloat32[] = {
    {2, 1.0},
    {8, 0.3},
    {32, 0.2},
    {256, 0.18},
    {kMany, 0.14},
};
// The same in bfloat16 on a processor that multiplies matrices of it (AMX).
constexpr DensityLimit kCpuLimitsAmx[] = {
    {2, 1.0},
    {4, 0.3},
    {8, 0.15},
    {16, 0.1},
    {64, 0.075},
    {kMany, 0.035},
};
// From kNeighbours tokens on, those that share neurons cost what their union says, too: where at most such a share of
// neurons is active in one or more, kernels are faster up to such a density. No 8-bit weights. (kernels/twell_cpu/LOG.md,
// "Rows that neighbours share", and "AMX")
constexpr double kCpuMaxUnion = 0.65;
constexpr double kCpuUnionMaxDensity = 0.3;
constexpr double kCpuMaxUnionAmx = 0.4;
constexpr double kCpuUnionMaxDensityAmx = 0.1;
// Forward and backward on a CPU.
constexpr double kCpuTrainingMaxDensity = 0.18;
constexpr double kCpuTrainingMaxDensityAmx = 0.03;

// Float32 matrices (D x F; no 8-bit ones) of fewer elements than kCpuCachedElements lie in a CPU's cache, where plain
// matmuls take tens of microseconds. Kernels are faster there up to this density, but at none where a matrix is smaller
// than the smallest, or tokens times its elements smaller than the smallest work, of few tokens or of more.
constexpr int64_t kCpuCachedElements = 1 << 19;
constexpr double kCpuCachedMaxDensity = 0.1;
constexpr int64_t kCpuSmallestElements = 1 << 15;
constexpr int64_t kCpuFewTokens = 2;
constexpr int64_t kCpuSmallestWorkFew = 1 << 17;
constexpr int64_t kCpuSmallestWork = 1 << 20;
// Under autocast plain matmuls find float32 weights cast already, and kernels cast them in each call. From so many
// tokens on kernels save more than that.
constexpr int64_t kCpuMinTokensCast = 48;
constexpr int64_t kCpuMinTokensCastAmx = 640;
// Elements of h, (T, F), below which one kernel between the plain matmuls takes longer than several of PyTorch's.
constexpr int64_t kCpuSmallestH = 1 << 17;
// Below the first density a CPU's kernels gather down_proj from columns faster at any number of tokens; above the
// second they are faster by rows, as plain matmuls are. Between them it stays as it lies.
constexpr double kCpuColumnsBelow = 0.1;
constexpr double kCpuRowsAbove = 0.18;

// Elements of an expert's matrices (D x F) from which on a call for each expert pays, as one of few tokens does.
constexpr int64_t kCpuExpertElements = 1 << 19;

// A GPU in evaluation, measured on an H200 (kernels/twell_cuda/LOG.md): matrices (D x F) of fewer elements than
// kCudaMediumElements, of fewer than kCudaLargeElements, and others.
struct DensityLimits {
  int64_t tokens;
  double small, medium, large;
};
constexpr int64_t kCudaMediumElements = 12 << 20;
constexpr int64_t kCudaLargeElements = 20 << 20;
constexpr DensityLimits kCudaLimits[] = {
    {2, 1.0, 1.0, 0.55},
    {4, 1.0, 0.3, 0.4},
    {8, 1.0, 0.18, 0.2},
    {16, 1.0, 1.0, 0.09},
    {32, 1.0, 1.0, 0.06},
    {64, 1.0, 1.0, 0.035},
    {512, 0.012, 0.012, 0.012},
    {1024, 0.018, 0.018, 0.018},
    {2048, 0.04, 0.04, 0.04},
    {kMany, 0.06, 0.06, 0.06},
};
// The same by the union: the share of neurons that at least one of 128 neighbouring tokens activates. The time of many
// tokens goes by it and hardly by the density, so where it is known, this table decides; 0: the density does. Small
// matrices are those of fewer elements than kCudaUnionMediumElements, large ones as above.
constexpr int64_t kCudaUnionMediumElements = 4 << 20;
constexpr DensityLimits kCudaUnionLimits[] = {
    {64, 0.0, 0.0, 0.0},
    {256, 0.0, 0.2, 0.3},
    {512, 0.25, 0.32, 0.55},
    {896, 0.34, 0.34, 0.55},
    {1024, 0.42, 0.45, 0.6},
    {2048, 0.55, 0.62, 0.62},
    {4096, 0.6, 0.7, 0.66},
    {kMany, 0.62, 0.82, 0.68},
};
// A GPU computes a layer's routed experts at once where its tokens, times the experts that each goes through, and its
// experts are no more than these; and does so by itself up to a density by the tokens that an expert has on average.
// H200s, Qwen3-30B-A3B's shape: 1.45 times compiled grouped matmuls at 16 tokens an expert and 10 % active, 1.69 at 8 and
// 19 %. Of 16 tokens more than 10 % is extrapolated.
constexpr int64_t kCudaExpertPairs = 2048;
constexpr int64_t kCudaExperts = 512;
constexpr DensityLimit kCudaExpertLimits[] = {
    {8, 0.2},
    {16, 0.12},
    {kMany, 0.0},
};
// Forward and backward on a GPU, for matrices of every size.
constexpr DensityLimit kCudaTrainingLimits[] = {
    {1024, 0.0},
    {2048, 0.008},
    {8192, 0.018},
    {kMany, 0.025},
};
// The same by the union (as above), up to which kernels that keep columns are faster than plain matmuls, as they cost
// what the union says. Kernels that keep pairs are faster still where the union is above `pairs` plus so many times the
// density. `with_runs` is the limit in place of `most` where the count term counts runs, too, which takes plain matmuls
// longer. One H200, D = 2048, F = 5632, 4,096 and 16,384 tokens; from 8,192 to 16,383 it is interpolated.
struct UnionLimit {
  int64_t tokens;
  double most, pairs, with_runs;
};
constexpr UnionLimit kCudaTrainingUnionLimits[] = {
    {4095, 0.0, 0.0, 0.0},
    {8191, 0.39, -0.68, 0.48},
    {16383, 0.47, -0.45, 0.55},
    {kMany, 0.54, -0.29, 0.62},
};
constexpr double kCudaColumnsDensity = 19.4;
// Compiled models know no union but that of runs that count, which is near that of kNeighbours tokens where they have so
// many tokens: 40 % for 46, 25 for 29. Of shorter ones it says little, so that such models stay with plain matmuls.
constexpr int64_t kCudaTrainingLeastRun = 64;
// Times the limit of training: above that a block which trains by kernels goes back to plain matmuls.
constexpr double kCudaTrainingBack = 1.1;
// Times the limit of training: what a block of a compiled model, whose blocks all train one way, counts for at most in
// the mean of their densities. Kernels' time grows with density up to about there, and then stays at that of matmuls.
constexpr double kCudaTrainingCounts = 2.0;

// ---- Memory of training: active neurons per token, on average, that forward keeps for backward

// By default F over these, of a block whose density is not known. A GPU keeps at least so many, in whole lists.
constexpr int64_t kCpuCapacityShare = 16;
constexpr int64_t kCpuMinCapacity = 32;
constexpr int64_t kCudaCapacityShare = 44;
constexpr int64_t kCudaMinCapacity = 64;
constexpr int64_t kCudaCapacityStep = 32;
// Times the active neurons of a block on a GPU: what its capacity becomes, at least; and, in a compiled model, below
// which it becomes so anew. That says when memory grows, and not which way blocks go.
constexpr double kCudaCapacityRoom = 1.5;
constexpr double kCudaCapacityTight = 1.25;

// ---- Where others multiply 8-bit types themselves

// The compute capability from which GPUs multiply e4m3, so that other matmuls than kernels' gain by quantized x, too.
constexpr double kCudaFp8Capability = 8.9;

// ---- Where vLLM's own matmuls stand against kernels, not PyTorch's

// On a CPU a weight lies either as kernels read it or packed for vLLM's matmuls, at all numbers of tokens. Two cores
// with AVX-512 BF16, D = 2048, F = 5632, bfloat16, 64 to 1,024 tokens, break even between 5 and 10 %; int8 on one core
// with AVX-512 VNNI, 4 to 256 tokens, between 2 and 5 % (at 2 %: 0.96 to 1.17 times vLLM's speed; one token: 2.2).
// Two processors with AMX, bfloat16, 1 to 1,024 tokens: at 2 % 1.4 to 3.8 times vLLM's speed, at 3.5 % 2.3 to 0.8; int8 at
// 2 % 1.15 to 2.8.
constexpr double kVllmCpuMaxDensity = 0.05;
constexpr double kVllmCpuMaxDensityAmx = 0.025;
constexpr double kVllmCpuInt8MaxDensity = 0.02;
// On a GPU, 16-bit weights of few tokens, sizes as in kCudaLimits: vLLM's block takes less time there than PyTorch's, as
// gate and up are one matrix and one kernel multiplies what they give. Whole decode steps of 16 and of 64 sequences on
// H200s gained, of small matrices, 1.23 and 1.11 at 0.5 % active (2048 x 5632), 1.10 and 1.09 at 5.4 % (896 x 4864), 1.03
// and 0.99 at 11 % (2048 x 5632); of medium ones (1536 x 8960) 1.07 and 1.01 at 4.3 %, 0.98 and 0.92 at 10.5 %. The
// limits are where the lines through these meet 1, or a little below; of 8 and 32 tokens they are interpolated, and up to
// 4 there is none beyond kCudaLimits, as one sequence gains 1.28 to 1.32 at 11 %.
constexpr DensityLimits kVllmCudaLimits[] = {
    {4, 1.0, 1.0, 1.0},
    {8, 0.18, 0.14, 1.0},
    {16, 0.12, 0.08, 1.0},
    {32, 0.11, 0.065, 1.0},
    {64, 0.1, 0.05, 1.0},
    {kMany, 1.0, 1.0, 1.0},
};
// On a GPU vLLM's 8-bit matmuls are faster than its 16-bit ones. One H200, for 1, 16, 64 and 128 sequences: of 0.5 %
// active neurons 1.32, 1.16, 1.04 and 0.97 times its speed in fp8, and 1.36, 1.21, 1.07 and 1.00 in int8; of 2.1 %,
// before the plugin had norms of its own, 1.23, 0.99, 0.95 and 0.96, and 1.27, 1.03, 0.95 and 0.99.
constexpr double kVllmCuda8BitMaxDensity = 0.01;
// Up to so many tokens a call of vLLM's may be one token each of as many sequences, which share less than neighbours do:
// the density decides, and not the union that neighbours have.
constexpr int64_t kVllmCudaDecodeTokens = 512;
// Int8 weights of calls of more tokens are read again or dequantized, where vLLM's matmuls multiply int8.
constexpr int64_t kVllmCudaInt8MaxTokens = 64;

}  // namespace twell
