"""Made-up measurements of a CPU and of a GPU."""

from __future__ import annotations

from autopar.compiler.profile.kernels import AttentionTime, LaunchTimes, Memory, ProductTime
from autopar.compiler.profile.machinery import Machinery, Update
from autopar.compiler.profile.measurements import Measurements
from autopar.compiler.profile.messages import OPS, MessageTime

SHAPES = [(64, 64, 64), (256, 512, 512), (1024, 128, 512), (512, 512, 512), (2048, 2048, 2048)]


def measurements(device: str, *, ranks: int = 2) -> Measurements:
    rates = {"float32": 5e10, "float64": 2e10, "bfloat16": 3e9, "float16": 3e9}
    if device == "cuda":
        rates = {"bfloat16": 6e14, "float16": 6e14, "float32": 5e13, "tf32": 3e14, "float64": 4e13}
    products = {
        dtype: tuple(
            ProductTime(m=m, n=n, k=k, seconds=4e-6 + 2 * (m + 4) * (n + 4) * (k + 8) / rate) for m, n, k in SHAPES
        )
        for dtype, rate in rates.items()
    }
    bandwidth = 2e10 if device == "cpu" else 3e12
    messages = tuple(
        MessageTime(op=op, ranks=size, num_bytes=num_bytes, seconds=2e-4 + num_bytes / 1e9)
        for size in ((2,) if ranks == 2 else ())
        for op in OPS
        for num_bytes in (256, 1 << 16, 1 << 22)
    )
    pair = (1e-5, 2e-5)
    return Measurements(
        device=device,
        device_name='Some \\Device\\ "X"',
        ranks=ranks,
        sm_count=1 if device == "cpu" else 132,
        memory=Memory(num_bytes=8 << 30, overhead_bytes=1 << 28),
        products=products,
        sustained_fraction=0.95,
        streaming=tuple(
            (size, 5e-6 + 2 * size / bandwidth, 9e-6 + 3 * size / bandwidth) for size in (1 << 12, 1 << 24)
        ),
        transcendental_seconds=1e-9,
        attention=tuple(
            AttentionTime(keys=keys, flops=10**8, seconds=1e-3 * (1 + 60 / keys), is_backward=is_backward)
            for keys in (64, 256, 1024)
            for is_backward in (False, True)
        ),
        launches=LaunchTimes(
            device_seconds=5e-6, host_seconds=5e-6, backward_seconds=9e-6, view_seconds=2e-6, view_backward_seconds=4e-6
        ),
        machinery=Machinery(
            updates={
                name: Update(tensor_seconds=5e-5, sharded_tensor_seconds=4e-4, seconds_per_byte=1e-9)
                for name in ("adamw", "sgd", "clip")
            },
            parameter=pair,
            conversion=pair,
            checkpoint_seconds=5e-5,
            fsdp_group=pair,
            fsdp_parameter=pair,
            action_seconds=1e-4,
        ),
        messages=messages,
        hidden_fraction=0.5 if ranks > 1 else None,
    )
