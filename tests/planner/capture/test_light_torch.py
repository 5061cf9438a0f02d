"""A capture on meta needs neither the compiler nor sympy, and whoever asks for them gets the real ones."""

import subprocess
import sys

import torch
from autopar.planner.capture.light_torch import Unfilled, light_meta, without_garbage_collection
from compare import SAMPLES


def run(text):
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_capture_imports_no_compiler():
    found = run(
        "import sys\nfrom autopar.planner.capture import capture_model\n"
        f"capture_model({str(SAMPLES / 'llama.py')!r}, guarded=False)\n"
        "print(*(name for name in ('torch._dynamo', 'sympy', 'torch.export._trace') if name in sys.modules))"
    )
    assert found == []


def test_the_real_modules_come_when_asked_for():
    found = run(
        "import torch\nfrom autopar.planner.capture.light_torch import light_meta\nwith light_meta():\n"
        "    torch.arange(4, device='meta') / 3\n    from torch._dynamo.exc import Unsupported\n"
        "    from torch.fx.experimental.symbolic_shapes import ShapeEnv\n    import sympy\n"
        "    x = sympy.Symbol('x')\n    torch.arange(4, device='meta') / 3\n"
        "import torch._dynamo, sys\nprint(ShapeEnv().__class__.__name__, Unsupported.__name__, x + x)\n"
        "print(torch._dynamo is sys.modules['torch._dynamo'], torch._dynamo.__file__ is not None)\n"
        "print(torch.compile(lambda t: t + 1, backend='eager')(torch.ones(())).item())"
    )
    assert found == ["ShapeEnv", "Unsupported", "2*x", "True", "True", "2.0"]


def test_the_block_leaves_nothing_behind():
    before = {name: sys.modules.get(name) for name in ("torch._dynamo", "sympy")}
    with light_meta():
        torch.arange(4, device="meta") / 3
    assert before == {name: sys.modules.get(name) for name in ("torch._dynamo", "sympy")}


def test_only_meta_tensors_stay_unfilled():
    with Unfilled():
        linear = torch.nn.Linear(3, 3, device="meta")
        assert torch.nn.init.normal_(linear.weight) is linear.weight
        assert torch.zeros(100).uniform_(1, 2).min() >= 1


def test_garbage_collection_comes_back():
    import gc

    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
