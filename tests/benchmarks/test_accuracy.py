"""The benchmark of published runs: reading rows, expressing them, and scoring; predictions of a few in full."""

import csv
import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.stacks import load_stack
from autopar.planner.capture import capture_model
from autopar.planner.capture.graph import Kind, ModelGraph
from autopar.planner.errors import CannotLower

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUNS = BENCHMARKS / "data" / "runs.csv"
STRONG = ("vtrain-multi", "narayanan-t1", "korthikanti-t5", "kempnerforge", "fms-fsdp", "bloom", "tr3m", "oneflow")

sys.path.insert(0, str(BENCHMARKS))
from accuracy import models, page, pins, predict, rows, scores, setups  # noqa: E402

ROWS = rows.read_rows(RUNS)


@pytest.fixture(autouse=True)
def _no_stale_path() -> Iterator[None]:
    yield
    assert str(BENCHMARKS) in sys.path


def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy_command", BENCHMARKS / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(name: str) -> rows.Row:
    return next(row for row in ROWS if row.id == name)


def test_rows_are_read_as_they_stand() -> None:
    first = row("vtrain-multi-001")
    assert (first.layers, first.hidden, first.tp, first.dp) == (30, 3072, 1, 64)
    assert first.measured_seconds == pytest.approx(3.5665)
    assert row("bigsci1b3-08").ran_out_of_memory
    assert row("narayanan-t1-01").microbatch is None


@pytest.mark.parametrize("family", STRONG)
def test_strong_families_are_expressed(family: str) -> None:
    mine = [r for r in ROWS if r.family == family and r.layers and r.dp * r.tp * r.pp == r.gpus]
    assert len(mine) >= 4
    for each in mine:
        setups.setup_of(each)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVLink3 NVSwitch; 8x HDR200 IB per node (Selene)", (8, 200.0)),
        ("NVLink intra; inter-node 800 Gb/s per node (repo config)", (4, 200.0)),
        ("NVLink4; RDMA 400Gb/s per GPU", (None, 400.0)),
        ("hybrid-cube-mesh NVLink2 (NV1/NV2) ; 1x EDR 100Gb/s IB per NODE", (1, 100.0)),
        ("NVLink intra; 4x Omni-Path 100Gb per node (tr11 README)", (4, 100.0)),
        ("NVLink intra-node; inter-node not stated in table", (None, None)),
    ],
)
def test_networks_are_read(text: str, expected: tuple[int | None, float | None]) -> None:
    assert setups._network(text) == expected


def test_what_cannot_be_expressed_says_why() -> None:
    with pytest.raises(setups.CannotExpress, match="layers is not stated"):
        setups.setup_of(row("bigsci176b-004"))
    with pytest.raises(setups.CannotExpress, match="context parallelism"):
        setups.setup_of(replace(row("titan-t1-1"), cp=2))
    with pytest.raises(setups.CannotExpress, match="not in the hardware catalogue"):
        setups.setup_of(replace(row("titan-t1-1"), gpu="tpu-v5"))
    stated = next(r for r in ROWS if r.family == "nemo" and r.layers and r.vocab and r.cp == 1)
    with pytest.raises(setups.CannotExpress, match="what is recomputed is not stated"):
        setups.setup_of(stated)
    assert setups.setup_of(replace(stated, checkpointing="full")).policy == "full"
    with pytest.raises(setups.CannotExpress, match="less than 8 bits"):
        setups.setup_of(replace(row("titan-t1-1"), float8="nvfp4"))


@pytest.mark.parametrize(
    ("text", "zero"),
    [("none", 0), ("none/zero1", 1), ("zero2 (no reshard)", 2), ("zero3", 3), ("HSDP", 3), ("FSDP2", 3), ("", 0)],
)
def test_sharding_is_read(text: str, zero: int) -> None:
    assert setups.setup_of(replace(row("titan-t1-1"), fsdp=text)).zero == zero
    assert setups.setup_of(replace(row("titan-t1-1"), fsdp=text, dp=1, tp=8)).zero == 0


def test_products_in_8_bits_are_a_choice_of_the_stack() -> None:
    plain, cast = setups.setup_of(row("titan-t1-2")).stack, setups.setup_of(row("titan-t1-3")).stack
    assert (plain.products, plain.gathered_dtype) == ("compute dtype", "compute")
    assert (cast.products, cast.gathered_dtype) == ("float8", "float8")
    assert setups.setup_of(row("mosaic-075")).stack.gathered_dtype == "compute"


def result(measured: float, predicted: float, tp: int) -> scores.Result:
    made = replace(row("vtrain-multi-001"), measured_seconds=measured, tp=tp, id=str(tp))
    return scores.Result(row=made, predicted_seconds=predicted, fits=True)


@pytest.mark.parametrize(("column", "text"), [("vocab", "many"), ("tp", "-1"), ("tp", "0"), ("peak_mem_gib", "nan")])
def test_a_line_that_cannot_be_read_is_a_row_with_its_reason(column: str, text: str, tmp_path: Path) -> None:
    header, first, *_ = RUNS.read_text().splitlines()
    cells = next(csv.reader([first]))
    cells[next(csv.reader([header])).index(column)] = text
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([next(csv.reader([header])), cells])
    (read,) = rows.read_rows(tmp_path / "runs.csv")
    with pytest.raises(setups.CannotExpress, match=column):
        setups.setup_of(read)


def written(path: Path, lines: list[dict[str, str]], *, encoding: str = "utf-8") -> Path:
    """A file of runs as someone else might write it."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(lines)
    return path


def line_of(name: str) -> dict[str, str]:
    with RUNS.open(newline="") as file:
        return next(line for line in csv.DictReader(file) if line["id"] == name)


def test_a_file_may_have_other_columns_and_leave_out_optional_ones(tmp_path: Path) -> None:
    kept = {name: line_of("vtrain-multi-017")[name] for name in rows._REQUIRED}
    one = kept | {"judge": 'extra, with "quotes"', "notes": "a comma, quoted", "micro_batch_seqs": "4"}
    two = kept | {"hidden": "4096.0", "id": "second", "contaminated": "a reason, or two"}
    first, second = rows.read_rows(written(tmp_path / "runs.csv", [one, two], encoding="utf-8-sig"))
    assert (first.id, first.notes, first.microbatch, first.problem) == ("line 2", "a comma, quoted", 4, "")
    assert (second.id, second.hidden, second.contaminated) == ("second", 4096, "a reason, or two")
    with pytest.raises(setups.CannotExpress, match="kv_heads is not stated"):
        setups.setup_of(first)
    setup = setups.setup_of(replace(first, kv_heads=first.heads))
    assert setup.cluster.gpus_per_node == 8  # of the catalogue, where the file does not say


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"id,family\nx,y\n", "column 'layers', 'hidden', .* is missing"),
        (",".join(rows._REQUIRED).encode(), "a header and no row"),
        (b"\xff\xfe\x00\x01", "no CSV text in UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(AutoparError, match=message):
        rows.read_rows(path)
    assert command().main(["--runs", str(path), "--json"]) == 2


def test_a_line_with_a_comma_too_many_is_a_row_with_its_reason(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.csv", [line_of("vtrain-multi-017")])
    path.write_text(path.read_text().rstrip() + ",more\n")
    (read,) = rows.read_rows(path)
    with pytest.raises(setups.CannotExpress, match="more cells than columns"):
        setups.setup_of(read)


@pytest.mark.parametrize(("column", "text", "reason"), [
    ("gpu", "h100-smx", "did you mean h100-sxm"), ("gpu", "", "gpu is not stated"),
    ("layers", "13.5", "no whole number"),
    ("layers", "1e9", "layers is 1000000000"), ("family", "mine", "no software stack is known"),
])  # fmt: skip
def test_what_a_line_gets_wrong_is_named(column: str, text: str, reason: str, tmp_path: Path) -> None:
    (read,) = rows.read_rows(written(tmp_path / "runs.csv", [line_of("vtrain-multi-017") | {column: text}]))
    with pytest.raises(setups.CannotExpress, match=reason):
        setups.setup_of(read)


def test_contaminated_rows_are_in_one_figure_and_not_in_the_other() -> None:
    good, bad = result(1.0, 1.1, 1), result(1.0, 2.0, 2)
    bad = replace(bad, row=replace(bad.row, contaminated="twice the work"))
    fp8 = replace(good, row=replace(good.row, float8="tensorwise"))
    families = scores.family_scores([good, bad, fp8])
    score = families["vtrain-multi"]
    assert (score.n, score.clean_n) == (2, 1)
    assert score.mape_percent == pytest.approx(55.0)
    assert score.clean_mape_percent == pytest.approx(10.0)
    assert families["vtrain-multi fp8"].n == 1


def test_every_contaminated_row_says_why_and_is_strong() -> None:
    marked = [each for each in ROWS if each.contaminated]
    assert {each.family for each in marked} == {"vtrain-multi", "bloom", "llm-foundry", "torchtitan"}
    assert all(len(each.contaminated) > 10 for each in marked)


def test_unseen_rows_are_expressed_and_none_is_a_development_row() -> None:
    unseen = rows.read_rows(BENCHMARKS / "data" / "unseen.csv")
    assert len({each.id for each in unseen}) == len(unseen) > 500
    assert not {each.family for each in unseen} & {each.family for each in ROWS}
    made = [setups.setup_of(each) for each in unseen]
    assert {setup.stack.name for setup in made} >= {"scaling", "scaling-torch", "scaling-flash2rms", "internevo"}
    table = page._unseen(scores.family_scores([result(1.0, 1.07, 1)]))
    assert any(line.startswith("| scaling, first look | 401 | 9.7 |") for line in table)
    assert any(line.startswith("| vtrain-multi | 1 | 7.0") for line in table)


def test_pipelines_deal_out_blocks_or_all_layers() -> None:
    shape = models.Shape(file="llama.py", arguments=(("vocab_size", 64), ("context", 8), ("num_heads", 2),
                         ("width", 16), ("hidden", 32), ("num_kv_heads", 2), ("tied", False)))  # fmt: skip

    def blocks(layers: int, dealt: str) -> list[int]:
        graph = models.deepened(models.captured(shape), layers)
        counts = graph.counts()
        block = max(range(len(counts)), key=lambda t: counts[t])
        stages = predict.stages_of(graph, layers, 4, dealt=dealt)
        return [sum(graph.units[i].template == block for i in range(*stage)) for stage in stages]

    assert blocks(8, "blocks") == [2, 2, 2, 2]
    assert blocks(10, "layers") == [3, 3, 3, 1]  # of 13: the first holds the embedding, the last norm and head
    with pytest.raises(setups.CannotExpress, match="8 blocks on 4 stages"):
        blocks(8, "layers")


def test_targets_are_met_or_missed() -> None:
    rows = page._targets(scores.family_scores([result(1.0, 1.07, 1)]))
    assert "| vtrain-multi | step time, all rows | 8 | 7.00 | met |" in rows
    assert "| vtrain-multi | step time, clean rows | 6 | 7.00 | missed |" in rows
    assert not any("bloom" in line for line in rows)


def test_regret_and_tau() -> None:
    sweep = [result(1.0, 2.0, 1), result(1.1, 1.0, 2), result(3.0, 4.0, 4)]
    assert scores.regret_percent(sweep) == pytest.approx(10.0)
    assert scores.kendall_tau(sweep) == pytest.approx(1 / 3)
    perfect = [result(float(i), 2.0 * i, i) for i in range(1, 7)]
    family = scores.family_scores(perfect)["vtrain-multi"]
    assert (family.sweeps, family.regret_percent_mean, family.kendall_tau) == (1, 0.0, 1.0)
    assert family.mape_percent == pytest.approx(100.0)


def test_stages_are_even_or_count_their_ends() -> None:
    units = ("prelude", *["block"] * 10, "head")
    graph = _graph_of(units)
    assert predict.stages_of(graph, 10, 2) == ((0, 6), (6, 12))
    assert [b - a for a, b in predict.stages_of(graph, 10, 3)] == [3 + 1, 4, 3 + 1]
    assert [b - a for a, b in predict.stages_of(graph, 10, 7)] == [2 + 1, 2, 2, 1, 1, 1, 1 + 1]
    assert [b - a for a, b in predict.stages_of(graph, 10, 4)] == [2 + 1, 3, 3, 2 + 1]


def _graph_of(names: tuple[str, ...]) -> ModelGraph:
    from autopar.planner.capture.graph import Template, Unit, Value

    kinds = list(dict.fromkeys(names))
    templates = tuple(Template(name=kind, pattern=kind, nodes=(), outputs=()) for kind in kinds)
    units = tuple(Unit(template=kinds.index(name), fqn=name, inputs=()) for name in names)
    return ModelGraph(
        name="m", batch_size=1, inputs=(), templates=templates, units=units, loss=Value(len(units) - 1, 0), tensors={}
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", ["gpt.py", "llama.py"])
def test_a_model_made_deeper_and_wider_equals_its_capture(file: str) -> None:
    shape = models.Shape(file=file, arguments=(("preset", "tiny"),))
    graph = models.captured(shape)
    software = setups.SOFTWARE["kempnerforge"]
    stack = setups._stack(row("kempner-mfu-01"), software)
    cluster = setups._cluster(row("kempner-mfu-01"))
    placements = pins.batch_placements(graph, cluster=cluster, stack=stack)
    made = models.deepened(models.with_batch(graph, placements, 8), 4)
    whole = capture_model(
        BENCHMARKS.parent / "sample_models" / file,
        name="build",
        arguments={"preset": "tiny", "num_layers": 4},
        batch_size=8,
        guarded=False,
    ).graph
    assert made.units == whole.units
    assert made.loss == whole.loss
    assert dict(made.tensors) == dict(whole.tensors)
    assert made.inputs == whole.inputs
    for ours, theirs in zip(made.templates, whole.templates, strict=True):
        assert [node.name for node in ours.nodes] == [node.name for node in theirs.nodes]
        for a, b in zip(ours.nodes, theirs.nodes, strict=True):
            assert a.outputs == b.outputs, a.name
            assert a.kind is not Kind.OP or a.op == b.op


@pytest.mark.parametrize(
    ("error", "is_expressed"),
    [(CannotLower("no such split"), False), (AutoparError("no such GPU"), False), (KeyError("a"), True),
     (ValueError("b"), True)],
)  # fmt: skip
def test_faults_of_the_benchmark_are_not_taken_for_rows_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_expressed: bool
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(predict.Predictor, "_evaluate", fails)
    with pytest.raises(type(error) if is_expressed else setups.CannotExpress):
        predict.Predictor().predict(setups.setup_of(row("vtrain-multi-017")))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "percent"), [("vtrain-multi-017", 8), ("kempner-mfu-03", 8), ("bigsci176b-120", 8)])
def test_single_runs_are_predicted(name: str, percent: float) -> None:
    each = row(name)
    predicted = predict.Predictor().predict(setups.setup_of(each))
    assert predicted.seconds == pytest.approx(each.measured_seconds, rel=percent / 100)
    assert predicted.fits


@pytest.mark.slow
def test_the_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = RUNS.read_text().splitlines()
    chosen = [lines[0], *(line for line in lines if line.startswith(("mosaic-212", "mosaic-075", "bigsci176b-004")))]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(chosen) + "\n")
    assert command().main(["--runs", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["families"]["llm-foundry"]["n"] == 1
    assert answer["families"]["bloom"]["not_expressed"] == 1
    assert answer["families"]["llm-foundry fp8"]["n"] == 1
    assert abs(answer["families"]["llm-foundry fp8"]["mape_percent"]) < 8
    assert set(answer["rows"][0]) >= {"id", "family", "reason", "contaminated", "error_percent", "memory_error_percent"}
    wanted = ("n", "mape_percent", "clean_n", "clean_mape_percent", "memory_mape_percent", "clean_memory_mape_percent")
    assert all(set(wanted) <= set(family) for family in answer["families"].values())
    assert command().main(["--runs", str(tmp_path / "none.csv")]) == 2


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "stacks").glob("*.toml")), ids=lambda path: path.stem)
def test_stack_files_hold_choices_only(path: Path) -> None:
    values = tomllib.loads(path.read_text())
    assert all(isinstance(value, str) for value in values.values())
    assert load_stack(str(path)).source == values["source"]
