"""One eager step of the user's module against the captured graph: loss, gradients and buffers must agree, and the loss
of a second step.

The step runs in a forked child: a process that has run autograd must not fork ranks later. Models or batches that are
too large for a quick step are not compared, and a note says so.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ...cost_models.units import format_bytes
from ..errors import UnsupportedModel
from .evaluation import evaluate
from .graph import Kind, ModelGraph
from .model_file import LoadedModel
from .step import StepFails, run_step, sample_inputs

MAX_PARAMETERS = 50_000_000
MAX_VALUE_BYTES = 1 << 30  # of all values of a forward together
TIMEOUT_SECONDS = 120.0
LOW_PRECISION = ("bfloat16", "float16")
NOT_COMPARED = "the capture was not compared with an eager step"
# How an answer of the child begins that is a refusal: the step is none to train with, or the graph differs from it.
FAILS, DIFFERS = "?", "!"


def guard(graph: ModelGraph, loaded: LoadedModel, *, seed: int = 0) -> str | None:
    """Compare one eager step with the graph; a note where it was not done, None where they agree.

    Raises:
        UnsupportedModel: they differ, or the step raises.
    """
    reason = too_large(graph)
    if reason:
        return f"{NOT_COMPARED}: {reason}"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(graph, loaded, seed, sender), daemon=True)
    child.start()
    sender.close()
    answer: str | None = None
    try:
        if not receiver.poll(TIMEOUT_SECONDS):
            return f"{NOT_COMPARED}: it took too long"
        answer = receiver.recv()
    except EOFError:
        return f"{NOT_COMPARED}: the child process died"
    finally:
        child.kill()
        child.join()
    if answer and answer.startswith(FAILS):
        raise UnsupportedModel(
            f"one eager step of the model {answer.removeprefix(FAILS)}",
            where=str(loaded.path),
            fix="give inputs that the model can be trained on (example_inputs, or --input NAME=int64[B,6]<LIMIT)",
        )
    if answer and answer.startswith(DIFFERS):
        raise UnsupportedModel(
            f"the captured graph differs from one eager step of the model: {answer.removeprefix(DIFFERS)}",
            where=str(loaded.path),
            fix="look for state that is no buffer (a counter, a cache), custom autograd functions or hooks in forward",
        )
    return answer


def too_large(graph: ModelGraph) -> str | None:
    """Why an eager step would take too long; None if it is quick."""
    parameters = sum(info.type.numel for info in graph.tensors.values() if not info.is_buffer)
    if parameters > MAX_PARAMETERS:
        return f"{parameters:,} parameters are more than the limit of {MAX_PARAMETERS:,}"
    value_bytes = sum(
        count * sum(out.num_bytes for node in template.nodes if node.kind is Kind.OP for out in node.outputs)
        for template, count in zip(graph.templates, graph.counts(), strict=True)
    )
    if value_bytes > MAX_VALUE_BYTES:
        return f"{format_bytes(value_bytes)} of activations are more than the limit of {format_bytes(MAX_VALUE_BYTES)}"
    return None


def _child(graph: ModelGraph, loaded: LoadedModel, seed: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(compare(graph, loaded, seed=seed))
    except Exception as error:
        sender.send(f"{NOT_COMPARED}: {type(error).__name__}: {error}")


def _raised(error: BaseException) -> str:
    """Kernels that the CPU lacks are a note; anything else would raise in training too."""
    if isinstance(error, StepFails):
        return f"{FAILS}fails: {error.what} ({error.where})"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    lacks = ("not implemented for", "out of memory", "allocate memory")
    if isinstance(error, NotImplementedError | MemoryError) or any(words in text for words in lacks):
        return f"{NOT_COMPARED}: one eager step raised {text}"
    return f"{FAILS}raised {text}"


def compare(graph: ModelGraph, loaded: LoadedModel, *, seed: int = 0) -> str | None:
    """Run both here. None if they agree; else a note, or a refusal that names the first difference."""
    module = loaded.build("cpu", seed=seed).train()
    sample = sample_inputs(loaded, module, graph.batch_size, seed=seed)
    tensors = {
        fqn: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for fqn, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    torch.manual_seed(seed)
    try:
        loss = run_step(loaded, module, sample)
        loss.backward()
    except (Exception, KeyboardInterrupt) as error:  # of the model's own: Ctrl-C raises another
        return _raised(error)
    wanted = {fqn: parameter.grad for fqn, parameter in module.named_parameters() if parameter.requires_grad}
    if not_finite := _not_finite({"the loss": loss, **{f"the gradient of {fqn}": g for fqn, g in wanted.items()}}):
        return f"{FAILS}makes {not_finite} infinite or not a number"
    torch.manual_seed(seed)
    ours = evaluate(graph, tensors, sample.tensors)
    trained = {f: t for f, t in tensors.items() if t.requires_grad}
    gradients = torch.autograd.grad(ours.loss, list(trained.values()), allow_unused=True)
    low = any(out.dtype in LOW_PRECISION for t in graph.templates for node in t.nodes for out in node.outputs)
    tolerance = 5e-2 if low else 1e-3
    if difference := _loss(ours.loss, loss, tolerance):
        return difference
    got, buffers = dict(zip(trained, gradients, strict=True)), dict(module.named_buffers())
    if difference := _difference(got, wanted, tolerance) or _buffers(ours.buffers, buffers, tolerance):
        return difference
    # Once more, from the buffers as they are now: nothing else may be left over from the first step.
    tensors |= {fqn: buffer.detach().clone() for fqn, buffer in buffers.items()}
    torch.manual_seed(seed)
    try:
        loss = run_step(loaded, module, sample)
    except (Exception, KeyboardInterrupt) as error:
        return _raised(error)
    torch.manual_seed(seed)
    return _loss(evaluate(graph, tensors, sample.tensors).loss, loss, tolerance, of=" of a second step")


def _loss(got: Tensor, wanted: Tensor, tolerance: float, *, of: str = "") -> str | None:
    if (wanted - got).abs() <= tolerance * (wanted.abs() + 1e-3):
        return None
    return f"{DIFFERS}loss{of} {got.item():.6g} instead of {wanted.item():.6g}"


def _not_finite(values: Mapping[str, Tensor | None]) -> str | None:
    return next((name for name, value in values.items() if value is not None and not value.isfinite().all()), None)


def _difference(got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], tolerance: float) -> str | None:
    whole = sum(float(g.norm()) ** 2 for g in wanted.values() if g is not None) ** 0.5
    for fqn, want in wanted.items():
        have = got[fqn]
        if want is None and have is None:
            continue
        one = torch.zeros(()) if have is None else have
        other = torch.zeros(()) if want is None else want
        if not float((one - other).norm()) <= tolerance * (float(other.norm()) + 1e-3 * whole) + 1e-12:
            missing = " (no gradient arrives there)" if have is None else ""
            return f"{DIFFERS}gradient of {fqn}{missing}"
    return None


def _buffers(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> str | None:
    for fqn, have in got.items():
        want = wanted[fqn].to(torch.float64)
        if not torch.allclose(have.to(torch.float64), want, rtol=tolerance, atol=1e-6, equal_nan=True):
            return f"{DIFFERS}buffer {fqn}"
    return None
