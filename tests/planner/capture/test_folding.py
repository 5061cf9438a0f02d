"""Units, templates and the prelude."""

import pytest
from autopar.planner.capture.graph import Kind
from compare import CASES, SAMPLES, capture


def names(graph):
    return [graph.template_of(number).name for number in range(len(graph.units))]


def test_gpt_folds_its_blocks():
    graph = capture(SAMPLES / "gpt.py", arguments={"num_layers": 3})
    assert names(graph) == ["Prelude", "Wte", "Wpe", "Block", "Block", "Block", "LnF", "LmHead"]
    assert [unit.fqn for unit in graph.units][3:6] == ["h.0", "h.1", "h.2"]
    block = graph.template_of(3)
    assert block.pattern == "h.*"
    assert block.is_module
    assert [node.name for node in block.of_kind(Kind.INPUT)] == ["x"]
    assert "attn.c_attn.weight" in block.by_name
    assert block.by_name["attn.c_attn.linear"].source.startswith("gpt.py:")
    assert dict(graph.units[4].tensors)["attn.c_attn.weight"] == "h.1.attn.c_attn.weight"


def test_tied_weight_has_one_name():
    graph = capture(SAMPLES / "gpt.py", arguments={"num_layers": 1})
    assert graph.tensors["wte.weight"].aliases == ("lm_head.weight",)
    assert dict(graph.units[-1].tensors) == {"weight": "wte.weight"}


def test_time_and_size_of_the_graph_do_not_depend_on_depth():
    small = capture(SAMPLES / "llama.py", arguments={"num_layers": 2})
    large = capture(SAMPLES / "llama.py", arguments={"num_layers": 4})
    assert [t.nodes for t in small.templates] == [t.nodes for t in large.templates]


def test_prelude_holds_what_needs_no_parameter():
    graph = capture(SAMPLES / "llama.py", arguments={"num_layers": 2})
    prelude = graph.templates[0]
    assert not prelude.of_kind(Kind.PARAMETER)
    assert {"cos", "sin"} <= {node.op.split(".")[1] for node in prelude.of_kind(Kind.OP)}
    operations = {n.op for t in graph.templates[1:] for n in t.of_kind(Kind.OP)}
    assert not operations & {"aten.arange.default", "aten.cos.default", "aten.ne.Scalar"}


def test_mlp_can_be_cut_at_every_layer():
    graph = capture(SAMPLES / "mlp.py")
    assert len(graph.units) == 9
    assert len(graph.templates) == 4
    assert [item.name for item in graph.inputs] == ["input", "labels"]
    assert [item.batch_dim for item in graph.inputs] == [0, 0]


def test_resnet_blocks_and_batch_norm():
    graph = capture(SAMPLES / "resnet.py")
    blocks = [name for name in names(graph) if name.startswith("BasicBlock")]
    assert len(blocks) == 6
    block = next(t for t in graph.templates if t.name == "BasicBlock")
    assert [name for name, _ in block.buffer_updates] == ["bn1.num_batches_tracked", "bn2.num_batches_tracked"]
    flags = [n.args[5] for n in block.nodes if n.op == "aten.batch_norm.default"]
    assert [flag.kind for flag in flags] == ["training", "training"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trap", "num_templates"),
    [("IdxUsed", 10), ("GlobalCounter", 10), ("Shared", 4), ("NoList", 4), ("Seq", 4), ("Frozen", 5), ("UNetSkip", 6)],
)
def test_trap_templates(trap, num_templates):
    """Blocks with other constants have other templates; equal ones share one."""
    graph = capture(CASES / "folding_traps.py", arguments={"trap": trap})
    assert len(graph.templates) == num_templates
    assert len({t.name for t in graph.templates}) == len({t.pattern for t in graph.templates}) == num_templates


@pytest.mark.slow
def test_shared_module_keeps_its_name():
    graph = capture(CASES / "folding_traps.py", arguments={"trap": "Shared"})
    assert [unit.fqn for unit in graph.units].count("blocks.0") == 8


def test_a_block_whose_weight_others_read_is_no_module(model_file):
    block = (
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up = nn.Linear(8, 16)\n        self.down = nn.Linear(16, 8)\n"
        "    def forward(self, x):\n        return x + self.down(self.up(x).relu())\n"
        "class Net(nn.Module):\n    def __init__(self, tied: bool = True):\n        super().__init__()\n"
        "        self.h = nn.ModuleList(Block() for _ in range(4))\n"
        "        if tied:\n            self.h[3].up.weight = self.h[0].up.weight\n"
        "    def forward(self, x):\n        for block in self.h:\n            x = block(x)\n"
        "        return x.square().mean()\n"
        "def example_inputs(batch_size=4):\n    return (torch.randn(batch_size, 8),)\n"
    )
    path = model_file(block)
    shared, own = capture(path, name="Net"), capture(path, name="Net", arguments={"tied": "false"})
    assert [own.template_of(unit).is_module for unit in range(1, 5)] == [True] * 4
    assert [shared.template_of(unit).is_module for unit in range(1, 5)] == [False, True, True, True]
    assert dict(shared.units[4].tensors)["up.weight"] == "h.0.up.weight"
    # h.3 holds fewer tensors than h.1 and h.2, so it is no copy of them.
    assert shared.units[2].template == shared.units[3].template != shared.units[4].template
