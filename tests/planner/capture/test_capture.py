"""The captured graph equals the user's module: loss, gradients, buffers, eval mode."""

import pytest
import torch
from compare import CASES, SAMPLES, assert_equal, outcome

BFLOAT16_TOLERANCE = 2e-2  # a bias is added after the product is rounded, so bfloat16 rounds twice
SAMPLE_NAMES = ("gpt", "llama", "mlp", "resnet", "matrix_factorization", "logistic_regression")


@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_sample_model(name):
    small = {"gpt": {"num_layers": 2}, "llama": {"num_layers": 2}}
    assert_equal(outcome(SAMPLES / f"{name}.py", arguments=small.get(name, {})))


def test_dropout_draws_alike_and_stops_in_eval():
    result = outcome(SAMPLES / "gpt.py", arguments={"num_layers": 2, "dropout": 0.1})
    assert_equal(result)
    assert result.loss != result.eval_loss


TRAPS = [
    "RegAll", "HasAttr", "LenUsed", "UNetSkip", "OuterPerLayer", "IdxUsed", "GlobalCounter", "TwoStreams", "Shared",
    "PeekParam", "Frozen", "NoList", "Seq", "CkptB", "ReadsParent", "DictRead", "Rand",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("trap", TRAPS)
def test_trap(trap):
    assert_equal(outcome(CASES / "folding_traps.py", arguments={"trap": trap}))


@pytest.mark.slow
def test_trap_with_in_place_blocks():
    # PyTorch itself cannot run the backward of this model, only its forward
    assert_equal(outcome(CASES / "folding_traps.py", arguments={"trap": "InPlace"}, backward=False))


@pytest.mark.slow
def test_trap_with_autocast_and_no_grad():
    result = outcome(CASES / "folding_traps.py", arguments={"trap": "NoGrad"}, dtype=torch.float32)
    assert_equal(result, tolerance=3 * BFLOAT16_TOLERANCE)  # relu opens at other places where the bias rounds


def test_autocast_without_bias_is_exact(model_file):
    path = model_file(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Linear(8, 8, bias=False)\n        self.n = nn.LayerNorm(8)\n"
        "    def forward(self, x):\n        with torch.no_grad():\n            g = x.abs().amax()\n"
        "        with torch.autocast('cpu', torch.bfloat16):\n            y = self.l(self.n(x)).softmax(-1)\n"
        "        return (x + torch.relu(y) / g).square().mean()\n"
        "def example_inputs(batch_size=4):\n    return (torch.randn(batch_size, 8),)\n"
    )
    assert_equal(outcome(path, dtype=torch.float32), tolerance=1e-6)


@pytest.mark.slow
def test_trap_with_batch_norm():
    inputs = {"x": "float32[B,64]"}
    result = outcome(CASES / "folding_traps.py", arguments={"trap": "BatchNormed"}, inputs=inputs, batch_size=4)
    assert_equal(result)
    assert result.buffer_errors


REPORTS = [
    "causal_mask_buffers", "checkpoint_non_reentrant", "control_flow_on_shapes", "conv_stride_groups",
    "dataclass_unregistered", "dropout_everywhere", "embedding_bag", "encoder_decoder_shared", "fused_qkv_split",
    "inplace_ops", "kv_heads_fewer_than_tp", "kwargs_only_dict_output", "param_used_directly", "sort_cumsum_topk",
    "tied_embedding_pp", "unused_parameters", "weight_norm",
]  # fmt: skip
# These write out float32 or bfloat16 in their code, so float64 would be another model.
FLOAT32_REPORTS = [
    "autocast_and_no_grad", "complex_rope", "lstm_gru", "moe_dense_dispatch", "vocab_not_divisible",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_report(name):
    assert_equal(outcome(CASES / "reports" / f"{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOAT32_REPORTS)
def test_report_in_float32(name):
    tolerance = BFLOAT16_TOLERANCE if name == "autocast_and_no_grad" else 1e-5
    assert_equal(outcome(CASES / "reports" / f"{name}.py", dtype=torch.float32), tolerance=tolerance)
