"""An evaluator of a small graph on the ranks of a cluster, for tests of bounds."""

from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.evaluate import Evaluator
from autopar.planner.search.prices import Prices
from autopar.planner.search.space import Space
from autopar.planner.sharding.mesh import MICROBATCH

CLUSTER, STACK = load_cluster("h100-sxm"), load_stack("eager")


def evaluator(graph, mesh):
    """Samples split over dp and microbatches, nothing else."""
    batch = find_batch_split(Space(graph)).placements
    present = {axis.name for axis in mesh.axes}
    placements = tuple(
        {
            name: {axis: labels[MICROBATCH] for axis in ("dp", MICROBATCH) if axis in present}
            for name, labels in placement.items()
        }
        for placement in batch
    )
    return Evaluator(
        graph=graph, master=graph, placements=placements, prices=Prices(mesh=mesh, cluster=CLUSTER, stack=STACK),
        optimizer="adamw",
    )  # fmt: skip
