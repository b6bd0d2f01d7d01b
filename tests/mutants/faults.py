"""Finds the one-line faults that can be planted in a file.

A fault changes one expression or drops one statement inside a function. Messages, types, defaults,
assertions and all line numbers stay as they are.
"""

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

Span = tuple[int, int, bytes]  # begin and end in the file, and the new text


@dataclass(frozen=True)
class Fault:
    """One change of one file.

    Attributes:
        where: the function, as `Class.name`.
        old, new: the changed lines joined into one line, before and after.
        number: counts equal changes of one function from 0.
        lines: first and last line of the statement, or of its head.
        span: the change itself.
    """

    file: str
    where: str
    old: str
    new: str
    number: int
    lines: tuple[int, int]
    span: Span

    @property
    def key(self) -> str:
        """Name of the fault, stable as long as the lines of its function are."""
        again = f" #{self.number + 1}" if self.number else ""
        return f"{self.file} {self.where}: {self.old} -> {self.new}{again}"

    def planted(self, source: bytes) -> bytes:
        """Return the file with the fault."""
        begin, end, text = self.span
        return source[:begin] + text + source[end:]


class NotThere(ValueError):
    """A fault of the table that does not apply to the file (any more)."""


def faults_in(root: Path, file: str) -> list[Fault]:
    """Return all faults of a file, in file order."""
    source = (root / file).read_bytes()
    seen: Counter[tuple[str, str, str]] = Counter()
    faults = []
    for where, node, span in _Finder(source).found:
        fault = _fault(source, file, where, node, span)
        if fault is not None:
            again = seen[where, fault.old, fault.new]
            seen[where, fault.old, fault.new] += 1
            faults.append(replace(fault, number=again))
    return faults


def fault_of(root: Path, file: str, old: str, new: str) -> Fault:
    """Return a fault of the table; `old` must occur once in the file, inside a function.

    Raises:
        NotThere: it does not.
    """
    source = (root / file).read_bytes()
    if (times := source.count(old.encode())) != 1:
        raise NotThere(f"{file} has {old!r} {times} times, expected 1: bring the table up to date")
    begin = source.index(old.encode())
    end = begin + len(old.encode())
    text = _same_lines(source[begin:end], new.encode())
    first = source.count(b"\n", 0, begin) + 1
    last = source.count(b"\n", 0, end) + 1
    function = _function_around(ast.parse(source), first, last)
    if function is None:
        raise NotThere(f"{file}: {old!r} is not inside a function")
    fault = Fault(
        file, function, _flat(old), _flat(new), 0, (first, last), (begin, end, text)
    )  # fmt: skip
    try:
        compile(fault.planted(source), file, "exec")
    except SyntaxError as error:
        raise NotThere(f"{file} with {new!r} for {old!r} is not Python: {error}") from None
    return fault


def sample(root: Path, faults: Sequence[Fault], number: int, seed: int) -> list[Fault]:
    """Draw faults that compile; a change to a file affects only draws in the changed lines."""

    def place(fault: Fault) -> bytes:
        return hashlib.sha256(f"{seed} {fault.key}".encode()).digest()

    drawn = list[Fault]()
    for fault in sorted(faults, key=place):
        if len(drawn) == number:
            break
        with suppress(SyntaxError):
            compile(fault.planted((root / fault.file).read_bytes()), fault.file, "exec")
            drawn.append(fault)
    return sorted(drawn, key=lambda one: (one.file, one.span))


def _fault(source: bytes, file: str, where: str, node: ast.stmt, span: Span) -> Fault | None:
    begin, end, text = span
    span = begin, end, _same_lines(source[begin:end], text)
    first = source.rfind(b"\n", 0, begin) + 1
    last = source.find(b"\n", end)
    before = source[first:last].decode()
    after = (source[first:begin] + span[2] + source[end:last]).decode()
    fault = Fault(file, where, _flat(before), _flat(after), 0, _head(node), span)
    return fault if fault.old != fault.new else None


def _flat(text: str) -> str:
    return " ".join(text.split())


def _same_lines(old: bytes, new: bytes) -> bytes:
    """Append the newlines that `new` lacks, so that later lines keep their numbers."""
    return new + b"\n" * (old.count(b"\n") - new.count(b"\n"))


def _head(node: ast.stmt) -> tuple[int, int]:
    """Return the lines of a statement without its body."""
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno
    return node.lineno, max(node.lineno, end or node.lineno)


def _function_around(tree: ast.AST, first: int, last: int) -> str | None:
    names, node = list[str](), tree
    inside = False
    while True:
        for child in ast.iter_child_nodes(node):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            begin, end = getattr(child, "lineno", 0), getattr(child, "end_lineno", 0)
            if not begin <= first <= last <= end:
                continue
            if isinstance(child, kinds):
                names.append(child.name)
                inside = not isinstance(child, ast.ClassDef) and child.body[0].lineno <= first
            node = child
            break
        else:
            return ".".join(names) if inside else None


_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_SIGN = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: r"is", ast.IsNot: r"is\s+not", ast.In: r"in", ast.NotIn: r"not\s+in",
    ast.Add: r"\+", ast.Sub: "-", ast.Mult: r"\*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: r"\|",
}  # fmt: skip
_CALCULATED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
_EXCHANGED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "amin": "amax",
    "amax": "amin", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor",
    "argmin": "argmax", "argmax": "argmin",
    "logical_or": "logical_and", "logical_and": "logical_or",
}  # fmt: skip
_BY_COMPARISON = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
# `strict` is a guard, like an assertion; devices do not differ without a GPU; thread names have no
# effect.
_UNSEEN = {"strict", "device", "thread_name_prefix"}
_SAID = {"log", "logger", "_log", "print", "warnings"}


class _Finder(ast.NodeVisitor):
    """Collects (function, statement, change)."""

    def __init__(self, source: bytes):
        self.source = source
        starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        self._starts = starts
        self._names: list[str] = []
        self._depth = 0  # nesting depth of functions
        self._statement: ast.stmt | None = None
        self.found: list[tuple[str, ast.stmt, Span]] = []
        self.visit(ast.parse(source))

    # Nodes that contain others --------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            before, self._statement = self._statement, node
            if self._depth:
                self._dropped(node)
            super().visit(node)
            self._statement = before
        else:
            super().visit(node)

    def _inner(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names.append(node.name)
        depth, self._depth = self._depth, 0 if isinstance(node, ast.ClassDef) else self._depth + 1
        for child in node.body:
            self.visit(child)
        self._depth = depth
        self._names.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _inner

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip the message."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions: in correct code they never fire."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip texts."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        if self._depth:
            self.visit(node.body)

    # Changes --------------------------------------------------------------------------------------

    def _dropped(self, node: ast.stmt) -> None:
        called = node.value if isinstance(node, ast.Expr) else None
        done = isinstance(called, ast.Call) and not _is_said(called)
        place = isinstance(node, ast.Assign) and isinstance(
            node.targets[0], ast.Attribute | ast.Subscript
        )
        gone = isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)
        if done or place or gone:
            self._add(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _is_said(node.value):
            return
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negated(condition)
        self.generic_visit(node)

    def _negated(self, test: ast.expr) -> None:
        compared = isinstance(test, ast.Compare) and isinstance(test.ops[0], _BY_COMPARISON)
        inverted = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not compared and not inverted:
            self._add(test, f"not ({self._text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, operator, _COMPARED[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.ListComp, ast.DictComp)
        sides = node.left, node.right
        plain = not any(isinstance(one, texts) or _is_text(one) for one in sides)
        if type(node.op) in _CALCULATED and plain:
            self._between(*sides, node.op, _CALCULATED[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _CALCULATED and not isinstance(node.value, ast.List | ast.ListComp):
            sign, new = _SIGN[type(node.op)] + "=", _CALCULATED[type(node.op)] + "="
            self._put(node.target, node.value, sign, new)
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._put(node.values[0], node.values[1], rf"\b{old}\b", new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int) or node.value in (0.0, 1.0):
            self._add(node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in _EXCHANGED:
            end = self._end(node.func)
            self._change(end - len(name), end, _EXCHANGED[name])
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _UNSEEN:
                self._without(keyword)
                self.visit(keyword.value)
        for child in (node.func, *node.args):
            self.visit(child)

    def _without(self, keyword: ast.keyword) -> None:
        begin, end = self._begin(keyword), self._end(keyword)
        if match := re.match(rb"\s*,", self.source[end:]):
            self._change(begin, end + match.end(), "")
        elif match := re.search(rb",\s*$", self.source[:begin]):
            self._change(match.start(), end, "")
        else:
            self._change(begin, end, "")

    # Positions in the source ----------------------------------------------------------------------

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST, new: str) -> None:
        sign = _SIGN[type(operator)]
        self._put(left, right, rf"\b{sign}\b" if sign[0].isalpha() else sign, new)

    def _put(self, left: ast.AST, right: ast.AST, sign: str, new: str) -> None:
        begin, end = self._end(left), self._begin(right)
        text = self.source[begin:end]
        match = re.search(sign.encode(), text)
        if match is not None and b"#" not in text:
            self._change(begin + match.start(), begin + match.end(), new)

    def _add(self, node: ast.AST, new: str) -> None:
        self._change(self._begin(node), self._end(node), new)

    def _change(self, begin: int, end: int, new: str) -> None:
        if self._depth and self._statement is not None:
            self.found.append((".".join(self._names), self._statement, (begin, end, new.encode())))

    def _begin(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        return self.source[self._begin(node) : self._end(node)].decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_said(call: ast.Call) -> bool:
    """Return whether a call only writes to a log."""
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in _SAID
