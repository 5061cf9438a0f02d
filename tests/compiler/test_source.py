"""Text: names, quoting, inlining, reuse of dead variables, loops and line breaking."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from autopar.compiler.source import ADD, MULTIPLY, Body, Expr, Loop, Statement
from autopar.compiler.text import (
    LINE_WIDTH,
    assigned_names,
    comment,
    identifier,
    layout,
    literal,
    quote,
)


@pytest.mark.parametrize("value", ['a"b', "a\\n\n", "\u00e9", "'''", "# x", ""])
def test_quote_gives_the_string_back(value: str) -> None:
    assert ast.literal_eval(quote(value)) == value
    assert quote(value).isascii()


@pytest.mark.parametrize("text", ["a.b", "0", "class", "", "x-y", "\u00e9"])
def test_identifier_is_valid(text: str) -> None:
    compile(f"{identifier(text)} = 1", "", "exec")


@pytest.mark.parametrize("value", [1, -2.5, True, None, "s", (1,), (1, (2.0, "a")), [1, 2], float("inf")])
def test_literal_gives_the_value_back(value: object) -> None:
    assert eval(literal(value), {"float": float}) == value


def test_comment_stays_on_one_line() -> None:
    assert comment('a\nimport os  "\u00e9') == 'a?import os  "?'


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("x = f(y)", ("x",)),
        ("q, k, v = f(y).split(3)", ("q", "k", "v")),
        ("x += y", ("x",)),
        ("self.x = y", ()),
        ("return f(x)", ()),
        ("x = f(", ()),
    ],
)
def test_assigned_names(code: str, names: tuple[str, ...]) -> None:
    assert assigned_names(code) == names


def test_weaker_operators_get_parentheses() -> None:
    assert Expr("a + b", ADD).at(MULTIPLY) == "(a + b)"
    assert Expr("a * b", MULTIPLY).at(ADD) == "a * b"


def _call(name: str, *, inline: bool = True) -> dict[str, object]:
    return {
        "render": lambda found: Expr(
            f"{name}({', '.join(e.text for e in found)})", weight=1 + sum(e.weight for e in found)
        ),
        "inline": inline,
    }  # fmt: skip


def _statement(result: str, operands: tuple[str, ...], function: str, name: str, *, inline: bool = True) -> Statement:
    return Statement(results=(result,), operands=operands, names=(name,), **_call(function, inline=inline))  # type: ignore[arg-type]


def _finish(found: list[Expr]) -> str:
    return f"return {', '.join(e.text for e in found)}"


def test_single_use_is_written_inside_its_reader() -> None:
    body = Body(reserved=())
    body.argument("a", "x")
    body.add(_statement("b", ("a",), "f", "y"))
    body.add(_statement("c", ("b",), "g", "z"))
    assert body.lines(["c"], _finish) == ["        return g(f(x))"]


@pytest.mark.parametrize(
    ("saves", "text"), [(True, "y = f(x)|z = meet(x)|return g(y), z"), (False, "z = meet(x)|return g(f(x)), z")]
)
def test_what_saves_for_the_backward_stays_before_what_communicates(saves: bool, text: str) -> None:
    """Blocks run again up to the last thing saved: behind a collective it would have that one run once more."""
    body = Body(reserved=())
    body.argument("a", "x")
    body.add(replace(_statement("b", ("a",), "f", "y"), saves=saves))
    body.add(replace(_statement("met", ("a",), "meet", "z", inline=False), communicates=True))
    body.add(_statement("c", ("b",), "g", "y"))
    lines = "|".join(line.strip() for line in body.lines(["c", "met"], _finish))
    assert lines == text


def test_what_is_read_twice_gets_a_variable_and_dead_names_are_reused() -> None:
    body = Body(reserved=("f",))
    body.argument("a", "x")
    body.add(_statement("b", ("a",), "f", "x", inline=False))
    body.add(_statement("c", ("b", "b"), "g", "x", inline=False))
    assert body.lines(["c"], _finish) == ["        x = f(x)", "        x = g(x, x)", "        return x"]


def test_live_names_are_not_overwritten() -> None:
    body = Body(reserved=())
    body.argument("a", "x")
    body.add(_statement("b", ("a",), "f", "x", inline=False))
    lines = body.lines(["a", "b"], _finish)
    assert lines == ["        x_2 = f(x)", "        return x, x_2"]


def test_an_inlined_expression_keeps_what_it_reads_alive() -> None:
    body = Body(reserved=())
    body.argument("a", "x")
    body.add(_statement("late", ("a",), "f", "y"))
    body.add(_statement("b", ("a",), "g", "x", inline=False))
    body.add(_statement("c", ("b", "late"), "h", "x", inline=False))
    lines = body.lines(["c"], _finish)
    scope: dict[str, object] = {}
    code = "def run(x, f, g, h):\n" + "\n".join(lines)
    exec(code, scope)
    run = scope["run"]
    assert callable(run)
    assert run(1, lambda v: ("f", v), lambda v: ("g", v), lambda *v: ("h", *v)) == ("h", ("g", 1), ("f", 1))


def test_unused_results_are_named_underscore() -> None:
    body = Body(reserved=())
    body.argument("a", "x")
    body.add(
        Statement(results=("b", "c"), operands=("a",), render=lambda e: Expr(f"pair({e[0].text})"), names=("y", "z"))
    )
    assert body.lines(["b"], _finish) == ["        y, _ = pair(x)", "        return y"]


def test_loop_carries_a_variable() -> None:
    body = Body(reserved=("block",))
    body.argument("a", "x")
    body.argument("m", "mask")
    call = Statement(
        results=("r",), operands=("in", "mask_in"), render=lambda e: Expr(f"block({e[0].text}, {e[1].text})"),
        names=("x",),
    )  # fmt: skip
    body.add(
        Loop(
            results=("r",), starts=("a", "m"), inside=("in", "mask_in"), back=(0, None), header="for block in blocks:",
            steps=(call,),
        )
    )  # fmt: skip
    assert body.lines(["r"], _finish) == [
        "        for block in blocks:",
        "            x = block(x, mask)",
        "        return x",
    ]


def test_a_long_loop_header_is_broken() -> None:
    body = Body(reserved=frozenset())
    blocks = ", ".join(f'self.stages["{i}"]["0"]' for i in range(8))
    call = Statement(results=("r",), operands=(), render=lambda found: Expr("block()"), names=("x",))
    body.add(Loop(results=("r",), starts=(), inside=(), back=(), header=f"for block in ({blocks}):", steps=(call,)))
    lines = body.lines([], lambda found: "return")
    assert max(map(len, lines)) <= LINE_WIDTH
    assert [line.strip() for line in lines[:2]] == ["for block in (", 'self.stages["0"]["0"],']


def test_loop_over_a_value_that_lives_on_copies_it_first() -> None:
    body = Body(reserved=("block",))
    body.argument("a", "x")
    call = Statement(results=("r",), operands=("in",), render=lambda e: Expr(f"block({e[0].text})"), names=("x",))
    body.add(
        Loop(results=("r",), starts=("a",), inside=("in",), back=(0,), header="for block in blocks:", steps=(call,))
    )
    lines = body.lines(["a", "r"], _finish)
    assert lines[0] == "        x_2 = x"
    assert lines[-1] == "        return x, x_2"


def test_long_lines_break_as_ruff_does() -> None:
    arguments = ", ".join(f"argument_{i}" for i in range(9))
    assert layout(f"x = function({arguments})", "    ") == ["    x = function(", f"        {arguments}", "    )"]
    many = ", ".join(f"argument_{i}" for i in range(12))
    broken = layout(f"x = function({many})", "    ")
    assert broken[1] == "        argument_0,"
    assert all(len(line) <= 120 for line in broken)


def test_a_note_that_does_not_fit_stands_above() -> None:
    code = "x = " + "a" * 100
    assert layout(code, "    ", "note of some length") == ["    # note of some length", f"    {code}"]


def test_parentheses_of_a_term_stay_no_tuple() -> None:
    import ast

    from autopar.compiler.text import layout

    code = f"weight = {'layer_norm_weight_' * 5} * (attention_output * attention_output_2)"
    lines = layout(code, "        ")
    assert len(lines) > 1
    assert ast.dump(ast.parse("\n".join(line[8:] for line in lines))) == ast.dump(ast.parse(code))
