"""Containers of blocks as source: as short as their numbers allow, and never wider than a line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from autopar.compiler.exporters.pytorch.tensors import Tree, assignments
from autopar.compiler.text import LINE_WIDTH

LONG = "ResidualBottleneckBlockWithProjectionAndSqueezeAndExcitation"


def made(text: list[str]) -> object:
    """What the lines build, a block being its class and its number."""
    names = {LONG: LONG, "Block": "Block"}
    blocks = {name: lambda mesh, number=None, name=name: (name, number) for name in names}
    found = SimpleNamespace()
    nn = SimpleNamespace(ModuleDict=dict)
    exec("\n".join(text), {"self": found, "nn": nn, "mesh": None, "Weights": dict, **blocks})
    return found.stages


@pytest.mark.parametrize("name", ["Block", LONG])
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("per_stage", [1, 2, 3])
def test_containers_in_containers(name: str, numbered: bool, per_stage: int) -> None:
    tree = Tree()
    expected: dict[str, dict[str, tuple[str, int | None]]] = {}
    for stage in range(3):
        for place in range(per_stage):
            number = 1 + stage * (per_stage + 1) + place if numbered else None
            tree.put(["stages", str(stage), str(place)], f"{name}(mesh{f', number={number}' if numbered else ''})")
            expected.setdefault(str(stage), {})[str(place)] = (name, number)
    lines = list(assignments(tree, ""))
    assert made(lines) == expected
    assert max(map(len, lines)) <= LINE_WIDTH
    if not numbered:
        assert sum(line.count(f"{name}(mesh)") for line in lines) == 1
