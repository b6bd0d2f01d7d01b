"""Only one module parses JSON stored under a root; it limits the size and nesting of the JSON."""

import ast

import pytest

from tests import ROOT

DOOR = "data_pipeline/store/json_objects.py"
# These files parse JSON from other origins: our own values, run folders, the catalogue, local
# files.
OTHERS = {
    "data_pipeline/catalog/audit.py": "rows of the catalogue",
    "data_pipeline/catalog/runs.py": "run folders",
    "data_pipeline/catalog/states.py": "checkpoints of run folders",
    "data_pipeline/govern/collect_plan.py": "a plan that the user gives",
    "data_pipeline/ingest/journal.py": "a copy of its own request",
    "data_pipeline/inspect/facts.py": "facts of this machine",
    "data_pipeline/plan/planner.py": "a copy of its own state",
    "launch/web/auth.py": "the tokens file",
}
READERS = ("data_pipeline", "launch/web", "launch/pages")


def parses_json(tree: ast.AST) -> bool:
    """Return whether a module calls `json.loads` or `json.load`, or imports one of them."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="json"), attr="loads" | "load"):
                return True
            case ast.ImportFrom(module="json"):
                return True
    return False


def test_only_the_one_reader_parses_json_of_a_root():
    files = [file for room in READERS for file in (ROOT / room).glob("**/*.py")]
    found = {
        str(file.relative_to(ROOT)) for file in files if parses_json(ast.parse(file.read_text()))
    }
    assert found == {DOOR, *OTHERS}


@pytest.mark.parametrize("text", ["import json\njson.loads(x)", "from json import loads"])
def test_the_check_sees_a_second_reader(text):
    assert parses_json(ast.parse(text))
    assert not parses_json(ast.parse("import json\njson.dumps(x)"))
