"""The work of a lowered template as a software stack runs it: its attention, norms and loss, and what it fuses.

Rules declare what eager PyTorch 2.13 does. A stack replaces single operations (`stack_work`) and drops the traffic of
values that a fused kernel never writes (`stack_works`):

- a value between two fusible operations is neither written nor read, nor is its gradient, if all that read it are
  fused with its producer; a reader that a product does not separate from the producer still saves its own read;
- a bias added to a fresh product is part of the product;
- a value with several readers gets its gradient by additions, one for each reader after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cost_models.stacks import Stack
from ...cost_models.work import Gemm, Pass, Work
from ..capture.graph import ITEM_BYTES, Node, TensorType
from ..sharding.program import Compute, Convert, TemplateProgram, Var
from ..sharding.rules import rule_of
from ..sharding.rules.pointwise import pointwise_options
from .prices import local_work

_ATTENTION = "aten.scaled_dot_product_attention.default"
_LOSS = "aten.cross_entropy_loss.default"
_NORMS = ("aten.rms_norm.default", "aten.layer_norm.default")
_EMBEDDING = "aten.embedding.default"
_ADD = "aten.add.Tensor"
_LINEAR = "aten.linear.default"
_FLOAT8 = "float8_e4m3fn"

# Bytes per score: scale, mask and softmax in one kernel (4), dropout with its mask (5), and the copies of a batched
# product's operands; or softmax and dropout in one. Source: kernels of Megatron-LM 2021 counted by hand; unverified.
_SCORE_BYTES = {"materialised": (11, 19), "materialised, fused dropout": (7, 9)}
# Bytes per logit beside the product: float32 copies, maximum, exponential, sum and gather in kernels of their own; or
# one cast and one pass over float32 logits. Source: operations of both forms counted by hand; unverified. A kernel that
# reads logits of 16 bits itself, in several passes, takes as long as that. Source: published steps of models of which
# the head is a third, within 2%.
_LOGIT_BYTES = {"stepwise": (26, 16), "fused": (14, 12), "fused, no copy": (14, 12)}
# Bytes per element of a norm in float32 steps: cast, square, mean, scale, cast, weight; and of their gradients as
# autograd makes them one by one, the square's being three kernels. Source: counted by hand.
_NORM_BYTES = (36, 92)
_ATTENTION_BACKWARD_PRODUCTS = 2
# Bytes per element of an operand that is cast to 8 bits: read in 16, written as it is and transposed. Its maximum is
# found where it is made. Source: cast-and-transpose kernels of github.com/NVIDIA/TransformerEngine, by their shapes.
_CAST_BYTES = 4


def stack_work(
    node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType], stack: Stack, *, in_block: bool = False
) -> Work:
    """Work of one local operation with the kernels of a stack. `in_block`: of a block, not of what lies outside."""
    work = local_work(node, operands, outputs)
    if in_block and node.op == _LINEAR and stack.products == "float8" and work.forward.gemms:
        return _in_float8(work)
    if node.op == _ATTENTION and stack.attention in _SCORE_BYTES:
        return _materialised(work, operands, *_SCORE_BYTES[stack.attention])
    if node.op == _LOSS and stack.loss in _LOGIT_BYTES:
        ahead, back = _LOGIT_BYTES[stack.loss]
        logits = operands[0].numel
        return replace(
            work,
            forward=replace(work.forward, bytes=ahead * logits),
            backward=replace(work.backward, bytes=back * logits) if work.backward.kernels else work.backward,
        )
    if node.op in _NORMS and stack.norms == "stepwise" and stack.fusion != "compiled":
        ahead, back = _NORM_BYTES
        size = operands[0].numel
        return replace(
            work,
            forward=replace(work.forward, bytes=ahead * size, kernels=6 * work.forward.kernels),
            backward=replace(work.backward, bytes=back * size, kernels=6 * work.backward.kernels),
        )
    return work


def _materialised(work: Work, operands: Sequence[TensorType], ahead: int, back: int) -> Work:
    query, key, value = operands[:3]
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    heads = query.numel // (num_queries * query.shape[-1])
    scores = Gemm(num_queries, num_keys, query.shape[-1], heads)
    mixed = Gemm(num_queries, value.shape[-1], num_keys, heads)
    elements = heads * num_queries * num_keys
    traffic = (scores.num_elements + mixed.num_elements) * query.num_bytes // query.numel
    forward = Pass(gemms=(scores, mixed), bytes=traffic + ahead * elements, kernels=4)
    if not work.backward.kernels:
        return Work(forward=forward, dtype=work.dtype)
    gradients = (
        Gemm(num_queries, query.shape[-1], num_keys, heads),
        Gemm(num_keys, query.shape[-1], num_queries, heads),
        Gemm(num_queries, num_keys, value.shape[-1], heads),
        Gemm(num_keys, value.shape[-1], num_queries, heads),
    )
    backward = Pass(
        gemms=gradients, bytes=_ATTENTION_BACKWARD_PRODUCTS * traffic + back * elements, kernels=4 + len(gradients)
    )
    return Work(forward=forward, backward=backward, dtype=work.dtype)


def _in_float8(work: Work) -> Work:
    """A linear layer whose operands are cast to 8 bits, its results in 16: both operands before the forward, the
    gradient of the result before the backward."""

    def moved(gemms: Sequence[Gemm]) -> int:
        return sum(gemm.num_elements + gemm.batch * gemm.m * gemm.n for gemm in gemms)

    ahead, back = work.forward, work.backward
    operands = sum(gemm.batch * (gemm.m + gemm.n) * gemm.k for gemm in ahead.gemms)
    results = sum(gemm.batch * gemm.m * gemm.n for gemm in ahead.gemms)
    forward = replace(ahead, bytes=moved(ahead.gemms) + _CAST_BYTES * operands, kernels=ahead.kernels + 2)
    backward = replace(back, bytes=moved(back.gemms) + _CAST_BYTES * results, kernels=back.kernels + 1)
    return Work(forward=forward, backward=backward if back.gemms else back, dtype=_FLOAT8)


def kept_by_kernels(node: Node, operands: Sequence[TensorType], stack: Stack) -> int:
    """What a stack's kernels keep beside what the rule says: scores (the softmax, and where it drops the mask and the
    result), and a float32 copy of the logits or of their logarithms, where the loss does not read them as they are."""
    has_copy = stack.loss in ("stepwise", "fused") and operands[0].dtype != "float32"
    if node.op == _LOSS and has_copy:
        return ITEM_BYTES["float32"] * operands[0].numel
    if node.op != _ATTENTION or stack.attention not in _SCORE_BYTES:
        return 0
    query, key = operands[:2]
    elements = query.numel // query.shape[-1] * key.shape[-2]
    size = query.num_bytes // query.numel
    drops = len(node.args) > 4 and node.args[4] != 0.0
    return elements * (2 * size + 1 if drops else size)


@dataclass
class _Flow:
    """Who makes and reads what in a program. Views stand for the value they show."""

    program: TemplateProgram
    works: dict[int, Work]

    def __post_init__(self) -> None:
        self.base: dict[Var, Var] = {}
        self.maker: dict[Var, int] = {}
        self.readers: dict[Var, list[int]] = {}
        # Steps that a path through a product or collective leads from.
        self.ancestors: list[set[int]] = []
        self.separated: list[set[int]] = []
        for index, step in enumerate(self.program.steps):
            sources = step.operands if isinstance(step, Compute) else (step.source,)
            if isinstance(step, Compute) and step.operands and self.is_view(index):
                for result in step.results:
                    self.base[result] = self.root(step.operands[0])
                self.ancestors.append(set())
                self.separated.append(set())
                continue
            above: set[int] = set()
            apart: set[int] = set()
            for source in map(self.root, sources):
                self.readers.setdefault(source, []).append(index)
                made = self.maker.get(source)
                if made is not None:
                    above |= {made} | self.ancestors[made]
                    apart |= self.separated[made]
                    if self.is_barrier(made):
                        apart |= self.ancestors[made] | {made}
            self.ancestors.append(above)
            self.separated.append(apart)
            for result in step.results if isinstance(step, Compute) else (step.target,):
                self.maker[result] = index

    def root(self, value: Var) -> Var:
        return self.base.get(value, value)

    def is_view(self, index: int) -> bool:
        work = self.works[index]
        return not work.forward.kernels and not work.forward.bytes

    def is_barrier(self, index: int) -> bool:
        if isinstance(self.program.steps[index], Convert):
            return True
        forward = self.works[index].forward
        return bool(forward.gemms or forward.attention_flops)


def _is_bias(flow: _Flow, index: int) -> bool:
    """Whether a step adds a vector to what a product has just made."""
    step = flow.program.steps[index]
    if not isinstance(step, Compute) or step.node.op != _ADD or len(step.operands) != 2:
        return False
    made = flow.maker.get(step.operands[0])
    return made in flow.works and bool(flow.works[made].forward.gemms) and len(step.operand_types[1].shape) == 1


def _is_fusible(flow: _Flow, index: int, stack: Stack) -> bool:
    step = flow.program.steps[index]
    if not isinstance(step, Compute) or flow.is_barrier(index) or step.collectives or step.node.op == _EMBEDDING:
        return False
    if stack.fusion == "compiled":
        return step.node.op != _LOSS and not _is_bias(flow, index)
    rule = rule_of(step.node.op)
    return "dropout" in step.node.op or (rule is not None and rule.options is pointwise_options)


def stack_works(program: TemplateProgram, stack: Stack) -> list[Work | None]:
    """The work of every step of a template, aligned with its steps; None for conversions."""
    works: dict[int, Work] = {}
    for index, step in enumerate(program.steps):
        if isinstance(step, Compute):
            in_block = program.template.is_module
            works[index] = stack_work(step.node, step.operand_types, step.outputs, stack, in_block=in_block)
    flow = _Flow(program, works)
    less_forward: dict[int, int] = {}
    less_backward: dict[int, int] = {}
    merged: set[int] = set()
    if stack.fusion != "eager":
        _fuse(flow, stack, less_forward, less_backward, merged)
    more_backward = _additions(flow, stack)
    found: list[Work | None] = []
    for index, step in enumerate(program.steps):
        work = works.get(index)
        if work is None or isinstance(step, Convert):
            found.append(None)
            continue
        forward, backward = work.forward, work.backward
        if _is_bias(flow, index) and index not in less_forward:
            forward = Pass()
        else:
            forward = _less(forward, less_forward.get(index, 0), index in merged)
        backward = _less(backward, less_backward.get(index, 0), index in merged)
        extra = more_backward.get(index, 0)
        if extra:
            backward += Pass(bytes=extra, kernels=0 if stack.fusion == "compiled" else 1)
        found.append(replace(work, forward=forward, backward=backward))
    return found


def _less(work: Pass, num_bytes: int, is_merged: bool) -> Pass:
    return replace(work, bytes=max(0, work.bytes - num_bytes), kernels=max(0, work.kernels - is_merged))


def _fuse(flow: _Flow, stack: Stack, forward: dict[int, int], backward: dict[int, int], merged: set[int]) -> None:
    outputs = {flow.root(made) for made in flow.program.outputs}
    for value, made in flow.maker.items():
        readers = flow.readers.get(value, [])
        if not readers or not _is_fusible(flow, made, stack):
            continue
        near = [r for r in readers if _is_fusible(flow, r, stack) and made not in flow.separated[r]]
        is_inner = len(near) == len(readers) and value not in outputs
        if stack.fusion == "kernels" and not (is_inner and len(readers) == 1):
            continue
        size, has_gradient = _size(flow, value, made)
        for reader in near:
            forward[reader] = forward.get(reader, 0) + size
            merged.add(reader)
            if is_inner and has_gradient:
                backward[reader] = backward.get(reader, 0) + size
        if is_inner:
            forward[made] = forward.get(made, 0) + size
            if has_gradient:
                backward[made] = backward.get(made, 0) + size


def _additions(flow: _Flow, stack: Stack) -> dict[int, int]:
    """Bytes of adding up gradients, at the last reader of each value."""
    found: dict[int, int] = {}
    times = 1 if stack.fusion == "compiled" else 3
    for value, readers in flow.readers.items():
        template = flow.program.template
        if len(readers) < 2 or not template.type_of(value.ref).requires_grad:
            continue
        if not template.by_name[value.ref.node].op and value not in flow.program.inputs:
            continue  # a parameter
        last = max(readers)
        step = flow.program.steps[last]
        if not isinstance(step, Compute):
            continue
        size = max((t.num_bytes for v, t in zip(step.operands, step.operand_types, strict=True)
                    if flow.root(v) == value), default=0)  # fmt: skip
        found[last] = found.get(last, 0) + times * (len(readers) - 1) * size
    return found


def _size(flow: _Flow, value: Var, made: int) -> tuple[int, bool]:
    step = flow.program.steps[made]
    assert isinstance(step, Compute)
    local = step.outputs[step.results.index(value)]
    return local.num_bytes, local.requires_grad
