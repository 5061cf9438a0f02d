"""The configurations whose predictions are timed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import prediction_speed


def test_there_are_a_thousand_different_configurations():
    found = [
        (setup.tp, setup.pp, setup.dp, setup.microbatch_sizes, setup.interleaves, setup.zero, setup.policy)
        for setup in prediction_speed.configurations()
    ]
    assert len(found) == len(set(found)) >= 1000
