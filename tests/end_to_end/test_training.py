"""The emitted package trained for real, through `bash launch.sh`, beside the user's module in one process."""

import json
import os
import socket
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from autopar.compiler.package import emit_package
from autopar.compiler.verify.ranks import run_ranks
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.plan_json import relative_to

GPT = Path(__file__).resolve().parents[2] / "sample_models" / "gpt.py"
BATCH_SIZE = 16
STEPS = 50
LEARNING_RATE = 1e-3
TORCHRUN = Path(sys.executable).with_name("torchrun")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def single_process_losses(path, batch_size, steps, learning_rate):
    """The loss of every step of the unsharded module, trained as anyone would."""
    import itertools

    import torch
    from autopar.planner.capture.model_file import load_model_file

    torch.set_num_threads(1)
    loaded = load_model_file(path, "build", {})
    module = loaded.build("cpu", seed=0)
    batches = sys.modules[type(module).__module__].training_batches(batch_size, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.01)
    losses = []
    for batch in itertools.islice(batches, steps):
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def emit(folder, **request):
    planned = make_plan(PlanRequest(model=f"{GPT}:build", batch_size=BATCH_SIZE, **request))
    emit_package(relative_to(planned.plan, folder), planned.graph, folder, force=False)
    return planned


def train(package, *options, seconds=600):
    """Loss by step of `bash launch.sh`."""
    command = ["bash", str(package / "launch.sh"), "--device", "cpu", "--json", "--lr", str(LEARNING_RATE), *options]
    environment = {**os.environ, "TORCHRUN": str(TORCHRUN), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def expected():
    results, failure = run_ranks(
        single_process_losses, [(str(GPT), BATCH_SIZE, STEPS, LEARNING_RATE)], timeout_seconds=300
    )
    assert failure is None, failure
    return results[0]


def test_eight_ranks_learn_like_one_process(tmp_path, expected):
    package = tmp_path / "package"
    emit(package, gpus=8, mesh={"pp": 2, "dp": 2, "tp": 2})
    losses = train(package, "--steps", str(STEPS))
    assert list(losses) == list(range(1, STEPS + 1))
    for step, want in enumerate(expected, 1):
        assert losses[step] == pytest.approx(want, rel=1e-3), f"step {step}"
    assert losses[1] - losses[STEPS] > 1.0


SEVERAL_STAGES = {"mesh": {"pp": 2, "dp": 2, "tp": 1}, "schedule": "interleaved", "stages_per_rank": 2}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    "pins", [{"mesh": {"pp": 2, "dp": 2, "tp": 1}}, {"mesh": {"pp": 1, "dp": 2, "tp": 2}}, SEVERAL_STAGES], ids=str
)
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path, expected, pins, zero):
    package, checkpoints = tmp_path / "package", tmp_path / "checkpoints"
    emit(package, gpus=4, zero=zero, **pins)
    first = train(package, "--steps", "3", "--checkpoint-dir", str(checkpoints))
    assert [path.name for path in checkpoints.iterdir()] == ["step-3"]
    second = train(package, "--steps", "6", "--checkpoint-dir", str(checkpoints), "--resume")
    assert list(first) == [1, 2, 3]
    assert list(second) == [4, 5, 6]
    for step, loss in {**first, **second}.items():
        assert loss == pytest.approx(expected[step - 1], rel=1e-4), f"step {step}"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ({"mesh": {"pp": 1, "dp": 1, "tp": 2}}, {"mesh": {"pp": 1, "dp": 2, "tp": 1}}),
        ({"mesh": {"pp": 1, "dp": 2, "tp": 1}, "zero": 3}, {"mesh": {"pp": 1, "dp": 2, "tp": 2}, "zero": 3}),
        ({"mesh": {"pp": 2, "dp": 1, "tp": 2}}, {"mesh": {"pp": 1, "dp": 2, "tp": 2}, "zero": 1}),
    ],
    ids=str,
)
def test_another_plan_resumes_a_run(tmp_path, expected, saved, resumed):
    """The fused q, k, v of gpt are held by parts under tp, and whole without."""
    checkpoints = str(tmp_path / "checkpoints")
    for name, pins in (("saved", saved), ("resumed", resumed)):
        emit(tmp_path / name, gpus=prod(pins["mesh"].values()), **pins)
    losses = train(tmp_path / "saved", "--steps", "3", "--checkpoint-dir", checkpoints)
    losses |= train(tmp_path / "resumed", "--steps", "6", "--checkpoint-dir", checkpoints, "--resume")
    for step in range(1, 7):
        assert losses[step] == pytest.approx(expected[step - 1], rel=1e-4), f"step {step}"


def test_two_nodes_on_one_machine(tmp_path, expected):
    package = tmp_path / "package"
    emit(package, gpus=4, mesh={"pp": 1, "dp": 2, "tp": 2}, zero=3)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"NNODES": "2", "MASTER_PORT": port, "TORCHRUN": str(TORCHRUN), "TMPDIR": str(tmp_path)}
    command = ["bash", str(package / "launch.sh"), "--device", "cpu", "--json", "--steps", "2"]
    nodes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "NODE_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    ended = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended[0][1][-2000:] + ended[1][1][-2000:]
    losses = [json.loads(line)["loss"] for line in ended[0][0].splitlines()]
    assert losses == pytest.approx(expected[:2], rel=1e-4)
    assert not list(tmp_path.glob("*.pt"))


def test_weights_of_another_model_are_refused(tmp_path):
    """By their names, and by their shapes: a transposed matrix has as many numbers."""
    package, weights = tmp_path / "package", tmp_path / "weights.pt"
    planned = emit(package, gpus=2, mesh={"pp": 1, "dp": 2, "tp": 1})
    full = {name: torch.zeros(info.type.shape) for name, info in planned.graph.tensors.items()}
    name = next(name for name, value in full.items() if value.ndim == 2 and value.shape[0] != value.shape[1])
    for wrong, message in (
        ({**full, name: full[name].T.contiguous()}, f"{name} has shape"),
        ({f"module.{key}": value for key, value in full.items()}, "tensors are missing"),
        ({"model": full}, "is no state dict, it holds model"),
    ):
        torch.save(wrong, weights)
        command = ["bash", str(package / "launch.sh"), "--device", "cpu", "--init-checkpoint", str(weights)]
        environment = {**os.environ, "TORCHRUN": str(TORCHRUN)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Error: " not in done.stderr.partition(message)[0]


def test_bad_options_of_the_training_script(tmp_path):
    package = tmp_path / "package"
    emit(package, gpus=2, mesh={"pp": 1, "dp": 2, "tp": 1})
    command = [sys.executable, str(package / "train.py"), "--device", "cpu", "--batch-size", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--batch-size must be a multiple of 2 ranks" in done.stderr
