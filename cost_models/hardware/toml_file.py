"""Reads a hardware TOML file with checks: every number has a source, no key is unknown, no value is absurd."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import HardwareError


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "did you mean ...", or the whole list where nothing is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(names)}"


def is_path(name_or_path: str) -> bool:
    """Whether a file is meant, not a name of the catalogue."""
    return name_or_path.endswith(".toml") or "/" in name_or_path


def read_toml(path: Path) -> dict[str, object]:
    """Parse a TOML file.

    Raises:
        HardwareError: it does not exist or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(
            f"cannot read {path}: {error.strerror or error}", fix="give the path of a hardware TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path.name} is not valid TOML: {error}", where=str(path)) from error


@dataclass(slots=True, kw_only=True)
class Table:
    """One table of a file. Numbers are inline tables `{ value = 3350, source = "..." }`.

    `sources` collects key path -> source; `citations` is the file's [sources] table, which a source may name.
    """

    path: str
    data: Mapping[str, object]
    prefix: str = ""
    citations: Mapping[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def fail(self, key: str, what: str, fix: str = "") -> HardwareError:
        return HardwareError(f"{self.prefix}{key} {what}", where=self.path, fix=fix)

    def check_keys(self, valid: Iterable[str]) -> None:
        names = set(valid)
        for key in self.data:
            if key not in names:
                raise self.fail(key, "is not a known key", nearest(key, names))

    def has(self, key: str) -> bool:
        return key in self.data

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        if not isinstance(value, str) or not value:
            raise self.fail(key, f"must be a text, not {value!r}")
        return value

    def table(self, key: str) -> Table:
        value = self.data.get(key)
        if value is None:
            raise self.fail(key, "is missing", f"add a [{self.prefix}{key}] table")
        if not isinstance(value, dict):
            raise self.fail(key, f"must be a table, not {value!r}")
        return Table(
            path=self.path, data=value, prefix=f"{self.prefix}{key}.", citations=self.citations, sources=self.sources
        )

    def tables(self, key: str) -> tuple[Table, ...]:
        """The tables of a list, [[key]]."""
        value = self.data.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.fail(key, f"must be a list of tables, not {value!r}", f"write [[{self.prefix}{key}]] tables")
        return tuple(
            Table(
                path=self.path, data=item, prefix=f"{self.prefix}{key}[{index}].", citations=self.citations,
                sources=self.sources,
            )
            for index, item in enumerate(value)
        )  # fmt: skip

    def _value(self, key: str) -> object:
        entry = self.data.get(key)
        if entry is None:
            raise self.fail(key, "is missing", f'add {key} = {{ value = ..., source = "..." }}')
        if not isinstance(entry, dict) or set(entry) != {"value", "source"} or not isinstance(entry["source"], str):
            raise self.fail(key, f'must be {{ value = ..., source = "..." }}, not {entry!r}')
        source = entry["source"]
        if not source.strip():
            raise self.fail(key, "has an empty source", 'name the source, or write source = "unverified"')
        self.sources[self.prefix + key] = self.citations.get(source, source)
        return entry["value"]

    def number(self, key: str, *, low: float = 0.0, high: float = math.inf, is_low_ok: bool = False) -> float:
        """A finite number above `low` (or equal to it with `is_low_ok`) and at most `high`."""
        return self._checked(key, self._value(key), low=low, high=high, is_low_ok=is_low_ok)

    def count(self, key: str) -> int:
        value = self.number(key)
        if value != int(value):
            raise self.fail(key, f"must be a whole number, not {value}")
        return int(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key)
        if not isinstance(value, list) or not value:
            raise self.fail(key, f"must be a list of numbers, not {value!r}")
        return tuple(self._checked(key, item) for item in value)

    def _checked(
        self, key: str, value: object, *, low: float = 0.0, high: float = math.inf, is_low_ok: bool = False
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"must be a number, not {value!r}")
        if value < low or (value == low and not is_low_ok) or value > high:
            bound = f"{'at least' if is_low_ok else 'more than'} {low:g}"
            raise self.fail(
                key, f"is {value:g}; it must be {bound}" + (f" and at most {high:g}" if high < math.inf else "")
            )
        return float(value)


def open_table(path: Path, data: Mapping[str, object] | None = None) -> Table:
    """The whole file as a Table, its [sources] taken out as citations."""
    content = dict(read_toml(path) if data is None else data)
    citations = content.pop("sources", {})
    if not isinstance(citations, dict) or not all(isinstance(text, str) and text for text in citations.values()):
        raise HardwareError("[sources] must map short names to texts", where=str(path))
    return Table(path=str(path), data=content, citations=citations)
