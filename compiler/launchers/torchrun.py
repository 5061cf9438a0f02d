"""train.py and launch.sh: how the emitted package is started, with torchrun."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

from ...cost_models.hardware import cluster_with, cut_to
from ...planner.capture.graph import ModelGraph
from ...planner.plan import Plan
from .train_script import render_train_script

_LAUNCH = """\
#!/usr/bin/env bash
# Starts train.py on {world} ranks ({mesh}). Options of train.py follow: bash launch.sh --steps 50 --device cpu
#
# On more than one node run it on each of them, with the same MASTER_ADDR and its own NODE_RANK:
#   NNODES={shown} NODE_RANK=0 MASTER_ADDR=node0 bash launch.sh
set -euo pipefail

HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
NNODES="${{NNODES:-{nodes}}}"
NODE_RANK="${{NODE_RANK:-0}}"
{on_node}
MASTER_ADDR="${{MASTER_ADDR:-localhost}}"
MASTER_PORT="${{MASTER_PORT:-29500}}"
TORCHRUN="${{TORCHRUN:-torchrun}}"
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}" # CPU ranks share the cores

for argument in "$@"; do
  case "$argument" in -h | --help) exec "$TORCHRUN" --standalone --nproc-per-node 1 "$HERE/train.py" --help ;; esac
done
{check}

if [ "$NNODES" -eq 1 ]; then
  exec "$TORCHRUN" --standalone --nproc-per-node "$NGPU" "$HERE/train.py" "$@"
fi
exec "$TORCHRUN" --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NGPU" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$HERE/train.py" "$@"
"""


_ALIKE = (
    'NGPU="${{NGPU:-$(({world} / NNODES))}}" # ranks on this node',
    """\
if [ "$((NGPU * NNODES))" -ne {world} ]; then
  echo "this plan needs {world} ranks, not NGPU=$NGPU x NNODES=$NNODES" >&2
  exit 2
fi""",
)
_DIFFERENT = (
    """\
NODES=({sizes}) # ranks on each node, by NODE_RANK
if [ "$NNODES" -eq 1 ]; then NODES=({world}); fi
NGPU="${{NGPU:-${{NODES[$NODE_RANK]:-0}}}}" # ranks on this node""",
    """\
if [ "$NNODES" -ne "${{#NODES[@]}}" ] || [ "$NGPU" != "${{NODES[$NODE_RANK]:-none}}" ]; then
  echo "this plan needs nodes of ${{NODES[*]}} ranks, not NGPU=$NGPU on NODE_RANK=$NODE_RANK of NNODES=$NNODES" >&2
  exit 2
fi""",
)


def render_training(plan: Plan, graph: ModelGraph, *, is_fused: bool, folder: Path = Path()) -> dict[str, str]:
    """File name -> text of the files that start the emitted module. Paths of the plan are counted from `folder`.

    `is_fused`: some parameters are held with a dim more than the user's, along which they are split.

    Raises:
        HardwareError: the plan's cluster is not known here.
    """
    # Text only: the folder may not be there yet.
    cluster = os.path.normpath(folder / plan.cluster) if plan.cluster.endswith(".toml") else plan.cluster
    hardware = cut_to(cluster_with(cluster, plan.cluster_overrides), plan.gpus)
    hardware.check_gpus(plan.gpus)
    nodes = ceil(hardware.num_nodes(plan.gpus))
    parts = _DIFFERENT if hardware.node_sizes and nodes > 1 else _ALIKE
    sizes = " ".join(map(str, hardware.node_sizes))
    on_node, check = (part.format(world=plan.gpus, sizes=sizes) for part in parts)
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one rank"
    return {
        "train.py": render_train_script(plan, graph, is_fused=is_fused),
        "launch.sh": _LAUNCH.format(
            world=plan.gpus, mesh=mesh, nodes=nodes, shown=max(2, nodes), on_node=on_node, check=check
        ),
    }
