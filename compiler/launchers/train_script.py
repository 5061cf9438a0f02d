"""The text of the emitted train.py: the plan's facts as constants, then a loop that is the same for every plan."""

from __future__ import annotations

from collections.abc import Mapping

from ...planner.capture.graph import ModelGraph
from ...planner.plan import Plan
from ...planner.schedules import get_schedule

_DOC = '''"""Trains {name} on {ranks} ranks ({mesh}); `bash launch.sh --help` lists the options.

It needs PyTorch and the user's model file. That gives the initial weights, which are those of the unsharded module for
the same seed, and the data: `training_batches(batch_size, ...)` if it has such a generator, which every rank runs alike
and takes its share of; else `example_inputs` again and again.
"""
'''

_BODY = '''

def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="samples a step, over all ranks")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default=OPTIMIZER)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.0, help="of sgd")
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip gradients to this norm, 0 for never")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=PRECISION, help="bf16 computes under autocast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="cuda where every rank has a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights, the data and dropout")
    parser.add_argument("--model-file", type=Path, default=HERE / MODEL_FILE)
    parser.add_argument("--init-checkpoint", type=Path, default=None, help="torch.save'd state dict to start from")
    parser.add_argument("--checkpoint-dir", type=Path, default=None, help="where checkpoints go: one folder a step")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0 for the last step only")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --checkpoint-dir")
    parser.add_argument("--log-every", type=int, default=1, help="steps")
    parser.add_argument("--json", action="store_true", help="log JSON lines")
    arguments = parser.parse_args()
    if arguments.resume and arguments.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    if arguments.batch_size % (DATA_PARALLEL * MICROBATCHES):
        parser.error(f"--batch-size must be a multiple of {DATA_PARALLEL} ranks x {MICROBATCHES} microbatches")
    return arguments


def load_model_file(path: Path) -> ModuleType:
    """Import the user's file by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"no model file {path}; say where it is with --model-file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def build_model(model_file: ModuleType) -> nn.Module:
    """The user's unsharded module."""
    found = getattr(model_file, MODEL_NAME)
    built = found if isinstance(found, nn.Module) else found(**MODEL_ARGUMENTS)
    return built[0] if isinstance(built, tuple) else built


def initialize(stage: nn.Module, model_file: ModuleType, seed: int, checkpoint: Path | None) -> None:
    """Give this rank its part of the initial weights.

    One process a node builds the user's module and lays its weights into a file that the others of the node map, so the
    module exists once in a node's memory.
    """
    if checkpoint is not None:
        full = torch.load(checkpoint, map_location="cpu", mmap=True)
        load_full_state_dict(stage, {**buffers(stage, model_file), **full})
        return
    name = f"weights-{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{os.environ.get('MASTER_PORT', '0')}.pt"
    path = Path(tempfile.gettempdir()) / name
    is_builder = int(os.environ["LOCAL_RANK"]) == 0
    if is_builder:
        torch.manual_seed(seed)
        module = build_model(model_file)
        torch.save({**module.state_dict(), **dict(module.named_buffers())}, path)
    dist.barrier()
    load_full_state_dict(stage, torch.load(path, map_location="cpu", mmap=True))
    dist.barrier()
    if is_builder:
        path.unlink()


def buffers(stage: nn.Module, model_file: ModuleType) -> dict[str, torch.Tensor]:
    """The buffers of the user's module, if the stage has some that no checkpoint holds; built without parameters."""
    if {name for name, _ in stage.named_buffers()} <= stage.state_dict().keys():
        return {}
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta")))

    nn.Module.register_parameter = register_on_meta
    try:
        return dict(build_model(model_file).named_buffers())
    finally:
        nn.Module.register_parameter = register


def batches(model_file: ModuleType, batch_size: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The whole batch of every step by input name, the same on every rank."""

    def accepted(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters
        return {name: value for name, value in MODEL_ARGUMENTS.items() if name in parameters}

    def named(batch: object) -> dict[str, torch.Tensor]:
        if isinstance(batch, dict):
            return {name: batch[name] for name in INPUT_BATCH_DIMS}
        values = batch if isinstance(batch, (tuple, list)) else (batch,)
        return dict(zip(INPUT_BATCH_DIMS, values, strict=True))

    torch.manual_seed(seed)
    if hasattr(model_file, "training_batches"):
        generator = model_file.training_batches
        arguments = accepted(generator)
        if "seed" in inspect.signature(generator).parameters:
            arguments.setdefault("seed", seed)
        yield from map(named, generator(batch_size, **arguments))
        return
    if dist.get_rank() == 0:
        print("note: no training_batches(batch_size) in the model file: one example batch repeated", file=sys.stderr)
    if not hasattr(model_file, "example_inputs"):
        raise SystemExit("the model file has neither training_batches(batch_size) nor example_inputs(batch_size)")
    arguments = accepted(model_file.example_inputs)
    names = inspect.signature(model_file.example_inputs).parameters
    sizes = {name: batch_size for name in ("batch_size", "batch", "n") if name in names}
    batch = named(model_file.example_inputs(**{**arguments, **sizes}))
    while True:
        yield batch


def share(batch: dict[str, torch.Tensor], rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What one data-parallel rank sees of a batch: its samples, and inputs without samples whole."""
    local = {}
    for name, dim in INPUT_BATCH_DIMS.items():
        value = batch[name] if dim is None else batch[name].chunk(DATA_PARALLEL, dim)[rank]
        local[name] = value.contiguous().to(device, non_blocking=True)
    return local


class TrainingState(Stateful):
    """What a checkpoint holds: weights and optimizer state under the user's names, as DTensors, and the step."""

    def __init__(self, stage: nn.Module, optimizer: torch.optim.Optimizer):
        self.stage, self.optimizer, self.step = stage, optimizer, 0
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)
        self.has_parameters = any(True for _ in stage.parameters())  # a stage may have none

    def state_dict(self) -> dict[str, object]:
        if not self.has_parameters:
            return {"model": self.stage.state_dict(), "step": torch.tensor(self.step)}
        model, optimizer = get_state_dict(self.stage, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        if self.has_parameters:
            set_state_dict(
                self.stage,
                self.optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
                options=self.options,
            )
        else:
            self.stage.load_state_dict(state_dict["model"])
        self.step = int(state_dict["step"])


def newest_checkpoint(folder: Path) -> Path:
    """The checkpoint with the most steps; one that was not finished has no metadata and does not count."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]
    if not found:
        raise SystemExit(f"no checkpoint in {folder}; leave out --resume to start from the beginning")
    return max(found, key=lambda path: int(path.name.removeprefix("step-")))


def main() -> None:
    arguments = parse_arguments()
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device_type = arguments.device or ("cuda" if torch.cuda.device_count() >= local_size else "cpu")
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    mesh = build_mesh(device_type)
    data_rank = mesh.get_local_rank("dp") if "dp" in (mesh.mesh_dim_names or ()) else 0
    model_file = load_model_file(arguments.model_file)
    stage = build_stage(mesh, device)
    parameters = [{"params": list(stage.parameters())}]
    if arguments.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            parameters, lr=arguments.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay
        )
    state = TrainingState(stage, optimizer)
    if arguments.resume:
        for name, value in buffers(stage, model_file).items():
            if name in dict(stage.named_buffers()):
                stage.get_buffer(name).copy_(value)
        checkpoint.load({"training": state}, checkpoint_id=newest_checkpoint(arguments.checkpoint_dir))
    else:
        initialize(stage, model_file, arguments.seed, arguments.init_checkpoint)

    stage.train()
    data = itertools.islice(batches(model_file, arguments.batch_size, arguments.seed), state.step, arguments.steps)
    for batch in data:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device_type, torch.bfloat16, enabled=arguments.precision == "bf16"):
            loss = train_step(stage, mesh, share(batch, data_rank, device), state.step)
        norm = clip_gradients(stage, mesh, arguments.max_norm) if arguments.max_norm > 0 else None
        optimizer.step()
        state.step += 1
        log(arguments, state.step, loss, norm, start)
        is_last = state.step == arguments.steps
        is_due = arguments.checkpoint_every > 0 and state.step % arguments.checkpoint_every == 0
        if arguments.checkpoint_dir is not None and (is_last or is_due):
            checkpoint.save({"training": state}, checkpoint_id=arguments.checkpoint_dir / f"step-{state.step}")
    dist.destroy_process_group()


def log(arguments: argparse.Namespace, step: int, loss: torch.Tensor, norm: torch.Tensor | None, start: float) -> None:
    if dist.get_rank() != 0 or step % arguments.log_every:
        return
    values = {"step": step, "loss": loss.item()}
    if norm is not None:
        values["norm"] = float(norm)
    values["seconds"] = time.perf_counter() - start
    if arguments.json:
        print(json.dumps(values), flush=True)
    else:
        print(" ".join(f"{name} {value:.6g}" for name, value in values.items()), flush=True)


if __name__ == "__main__":
    main()
'''

_IMPORTS = """
import argparse
import importlib.util
import inspect
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from sharded_model import build_mesh, build_stage, clip_gradients, load_full_state_dict, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

HERE = Path(__file__).resolve().parent
"""


# What differs where a rank holds a list of stages: each has the user's names, and an optimizer of its own.
_SEVERAL_STAGES = (
    (
        '''    """Give this rank its part of the initial weights.
''',
        '''    """Give this rank's stages their parts of the initial weights.
''',
    ),
    (
        """\
        full = torch.load(checkpoint, map_location="cpu", mmap=True)
        load_full_state_dict(stage, {**buffers(stage, model_file), **full})
        return
""",
        """\
        full = torch.load(checkpoint, map_location="cpu", mmap=True)
        for stage in stages:
            load_full_state_dict(stage, {**buffers(stage, model_file), **full})
        return
""",
    ),
    (
        """\
    load_full_state_dict(stage, torch.load(path, map_location="cpu", mmap=True))
    dist.barrier()
""",
        """\
    full = torch.load(path, map_location="cpu", mmap=True)
    for stage in stages:
        load_full_state_dict(stage, full)
    dist.barrier()
""",
    ),
    (
        "def initialize(stage: nn.Module, model_file",
        "def initialize(stages: nn.ModuleList, model_file",
    ),
    (
        """\
    def __init__(self, stage: nn.Module, optimizer: torch.optim.Optimizer):
        self.stage, self.optimizer, self.step = stage, optimizer, 0
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)
        self.has_parameters = any(True for _ in stage.parameters())  # a stage may have none

    def state_dict(self) -> dict[str, object]:
        if not self.has_parameters:
            return {"model": self.stage.state_dict(), "step": torch.tensor(self.step)}
        model, optimizer = get_state_dict(self.stage, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        if self.has_parameters:
            set_state_dict(
                self.stage,
                self.optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
                options=self.options,
            )
        else:
            self.stage.load_state_dict(state_dict["model"])
        self.step = int(state_dict["step"])
""",
        """\
    def __init__(self, stages: nn.ModuleList, optimizers: list[torch.optim.Optimizer]):
        self.parts, self.step = list(zip(stages, optimizers, strict=True)), 0
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, object]:
        found = {"model": {}, "optimizer": {}, "step": torch.tensor(self.step)}
        for stage, optimizer in self.parts:
            if not any(True for _ in stage.parameters()):  # a stage may have none
                found["model"] |= stage.state_dict()
                continue
            model, state = get_state_dict(stage, optimizer, options=self.options)
            found["model"] |= model
            found["optimizer"] |= state
        return found

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        for stage, optimizer in self.parts:
            mine = {name: state_dict["model"][name] for name in stage.state_dict()}
            if not any(True for _ in stage.parameters()):
                stage.load_state_dict(mine)
                continue
            set_state_dict(
                stage,
                optimizer,
                model_state_dict=mine,
                optim_state_dict=state_dict["optimizer"],
                options=self.options,
            )
        self.step = int(state_dict["step"])
""",
    ),
    (
        """\
    stage = build_stage(mesh, device)
    parameters = [{"params": list(stage.parameters())}]
    if arguments.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            parameters, lr=arguments.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay
        )
    state = TrainingState(stage, optimizer)
    if arguments.resume:
        for name, value in buffers(stage, model_file).items():
            if name in dict(stage.named_buffers()):
                stage.get_buffer(name).copy_(value)
        checkpoint.load(""",
        """\
    stages = build_stage(mesh, device)
    optimizers = []
    for stage in stages:
        parameters = [{"params": list(stage.parameters())}]
        if arguments.optimizer == "adamw":
            made = torch.optim.AdamW(parameters, lr=arguments.lr, weight_decay=arguments.weight_decay)
        else:
            made = torch.optim.SGD(
                parameters, lr=arguments.lr, momentum=arguments.momentum, weight_decay=arguments.weight_decay
            )
        optimizers.append(made)
    state = TrainingState(stages, optimizers)
    if arguments.resume:
        for stage in stages:
            for name, value in buffers(stage, model_file).items():
                if name in dict(stage.named_buffers()):
                    stage.get_buffer(name).copy_(value)
        checkpoint.load(""",
    ),
    ("initialize(stage, model_file, arguments", "initialize(stages, model_file, arguments"),
    ("    stage.train()\n", "    stages.train()\n"),
    (
        "        optimizer.zero_grad()\n",
        "        for optimizer in optimizers:\n            optimizer.zero_grad()\n",
    ),
    ("train_step(stage, mesh,", "train_step(stages, mesh,"),
    ("clip_gradients(stage, mesh,", "clip_gradients(stages, mesh,"),
    ("        optimizer.step()\n", "        for optimizer in optimizers:\n            optimizer.step()\n"),
)


def python_literal(value: object) -> str:
    """A JSON-like value as Python source, double-quoted; nothing of it is ever more than a literal.

    Raises:
        TypeError: anything but None, booleans, numbers, strings, lists, tuples and string-keyed mappings of these.
    """
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        text = ascii(value)
        if text.startswith('"'):
            return text
        return '"' + text[1:-1].replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{python_literal(k)}: {python_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(python_literal(item) + ", " for item in value).rstrip() + ")" if value else "()"
    if isinstance(value, list):
        return "[" + ", ".join(python_literal(item) for item in value) + "]"
    raise TypeError(f"no literal for {type(value).__name__}")


def _mapping_lines(name: str, values: Mapping[str, object]) -> list[str]:
    """`NAME = {...}` as the formatter would write it: on one line if it fits, else one entry a line."""
    line = f"{name} = {python_literal(values)}"
    if len(line) <= 120:
        return [line]
    return [f"{name} = {{", *(f"    {python_literal(k)}: {python_literal(v)}," for k, v in values.items()), "}"]


def render_train_script(plan: Plan, graph: ModelGraph) -> str:
    """The text of train.py."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one rank"
    constants = [
        f"MODEL_FILE = {python_literal(plan.model.path)}  # the user's, relative to this folder",
        f"MODEL_NAME = {python_literal(plan.model.name)}",
        *_mapping_lines("MODEL_ARGUMENTS", plan.model.arguments),
        f"BATCH_SIZE = {plan.batch_size}",
        f"DATA_PARALLEL = {plan.mesh.get('dp', 1)}",
        f"MICROBATCHES = {plan.microbatches}",
        *_mapping_lines("INPUT_BATCH_DIMS", {value.name: value.batch_dim for value in graph.inputs}),
        f"OPTIMIZER = {python_literal(plan.optimizer)}",
        f"PRECISION = {python_literal('bf16' if plan.precision == 'bf16' else 'fp32')}",
    ]
    name = (
        "".join(character for character in graph.name if character.isidentifier() or character.isdigit()) or "a model"
    )
    doc = _DOC.format(name=name, ranks=plan.gpus, mesh=mesh)
    imports, body = _IMPORTS, _BODY
    if get_schedule(plan.schedule).is_multi_stage:
        for one, several in _SEVERAL_STAGES:
            assert one in body
            body = body.replace(one, several)
    if plan.zero == 1 and plan.mesh.get("dp", 1) > 1:
        # The optimizer has parts of the parameters, and they are what a checkpoint holds.
        imports = imports.replace("load_full_state_dict, train_step", "load_full_state_dict, optimized, train_step")
        body = body.replace("list(stage.parameters())", "list(optimized(stage).parameters())")
        body = body.replace("TrainingState(stage, optimizer)", "TrainingState(optimized(stage), optimizer)")
        body = body.replace("TrainingState(stages, optimizers)", "TrainingState(optimized(stages), optimizers)")
    return doc + imports + "\n".join(constants) + "\n" + body
