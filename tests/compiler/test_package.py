"""How files reach a folder: all or none, and nothing of the user's is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from autopar.compiler.package import check_stack, write_files
from autopar.planner.errors import AutoparError

FILES = {"sharded_model.py": "x = 1\n", "launch.sh": "#!/bin/sh\n"}


def test_writes_every_file_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    written = write_files(FILES, out, force=False)
    assert {path.name: path.read_text() for path in out.iterdir()} == FILES
    assert set(written) == set(out.iterdir())
    assert os.access(out / "launch.sh", os.X_OK)


def test_refuses_a_folder_with_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AutoparError, match="not empty: notes.txt") as error:
        write_files(FILES, tmp_path, force=False)
    assert "--force" in error.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_force_replaces_only_what_autopar_writes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "sharded_model.py").write_text("old")
    write_files(FILES, tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "sharded_model.py").read_text() == FILES["sharded_model.py"]


def test_refuses_a_file_as_folder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(AutoparError, match="is a file"):
        write_files(FILES, path, force=True)
    assert path.read_text() == "mine"


def test_a_folder_in_the_way_of_a_file_leaves_all_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "sharded_model.py").mkdir()
    (tmp_path / "launch.sh").write_text("old")
    with pytest.raises(AutoparError, match=r"sharded_model\.py is a folder"):
        write_files(FILES, tmp_path, force=True)
    assert (tmp_path / "launch.sh").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"sharded_model.py", "launch.sh"}


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="File name too long"):
        write_files(FILES, tmp_path / ("a" * 300), force=False)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AutoparError, match="cannot"):
        write_files(FILES, tmp_path / "file" / "below", force=False)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(AutoparError, match="cannot write"):
        write_files({**FILES, "no/such/folder.py": ""}, out, force=False)
    assert not out.exists()


def test_products_in_8_bits_are_not_written(tmp_path: Path) -> None:
    text = 'description = "d"\nsource = "s"\nfusion = "eager"\nfloat32_matmul = "ieee"\n'
    (tmp_path / "plain.toml").write_text(text)
    (tmp_path / "cast.toml").write_text(text + 'products = "float8"\n')
    check_stack("eager")
    check_stack(str(tmp_path / "plain.toml"))
    with pytest.raises(AutoparError, match="predicted, not emitted") as error:
        check_stack(str(tmp_path / "cast.toml"))
    assert "--json" in str(error.value)
