"""Small calls of every CUDA path, for compute-sanitizer (`make sanitize`): each buffer is an allocation of its own, so
that an access past its end is seen. Prints the number of calls; results are checked too, against plain PyTorch."""

import itertools
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from hf_twell import ops, reference
from tests.ffn_cases import make_case

TOKENS = {"decode": (1, 3, 17, 64), "sm90": (1, 65, 130, 300), "portable": (1, 65, 130, 300)}
# D, F, density, gated, biases, dtype
CALLS = (
    (8, 16, 1.0, True, True, torch.bfloat16),
    (33, 70, 0.1, True, False, torch.float16),
    (72, 344, 0.02, True, True, torch.bfloat16),
    (136, 1001, 0.0, False, True, torch.bfloat16),
    (136, 1001, 0.3, False, False, torch.float16),
    (264, 1536, 1.0, True, False, torch.bfloat16),
)


@torch.no_grad()
def main() -> None:
    calls = 0
    for path, (hidden, width, density, gated, biases, dtype) in itertools.product(TOKENS, CALLS):
        if path == "sm90" and torch.cuda.get_device_capability() != (9, 0):
            continue
        os.environ["HF_TWELL_CUDA_PATH"] = path
        for tokens in TOKENS[path]:
            case = make_case(tokens, hidden, width, density, dtype, gated=gated, biases=biases)
            case = {name: None if tensor is None else tensor.cuda() for name, tensor in case.items()}
            y, truth = ops.ffn(**case, backend="cuda"), reference.ffn(**case)
            torch.testing.assert_close(y, truth, rtol=0.05, atol=0.05)
            calls += 1
    print(f"{calls} calls")


main()
