"""Work, depth and pictures of the folded graph."""

from xml.etree import ElementTree

import pytest
from autopar.planner.capture.analysis import WorkDepth, analyse
from autopar.planner.capture.drawing import draw_html, draw_svg, runs
from compare import SAMPLES, capture


@pytest.fixture(scope="module")
def graph():
    return capture(SAMPLES / "gpt.py", arguments={"num_layers": 3})


def test_folded_counts_are_multiplied_out(graph):
    found = analyse(graph, lambda node, operands: (1.0, 2.0))
    operations = sum(
        sum(1 for node in template.nodes if node.op) * count
        for template, count in zip(graph.templates, graph.counts(), strict=True)
    )
    assert found.forward_work == operations
    assert found.backward_work == 2 * operations
    assert found.backward_depth == 2 * found.forward_depth
    assert found.depth < found.work


def test_depth_of_a_deeper_model_grows_by_the_same_for_each_block():
    depths = [
        analyse(capture(SAMPLES / "mlp.py", arguments={"num_hidden": n}), lambda node, operands: (1.0, 0.0)).depth
        for n in (1, 2, 3)
    ]
    assert depths[2] - depths[1] == depths[1] - depths[0] == 3  # linear, bias, relu


def test_depth_counts_parallel_branches_once(graph):
    block = next(t for t in graph.templates if t.name == "Block")
    views = {n.name for n in block.nodes if n.op == "aten.reshape.default" and n.module == "attn"}
    alone = analyse(graph, lambda node, operands: (1.0 if node.name in views else 0.0, 0.0))
    assert alone.work == 3 * 4  # q, k, v and the output, three blocks
    assert alone.depth == 3 * 2  # q, k and v run side by side


def test_brent_bounds():
    found = WorkDepth(forward_work=60, backward_work=40, forward_depth=6, backward_depth=4)
    assert found.average_parallelism == 10
    assert found.brent_bounds(1) == (100, 110)
    assert found.brent_bounds(5) == (20, 30)
    assert found.brent_bounds(100) == (10, 11)
    with pytest.raises(ValueError, match="at least one"):
        found.brent_bounds(0)


def test_runs_are_found(graph):
    assert [run.repeats for run in runs(graph)] == [1, 1, 1, 3, 1, 1]


def test_the_picture_is_valid_and_complete(graph):
    root = ElementTree.fromstring(draw_svg(graph, lines=["W = 1 < 2"]))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert any(text and "Block" in text and "x 3" in text for text in texts)
    assert "W = 1 < 2" in texts
    page = draw_html(graph)
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
