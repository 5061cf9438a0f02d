"""Bytes of parameters, gradients and optimizer state on every rank of a real step: those that the plan predicts."""

import importlib
import os
import sys
from math import prod
from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify.ranks import run_ranks
from autopar.planner.driver import PlanRequest, make_plan

SAMPLE_MODELS = Path(__file__).resolve().parents[2] / "sample_models"

pytestmark = [pytest.mark.gloo]


def _storage_bytes(tensors) -> int:
    """Bytes of the storages behind the tensors, each once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_bytes(rank: int, world_size: int, package: str, model: str, inputs: str, store: str) -> dict[str, int]:
    """One training step of an emitted package; what is there when it ends. Step counters of AdamW are left out."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        sys.path.insert(0, package)
        emitted = importlib.import_module("sharded_model")
        mesh = emitted.build_mesh("cpu")
        stage = emitted.build_stage(mesh, torch.device("cpu"))
        with torch.no_grad():
            for parameter in stage.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.fill_(0.01)
        stage.train()
        optimized = emitted.optimized(stage) if hasattr(emitted, "optimized") else stage
        optimizer = torch.optim.AdamW([{"params": list(optimized.parameters())}], lr=1e-3)
        batch, dims = torch.load(inputs)
        if "dp" in mesh.mesh_dim_names:
            dp = mesh["dp"]
            batch = {
                name: value.chunk(dp.size(), dims[name])[dp.get_local_rank()].contiguous()
                for name, value in batch.items()
            }
        gradients = [0]

        def count() -> None:
            modules = {stage, optimized}
            gradients.append(_storage_bytes(p.grad for m in modules for p in m.parameters() if p.grad is not None))

        # Under ZeRO-1 whole gradients are there until they are exchanged for parts.
        if hasattr(emitted, "reduce_gradients"):
            reduce_gradients = emitted.reduce_gradients

            def counted(*arguments):
                count()
                return reduce_gradients(*arguments)

            emitted.reduce_gradients = counted
        emitted.train_step(stage, mesh, batch, 0)
        count()
        found = {"parameters": _storage_bytes(stage.parameters()), "gradients": max(gradients)}
        emitted.clip_gradients(stage, mesh, 1.0)
        optimizer.step()
        states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        return {**found, "optimizer": _storage_bytes(states)}
    finally:
        dist.destroy_process_group()


def gathered_bytes(rank: int, world_size: int, package: str, model: str, inputs: str, store: str) -> int:
    """The most that FSDP2 holds of gathered parameters in a step: unsharded, or on their way."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    prefetch, most = FSDPParamGroup._backward_prefetch, [0]
    groups: dict[int, FSDPParamGroup] = {}

    def counted(self):
        prefetch(self)
        found = [g for g in groups.values() if g.is_unsharded or g._all_gather_result is not None]
        most.append(sum(p._orig_size.numel() * 4 for group in found for p in group.fsdp_params))

    def lazy_init(self):
        groups[id(self)] = self
        return initialise(self)

    initialise, FSDPParamGroup.lazy_init = FSDPParamGroup.lazy_init, lazy_init
    FSDPParamGroup._backward_prefetch = counted
    state_bytes(rank, world_size, package, model, inputs, store)
    return max(most)


SLOW = pytest.mark.slow
CASES = [
    pytest.param("gpt", {"dp": 2}, {"zero": 0}, marks=SLOW),
    pytest.param("gpt", {"dp": 2}, {"zero": 1}),
    pytest.param("gpt", {"dp": 2}, {"zero": 2}, marks=SLOW),
    pytest.param("gpt", {"dp": 2}, {"zero": 3}, marks=SLOW),
    pytest.param("gpt", {"tp": 2}, {}, marks=SLOW),
    pytest.param("gpt", {"pp": 2}, {"schedule": "1f1b"}, marks=SLOW),
    pytest.param("llama", {"dp": 2, "tp": 2}, {"zero": 3}, marks=SLOW),
    pytest.param("llama", {"pp": 2, "dp": 2}, {"zero": 2, "schedule": "gpipe"}, marks=SLOW),
    pytest.param("mlp", {"dp": 3}, {"zero": 3}),
    pytest.param("mlp", {"dp": 3}, {"zero": 1}, marks=SLOW),
    pytest.param("mlp", {"pp": 2, "dp": 2}, {"zero": 0, "schedule": "1f1b"}, marks=SLOW),
]


@pytest.mark.parametrize(("model", "mesh", "pins"), CASES)
def test_state_bytes(tmp_path, model, mesh, pins):
    plan, found = measured(tmp_path, model, mesh, pins, state_bytes)
    per_stage = len(found) // plan.mesh["pp"]
    for index, stage in enumerate(plan.stages):
        measured_bytes = found[index * per_stage]  # dp rank 0 has the largest shards
        predicted = {name: stage.memory_bytes[name] for name in measured_bytes}
        assert predicted == measured_bytes


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_gathered_bytes(tmp_path, model):
    """Two blocks and the root, or all where there are no blocks; beside them the largest group's gradient."""
    plan, found = measured(tmp_path, model, {"dp": 2}, {"zero": 3, "microbatch_size": 4}, gathered_bytes)
    sizes = {name: prod(shape) * 4 for name, shape in plan.tensor_shapes.items()}
    block = sum(size for name, size in sizes.items() if name.startswith("h.*"))
    root = sum(size for name, size in sizes.items() if not name.startswith("h.*"))
    assert found == [root + 2 * block] * 2
    assert plan.stages[0].memory_bytes["gather_buffers"] == found[0] + max(root, block)


def measured(tmp_path, model, mesh, pins, on_rank):
    """A plan, and what every rank of its package measures."""
    import torch
    from autopar.planner.capture.model_file import load_model_file

    batch_size = 48 if model == "mlp" else 8
    path = SAMPLE_MODELS / f"{model}.py"
    sizes = {"pp": 1, "dp": 1, "tp": 1, **mesh}
    world_size = prod(sizes.values())
    planned = make_plan(
        PlanRequest(
            model=str(path), gpus=world_size, batch_size=batch_size, mesh=sizes, cluster="cpu-local",
            activation_checkpoint="none", **pins,
        )
    )  # fmt: skip
    package = tmp_path / "package"
    emit_package(planned.plan, planned.graph, package, force=False)
    load_model_file(str(path), "build", {})
    example = sys.modules[next(n for n in sys.modules if getattr(sys.modules[n], "__file__", None) == str(path))]
    batch = dict(
        zip([v.name for v in planned.graph.inputs], example.example_inputs(batch_size=batch_size), strict=True)
    )
    inputs = tmp_path / "inputs.pt"
    torch.save((batch, {v.name: v.batch_dim for v in planned.graph.inputs}), inputs)
    jobs = [(rank, world_size, str(package), model, str(inputs), str(tmp_path / "store")) for rank in range(world_size)]
    found, failure = run_ranks(on_rank, jobs, timeout_seconds=300)
    assert failure is None, failure.traceback
    return planned.plan, found
