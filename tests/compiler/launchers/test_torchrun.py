"""train.py and launch.sh: text that is valid, escaped, stable, and refuses a wrong number of ranks."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from autopar.compiler.launchers.train_script import python_literal
from autopar.cost_models.hardware import catalogue
from training_text import rendered

NASTY = 'a "quoted" \\ name\n# {braces} \u00e9'


def constants(text):
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def test_the_facts_of_the_plan_are_constants():
    found = constants(rendered()["train.py"])
    assert found["MODEL_FILE"] == "../gpt.py"
    assert found["MODEL_ARGUMENTS"] == {"preset": "tiny", "dropout": 0.1}
    assert found["BATCH_SIZE"] == 16
    assert found["DATA_PARALLEL"] == 2
    assert found["INPUT_BATCH_DIMS"] == {"ids": 0, "scale": None}


def test_a_rank_takes_its_share_of_the_batch():
    torch = pytest.importorskip("torch")
    text = rendered(batch_shares=(3, 1))["train.py"]
    constant = next(line for line in text.splitlines() if line.startswith("BATCH_SHARES"))
    definition = text[text.index("def share(") :].partition("\n\n\n")[0]
    names = {"torch": torch, "INPUT_BATCH_DIMS": {"ids": 0, "scale": None}}
    exec(f"{constant}\n{definition}", names)
    batch = {"ids": torch.arange(16), "scale": torch.ones(2)}
    shares = [names["share"](batch, rank, torch.device("cpu")) for rank in range(2)]
    assert [share["ids"].tolist() for share in shares] == [list(range(12)), list(range(12, 16))]
    assert all(share["scale"].shape == (2,) for share in shares)


def test_strings_of_the_plan_stay_strings():
    model = SimpleNamespace(path=NASTY, name="build", arguments={NASTY: [NASTY, None, (1, 2.5)]})
    found = constants(rendered(model=model)["train.py"])
    assert found["MODEL_FILE"] == NASTY
    assert found["MODEL_ARGUMENTS"] == {NASTY: [NASTY, None, (1, 2.5)]}


@pytest.mark.parametrize("value", [None, True, -1, 2.5, 1e-9, "", NASTY, [], (), (1,), {"a": {"b": [1, "'"]}}])
def test_literals_read_back(value):
    assert ast.literal_eval(python_literal(value)) == value


def test_only_literals_are_written():
    with pytest.raises(TypeError):
        python_literal(object())


def test_rendering_twice_is_equal():
    assert rendered() == rendered()


RUFF = Path(sys.executable).with_name("ruff")


@pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed")
@pytest.mark.parametrize("shares", [(), (3, 1), (*[6] * 32, *[2] * 32)], ids=["even", "few", "many"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_train_script_is_formatted(tmp_path, shares, schedule, zero, is_fused):
    text = rendered(batch_shares=shares, schedule=schedule, zero=zero, is_fused=is_fused)["train.py"]
    (tmp_path / "train.py").write_text(text)
    for command in (["format", "--check"], ["check", "--select", "E,F,I,UP,B,SIM"]):
        done = subprocess.run(
            [RUFF, *command, "--line-length", "120", "--isolated", "train.py"], cwd=tmp_path, capture_output=True
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_printed_by_one_rank(tmp_path, option):
    (tmp_path / "launch.sh").write_text(rendered()["launch.sh"])
    done = subprocess.run(
        ["bash", "launch.sh", "--steps", "2", option], cwd=tmp_path, env={**os.environ, "TORCHRUN": "echo"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["--standalone", "--nproc-per-node", "1", f"{tmp_path}/train.py", "--help"]


def test_nodes_follow_from_the_cluster():
    assert 'NNODES="${NNODES:-1}"' in rendered()["launch.sh"]
    assert 'NNODES="${NNODES:-4}"' in rendered(gpus=32, mesh={"pp": 8, "dp": 2, "tp": 2})["launch.sh"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "--standalone --nproc-per-node 8 {here}/train.py --steps 3"),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"},
            "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr node0 --master-port 29500 {here}/train.py "
            "--steps 3",
        ),
    ],
)
def test_launch_calls_torchrun(tmp_path, environment, expected):
    (tmp_path / "launch.sh").write_text(rendered()["launch.sh"])
    command = ["bash", str(tmp_path / "launch.sh"), "--steps", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "TORCHRUN": "echo", **environment}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.format(here=tmp_path)


UNEVEN = '[[groups]]\ngpu = "h100-sxm"\nnodes = 1\n[[groups]]\ngpu = "h100-sxm"\nnodes = 1\ngpus_per_node = 4\n'


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NODE_RANK": "0"}, "--nproc-per-node 8 "),
        ({"NODE_RANK": "1"}, "--nproc-per-node 4 "),
        ({"NNODES": "1"}, "--standalone --nproc-per-node 12 "),
        ({"NODE_RANK": "2"}, None),
        ({"NODE_RANK": "1", "NGPU": "8"}, None),
        ({"NNODES": "3"}, None),
    ],
)
def test_each_node_starts_its_own_number_of_ranks(tmp_path, environment, expected):
    lines = (Path(catalogue.__file__).with_name("clusters") / "h100-sxm.toml").read_text().splitlines()
    cluster = tmp_path / "uneven.toml"
    cluster.write_text("\n".join([*(line for line in lines if not line.startswith("gpu =")), UNEVEN]))
    text = rendered(cluster=str(cluster), gpus=12, mesh={"pp": 3, "dp": 2, "tp": 2})["launch.sh"]
    (tmp_path / "launch.sh").write_text(text)
    done = subprocess.run(
        ["bash", str(tmp_path / "launch.sh")], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "TORCHRUN": "echo", **environment},
    )  # fmt: skip
    assert (done.returncode, expected is None) in ((0, False), (2, True)), done.stderr
    assert (expected or "") in done.stdout
    assert ("nodes of " in done.stderr) == (expected is None)


def test_launch_refuses_another_number_of_ranks(tmp_path):
    (tmp_path / "launch.sh").write_text(rendered()["launch.sh"])
    done = subprocess.run(
        ["bash", str(tmp_path / "launch.sh")],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "TORCHRUN": "echo", "NGPU": "4"},
    )
    assert done.returncode == 2
    assert "8 ranks" in done.stderr
    assert done.stdout == ""
