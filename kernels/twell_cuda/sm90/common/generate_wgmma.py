"""Write wgmma.cuh, wgmma_e4m3.cuh and wgmma_registers.cuh.

They have one inline-assembly function for each width of the warpgroup matrix instruction.

Run it after a change: python3 kernels/twell_cuda/sm90/common/generate_wgmma.py
"""

from pathlib import Path

WIDTHS = (16, 32, 48, 64, 96, 112, 128, 176, 192, 208, 256)
E4M3_WIDTHS = (64, 96, 128, 192, 256)
REGISTER_WIDTHS = (64,)
HEAD = """\
// Written by generate_wgmma.py; do not edit. PTX ISA, wgmma.mma_async: D (64 x N, fp32) += A (64 x 16) B (16 x N), both
// operands in shared memory, bf16 or fp16. Trans: 0 where K is contiguous, 1 where M (of A) or N (of B) is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace twell::sm90 {

template <typename T, int N, int TransA, int TransB>
struct Wgmma;
"""
BODY = """
template <int TransA, int TransB>
struct Wgmma<{type}, {n}, TransA, TransB> {{
  static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{acc}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} "
{operands}
        ", %{a}, %{b}, p, 1, 1, %{ta}, %{tb};\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));
  }}
}};
"""
E4M3_HEAD = """\
// Written by generate_wgmma.py; do not edit. PTX ISA, wgmma.mma_async: D (64 x N, fp32) += A (64 x 32) B (32 x N), both
// operands in shared memory, e4m3. K is contiguous in both: one-byte operands have no other form.
#pragma once

#include <cuda_fp8.h>

#include "sm90/common/wgmma.cuh"

namespace twell::sm90 {
"""
E4M3_BODY = """
template <>
struct Wgmma<__nv_fp8_e4m3, {n}, 0, 0> {{
  static __device__ __forceinline__ void multiply(float* d, uint64_t a, uint64_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{acc}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
{operands}
        ", %{a}, %{b}, p, 1, 1;\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(accumulate));
  }}
}};
"""
REGISTERS_HEAD = """\
// Written by generate_wgmma.py; do not edit. PTX ISA, wgmma.mma_async: D (64 x N, fp32) += A (64 x 16) B (16 x N), bf16
// or fp16. A is in registers, each warp's 16 rows as those of mma.m16n8k16; B in shared memory. TransB: 0 where K is
// contiguous, 1 where N is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace twell::sm90 {

template <typename T, int N, int TransB>
struct WgmmaOfRegisters;
"""
REGISTERS_BODY = """
template <int TransB>
struct WgmmaOfRegisters<{type}, {n}, TransB> {{
  static __device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4], uint64_t b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} "
{operands}
        ", {{%{a}, %{b}, %{acc}, %{ta}}}, %{tb}, 1, 1, 1, %{trans};\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TransB));
  }}
}};
"""
TAIL = "\n}  // namespace twell::sm90\n"


def lines_of(items, width, indent, first=""):
    lines, line = [], first
    for i, item in enumerate(items):
        piece = item + (", " if i + 1 < len(items) else "")
        if line and len(indent + line + piece.rstrip()) > width:
            lines.append(line)
            line = ""
        line += piece
    return [*lines, line]


def body(form, n, **names):
    count = n // 2
    registers = lines_of([f"%{i}" for i in range(count)], 112, "        ")
    registers[0] = "{" + registers[0]
    registers[-1] += "}"
    operands = "\n".join(f'        "{line}"' for line in registers)
    outputs = lines_of([f'"+f"(d[{i}])' for i in range(count)], 118, "          ")
    return form.format(
        **names,
        n=n,
        operands=operands,
        outputs="\n          ".join(line.rstrip() for line in outputs),
        a=count,
        b=count + 1,
        acc=count + 2,
        ta=count + 3,
        tb=count + 4,
        trans=count + 5,
    )


if __name__ == "__main__":
    types = (("__nv_bfloat16", "bf16"), ("__half", "f16"))
    text = "".join(body(BODY, n, type=name, ptx=ptx) for name, ptx in types for n in WIDTHS)
    Path(__file__).with_name("wgmma.cuh").write_text(HEAD + text + TAIL)
    text = "".join(body(REGISTERS_BODY, n, type=name, ptx=ptx) for name, ptx in types for n in REGISTER_WIDTHS)
    Path(__file__).with_name("wgmma_registers.cuh").write_text(REGISTERS_HEAD + text + TAIL)
    text = "".join(body(E4M3_BODY, n) for n in E4M3_WIDTHS)
    Path(__file__).with_name("wgmma_e4m3.cuh").write_text(E4M3_HEAD + text + TAIL)
