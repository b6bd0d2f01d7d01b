"""Functions that several processes of test_catalog.py run at once; they import them by name."""

import os
import random
from collections.abc import Callable

from data_pipeline.catalog.audit import check
from data_pipeline.catalog.engine import Catalog, Conflict
from data_pipeline.catalog.lookup import version
from data_pipeline.catalog.states import promote
from tests import postgres


def told(results, start, work: Callable[..., object], given: tuple) -> None:
    """Put what work returns into a queue; all begin together."""
    os.environ["PGPASSWORD"] = postgres.PASSWORD  # theirs is the environment of the first test
    start.wait(60)
    results.put(work(*given))


def migrated(url: str) -> tuple:
    found = Catalog(url)
    try:
        return found.migrate()
    finally:
        found.close()


def transitions(url: str, number: int, count: int) -> int:
    """Bring versions to and fro as they were seen; returns how often somebody came between."""
    catalog, chance, conflicts = Catalog(url), random.Random(number), 0
    done = 0
    while done < count:
        name = f"c{chance.randrange(3)}@1"
        with catalog.read() as connection:
            row = version(connection, name)
        to = "active" if row.state == "deprecated" else "deprecated"
        try:
            promote(catalog, name, to, revision=row.revision)
            done += 1
            if done % 25 == 1:  # while others write
                with catalog.read() as connection:
                    check(connection)
        except Conflict:
            conflicts += 1
    catalog.close()
    return conflicts
