"""What only the runtime shows: draws, borders, narrow types, and collectives on the wire against those declared."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from autopar.compiler import runtime
from autopar.planner.capture.graph import Kind, Node, Ref, TensorType
from autopar.planner.sharding.rules import rule_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Recorder(TorchDispatchMode):
    """Counts c10d operations and the bytes of their tensors by the convention of CollectiveUse."""

    NAMES = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "alltoall_base_": "all_to_all",
        "send": "send",
    }

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[tuple[str, int]] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and (op := self.NAMES.get(func._opname)):
            tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a])]
            sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
            self.seen[op, max(sizes)] += 1
        return func(*args, **(kwargs or {}))


def _type(x: torch.Tensor) -> TensorType:
    return TensorType(shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."), requires_grad=x.requires_grad)


def _declared(op: str, label: str, args: tuple, size: int, outputs: list[torch.Tensor], whole: tuple[int, ...]):
    """The collectives that the rule declares, from local tensors; `whole` is the output's global shape."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    position = iter(range(len(tensors)))
    refs = tuple(Ref(f"x{next(position)}") if isinstance(a, torch.Tensor) else a for a in args)
    node = Node(name="n", kind=Kind.OP, op=op, args=refs, outputs=(TensorType(shape=whole, requires_grad=True),))
    rule = rule_of(op)
    assert rule is not None
    uses = rule.collectives(node, label, "tp", size, [_type(t) for t in tensors], [_type(t) for t in outputs])
    return collections.Counter((use.op, use.num_bytes) for use in uses)


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def _wire(mesh) -> list[str]:
    torch.manual_seed(0)
    axis, size, wrong = mesh["tp"], mesh["tp"].size(), []

    def compare(op: str, label: str, args: tuple, run, whole: tuple[int, ...]) -> None:
        with Recorder() as recorder:
            y = run()
            y.sum().backward()
        want = _declared(op, label, args, size, [y], whole)
        if recorder.seen != want:
            wrong.append(f"{op} {label}: {dict(recorder.seen)} on the wire, {dict(want)} declared")

    x, w, b = _leaf(4, 6, 4), _leaf(4), _leaf(4)
    args = (x, (4 * size,), w, b, 1e-5)
    run = lambda: runtime.layer_norm_split(x, 1, w, b, 1e-5, (axis,))  # noqa: E731
    compare("aten.layer_norm.default", "d2", args, run, (4, 6, 4 * size))
    args = (x, (4 * size,), w, 1e-5)
    run = lambda: runtime.rms_norm_split(x, 1, w, 1e-5, (axis,))  # noqa: E731
    compare("aten.rms_norm.default", "d2", args, run, (4, 6, 4 * size))
    run = lambda: runtime.softmax_split(x, 2, (axis,))  # noqa: E731
    compare("aten.softmax.int", "d2", (x, 2), run, (4, 6, 4 * size))
    image, kernel, c, d = _leaf(2, 6, 4, 4), _leaf(4, 6, 5, 3), _leaf(6), _leaf(6)
    mean, variance = torch.zeros(6), torch.ones(6)
    args = (image, c, d, mean, variance, True, 0.1, 1e-5)
    run = lambda: runtime.batch_norm_split(*args, (axis,))  # noqa: E731
    compare("aten.batch_norm.default", "d0", args, run, (2 * size, 6, 4, 4))
    run = lambda: runtime.group_norm_split(image, 3, c, d, 1e-5, (axis,))  # noqa: E731
    compare("aten.group_norm.default", "d2", (image, 3, c, d, 1e-5), run, (2, 6, 4 * size, 4))
    args = (image, kernel, None, (1, 1), (2, 1), (1, 1), 1)
    run = lambda: runtime.convolution_halo(image, kernel, *args[3:], (axis, None))  # noqa: E731
    compare("aten.conv2d.default", "h0", args, run, (2, 4, 4 * size, 4))
    args = (image, (3, 3), (2, 2), (1, 1), (1, 1))
    run = lambda: runtime.max_pool_halo(*args, (None, axis))  # noqa: E731
    compare("aten.max_pool2d.default", "h1", args, run, (2, 6, 2, 2 * size))
    logits, target = _leaf(6, 4), torch.randint(4 * size, (6,))
    args = (logits, target, None, 2, -100, 0.0)
    run = lambda: runtime.cross_entropy_split(*args, axis)  # noqa: E731
    compare("aten.cross_entropy_loss.default", "v", args, run, ())
    return wrong


def _two_split_dims(mesh) -> float:
    """Rows over dp, columns over tp: corners come through two neighbours."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 2, 8, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=generator)
    part = runtime.slice_shard(runtime.slice_shard(image, 2, mesh["dp"]), 3, mesh["tp"])
    with Recorder() as recorder:
        y = runtime.convolution_halo(part, kernel, (1, 1), (1, 1), (1, 1), 1, (mesh["dp"], mesh["tp"]))
    declared: collections.Counter[tuple[str, int]] = collections.Counter()
    for label in ("h0", "h1"):
        uses = _declared("aten.conv2d.default", label, (part, kernel, None, (1, 1), (1, 1)), 2, [y], (1, 3, 8, 8))
        declared.update(uses)
    assert {key: 2 * count for key, count in recorder.seen.items()} == declared  # forward is half of it
    y = runtime.all_gather(runtime.all_gather(y, 3, mesh["tp"]), 2, mesh["dp"])
    want = F.conv2d(image, kernel, None, 1, 1)
    return (y - want).abs().max().item()


def _narrow(mesh) -> list[float]:
    """Cross entropy and layer norm of bfloat16 against float32 on whole tensors."""
    torch.manual_seed(0)
    logits, target = (torch.randn(16, 32) * 4).bfloat16(), torch.randint(32, (16,))
    part = runtime.take_shard(logits, 1, mesh).requires_grad_()
    loss = runtime.cross_entropy_split(part, target, None, 2, -100, 0.0, mesh)
    loss.backward()
    total = runtime.all_reduce(loss.detach().float(), mesh)
    want = F.cross_entropy(logits.float(), target, reduction="sum")
    x = torch.randn(8, 32).bfloat16()
    y = runtime.layer_norm_split(runtime.take_shard(x, 1, mesh), 1, None, None, 1e-5, (mesh,))
    error = (y.float() - runtime.take_shard(F.layer_norm(x.float(), (32,)), 1, mesh)).abs().max().item()
    assert part.grad is not None
    assert (y.dtype, part.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    return [abs(total.item() - want.item()) / want.item(), error]


def test_seeds_of_near_numbers_differ() -> None:
    numbers = [
        (step, microbatch, operation, rest)
        for step in range(12)
        for microbatch in range(6)
        for operation in range(6)
        for rest in ((), (0,), (1,), (0, 0), (0, 1), (1, 0))
    ]
    seeds = [runtime.seed_of(*number) for number in numbers]
    assert len({seed % 2**32 for seed in seeds}) > len(seeds) - 3  # CPU generators read the low half
    assert seeds == [runtime.seed_of(*number) for number in numbers]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draws_repeat_and_leave_the_generator_alone() -> None:
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = runtime.seeded_dropout(x, 0.5, True, 11)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, runtime.seeded_dropout(x, 0.5, True, 11))
    assert not torch.equal(first, runtime.seeded_dropout(x, 0.5, True, 12))
    assert torch.equal(runtime.seeded_dropout(x, 0.5, False, 11), x)
    assert 0.4 < (first == 0).float().mean().item() < 0.6


def test_attention_dropout_repeats_in_recomputation() -> None:
    q = torch.randn(2, 2, 8, 4, requires_grad=True)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return runtime.seeded_attention(q, q, q, None, 0.3, True, seed=5)

    plain = attend(q)
    (want,) = torch.autograd.grad(plain.sum(), q)
    again = checkpoint(attend, q, use_reentrant=False)
    (got,) = torch.autograd.grad(again.sum(), q)
    assert torch.equal(plain, again)
    assert torch.equal(got, want)


def _draws(mesh) -> list[float]:
    x = torch.ones(32, 32)
    alike = runtime.seeded_dropout(x, 0.5, True, runtime.seed_of(1, 0, 2))
    split = runtime.seeded_dropout(x, 0.5, True, runtime.seed_of(1, 0, 2, (mesh.get_local_rank(),)))
    spread = [runtime.all_gather(t[None], 0, mesh) for t in (alike, split)]
    return [(s[0] - s[1]).abs().sum().item() for s in spread]


def _bodies(mesh) -> dict[str, list]:
    return {
        "wire": _wire(mesh),
        "corners": [_two_split_dims(mesh)],
        "narrow": _narrow(mesh["tp"]),
        "draws": _draws(mesh["tp"]),
    }


@pytest.fixture(scope="module")
def found(on_ranks) -> list[dict[str, list]]:
    return on_ranks(_bodies, dp=2, tp=2)


@pytest.mark.gloo
def test_bodies_send_what_their_rules_declare(found: list[dict[str, list]]) -> None:
    assert [rank["wire"] for rank in found] == [[]] * 4


@pytest.mark.gloo
def test_corners_of_images_split_both_ways(found: list[dict[str, list]]) -> None:
    assert max(rank["corners"][0] for rank in found) < 1e-12


@pytest.mark.gloo
def test_narrow_types_are_reduced_in_float32(found: list[dict[str, list]]) -> None:
    for rank in found:
        loss_error, norm_error = rank["narrow"]
        assert loss_error < 1e-2
        assert norm_error < 3e-2


@pytest.mark.gloo
def test_replicated_values_draw_alike_and_split_ones_differ(found: list[dict[str, list]]) -> None:
    for rank in found:
        alike, split = rank["draws"]
        assert alike == 0.0
        assert split > 0.0
