"""One job: a student made from the parent, trained with the job's losses along its density path, and scored."""

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from always_on import add_always_on
from batches import Batches
from graphs import capture
from model import HeadLoss, Llama, Shape, add_biases, chunk_loss, fit_biases
from optimizers import Optimizers, rate
from sampling import write_samples
from scoring import score
from sparsity import Controller, first_coefficient, layer_shares

# Every setting of a job, with its default; jobs.py says what is tried.
DEFAULTS = {
    "name": None,
    # or "sample": `tokens` of the model's own text, `batch` sequences at a time; or "average": of a job and the parent
    "kind": "train",
    "start_from": None,  # another job's name; None: the parent
    "teacher": None,  # another job's name; None: the parent
    "activation": "relu",  # or "silu"
    "fade": None,  # {"kind": "mix" or "sharpen", "end": share of the run}: SiLU becomes ReLU along the way
    "bias": None,  # "zero" or "fit"
    "always_on": None,  # {"neurons": how many a block gets, "windows": those they are fitted on}
    "tokens": 8_000_000,
    "batch": 65_536,
    "micro_batch": 32,  # windows
    "skip": 0,  # training windows passed over at the start
    "self_text": None,  # {"from": a "sample" job or several, "ratio": share of the windows}
    "local_tokens": 0,  # a first phase: each feed-forward block alone on the teacher's inputs
    "local_lr": 1e-3,
    "lr": 5e-4,  # or {"ffn": ..., "attention": ..., "rest": ...}
    "schedule": "cosine",  # or "wsd"
    "decay_share": 0.3,
    "warmup": 0.02,
    "muon": False,
    "ema": None,
    "clip": 1.0,
    "ce": 0.0,
    "kl": 1.0,
    "reverse": False,
    "hidden": 0.0,
    "target": None,
    "path": [0.0, 0.7],
    "penalty": "contribution",  # "l1", "sigmoid_count", "hinge"
    "temperature": 0.1,
    "per_layer": None,
    "controller": {},
    "prefix": 8,  # tokens of a training window that a sample begins with; 0: the document separator alone
    "sample_length": 1024,  # tokens of a sample; several make a window
    "share": 0.5,  # of the parent, in an "average"
    "seed": 0,
    "compile": True,
    "graph": True,  # on a GPU, a step's forward and backward are one CUDA graph: small batches wait for no launches
    "save": True,
    "report_every": 50,
}


@dataclass
class Context:
    """What a worker holds: the parent, training windows (on the device), evaluation, and the folder of results."""

    shape: Shape
    parent: dict[str, torch.Tensor]
    windows: torch.Tensor
    evaluation: dict[str, np.ndarray]
    folder: Path
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def load(self, name: str | None) -> Llama:
        saved = {"state": self.parent, "activation": "silu"}
        if name is not None:
            saved = torch.load(self.folder / f"{name}.pt", map_location=self.device)
        hidden, _ = saved["state"]["layers.0.mlp.gate_proj.weight"].shape
        model = Llama(replace(self.shape, hidden=hidden), self.dtype).to(self.device)
        if any(key.endswith("proj.bias") for key in saved["state"]):
            add_biases(model)
        model.load_state_dict(saved["state"])
        model.set_blocks(activation=saved["activation"], always_on=saved.get("always_on", 0))
        return model


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Squared error over squared size, token by token, so that no token of a great norm rules."""
    wanted = wanted.float()
    return ((found.float() - wanted).pow(2).sum(-1) / wanted.pow(2).sum(-1).clamp(min=1e-6)).mean()


class Run:
    def __init__(self, settings: dict, context: Context, report):
        unknown = set(settings) - set(DEFAULTS)
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}: {', '.join(DEFAULTS)}")
        self.settings = settings = {**DEFAULTS, **settings}
        self.context, self.report, self.curve, self.read, self.filled = context, report, [], 0, []
        torch.manual_seed(settings["seed"])
        self.batches = Batches(context, settings)
        self.student = context.load(settings["start_from"])
        needs_teacher = any(settings[key] for key in ("kl", "hidden", "local_tokens", "always_on"))
        needs_teacher |= settings["bias"] == "fit"
        self.teacher = context.load(settings["teacher"]).requires_grad_(False) if needs_teacher else None
        if settings["bias"]:
            add_biases(self.student)
        if settings["bias"] == "fit":
            fit_biases(self.student, self.teacher, self.batches.windows[:8].long())
        if settings["always_on"]:
            self.student.set_blocks(activation="relu")
            tokens = self.batches.windows[: settings["always_on"].get("windows", 32)].long()
            self.filled = add_always_on(self.student, self.teacher, tokens, settings["always_on"]["neurons"])
        fade = settings["fade"]
        self.student.set_blocks(
            activation=fade["kind"] if fade else settings["activation"],
            penalty=settings["penalty"] if settings["target"] else "",
            temperature=settings["temperature"],
        )
        self.share = torch.zeros((), device=context.device)
        self.student.set_blocks(relu_share=self.share)
        self.chunk_loss = chunk_loss
        if settings["compile"]:
            self.student.compile_blocks()
            self.chunk_loss = torch.compile(chunk_loss, dynamic=False)
            if self.teacher is not None:
                self.teacher.compile_blocks()
        self.weights = torch.tensor([float(settings["ce"]), float(settings["kl"])], device=context.device)
        self.head = None
        if self.teacher is not None:
            self.head = self.teacher.embed_tokens.weight.to(context.dtype)
        self.controller = self.average = self.replay = None
        self.coefficients = torch.zeros(len(self.student.layers), device=context.device)

    def local_loss(self, tokens):
        with torch.no_grad():
            _, _, kept = self.teacher(tokens, keep="feed")
        errors, figures = [], []
        for feed, (middle, y) in zip(self.student.fast_feed, kept, strict=True):
            found, figure = feed(middle)
            errors.append((found.float() - y.float()).pow(2).sum() / y.float().pow(2).sum())
            figures.append(figure)
        loss = torch.stack(errors).mean()
        return loss, torch.stack((loss.detach(), loss.detach(), loss.detach())), torch.stack(figures)

    def end_to_end_loss(self, tokens, fast: bool = True):
        """The loss, (its value, cross-entropy, divergence), and [layer, (density, penalty)]."""
        settings, keep = self.settings, "stream" if self.settings["hidden"] else ""
        hidden, figures, streams = self.student(tokens, fast, keep)
        parent = None
        if self.settings["kl"] or keep:
            with torch.no_grad():
                parent, _, wanted = self.teacher(tokens, fast, keep)
        window = tokens.shape[1] - 1
        means_of = [None if states is None else states[:, :-1].flatten(0, 1) for states in (hidden, parent)]
        teacher = means_of[1] if settings["kl"] else None
        loss, means = HeadLoss.apply(
            *(means_of[0], self.student.embed_tokens.weight, teacher, self.head, tokens[:, 1:].flatten()),
            *(self.weights, settings["reverse"], 8 * window, self.chunk_loss),
        )
        if keep:
            errors = [relative_error(found, right) for found, right in zip(streams, wanted, strict=True)]
            loss = loss + settings["hidden"] * torch.stack(errors).mean()
        return loss, means, figures

    def start_controller(self, steps: int) -> None:
        """From one batch before training: the natural density, and how the two gradients compare."""
        settings = self.settings
        loss, _, figures = self.end_to_end_loss(self.batches.windows[:16].long(), fast=False)
        natural = figures[:, 0].detach()
        mlp = self.student.layers[0].mlp
        least = mlp.always_on / mlp.gate_proj.out_features
        if settings["target"] <= least:
            raise ValueError(f"target {settings['target']}: the neurons that are always on are {least:.4f} of all")
        shares = layer_shares(settings["per_layer"], natural)
        arguments = (settings["target"], settings["path"], natural, shares)
        self.controller = Controller(*arguments, steps=steps, **settings["controller"])
        gates = [layer.mlp.gate_proj.weight for layer in self.student.layers]
        self.controller.start(first_coefficient(loss, figures[:, 1].mean(), gates))

    def train(self, phase: str, tokens: int, lr) -> None:
        settings, local = self.settings, phase == "local"
        steps, fade = tokens // settings["batch"], settings["fade"]
        if not steps:
            return
        optimizers = Optimizers(self.student, lr, settings["muon"])
        if settings["target"] and not local:
            self.start_controller(steps)
        self.replay = None  # the other phase's graph
        for step in range(steps):
            if fade and not local:
                self.share.fill_(min(step / (steps * fade["end"]), 1.0))
            if self.controller:
                self.coefficients.copy_(self.controller.coefficients(len(self.coefficients)))
            total, seen = self.gradients(self.batches.draw(), local)
            optimizers.step(rate(settings["schedule"], step / steps, settings["warmup"], settings["decay_share"]))
            self.read += settings["batch"]
            if self.controller:
                self.controller.step(step, seen[:, 0])
            if settings["ema"] and not local:
                self.follow(settings["ema"])
            if step % settings["report_every"] == 0 or step == steps - 1:
                self.note(phase, step, steps, total, seen)

    def gradients(self, batch, local: bool):
        """One step's gradients; returns its (loss, cross-entropy, divergence) and [layer, (density, penalty)]."""
        if not (self.settings["graph"] and batch.is_cuda):
            return self.forward_and_backward(batch, local)
        if self.replay is None:
            self.replay = capture(lambda static: self.forward_and_backward(static, local), batch)
        return self.replay(batch)

    def forward_and_backward(self, batch, local: bool):
        settings, parameters = self.settings, list(self.student.parameters())
        grown = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if grown:
            torch._foreach_zero_(grown)
        parts = batch.split(settings["micro_batch"])
        total, seen = 0.0, 0.0
        for part in parts:
            loss, means, figures = self.local_loss(part) if local else self.end_to_end_loss(part)
            if self.controller:
                loss = loss + (self.coefficients * figures[:, 1]).mean()
            (loss / len(parts)).backward()
            total, seen = total + means / len(parts), seen + figures.detach() / len(parts)
        if settings["clip"]:
            torch.nn.utils.clip_grad_norm_(parameters, settings["clip"], foreach=True)
        return total, seen

    def follow(self, decay: float) -> None:
        parameters = [parameter.detach() for parameter in self.student.parameters()]
        if self.average is None:
            self.average = [parameter.clone() for parameter in parameters]
        torch._foreach_lerp_(self.average, parameters, 1 - decay)

    def note(self, phase, step, steps, total, seen) -> None:
        density = float(seen[:, 0].mean())
        point = {"phase": phase, "step": step, "loss": float(total[1]), "kl": float(total[2]), "density": density}
        if self.controller:
            point["path"] = float(self.controller.wanted(step).exp().mean())
            point["coefficient"] = float(self.controller.coefficients(len(seen)).mean())
        self.curve.append({key: round(value, 6) if isinstance(value, float) else value for key, value in point.items()})
        self.report(
            f"{self.settings['name']} {phase} {step}/{steps} "
            + " ".join(f"{key} {value:.4g}" for key, value in point.items() if isinstance(value, float))
        )
        if not np.isfinite(point["loss"]):
            raise FloatingPointError(f"loss {point['loss']} at step {step} of {phase}")


def run_job(job: dict, context: Context, report) -> dict:
    """A row: the job, tokens read, seconds, scores and curve; weights or samples are left in the folder."""
    began = time.time()
    if job.get("kind") == "sample":
        sampled = write_samples({**DEFAULTS, **job}, context, report)
        return {"job": job, "sampled": sampled, "seconds": time.time() - began}
    if job.get("kind") == "average":
        scores = write_average({**DEFAULTS, **job}, context)
        return {"job": job, "tokens": 0, **scores, "seconds": round(time.time() - began, 1), "curve": []}
    run = Run(job, context, report)
    settings = run.settings
    run.train("local", settings["local_tokens"], settings["local_lr"])
    run.train("end", settings["tokens"], settings["lr"])
    trained = time.time() - began
    if settings["activation"] == "relu":
        run.student.set_blocks(activation="relu")
    if run.average is not None:
        for parameter, average in zip(run.student.parameters(), run.average, strict=True):
            parameter.data.copy_(average)
    run.student.set_blocks(penalty="")
    row = {"job": job, "tokens": run.read, "train_seconds": round(trained, 1), **score(run.student, context.evaluation)}
    if run.filled:
        row["filled"] = [round(share, 3) for share in run.filled]
    if settings["save"]:
        save(run.student, settings, context)
    return {**row, "seconds": round(time.time() - began, 1), "curve": copy.copy(run.curve)}


def write_average(settings: dict, context: Context) -> dict:
    """The mean of another job's weights and the parent's, with the parent's activation; returns its scores."""
    model, parent = context.load(settings["start_from"]), context.load(None)
    for found, other in zip(model.parameters(), parent.parameters(), strict=True):
        found.data.lerp_(other.data, settings["share"])
    save(model, settings, context)
    return score(model, context.evaluation)


def save(model: Llama, settings: dict, context: Context) -> None:
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    kept = {"activation": settings["activation"], "always_on": model.layers[0].mlp.always_on}
    path = context.folder / f"{settings['name']}.part"
    torch.save({"state": state, **kept}, path)
    path.rename(path.with_suffix(".pt"))  # whole at once: another worker may wait for it
