"""Every option of an operation, run on real gloo ranks and compared with the unsharded operation.

`check(cases)` starts a fresh process (so that no autograd ran before the fork), forks four ranks once, and runs every
option of every case on an axis of size 2, on an axis of size 4, and every pair of options on a 2 x 2 mesh (the earlier
option on the major axis):

- operands are laid out by their pair: S its slice, R and R/P whole, P/R a random split into a sum;
- the local `Call` runs with autograd; output gradients are fed by pair: S its slice, R and P/R whole, R/P a
  split into a sum;
- outputs and operand gradients of all ranks are put together by pair and compared with the unsharded result.

Local shapes and dtypes must be those that the placements predict, and every option must have run at least once.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from autopar.compiler import runtime
from autopar.planner.capture.graph import Kind, Node, Ref, Symbol, Template, TensorType
from autopar.planner.sharding.mesh import Axis
from autopar.planner.sharding.placement import REPLICATED, Layout, can_split, local_type
from autopar.planner.sharding.program import node_layouts
from autopar.planner.sharding.rules import (
    AxisRef,
    Call,
    Operand,
    Option,
    SeedRef,
    label_groups,
    options_of,
    plain_label,
    rule_of,
)
from autopar.planner.sharding.rules.registry import same_call

WORLD = 4
MESHES = ((Axis("dp", 2), Axis("tp", 2)), (Axis("tp", 4),))
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """An operation with example operands: tensors inside `args`, float64.

    `no_grad`: operand positions that need no gradient. `labels`: the factor options that there must be, no more and no
    fewer; empty: any. `groups`: group counts to try.
    """

    op: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()
    no_grad: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    groups: tuple[int, ...] = (2,)

    @property
    def operands(self) -> list[torch.Tensor]:
        return list(_tensors((*self.args, *(v for _, v in self.kwargs))))


def case(
    op: str,
    *args: object,
    no_grad: tuple[int, ...] = (),
    labels: tuple[str, ...] = (),
    groups: tuple[int, ...] = (2,),
    **kwargs: object,
) -> Case:
    return Case(op, args, tuple(kwargs.items()), no_grad, labels, groups)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 97 * len(shape)))


def randint(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


_NODES: dict[int, tuple[Case, Node, list[TensorType]]] = {}


def node_of(example: Case) -> tuple[Node, list[TensorType]]:
    """The graph node of a case, and its global operand types."""
    if id(example) in _NODES:
        return _NODES[id(example)][1:]
    operands = _leaves(example)
    results = _run_aten(example.op, *_filled(example, operands))
    args = tuple(_map_tensors(example.args, itertools.count(), lambda i, _: Ref(f"x{i}")))
    positions = itertools.count(len(list(_tensors(example.args))))
    kwargs = tuple((k, _map_tensors(v, positions, lambda i, _: Ref(f"x{i}"))) for k, v in example.kwargs)
    node = Node(
        name="op", kind=Kind.OP, op=example.op, args=args, kwargs=kwargs, outputs=tuple(_type_of(r) for r in results)
    )
    _NODES[id(example)] = example, node, [_type_of(x) for x in operands]  # holds the case, so that its id stays its own
    return _NODES[id(example)][1:]


def template_of(node: Node, operands: Sequence[TensorType]) -> Template:
    inputs = tuple(Node(name=f"x{i}", kind=Kind.INPUT, outputs=(t,)) for i, t in enumerate(operands))
    refs = tuple(Ref("op", i) for i in range(len(node.outputs)))
    return Template(name="T", pattern="t", nodes=(*inputs, node), outputs=refs)


def check(cases: Sequence[Case], *, pairs: bool = True, timeout_seconds: float = 300.0) -> int:
    """Run every option of every case; returns how many trials ran.

    Raises:
        AssertionError: a result, gradient or local type is wrong, an option never ran, or an expected label is missing.
    """
    problems: list[str] = []
    for example in cases:
        node, operands = node_of(example)
        has = {plain_label(o.label) for o in options_of(node, operands)}
        if missing := set(example.labels) - has:
            problems.append(f"{_title(example)}: no option {sorted(missing)}, has {sorted(has)}")
        if unexpected := has - set(example.labels) - {"none", "grad"} if example.labels else set():
            problems.append(f"{_title(example)}: unexpected options {sorted(unexpected)}")
    assert not problems, "\n".join(problems)
    plain = [(c.op, c.args, c.kwargs, c.no_grad, c.labels, c.groups) for c in cases]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cases.pkl").write_bytes(pickle.dumps((plain, pairs)))
        done = subprocess.run(
            [sys.executable, __file__, folder], timeout=timeout_seconds, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        ran, failures = pickle.loads(Path(folder, "report.pkl").read_bytes())
    assert not failures, f"{len(failures)} of {ran} trials failed:\n" + "\n".join(failures[:40])
    return ran


# What one rank does.


@dataclass(frozen=True)
class Trial:
    case: int
    axes: tuple[Axis, ...]
    labels: tuple[tuple[str, str], ...]


def trials_of(index: int, example: Case, *, pairs: bool) -> Iterator[Trial]:
    node, operands = node_of(example)
    options = options_of(node, operands, frozenset(example.groups))
    for axes in MESHES:
        for chosen in itertools.product(options, repeat=len(axes)):
            if not pairs and sum(option.label != "none" for option in chosen) > 1:
                continue
            plain = [plain_label(option.label) for option in chosen]
            if len(axes) > 1 and set(plain) == {"none"}:
                continue
            # Each pair in one order; linearity in the gradient needs no company.
            if len(axes) > 1 and (options.index(chosen[0]) > options.index(chosen[1]) or plain[0] == "grad"):
                continue
            # A grouped split beside another one matters on the same dim only.
            if any(";" in o.label for o in chosen) and "none" not in plain and len(set(plain)) > 1:
                continue
            if _is_legal(node, operands, chosen, axes):
                labels = tuple((axis.name, option.label) for axis, option in zip(axes, chosen, strict=True))
                yield Trial(index, axes, labels)


def _is_legal(node: Node, operands: Sequence[TensorType], chosen: Sequence[Option], axes: Sequence[Axis]) -> bool:
    for option in chosen:
        same = [a.size for o, a in zip(chosen, axes, strict=True) if plain_label(o.label) == plain_label(option.label)]
        if option.one_axis and len(same) > 1:
            return False
        size = 1
        for o, a in zip(chosen, axes, strict=True):
            size *= a.size if o.label == option.label else 1
        if option.extent % size:
            return False
    for position, value in enumerate(operands):
        layout = {a.name: o.operands[position] for o, a in zip(chosen, axes, strict=True)}
        if not can_split(value, layout, axes):
            return False
    for position, value in enumerate(node.outputs):
        layout = {a.name: o.outputs[position] for o, a in zip(chosen, axes, strict=True)}
        if not can_split(value, layout, axes):
            return False
    return True


def positions(
    size: int, dim: int, layout: Layout, axes: Sequence[Axis], coordinates: Mapping[str, int]
) -> torch.Tensor:
    """The global positions of `dim` that the rank holds, from the definition of S(dim; groups)."""
    every = torch.arange(size)
    if all(layout.get(a.name, REPLICATED).dim != dim for a in axes):
        return every
    held = torch.ones(size, dtype=torch.bool)
    by_groups: dict[int, list[Axis]] = {}
    for axis in axes:
        pair = layout.get(axis.name, REPLICATED)
        if pair.is_split and pair.dim == dim:
            by_groups.setdefault(pair.groups, []).append(axis)
    for groups, splitting in by_groups.items():
        run = size // groups
        parts, part = 1, 0
        for axis in splitting:
            parts, part = parts * axis.size, part * axis.size + coordinates[axis.name]
        held &= (every % run) // (run // parts) == part
    return every[held]


_REGIONS: dict[object, tuple[torch.Tensor, ...]] = {}


def region(
    shape: Sequence[int], layout: Layout, axes: Sequence[Axis], coordinates: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """An index of a global tensor that gives the rank's part."""
    key = (tuple(shape), tuple(layout.items()), tuple(axes), tuple(coordinates.items()))
    if key in _REGIONS:
        return _REGIONS[key]
    found = []
    for dim, size in enumerate(shape):
        index = positions(size, dim, layout, axes, coordinates)
        found.append(index.reshape([-1] + [1] * (len(shape) - dim - 1)))
    _REGIONS[key] = tuple(found)
    return _REGIONS[key]


def local_part(
    x: torch.Tensor, layout: Layout, axes: Sequence[Axis], coordinates: Mapping[str, int], *, summed: str, seed: int
) -> torch.Tensor:
    """The rank's part of `x`; on axes whose pair is `summed` a random split into a sum."""
    part, parts = 0, 1
    for axis in axes:
        if layout.get(axis.name, REPLICATED).kind == summed:
            part, parts = part * axis.size + coordinates[axis.name], parts * axis.size
    if parts > 1:
        generator = torch.Generator().manual_seed(seed)
        if x.is_floating_point():
            pieces = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(parts - 1)]
        else:
            pieces = [torch.randint(0, 5, x.shape, generator=generator).to(x.dtype) for _ in range(parts - 1)]
        pieces.append(x - sum(pieces))
        x = pieces[part]
    return x[region(x.shape, layout, axes, coordinates)].clone() if x.dim() else x.clone()


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    cases, pairs = load(folder)
    meshes = {}
    for axes in MESHES:
        shape = tuple(axis.size for axis in axes)
        meshes[axes] = dist.init_device_mesh("cpu", shape, mesh_dim_names=tuple(a.name for a in axes))
    results: list[object] = []
    for index, example in enumerate(cases):
        for trial in trials_of(index, example, pairs=pairs):
            try:
                results.append(_run_trial(example, trial, meshes[trial.axes], rank))
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
    Path(folder, f"rank{rank}.pkl").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def coordinates_of(rank: int, axes: Sequence[Axis]) -> dict[str, int]:
    found: dict[str, int] = {}
    for axis in reversed(axes):
        found[axis.name] = rank % axis.size
        rank //= axis.size
    return found


def _run_trial(example: Case, trial: Trial, mesh: object, rank: int) -> tuple[object, ...]:
    node, types = node_of(example)
    axes, labels = trial.axes, dict(trial.labels)
    here = coordinates_of(rank, axes)
    wants, makes = node_layouts(template_of(node, types), node, {"op": labels}, axes)
    locals_ = []
    for position, (x, layout, kind) in enumerate(zip(example.operands, wants, types, strict=True)):
        part = local_part(x, layout, axes, here, summed="P/R", seed=100 + position)
        assert part.shape == local_type(kind, layout, axes).shape
        locals_.append(part.requires_grad_(kind.requires_grad))
    expected = [local_type(kind, layout, axes) for kind, layout in zip(node.outputs, makes, strict=True)]
    rule = rule_of(node.op)
    sizes = {axis.name: axis.size for axis in axes}
    call = (rule.localise if rule else same_call)(node, labels, expected, sizes)
    results = run_call(call, locals_, mesh, here)
    for result, kind in zip(results, expected, strict=True):
        if tuple(result.shape) != kind.shape or _name(result.dtype) != kind.dtype:
            raise TypeError(f"local output is {tuple(result.shape)} {result.dtype}, predicted {kind}; {call}")
    given, wanted = [], []
    for position, (result, layout, kind) in enumerate(zip(results, makes, node.outputs, strict=True)):
        if kind.requires_grad and result.requires_grad:
            whole = output_gradient(kind, position)
            given.append(local_part(whole, layout, axes, here, summed="R/P", seed=200 + position))
            wanted.append(result)
    gradients: list[torch.Tensor | None] = [None] * len(locals_)
    leaves = [i for i, x in enumerate(locals_) if x.requires_grad]
    if leaves and wanted:
        found = torch.autograd.grad(wanted, [locals_[i] for i in leaves], given, allow_unused=True)
        for i, gradient in zip(leaves, found, strict=True):
            gradients[i] = gradient if gradient is not None else torch.zeros_like(locals_[i])
    # numpy arrays pickle ten times faster
    return tuple([None if x is None else x.detach().numpy() for x in xs] for xs in (results, gradients, locals_))


def run_call(
    call: Call, operands: Sequence[torch.Tensor], mesh: object, coordinates: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Run a local call as emitted code would."""

    def visit(arg: object) -> object:
        match arg:
            case Operand():
                return operands[arg.position]
            case AxisRef():
                return mesh[arg.name] if arg.name in coordinates else None  # type: ignore[index]
            case SeedRef():
                return 1234 + sum(5**i * coordinates[name] for i, name in enumerate(arg.axes))
            case Symbol(kind="training"):
                return True
            case Symbol(kind="device"):
                return torch.device("cpu")
            case Symbol():
                return getattr(torch, arg.name)
            case tuple():
                return tuple(visit(item) for item in arg)
        return arg

    args, kwargs = visit(call.args), {name: visit(arg) for name, arg in call.kwargs}
    if call.target.startswith("aten."):
        results = _run_aten(call.target, args, kwargs)
    else:
        results = _as_tuple(runtime_function(call.target)(*args, **kwargs))
    return tuple(r / call.divide_by for r in results) if call.divide_by != 1 else results


def runtime_function(name: str) -> object:
    for module in pkgutil.iter_modules(runtime.__path__):
        found = getattr(importlib.import_module(f"{runtime.__name__}.{module.name}"), name, None)
        if found is not None:
            return found
    raise LookupError(f"compiler/runtime has no function {name}")


def output_gradient(kind: TensorType, position: int) -> torch.Tensor:
    return torch.randn(
        kind.shape, dtype=getattr(torch, kind.dtype), generator=torch.Generator().manual_seed(7 + position)
    )


# What the driver of the fresh process does.


def load(folder: str) -> tuple[list[Case], bool]:
    plain, pairs = pickle.loads(Path(folder, "cases.pkl").read_bytes())
    return [Case(*fields) for fields in plain], pairs


def gathered(
    parts: Sequence[np.ndarray], shape: Sequence[int], layout: Layout, axes: Sequence[Axis], *, summed: str
) -> list[torch.Tensor]:
    """The global tensor as every set of replicas has it: parts placed, parts on `summed` axes added."""
    wholes: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, array in enumerate(parts):
        part = torch.from_numpy(np.asarray(array))
        here = coordinates_of(rank, axes)
        copies = tuple(
            here[a.name]
            for a in axes
            if not layout.get(a.name, REPLICATED).is_split and layout.get(a.name, REPLICATED).kind != summed
        )
        dtype = torch.int64 if part.dtype == torch.bool else part.dtype
        whole = wholes.setdefault(copies, torch.zeros(tuple(shape), dtype=dtype))
        if whole.dim():
            whole[region(shape, layout, axes, here)] += part
        else:
            whole += part
    return list(wholes.values())


def differs(got: torch.Tensor, want: torch.Tensor) -> str:
    if not want.is_floating_point():
        return "" if torch.equal(got, want.to(got.dtype)) else "values differ"
    error = (torch.nan_to_num(got) - torch.nan_to_num(want)).abs().max().item() if want.numel() else 0.0
    scale = 1.0 + (want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0)
    return "" if error <= TOLERANCE * scale else f"error {error:.3g} at scale {scale:.3g}"


def _judge(example: Case, trial: Trial, results: Sequence[object], want: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    node, types = node_of(example)
    wants, makes = node_layouts(template_of(node, types), node, {"op": dict(trial.labels)}, trial.axes)
    where = f"{_title(example)} {dict(trial.labels)} on {[a.size for a in trial.axes]}"
    errors = {r for r in results if isinstance(r, str)}
    if errors:
        return [f"{where}: {error}" for error in sorted(errors)]
    found = []
    outputs, gradients, after = want

    def compare(what: str, parts: list[np.ndarray], whole: torch.Tensor, layout: Layout, summed: str) -> None:
        for got in gathered(parts, whole.shape, layout, trial.axes, summed=summed):
            if problem := differs(got, whole):
                found.append(f"{where}: {what}: {problem}")
                return

    for i, layout in enumerate(makes):
        compare(f"output {i} {_text(layout)}", [r[0][i] for r in results], outputs[i], layout, "P/R")
    for i, layout in enumerate(wants):
        if types[i].requires_grad and gradients[i] is not None:
            compare(f"gradient {i} {_text(layout)}", [r[1][i] for r in results], gradients[i], layout, "R/P")
        if not types[i].requires_grad:
            compare(f"operand {i} after the call", [r[2][i] for r in results], after[i], layout, "P/R")
    return found


def _reference(example: Case) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
    operands = _leaves(example)
    results = _run_aten(example.op, *_filled(example, operands))
    leaves = [i for i, x in enumerate(operands) if x.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(operands)
    wanted = [(r, output_gradient(_type_of(r), i)) for i, r in enumerate(results) if r.requires_grad]
    if wanted and leaves:
        outs, given = zip(*wanted, strict=True)
        found = torch.autograd.grad(outs, [operands[i] for i in leaves], given, allow_unused=True)
        for i, gradient in zip(leaves, found, strict=True):
            gradients[i] = gradient if gradient is not None else torch.zeros_like(operands[i])
    return [r.detach() for r in results], gradients, [x.detach() for x in operands]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    mp.start_processes(_run_rank, args=(folder,), nprocs=WORLD, start_method="fork")
    results = [pickle.loads(Path(folder, f"rank{rank}.pkl").read_bytes()) for rank in range(WORLD)]
    cases, pairs = load(folder)
    failures: list[str] = []
    count = 0
    for index, example in enumerate(cases):
        want = _reference(example)
        ran = set()
        for trial in trials_of(index, example, pairs=pairs):
            ran.update(label for _, label in trial.labels)
            failures.extend(_judge(example, trial, [r[count] for r in results], want))
            count += 1
        node, operands = node_of(example)
        never = {o.label for o in options_of(node, operands) if label_groups(o.label) == 1} - ran
        if never:
            failures.append(f"{_title(example)}: options {sorted(never)} never ran, choose other sizes")
    Path(folder, "report.pkl").write_bytes(pickle.dumps((count, failures)))


# Small helpers.


def _tensors(arg: object) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _tensors(item)


def _map_tensors(arg: object, counter: Iterator[int], change: object) -> object:
    if isinstance(arg, torch.Tensor):
        return change(next(counter), arg)  # type: ignore[operator]
    if isinstance(arg, tuple):
        return tuple(_map_tensors(item, counter, change) for item in arg)
    return arg


def _filled(example: Case, operands: Sequence[torch.Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
    counter = itertools.count()
    args = _map_tensors(example.args, counter, lambda i, _: operands[i])
    return _symbols(args), {k: _symbols(_map_tensors(v, counter, lambda i, _: operands[i])) for k, v in example.kwargs}


def _symbols(arg: object) -> object:
    if isinstance(arg, Symbol):
        return True if arg.kind == "training" else getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return tuple(_symbols(item) for item in arg)
    return arg


def _leaves(example: Case) -> list[torch.Tensor]:
    return [
        x.clone().requires_grad_(x.is_floating_point() and i not in example.no_grad)
        for i, x in enumerate(example.operands)
    ]


def _run_aten(op: str, args: object, kwargs: Mapping[str, object]) -> tuple[torch.Tensor, ...]:
    _, name, overload = op.split(".")
    return _as_tuple(getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs))  # type: ignore[misc]


def _as_tuple(result: object) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)  # type: ignore[arg-type]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type_of(x: torch.Tensor) -> TensorType:
    return TensorType(shape=tuple(x.shape), dtype=_name(x.dtype), requires_grad=x.requires_grad)


def _text(layout: Layout) -> str:
    return "{" + ", ".join(f"{axis}: {pair}" for axis, pair in layout.items()) + "}"


def _title(example: Case) -> str:
    shapes = [list(x.shape) for x in example.operands]
    rest = [a for a in example.args if not isinstance(a, torch.Tensor | tuple)]
    return f"{example.op} on {shapes} {rest}"


if __name__ == "__main__":
    main(sys.argv[1])
