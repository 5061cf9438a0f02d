"""Checkpoints of train.py hold parameters in the user's shapes, however a plan holds them."""

import os

import pytest
import torch
from autopar.compiler.verify.ranks import run_ranks
from training_text import rendered

SHAPE, HELD = (4, 12), (4, 3, 4)  # three fused parts along the last dim


def definitions(text):
    """The classes and functions for fused parameters, with what they import."""
    names = {}
    lines = [line for line in text.splitlines() if line.startswith("from torch") or line == "import torch"]
    begin, end = text.index("class Fused("), text.index("class TrainingState(")
    exec("\n".join([*lines, text[begin:end]]), names)
    return names


def save_and_load(rank, folder):
    """Split over 4 ranks along the last dim and the first; read back whole, and by ranks that split it otherwise."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.FileStore(os.path.join(folder, "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    names = definitions(rendered(is_fused=True)["train.py"])
    values, shapes = torch.arange(48.0).reshape(SHAPE), {"qkv": SHAPE}

    def on(sizes, start):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        held = {
            key: distribute_tensor(value.reshape(HELD), mesh, (Shard(0), Shard(2)))
            for key, value in {"qkv": start, "state.qkv.exp_avg": start + 1}.items()
        }
        return names["in_user_shapes"](held, shapes)

    checkpoint.save(on((2, 2), values), checkpoint_id=os.path.join(folder, "saved"))
    whole = {"qkv": torch.zeros(SHAPE), "state.qkv.exp_avg": torch.zeros(SHAPE)}
    checkpoint.load(whole, checkpoint_id=os.path.join(folder, "saved"))
    other = on((1, 4), torch.zeros(SHAPE))
    checkpoint.load(other, checkpoint_id=os.path.join(folder, "saved"))
    again = {key: held.full_tensor().reshape(SHAPE) for key, held in names["as_held"](other).items()}
    dist.destroy_process_group()
    return [bool(read["qkv"].equal(values) and read["state.qkv.exp_avg"].equal(values + 1)) for read in (whole, again)]


@pytest.mark.gloo
def test_fused_parameters_are_whole_in_a_checkpoint(tmp_path):
    answers, failure = run_ranks(save_and_load, [(rank, str(tmp_path)) for rank in range(4)], timeout_seconds=60)
    assert failure is None, failure
    assert answers == [[True, True]] * 4
