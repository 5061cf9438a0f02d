"""Makes `compare` importable by the tests beside it."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def model_file(tmp_path):
    """Write a model file and return its path."""

    def write(text: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.write_text("import torch\nimport torch.nn.functional as F\nfrom torch import nn\n" + text)
        return path

    return write
