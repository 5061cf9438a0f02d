import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware import load_gpu
from autopar.cost_models.memory import Memory, activation_bytes, fits, overhead_bytes, state_bytes
from autopar.cost_models.optimizer import optimizer_seconds
from hypothesis import given
from hypothesis import strategies as st

H100 = load_gpu("h100-sxm")
COUNT = 10**9  # parameters


def states(**changes: object) -> Memory:
    settings: dict = {"zero": 0, "dp": 8, "optimizer": "adamw", "precision": "fp32", "largest_unit_bytes": 4 * 10**7}
    return state_bytes(4 * COUNT, **{**settings, **changes})


def test_records_add_up() -> None:
    one = Memory(parameters=1, activations=2)
    assert (one + one).total_bytes == 6
    assert one + Memory.zero() == one
    assert one.by_component()["total"] == sum(v for k, v in one.by_component().items() if k != "total") == 3
    with pytest.raises(ValueError, match="activations is negative"):
        Memory(activations=-1)


def test_bytes_per_parameter() -> None:
    assert states().total_bytes == 16 * COUNT  # parameter, gradient, two moments
    assert states(optimizer="sgd").total_bytes == 8 * COUNT
    assert states(precision="bf16").total_bytes == 18 * COUNT  # and a copy in bf16
    assert states(zero=1).total_bytes == (8 + 1) * COUNT
    assert states(zero=3).total_bytes == 16 * COUNT // 8 + 3 * 4 * 10**7
    assert states(zero=2).total_bytes == 16 * COUNT // 8 + 4 * COUNT + 4 * 10**7
    assert states(zero=2, precision="bf16").gather_buffers == 2 * COUNT + 2 * 10**7 + 4 * 10**7
    assert states(zero=3, precision="bf16").master_weights == 4 * COUNT // 8
    assert states(zero=3, precision="bf16").parameters == 0


@given(st.integers(0, 10**12), st.sampled_from([1, 2, 8, 64]), st.sampled_from(["fp32", "bf16", "fp16"]))
def test_more_splitting_needs_no_more(parameter_bytes: int, dp: int, precision: str) -> None:
    totals = [
        state_bytes(parameter_bytes, zero=zero, dp=dp, optimizer="adamw", precision=precision, largest_unit_bytes=0)
        for zero in (0, 1, 3)
    ]
    sizes = [memory.total_bytes for memory in totals]
    assert sizes == sorted(sizes, reverse=True)
    if dp == 1:
        assert totals[0] == totals[-1]


def test_frozen_parameters_have_no_state() -> None:
    assert states(frozen_bytes=100).total_bytes == states().total_bytes + 100


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="zero is 4"):
        states(zero=4)
    with pytest.raises(ValueError, match="precision"):
        states(precision="bf8")
    with pytest.raises(AutoparError, match="no optimizer 'adam'"):
        states(optimizer="adam")


def test_activations() -> None:
    assert activation_bytes([10, 20, 30], in_flight=4).activations == 240
    full = activation_bytes([10, 20, 30], in_flight=4, input_bytes=[1, 2, 3], is_checkpointed=[True, True, False])
    assert full.activations == 4 * (1 + 2 + 30) + 18
    # what is smaller than the inputs is not made larger by checkpointing
    assert activation_bytes([1], in_flight=2, input_bytes=[5], is_checkpointed=[True]).activations == 2


def test_overhead_and_capacity() -> None:
    assert overhead_bytes(Memory(), H100).overhead == H100.overhead_bytes
    assert overhead_bytes(Memory(activations=10**9), H100).overhead > H100.overhead_bytes
    assert fits(Memory(parameters=H100.hbm_bytes), H100)
    assert not fits(Memory(parameters=H100.hbm_bytes, overhead=1), H100)


def test_the_step_of_an_optimizer() -> None:
    adamw = optimizer_seconds(4 * COUNT, H100, optimizer="adamw")
    assert 28 * COUNT / H100.hbm_bytes_per_second < adamw < 60 * COUNT / H100.hbm_bytes_per_second
    assert optimizer_seconds(4 * COUNT, H100, optimizer="sgd") < adamw
    assert optimizer_seconds(0, H100, optimizer="sgd", num_tensors=100) > 0
    with pytest.raises(AutoparError):
        optimizer_seconds(1, H100, optimizer="lion")
