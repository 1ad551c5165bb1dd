"""Measuring calls on CPU and CUDA alike: interleaved medians, peak memory, energy, captured graphs."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hf_twell.bench.progress import Report, silent

FLUSH_BYTES = 512 << 20  # read before each timed call on CUDA: ten times an H200's L2, and longer than a launch takes
HEAD_START_CYCLES = 2_000_000  # about a millisecond of waiting on the device, while a call of many launches is queued


class Captured:
    """A function's launches as one CUDA graph; calling it replays them and returns the same tensors, rewritten.

    Elsewhere than on CUDA it simply calls the function.
    """

    def __init__(self, function: Callable, device: torch.device) -> None:
        self.function, self.graph = function, None
        if device.type != "cuda":
            return
        # What is chosen, compiled or allocated at first use happens outside the capture.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
                torch.cuda.synchronize(device)  # what a block learns of its density has arrived
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = function()

    def __call__(self) -> Any:
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return self.result


def interleaved_ms(
    calls: Mapping[str, Callable[[int], object]],
    repeats: int,
    device: torch.device,
    prepare: Callable[[str, int], object] = lambda name, turn: None,
    head_start: bool = False,
    report: Report = silent,
) -> dict[str, float]:
    """Median milliseconds of each call, all taking turns after two turns of warming up.

    On CUDA, time is between two events, and a long read before the first leaves nothing of earlier calls in L2 and
    keeps the device busy while the call is being launched. A call gets the number of its turn.

    Args:
        prepare: gets a call's name and the number of its turn before each, untimed.
        head_start: on CUDA, keep the device busy for longer, for calls that take the host long to launch.
        report: told of each call before it is prepared; on CUDA, where the host runs ahead of the device, once before.
    """
    turns = repeats + 2
    if device.type == "cuda":
        report("timing")
        times = _event_times(calls, turns, device, prepare, head_start)
    else:
        times = _wall_times(calls, turns, prepare, report)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def _wall_times(calls, turns, prepare, report):
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name, call in calls.items():
            report("timing", f"{name}, turn {turn + 1} of {turns}")
            prepare(name, turn)
            start = time.perf_counter()
            call(turn)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _event_times(calls, turns, device, prepare, head_start):
    scratch = torch.zeros(FLUSH_BYTES // 4, device=device)
    pairs: dict[str, list[tuple]] = {name: [] for name in calls}
    for turn in range(turns):
        for name, call in calls.items():
            prepare(name, turn)
            if head_start:
                torch.cuda._sleep(HEAD_START_CYCLES)
            scratch.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(turn)
            end.record()
            pairs[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in events] for name, events in pairs.items()}


def mean_ms(call: Callable, prepared: Iterable, device: torch.device) -> float:
    """Mean milliseconds of a call after each item of `prepared`; on CUDA the host runs ahead, and waits at the end."""
    if device.type != "cuda":
        times = []
        for _ in prepared:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.mean(times)
    pairs = []
    for _ in prepared:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return statistics.mean(start.elapsed_time(end) for start, end in pairs)


def peak_mib(call: Callable, device: torch.device) -> float | None:
    """MiB that PyTorch holds at most during one call, above what it held before: the result and all temporaries.

    Weights and inputs are in the baseline. None elsewhere than on CUDA.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 2)


def held_mib(forward: Callable, device: torch.device) -> float | None:
    """MiB that a differentiable result keeps allocated for its backward, beyond itself. None elsewhere than on CUDA."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    result = forward()
    return round((torch.cuda.memory_allocated(device) - before - result.nbytes) / 2**20, 2)


def millijoules(call: Callable[[int], object], device: torch.device) -> float:
    """Energy of one call in mJ: what NVML's counter of the whole board gains over two seconds of calls back to back. A
    ValueError without a CUDA device whose counter can be read, an ImportError without the package nvidia-ml-py."""
    with _energy_counter(device) as consumed_mj:
        _calls_for(call, device, 0.3)  # the clocks settle
        start = consumed_mj()
        count = _calls_for(call, device, 2.0)
        return (consumed_mj() - start) / count


def check_energy(device: torch.device) -> None:
    """Raise what `millijoules` would, before anything is measured."""
    with _energy_counter(device) as consumed_mj:
        consumed_mj()


def _calls_for(call, device, seconds) -> int:
    count, batch, end = 0, 1, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(batch):
            call(count)
            count += 1
        torch.cuda.synchronize(device)
        # About 50 ms between synchronizations, so that the device does not wait.
        batch = max(1, min(10_000, int(batch * 0.05 / (time.perf_counter() - start))))
    return count


@contextlib.contextmanager
def _energy_counter(device):
    """A function that reads the millijoules the board has used since its driver was loaded."""
    if device.type != "cuda":
        raise ValueError(f"energy is read from an NVIDIA GPU; the device is {device}. Leave --energy out.")
    try:
        import pynvml
    except ImportError as error:
        raise ImportError("energy needs NVML's Python package: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        # NVML numbers the devices its own way, whatever CUDA_VISIBLE_DEVICES says.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        yield lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ValueError(f"NVML cannot read this GPU's energy: {error}. Leave --energy out.") from error
