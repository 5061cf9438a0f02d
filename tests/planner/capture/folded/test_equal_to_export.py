"""Recording repeated blocks once gives what torch.export gives, operation by operation, or says why it does not."""

import json
from unittest import mock

import pytest
from autopar.planner.capture import capture_model
from autopar.planner.capture.folded import block_calls
from autopar.planner.errors import AutoparError
from compare import CASES, SAMPLES
from expansion import assert_recorded_equals_exported

FOLDED = [
    "NoGrad", "RegAll", "HasAttr", "LenUsed", "UNetSkip", "OuterPerLayer", "TwoStreams", "Shared", "PeekParam",
    "Frozen", "NoList", "Seq", "CkptB", "Rand",
]  # fmt: skip
# What each says that cannot be folded.
NOT_FOLDED = {
    "IdxUsed": "each copy computes something else",
    "GlobalCounter": "it changes global state",
    "InPlace": "it writes to an argument",
    "ReadsParent": "it uses a tensor without data that is no input, parameter or buffer",
    "DictRead": "it uses __dict__ to read attributes that differ between its copies",
}


@pytest.mark.parametrize("trap", FOLDED)
def test_trap_is_folded(trap):
    notes = assert_recorded_equals_exported(CASES / "folding_traps.py", arguments={"trap": trap})
    assert not [note for note in notes if "one by one" in note or "torch.export" in note]


@pytest.mark.parametrize("trap", NOT_FOLDED)
def test_trap_is_not_folded(trap):
    (note,) = assert_recorded_equals_exported(CASES / "folding_traps.py", arguments={"trap": trap})
    assert note.startswith("copies of ")
    assert note.endswith(f"are captured one by one: {NOT_FOLDED[trap]}")


def test_trap_with_running_statistics():
    options = {"arguments": {"trap": "BatchNormed"}, "inputs": {"x": "float32[B,64]"}, "batch_size": 4}
    assert not assert_recorded_equals_exported(CASES / "folding_traps.py", **options)


SMALL = {"gpt": {"num_layers": 3, "dropout": 0.1}, "llama": {"num_layers": 3}}


@pytest.mark.parametrize("name", [path.stem for path in sorted(SAMPLES.glob("*.py"))])
def test_sample_model(name):
    assert not assert_recorded_equals_exported(SAMPLES / f"{name}.py", arguments=SMALL.get(name, {}))


REPORTS = sorted(path.stem for path in (CASES / "reports").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_report(name):
    """Both give the same graph, or the same refusal."""
    path = CASES / "reports" / f"{name}.py"
    refusals = [refusal(path, is_exact=is_exact) for is_exact in (True, False)]
    assert refusals[0] == refusals[1]
    if refusals[0] is None:
        assert_recorded_equals_exported(path)


def refusal(path, *, is_exact):
    try:
        capture_model(path, guarded=False, is_exact=is_exact)
    except AutoparError as error:
        return str(error)
    return None


BLOCK = """
class Block(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i, self.scale = i, 1.0
        self.l = nn.Linear(8, 8)
        self.n = nn.LayerNorm(8)
    def forward(self, x{more}):
        {body}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block(i) for i in range(6))
        self.seen = []
    def forward(self, x):
        {setup}
        for i, b in enumerate(self.h):
            {call}
        return x.square().mean()
def build():
    return Net()
def example_inputs(batch_size=4):
    return (torch.randn(batch_size, 8),)
"""


def blocks(*, body="return x + self.l(self.n(x)).relu()", call="x = b(x)", setup="pass", more="", before=""):
    return before + BLOCK.format(body=body, call=call, setup=setup, more=more)


# Programs that a capture which traces one copy for all gets silently wrong.
PROGRAMS = {
    "appends to a list that it is given": blocks(
        body="kept.append(x); return x + self.l(self.n(x))", call="x = b(x, kept)", setup="kept = []", more=", kept",
    ).replace("return x.square().mean()", "return x.square().mean() + sum(k.abs().mean() for k in kept)"),
    "reads state that only middle copies see": blocks(
        body="return x + self.l(self.n(x)) * STATE[0]", call="STATE[0] = 2.0 if i in (2, 3) else 1.0; x = b(x)",
        setup="STATE[0] = 1.0", before="STATE = [1.0]\n",
    ),
    "has an attribute set from outside": blocks(
        body="return x + self.l(self.n(x)) * self.scale", call="b.scale = 2.0 if i == 3 else 1.0; x = b(x)",
    ),
    "appends to its parent's list": blocks(call="x = b(x); self.seen.append(x)").replace(
        "return x.square().mean()", "return x.square().mean() + sum(s.mean() for s in self.seen[-6:])"
    ),
    "is called with another constant in the middle": blocks(
        body="return x + self.l(self.n(x)) * factor", call="x = b(x, 2.0 if i == 3 else 1.0)", more=", factor",
    ),
    "has its result written to": blocks(call="x = b(x); x += 1"),
    "has a view as its result that is written to": blocks(
        body="return (x + self.l(self.n(x)))[:, :]", call="x = b(x).view(4, 8); x.mul_(0.5)"
    ),
    "returns a view of its argument": blocks(body="return x.view(-1, 8), self.l(x)", call="y, x = b(x); x = x + y"),
    "asks whether two arguments are one": blocks(
        body="return self.l(self.n(x)) if x is y else x + y", call="x = b(x, x if i % 2 else x * 1)", more=", y",
    ),
    "reads its number only in the last copy": blocks(
        body="return x + self.l(x) * (self.i if self.scale > 1 else 1)",
        setup="self.h[5].scale = 2.0",
    ),
    "detaches what was detached before": blocks(
        body="with torch.no_grad():\n            s = a.abs().sum()\n        return x + self.l(x) * s",
        setup="a = x * self.h[0].l.weight.sum()", call="x = b(x, a)", more=", a",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_program(model_file, what):
    assert_recorded_equals_exported(model_file(PROGRAMS[what]))


def test_a_shared_buffer_is_read_after_its_last_write(model_file):
    text = blocks(body="self.count.add_(1); return x + self.l(x) * self.count").replace(
        "self.seen = []",
        "self.register_buffer('count', torch.zeros(()))\n        for b in self.h: b.count = self.count",
    )
    text = text.replace("self.i, self.scale = i, 1.0", "self.register_buffer('count', torch.zeros(()))")
    assert_recorded_equals_exported(model_file(text))


def test_blocks_are_recorded_once_whatever_the_depth():
    calls = []
    for depth in (4, 8):
        with mock.patch.object(block_calls, "record_template", wraps=block_calls.record_template) as recorded:
            capture_model(SAMPLES / "llama.py", arguments={"num_layers": depth}, guarded=False)
        calls.append(recorded.call_count)
    assert calls == [2, 2]  # the first copy, and the last to compare


ARCHITECTURES = [
    "llama", "mistral", "gpt2", "gpt_neo", "gpt_bigcode", "codegen", "opt", "falcon", "stablelm", "olmo", "starcoder2",
    "cohere", "glm", "nemotron", "mamba2", "t5", "marian", "whisper", "bert", "bert_qa", "modernbert", "vit", "deit",
    "beit", "clip",
]  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hugging_face_architecture(architecture, tmp_path, monkeypatch):
    """Five layers of each, without a cache; `use_cache` is what a training script switches off."""
    pytest.importorskip("transformers")
    listed = json.loads((CASES / "hf_architectures.json").read_text())
    config = listed[architecture]["config"]
    config.update({key: 5 for key in DEPTHS if config.get(key) == 2}, use_cache=False)
    if "attention_types" in config:
        config["attention_types"] = [[["global", "local"], 2], [["global"], 1]]
    changed = tmp_path / "architectures.json"
    changed.write_text(json.dumps(listed))
    monkeypatch.setenv("HF_ARCHITECTURES", str(changed))
    assert_recorded_equals_exported(CASES / "hf.py", arguments={"arch": architecture})
