"""`fsdp_on_cpu.py SCRIPT ARGUMENTS` in place of the script: `accelerate launch` then runs FSDP2 by gloo on CPUs.

Accelerate turns FSDP on where its processes have GPUs, and on CPUs runs DDP whatever the configuration says. So this
tells it, of CPU processes, that they are of the GPU kind. Devices, tensors and gloo stay the CPU's, and all that comes
then is accelerate's and PyTorch's own code: reading the configuration, `fully_shard`, gathering, saving, resuming. What
it cannot show is NCCL, memory, and streams that overlap.
"""

import os
import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

begin = PartialState.__init__


def begin_as_gpus(self, *args, **options):
    begin(self, *args, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = begin_as_gpus
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    # All is done and written; gloo's threads now and then abort the interpreter's own shutdown.
    sys.stdout.flush()
    os._exit(0)
