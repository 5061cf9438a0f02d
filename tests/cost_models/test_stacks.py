from pathlib import Path

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.stacks import load_stack, stack_names

STACK = 'description = "d"\nsource = "s"\nfusion = "eager"\nfloat32_matmul = "tf32"\n'


def test_every_stack_loads() -> None:
    assert stack_names() == ("compiled", "eager")
    assert all(load_stack(name).name == name for name in stack_names())


def test_a_stack_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(STACK)
    assert load_stack(str(path)).float32_matmul == "tf32"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"eager"', '"eagre"', "did you mean eager"),
        ("fusion", "fusoin", "did you mean fusion"),
        ('source = "s"', "", "source is missing"),
        ('"tf32"', "3", "float32_matmul is missing or no text"),
    ],
)
def test_nonsense(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(STACK.replace(old, new, 1))
    with pytest.raises(AutoparError) as caught:
        load_stack(str(path))
    assert message in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(AutoparError, match="no stack 'compile'") as caught:
        load_stack("compile")
    assert "compiled" in str(caught.value)
