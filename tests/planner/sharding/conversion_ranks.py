"""Runs conversions on four gloo ranks and compares with the definition; started as a fresh process by the tests.

For every pair of legal layouts of one value on a 2 x 2 mesh, `changes` says the conversions; each runs as the runtime
function that it names. Forward: the source's parts of a known tensor go in, the target's parts must come out. Backward:
gradients laid out by the target go in, those of the source must come out.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rules"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from autopar.planner.capture.graph import TensorType
from autopar.planner.sharding.mesh import Axis
from autopar.planner.sharding.placement import Pair, can_split, local_groups, parse_pair
from autopar.planner.sharding.redistribute import changes, has_conversion
from harness import coordinates_of, differs, gathered, local_part, randn, runtime_function

AXES = (Axis("dp", 2), Axis("tp", 2))
SHAPE = (8, 12)
PAIRS = tuple(parse_pair(text) for text in ("R", "R/P", "P/R", "S(0)", "S(1)", "S(0;2)", "S(1;3)"))
VALUE = TensorType(shape=SHAPE, dtype="float64", requires_grad=True)


def layouts() -> list[dict[str, Pair]]:
    every = [dict(zip(("dp", "tp"), pairs, strict=True)) for pairs in product(PAIRS, repeat=2)]
    return [layout for layout in every if can_split(VALUE, layout, AXES)]


def cases() -> Iterator[tuple[dict[str, Pair], dict[str, Pair]]]:
    for source, target in product(layouts(), repeat=2):
        if all(has_conversion(source[axis.name], target[axis.name]) for axis in AXES):
            yield source, target


def convert(x: torch.Tensor, source: Mapping[str, Pair], target: Mapping[str, Pair], mesh: object) -> torch.Tensor:
    """Run the conversions of `changes` as emitted code does."""
    layout = dict(source)
    for change in changes(VALUE, source, target, AXES):
        after = {**layout, change.axis: change.target}
        dims: list[int] = []
        groups: dict[str, int] = {}
        if change.source.is_split:
            dims.append(change.source.dim)
            groups["groups"] = local_groups(layout, change.axis, AXES)
        if change.target.is_split:
            dims.append(change.target.dim)
            groups["to_groups" if groups else "groups"] = local_groups(after, change.axis, AXES)
        if tuple(x.shape) != change.before.shape:
            raise ValueError(f"{change} starts from a tensor of shape {tuple(x.shape)}")
        x = runtime_function(change.conversion.function)(x, *dims, mesh[change.axis], **groups)  # type: ignore
        if tuple(x.shape) != change.after.shape:
            raise ValueError(f"{change} made a tensor of shape {tuple(x.shape)}")
        layout = after
    return x


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    here = coordinates_of(rank, AXES)
    x, gradient = randn(*SHAPE), randn(*SHAPE, seed=1)
    results = []
    for source, target in cases():
        part = local_part(x, source, AXES, here, summed="P/R", seed=1).requires_grad_()
        given = local_part(gradient, target, AXES, here, summed="R/P", seed=2)
        try:
            out = convert(part, source, target, mesh)
            (grad,) = torch.autograd.grad(out, part, given)
            results.append((out.detach().numpy(), grad.numpy()))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    Path(folder, f"rank{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _judge(source: Mapping[str, Pair], target: Mapping[str, Pair], results: Sequence[object]) -> str:
    errors = {r for r in results if isinstance(r, str)}
    if errors:
        return "; ".join(sorted(errors))
    x, gradient = randn(*SHAPE), randn(*SHAPE, seed=1)
    for what, index, whole, layout, summed in (
        ("value", 0, x, target, "P/R"),
        ("gradient", 1, gradient, source, "R/P"),
    ):
        for got in gathered([r[index] for r in results], SHAPE, layout, AXES, summed=summed):  # type: ignore
            if problem := differs(got, whole):
                return f"{what}: {problem}"
    return ""


def main(folder: str) -> None:
    mp.start_processes(_rank, args=(folder,), nprocs=4, start_method="fork")
    results = [pickle.loads(Path(folder, f"rank{rank}.pkl").read_bytes()) for rank in range(4)]
    failures = []
    count = 0
    for index, (source, target) in enumerate(cases()):
        count += 1
        if problem := _judge(source, target, [r[index] for r in results]):
            names = [" ".join(f"{axis}: {pair}" for axis, pair in layout.items()) for layout in (source, target)]
            failures.append(f"{names[0]} -> {names[1]}: {problem}")
    Path(folder, "report.pkl").write_bytes(pickle.dumps((count, failures)))


if __name__ == "__main__":
    main(sys.argv[1])
