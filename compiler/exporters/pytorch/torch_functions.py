"""Python functions of PyTorch with documented keywords, by the name of their aten operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REQUIRED = object()
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A Python function with documented keywords.

    `parameters`: in aten's order, name -> default (REQUIRED: written by position).
    `order`: positions of aten arguments that are written first, where Python's order differs.
    """

    name: str
    parameters: Mapping[str, object]
    order: tuple[int, ...] = ()
    pairs: tuple[str, ...] = field(default=())  # written as one number where all entries are equal


def _loss(name: str, **more: object) -> Function:
    return Function(name=name, parameters={"input": REQUIRED, "target": REQUIRED, **more})


def _convolution(name: str) -> Function:
    spatial = {"stride": 1, "padding": 0, "dilation": 1}
    parameters = {"input": REQUIRED, "weight": REQUIRED, "bias": None, **spatial, "groups": 1}
    return Function(name=name, parameters=parameters, pairs=tuple(spatial))


def _max_pool(name: str) -> Function:
    window = {"kernel_size": REQUIRED, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
    return Function(name=name, parameters={"input": REQUIRED, **window}, pairs=tuple(window))


def _avg_pool(name: str) -> Function:
    window = {"kernel_size": REQUIRED, "stride": None, "padding": 0}
    more = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}
    return Function(name=name, parameters={"input": REQUIRED, **window, **more}, pairs=tuple(window))


def _unary(name: str, **more: object) -> Function:
    return Function(name=name, parameters={"input": REQUIRED, **more})


FUNCTIONS: Mapping[str, Function] = {
    "linear": Function(name="F.linear", parameters={"input": REQUIRED, "weight": REQUIRED, "bias": None}),
    "embedding": Function(
        name="F.embedding",
        parameters={
            "weight": REQUIRED, "input": REQUIRED, "padding_idx": -1, "scale_grad_by_freq": False, "sparse": False,
        },
        order=(1, 0),
    ),  # fmt: skip
    "layer_norm": Function(
        name="F.layer_norm",
        parameters={"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "rms_norm": Function(
        name="F.rms_norm", parameters={"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "eps": None}
    ),
    "group_norm": Function(
        name="F.group_norm",
        parameters={"input": REQUIRED, "num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "batch_norm": Function(
        name="F.batch_norm",
        parameters={
            "input": REQUIRED, "weight": None, "bias": None, "running_mean": REQUIRED, "running_var": REQUIRED,
            "training": False, "momentum": 0.1, "eps": 1e-5,
        },
        order=(0, 3, 4),
    ),  # fmt: skip
    "scaled_dot_product_attention": Function(
        name="F.scaled_dot_product_attention",
        parameters={
            "query": REQUIRED, "key": REQUIRED, "value": REQUIRED, "attn_mask": None, "dropout_p": 0.0,
            "is_causal": False, "scale": None, "enable_gqa": False,
        },
    ),  # fmt: skip
    "cross_entropy_loss": _loss(
        "F.cross_entropy", weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0
    ),
    "nll_loss_nd": _loss("F.nll_loss", weight=None, reduction=1, ignore_index=-100),
    "nll_loss": _loss("F.nll_loss", weight=None, reduction=1, ignore_index=-100),
    "mse_loss": _loss("F.mse_loss", reduction=1),
    "l1_loss": _loss("F.l1_loss", reduction=1),
    "smooth_l1_loss": _loss("F.smooth_l1_loss", reduction=1, beta=1.0),
    "huber_loss": _loss("F.huber_loss", reduction=1, delta=1.0),
    "binary_cross_entropy": _loss("F.binary_cross_entropy", weight=None, reduction=1),
    "binary_cross_entropy_with_logits": _loss(
        "F.binary_cross_entropy_with_logits", weight=None, pos_weight=None, reduction=1
    ),
    "kl_div": _loss("F.kl_div", reduction=1, log_target=False),
    "conv1d": _convolution("F.conv1d"),
    "conv2d": _convolution("F.conv2d"),
    "conv3d": _convolution("F.conv3d"),
    "max_pool1d": _max_pool("F.max_pool1d"),
    "max_pool2d": _max_pool("F.max_pool2d"),
    "max_pool3d": _max_pool("F.max_pool3d"),
    "avg_pool1d": _avg_pool("F.avg_pool1d"),
    "avg_pool2d": _avg_pool("F.avg_pool2d"),
    "avg_pool3d": _avg_pool("F.avg_pool3d"),
    "adaptive_avg_pool1d": Function(
        name="F.adaptive_avg_pool1d", parameters={"input": REQUIRED, "output_size": REQUIRED}, pairs=("output_size",)
    ),
    "adaptive_avg_pool2d": Function(
        name="F.adaptive_avg_pool2d", parameters={"input": REQUIRED, "output_size": REQUIRED}, pairs=("output_size",)
    ),
    "gelu": _unary("F.gelu", approximate="none"),
    "relu": _unary("F.relu"),
    "silu": _unary("F.silu"),
    "leaky_relu": _unary("F.leaky_relu", negative_slope=0.01),
    "elu": _unary("F.elu", alpha=1.0, scale=1, input_scale=1),
    "softplus": _unary("F.softplus", beta=1, threshold=20),
    "mish": _unary("F.mish"),
    "hardswish": _unary("F.hardswish"),
    "log_sigmoid": _unary("F.logsigmoid"),
    "softmax": Function(name="F.softmax", parameters={"input": REQUIRED, "dim": None, "dtype": None}),
    "log_softmax": Function(name="F.log_softmax", parameters={"input": REQUIRED, "dim": None, "dtype": None}),
    "one_hot": _unary("F.one_hot", num_classes=-1),
    "pad": Function(name="F.pad", parameters={"input": REQUIRED, "pad": REQUIRED, "mode": "constant", "value": None}),
    "constant_pad_nd": Function(name="F.pad", parameters={"input": REQUIRED, "pad": REQUIRED, "value": 0}),
    "cat": Function(name="torch.cat", parameters={"tensors": REQUIRED, "dim": 0}),
    "stack": Function(name="torch.stack", parameters={"tensors": REQUIRED, "dim": 0}),
}  # fmt: skip
