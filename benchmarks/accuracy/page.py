"""Scores -> docs/accuracy.md: the table, a plot per family, and what has no prediction."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from html import escape
from math import floor, log10
from pathlib import Path

from autopar.cost_models.hardware import cluster_names, gpu_names, load_cluster, load_gpu

from .scores import FamilyScore, Result

_DATA = Path(__file__).resolve().parents[1] / "data"
_TARGETS, _FIRST_LOOK = _DATA / "targets.csv", _DATA / "first_look.csv"
_FIGURES = (
    ("all_percent", "step time, all rows", "mape_percent"),
    ("clean_percent", "step time, clean rows", "clean_mape_percent"),
    ("memory_percent", "memory, all rows", "memory_mape_percent"),
    ("memory_percent", "memory, clean rows", "clean_memory_mape_percent"),
)
_SIDE = 260
_MARGIN = 40
_INTRODUCTION = """# Accuracy

Predicted step time and memory against published training runs. Made by

    python benchmarks/accuracy.py --runs benchmarks/data/runs.csv --unseen benchmarks/data/unseen.csv \\
        --page docs/accuracy.md

Every row is planned as a user would plan it: its model is captured from `sample_models/`, its configuration pinned,
and priced by the evaluator of `autopar plan` with the hardware file of its cluster and the stack file of its software
(`benchmarks/stacks/`, enumerated choices only). No constant belongs to a row, a model or a paper. All measurements are
those of others: `benchmarks/data/README.md` names the source of each family, `runs.csv` that of each row.

Clean: without the rows that contradict themselves or their neighbours; column `contaminated` of `runs.csv` says why for
each. MAPE: mean absolute error of the step time. Bias: mean signed error. OOM: share of the runs that ran out of memory
which are called so; runs: share of the timed runs which are called feasible. Regret: measured time of the configuration
ranked first, over the best measured, minus one, for sweeps of at least five configurations of one model on one cluster;
tau: Kendall's rank correlation in those. Rows with matrix products in 8 bits are scored apart ("fp8").

nanotron, nemo, megatron-bridge, oneflow and narayanan-t2 are weak: recomputation, kernels, precision or communication
of their runs are not stated, so that most rows of NVIDIA's tables have no prediction.
"""

_UNSEEN = """## Runs of other sources

`unseen.csv` has runs of four sources that no constant was fitted to: other models, software and clusters (scaling:
three Llamas in 401 layouts, and 556 that ran out of memory). Their stack files were written from the sources' own
code and papers, and their times were then predicted once with the model of that day. That first look is the only
figure here that tells what to expect of a run that nobody has looked at yet: errors of 7 to 12%, about three times
those of the rows above. Rows were marked as contaminated after it.

What was mended after it, with no constant fitted to these runs:

- masters that belong to the optimizer are split with its state under ZeRO-1, and nvidia-smi shows PyTorch's cache
  beside the tensors, which had hidden that: no run that fitted is called too large any more (a fifth were), and a
  quarter of those that did not are called feasible (an eighth were);
- the pipelines of scaling deal out embedding, norm and head like blocks, and it adds up gradients in bfloat16, as its
  code says: the order of its layouts improves (regret, tau), though the mean error does not;
- gradients of norms in float32 steps are counted kernel by kernel as autograd makes them, and fused attention of the
  second generation is faster on A100 than it was taken for, by as much as fms-fsdp and torchtitan allow.

What remains: runs of scaling with norms in steps or with written scores are predicted a tenth and a quarter too fast
(those with its norm kernel 6%), and its 256-GPU runs, whose network is not stated, up to 40% too fast where data
parallelism is wide; InternEvo's parameters broadcast over all ranks (its "node" rows, which broadcast within a node,
are 5% off); MT-NLG, which is slower per sample than Narayanan's model of the same size, layout and GPUs.
"""


_CONSTANTS = """## Fitted constants

Most numbers come from primitives (matrix products, collectives) and datasheets. Those below were fitted to published
training runs; each belongs to a GPU, a link or a kind of kernel. Solved from single rows: attention rates from
llm-foundry runs of 32768 and 65536 tokens (mosaic-051, -052, -106, -107), and the rate of misaligned batched products
(bigsci176b-100 and -101). Chosen by hand while looking at the rows of several families: the first generation of
fused attention against the second (llm-foundry against fms-fsdp, torchtitan and kempnerforge), the network jitter
(narayanan-t1, korthikanti-t5, bloom), the V100 nodes' network (oneflow), the sustained rate of H200 and the links of
its nodes without a switch (kempnerforge), two ranks on 4-GPU V100 nodes (solved from bigsci1b3-11; -16, which runs
nothing again, is then 1.5% off), and what nvidia-smi shows beside the tensors of the peak, 22% (bloom and tr3m; part
of the benchmark, not of plans). Products in 8 bits have no fitted constant: peak and curve of the device, and casts
counted.

The rows of `runs.csv` are a development set, not a test: no part of them was kept unseen. What the software of a
family does is read from its own source where a stack file names it: gradients, resharding, embedding and loss of
KempnerForge, buffers of OneFlow's and DeepSpeed's pipelines, Megatron's optimizer and asynchronous all_reduces. That
the runs of vtrain-multi had those is inferred from its times (its runs on one, eight and sixteen tensor-parallel
ranks then agree within 2%), as are which messages are scattered and what hides where a source does not say. Supported
by one family alone: the attention rates of A100 and H100 (llm-foundry), everything of H200 (kempnerforge), the 500 W
H100 (torchtitan), V100 (oneflow for its network, tr3m for nodes of 4), and the nodes of two boards (bloom). The
sustained rate of A100, 0.95, is shared by seven: each alone would choose between 0.91 (bloom) and 0.99
(korthikanti-t5), 0.93 to 0.97 for the others, and the error of none grows by two points if it is left out of the
choice; most runs of other sources would choose less.

Kernels (`cost_models/compute.py`, `cost_models/communication.py`, `planner/search/kernels.py`): first generation of
fused attention at 0.8 of the second (0.7 on A100); misaligned products at 0.076 (batched) and 0.76 of the aligned
rate; compute slowed by 1.25 (eager) or 1.05 (compiled) while communication runs beside it; bytes per score, per logit
and per element of a norm in float32 steps counted by hand.

| where | number | source |
|---|---|---|
"""


def write_page(
    results: Sequence[Result], scores: dict[str, FamilyScore], unseen: dict[str, FamilyScore], path: Path
) -> None:
    """Write the page and, into a folder of its name beside it, the plots. `unseen`: of sources that nothing fits."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_INTRODUCTION, *_table(scores), "", *_targets(scores), ""]
    for family, score in scores.items():
        points = [r for r in results if r.row.scored_as == family and r.error_percent is not None]
        lines += [f"## {family}", ""]
        if points:
            name = f"{family.replace(' ', '-')}.svg"
            (folder / name).write_text(_plot(family, points), encoding="utf-8")
            lines += [f"![predicted against measured step seconds, {family}]({folder.name}/{name})", ""]
            spread = max(r.spread_percent for r in points)
            if spread:
                lines += [
                    f"Microbatch size or interleaving are not stated in some rows: the best is taken; the worst "
                    f"allowed choice is up to {spread:.0f}% slower.",
                    "",
                ]
        if score.not_expressed:
            lines += [f"{score.not_expressed} rows have no prediction:", ""]
            reasons: dict[str, int] = {}
            for result in results:
                if result.row.scored_as == family and result.reason:
                    reasons[result.reason] = reasons.get(result.reason, 0) + 1
            lines += [*(f"- {count}: {reason}" for reason, count in reasons.items()), ""]
    lines += [_UNSEEN, *_unseen(unseen), ""] if unseen else []
    lines.append(_CONSTANTS + "\n".join(_fitted()))
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _fitted() -> list[str]:
    """Numbers of the hardware catalogue whose source is a fit to training runs, once for each source."""
    files = [(name, load_gpu(name).sources) for name in gpu_names()]
    files += [(name, load_cluster(name).sources) for name in cluster_names()]
    found: dict[tuple[str, str], list[str]] = {}
    for name, sources in files:
        for key, source in sources:
            if "published" in source and ("fit" in source or "training" in source):
                found.setdefault((key, source), []).append(name)
    return [f"| {', '.join(names)} | {key} | {source} |" for (key, source), names in sorted(found.items())]


def _targets(scores: dict[str, FamilyScore]) -> list[str]:
    """What was aimed at beside what was reached, percent."""
    lines = ["## Targets", "", "| family | figure | aim % | reached % | |", "|---|---|---|---|---|"]
    with _TARGETS.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            score = scores.get(line["family"])
            for column, figure, field in _FIGURES:
                reached = getattr(score, field) if score is not None else None
                if line[column] and reached is not None:
                    is_met = reached <= float(line[column])
                    cells = (line["family"], figure, line[column], f"{reached:.2f}", "met" if is_met else "missed")
                    lines.append("| " + " | ".join(cells) + " |")
    return lines


def _unseen(scores: dict[str, FamilyScore]) -> list[str]:
    """What was predicted at first beside what is predicted now."""
    head = ("family", "rows", "MAPE %", "bias %", "max %", "clean rows", "clean MAPE %", "OOM", "runs", "sweeps")
    head += ("regret %", "tau")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    with _FIRST_LOOK.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            family, *figures = line.values()
            cells = [f"{family}, first look", *figures]
            lines.append("| " + " | ".join(cells) + " |")
    for name, s in scores.items():
        cells = [name, str(s.n), _text(s.mape_percent), _text(s.bias_percent), _text(s.max_percent), str(s.clean_n)]
        cells += [_text(s.clean_mape_percent), _text(s.oom_correct_fraction, 2)]
        cells += [_text(s.feasible_correct_fraction, 2), str(s.sweeps), _text(s.regret_percent_mean)]
        lines.append("| " + " | ".join([*cells, _text(s.kendall_tau, 2)]) + " |")
    return lines


def _table(scores: dict[str, FamilyScore]) -> list[str]:
    head = ("family", "rows", "MAPE %", "bias %", "max %", "clean rows", "clean MAPE %", "memory rows", "memory MAPE %")
    head += ("OOM", "runs", "sweeps", "regret %", "tau", "no prediction")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, s in scores.items():
        cells = [name, str(s.n), _text(s.mape_percent), _text(s.bias_percent), _text(s.max_percent)]
        cells += [str(s.clean_n), _text(s.clean_mape_percent), str(s.memory_n)]
        cells += [_text(s.memory_mape_percent), _text(s.oom_correct_fraction, 2), _text(s.feasible_correct_fraction, 2)]
        cells += [str(s.sweeps), _text(s.regret_percent_mean), _text(s.kendall_tau, 2), str(s.not_expressed)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _text(number: float | None, digits: int = 1) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def _plot(title: str, points: Sequence[Result]) -> str:
    """Measured seconds to the right, predicted upwards, both logarithmic, with the line of equality."""
    pairs = [(r.row.measured_seconds or 1.0, r.predicted_seconds or 1.0, r.row.id) for r in points]
    low = floor(log10(min(min(m, p) for m, p, _ in pairs)) * 2) / 2
    high = floor(log10(max(max(m, p) for m, p, _ in pairs)) * 2) / 2 + 0.5
    size = _SIDE + 2 * _MARGIN

    def at(seconds: float) -> float:
        return _SIDE * (log10(seconds) - low) / (high - low)

    marks = [
        f'<circle cx="{_MARGIN + at(m):.1f}" cy="{_MARGIN + _SIDE - at(p):.1f}" r="2.5" fill="#1f6feb" '
        f'fill-opacity="0.6"><title>{escape(name)}: {m:.4g} s measured, {p:.4g} s predicted</title></circle>'
        for m, p, name in pairs
    ]
    ends = (f"{10**low:.3g}", f"{10**high:.3g}")
    bottom = _MARGIN + _SIDE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" font-family="sans-serif" '
            f'font-size="11">',
            f'<rect width="{size}" height="{size}" fill="white"/>',
            f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>',
            f'<line x1="{_MARGIN}" y1="{bottom}" x2="{bottom}" y2="{_MARGIN}" stroke="#888"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN - 10}">{escape(title)}</text>',
            f'<text x="{_MARGIN}" y="{bottom + 14}">{ends[0]} s</text>',
            f'<text x="{bottom}" y="{bottom + 14}" text-anchor="end">{ends[1]} s measured</text>',
            f'<text x="{_MARGIN - 4}" y="{_MARGIN + 10}" text-anchor="end">{ends[1]}</text>',
            *marks,
            "</svg>",
            "",
        ]
    )
