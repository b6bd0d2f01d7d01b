"""`python -m tests.mutants`: plants faults in the critical organs and writes RESULT.md."""

import argparse
import sys
from pathlib import Path

from tests import ROOT
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.faults import Fault, NotThere, fault_of, faults_in, sample
from tests.mutants.named import NAMED
from tests.mutants.organs import ORGANS
from tests.mutants.run import Planted, Results, plant_all
from tests.mutants.table import Row, page

NUMBER, SEED = 40, 0
NAMES = "named"
RESULT = Path(__file__).with_name("RESULT.md")


def main(arguments: list[str]) -> int:
    """Plant faults, print progress, write the page; return 1 if an unproven fault survived."""
    options = _options(arguments)
    chosen = options.organ or [NAMES, *ORGANS]
    known = Results(options.folder / "outcomes.jsonl")
    survived, rows = 0, list[Row]()
    try:
        named = named_faults()
        check_equivalents()
        drawn = {organ: faults_of(organ, options.number, options.seed) for organ in ORGANS}
    except NotThere as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for organ in (NAMES, *ORGANS):
        faults = list(named) if organ == NAMES else drawn[organ]
        some = [fault for fault in faults if options.match in fault.key]
        if organ in chosen:
            outcomes = _plant(organ, some, named, options.folder)
            survived += sum(not one.noticed for one in outcomes.values())
        else:
            outcomes = dict[str, Planted]()
        tests = [] if organ == NAMES else ORGANS[organ].expanded(ROOT)[1]
        for fault in faults:  # results of earlier calls
            before = known.of(ROOT, fault, named.get(fault, tests))
            if fault.key not in outcomes and before is not None:
                outcomes[fault.key] = before
        rows.append(Row(organ, faults, outcomes))
    RESULT.write_text(page(rows, options.number, options.seed))
    print(f"{survived} faults survived; see {RESULT.relative_to(ROOT)}", file=sys.stderr)
    return int(survived > 0)


def faults_of(organ: str, number: int, seed: int) -> list[Fault]:
    """Draw faults of an organ."""
    files, _ = ORGANS[organ].expanded(ROOT)
    return sample(ROOT, [fault for file in files for fault in faults_in(ROOT, file)], number, seed)


def check_equivalents() -> None:
    """Check that every known equivalent is still a fault of its file.

    Raises:
        NotThere: a listed equivalent is no longer a fault of its file.
    """
    for file in sorted({key.split()[0] for key in EQUIVALENT}):
        keys = {fault.key for fault in faults_in(ROOT, file)}
        for key in EQUIVALENT:
            if key.split()[0] == file and key not in keys:
                raise NotThere(f"tests/mutants/equivalent.py: no such fault any more: {key}")


def named_faults() -> dict[Fault, list[str]]:
    """Return the faults of the table, each with its tests.

    Raises:
        NotThere: a fault no longer applies.
    """
    found = dict[Fault, list[str]]()
    for file, old, new, tests in NAMED:
        if missing := [test for test in tests if not (ROOT / test).is_file()]:
            raise NotThere(f"tests/mutants/named.py: {missing[0]} is not there")
        found[fault_of(ROOT, file, old, new)] = list(tests)
    return found


def _plant(
    organ: str, faults: list[Fault], named: dict[Fault, list[str]], folder: Path
) -> dict[str, Planted]:
    left = [fault for fault in faults if fault.key not in EQUIVALENT]
    print(f"{organ}: {len(left)} faults", file=sys.stderr, flush=True)
    if organ != NAMES:
        _, tests = ORGANS[organ].expanded(ROOT)
        return plant_all(left, tests, folder, watched=faults, forks=ORGANS[organ].forks)
    only = {fault.key: named[fault] for fault in faults}
    tests = sorted({test for some in only.values() for test in some})
    return plant_all(left, tests, folder, watched=faults, forks=True, only=only)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("make mutants", description=__doc__)
    parser.add_argument("--organ", action="append", choices=(NAMES, *ORGANS), help="all by default")
    parser.add_argument("--number", type=int, default=NUMBER, help="faults drawn in each organ")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw")
    parser.add_argument("--match", default="", help="only faults with this text in their key")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants", help="outcomes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
