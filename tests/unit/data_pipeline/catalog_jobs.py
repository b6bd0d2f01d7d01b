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
    """Put the result of `work` into a queue; all processes start together."""
    # the fork server has the environment of the first test
    os.environ["PGPASSWORD"] = postgres.PASSWORD
    start.wait(60)
    results.put(work(*given))


def migrated(url: str) -> tuple:
    found = Catalog(url)
    try:
        return found.migrate()
    finally:
        found.close()


def transitions(url: str, number: int, count: int) -> int:
    """Switch versions between active and deprecated; return the number of conflicts."""
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
            if done % 25 == 1:  # while other processes write
                with catalog.read() as connection:
                    check(connection)
        except Conflict:
            conflicts += 1
    catalog.close()
    return conflicts
