"""Which parameters may get a gradient that is another tensor's memory, as autograd leaves it.

The backward of an addition or a view hands on the gradient that it got, so in `a + b` both parameters get one tensor.
Autograd copies it where a plain parameter accumulates it, but not where `DTensor.to_local` wraps it first: then adding
the gradient of the next microbatch to one parameter, or clipping it in place, would change the other one's as well.
"""

from __future__ import annotations

from ..planner.capture.graph import Kind, Ref
from ..planner.sharding.program import Compute, TemplateProgram

# Operations whose backward makes a new tensor for every operand.
_NEW = (
    "linear", "matmul", "mm", "bmm", "addmm", "convolution", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm",
    "rms_norm", "group_norm", "batch_norm", "mul", "div", "pow", "prelu", "select", "slice", "gather", "index",
    "index_select", "where", "softmax",
)  # fmt: skip
# Those that hand on the gradient in another view, so that what reads their result decides.
_VIEWS = ("reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand")


def shared_gradients(program: TemplateProgram) -> frozenset[str]:
    """The PARAMETER nodes of which a use may hand on its own gradient, not a new one."""
    readers: dict[Ref, list[Compute]] = {}
    for step in program.steps:
        if isinstance(step, Compute):
            for ref in dict.fromkeys(operand.ref for operand in step.operands):
                readers.setdefault(ref, []).append(step)
    returned = {output.ref for output in program.outputs}

    def may_share(ref: Ref) -> bool:
        return ref in returned or any(shares(reader, ref) for reader in readers.get(ref, ()))

    def shares(reader: Compute, ref: Ref) -> bool:
        name = reader.node.op.split(".")[1]
        if name in _NEW:
            return False
        types = [t for operand, t in zip(reader.operands, reader.operand_types, strict=True) if operand.ref == ref]
        if name in ("add", "sub", "expand") and all(t.numel < reader.outputs[0].numel for t in types):
            return False  # it is summed over what it was broadcast to
        return may_share(Ref(reader.node.name)) if name in _VIEWS else True

    parameters = program.template.of_kind(Kind.PARAMETER)
    return frozenset(node.name for node in parameters if node.output.requires_grad and may_share(Ref(node.name)))
