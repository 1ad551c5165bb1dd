// The two launches of a prefill of few neurons and tokens.

#include "sm90/mid/mid.h"

#include "sm90/common/launch.h"
#include "sm90/prefill/prefill.h"

namespace twell::sm90 {

cudaError_t mid_forward(const Ffn& ffn, const MidPlan& plan, const Device& device, void* workspace,
                        cudaStream_t stream) {
  int64_t blocks = 0;
  const Chunk chunk = first_chunk(ffn, device, workspace, &blocks);  // so few neurons and tokens are always one chunk
  TWELL_RETURN_IF_ERROR(launch_mid_gate_up(ffn, chunk, plan, stream));
  return launch_mid_down(ffn, chunk, device, plan, stream);
}

}  // namespace twell::sm90
