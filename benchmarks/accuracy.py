"""Predict published training runs and say how far off the predictions are.

    python benchmarks/accuracy.py --runs benchmarks/data/runs.csv [--json] [--only vtrain-multi,bloom] [--rows]
        [--page docs/accuracy.md --unseen benchmarks/data/unseen.csv]

Every row's model is captured from `sample_models/`, its configuration pinned, and priced by the evaluator that
`autopar plan` uses. Rows that cannot be expressed are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accuracy.page import write_page
from accuracy.predict import Predictor
from accuracy.rows import Row, read_rows
from accuracy.scores import FamilyScore, Result, family_scores
from accuracy.setups import CannotExpress, setup_of
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware.toml_file import nearest
from autopar.cost_models.units import GIB

_USAGE_ERROR = 2


def results_of(rows: Sequence[Row], progress: Callable[[str], None]) -> list[Result]:
    """One result for every row."""
    predictor = Predictor()
    found: list[Result] = []
    for index, row in enumerate(rows):
        progress(f"{index + 1} of {len(rows)}: {row.id}")
        try:
            prediction = predictor.predict(setup_of(row))
        except (CannotExpress, AutoparError) as reason:  # a GPU, a node or a split that does not exist
            found.append(Result(row=row, reason=str(reason).splitlines()[0]))
            continue
        found.append(
            Result(
                row=row,
                predicted_seconds=prediction.seconds,
                predicted_memory_gib=prediction.memory_bytes / GIB,
                fits=prediction.fits,
                microbatch=prediction.microbatch,
                interleave=prediction.interleave,
                spread_percent=prediction.spread_percent,
            )
        )
    return found


def as_json(results: Sequence[Result], scores: dict[str, FamilyScore]) -> str:
    """The families and every row."""
    families = {name: asdict(score) for name, score in scores.items()}
    rows = [
        {
            "id": r.row.id,
            "family": r.row.family,
            "reason": r.reason,
            "contaminated": r.row.contaminated,
            "measured_seconds": r.row.measured_seconds,
            "predicted_seconds": r.predicted_seconds,
            "error_percent": r.error_percent,
            "measured_memory_gib": r.row.peak_memory_gib,
            "ran_out_of_memory": r.row.ran_out_of_memory,
            "predicted_memory_gib": r.predicted_memory_gib,
            "fits": r.fits,
            "microbatch": r.microbatch,
            "interleave": r.interleave,
            "spread_percent": r.spread_percent,
            "memory_error_percent": r.memory_error_percent,
        }
        for r in results
    ]
    return json.dumps({"schema_version": 1, "families": families, "rows": rows}, indent=1)


def as_table(results: Sequence[Result], scores: dict[str, FamilyScore], *, with_rows: bool) -> str:
    """The same for people."""
    lines = [
        f"{'family':<20}{'n':>4}{'MAPE %':>8}{'bias %':>8}{'max %':>8}{'clean n':>8}{'MAPE %':>8}{'mem n':>6}"
        f"{'mem %':>7}{'OOM':>6}"
        f"{'runs':>6}{'sweeps':>7}{'regret':>7}{'tau':>6}{'out':>5}"
    ]
    for name, s in scores.items():
        lines.append(
            f"{name:<20}{s.n:>4}{_text(s.mape_percent):>8}{_text(s.bias_percent):>8}{_text(s.max_percent):>8}"
            f"{s.clean_n:>8}{_text(s.clean_mape_percent):>8}"
            f"{s.memory_n:>6}{_text(s.memory_mape_percent):>7}{_text(s.oom_correct_fraction, 2):>6}"
            f"{_text(s.feasible_correct_fraction, 2):>6}{s.sweeps:>7}{_text(s.regret_percent_mean):>7}"
            f"{_text(s.kendall_tau, 2):>6}{s.not_expressed:>5}"
        )
    for r in results if with_rows else ():
        if not r.reason:
            lines.append(
                f"{r.row.id:<46} {_text(r.row.measured_seconds, 4):>9} {_text(r.predicted_seconds, 4):>9} "
                f"{_text(r.error_percent):>6}% "
                f"{_text(r.row.peak_memory_gib):>6} {_text(r.predicted_memory_gib):>6} GiB"
            )
    reasons: dict[str, list[str]] = {}
    for r in results:
        if r.reason:
            reasons.setdefault(f"{r.row.family}: {r.reason}", []).append(r.row.id)
    for reason, ids in reasons.items():
        lines.append(f"not expressed, {reason}: {len(ids)} ({', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''})")
    return "\n".join(lines)


def _text(number: float | None, digits: int = 1) -> str:
    return "-" if number is None else f"{number:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, required=True, help="CSV file in the format of data/runs.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--rows", action="store_true", help="also list every row")
    parser.add_argument("--page", type=Path, help="write docs/accuracy.md and its plots to this file and folder")
    parser.add_argument("--unseen", type=Path, help="runs of sources that nothing was fitted to, for the page")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        rows = read_rows(given.runs)
        families = {row.family for row in rows}
        wanted = set(given.only.split(",")) if given.only else families
        if unknown := sorted(wanted - families):
            raise AutoparError(
                f"no row is of family {', '.join(unknown)}", where=str(given.runs), fix=nearest(unknown[0], families)
            )
        results = results_of([row for row in rows if row.family in wanted], _progress)
        unseen = results_of(read_rows(given.unseen), _progress) if given.unseen else []
    except AutoparError as error:
        print(error, file=sys.stderr)
        return _USAGE_ERROR
    scores = family_scores(results)
    if given.page:
        write_page(results, scores, family_scores(unseen), given.page)
    print(as_json(results, scores) if given.json else as_table(results, scores, with_rows=given.rows))
    print(f"{len(results)} rows in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<70}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
