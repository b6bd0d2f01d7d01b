"""Process that saves checkpoints until it is killed: `saving_run.py FOLDER STEPS`.

Prints the pid of its writer first, then each step whose checkpoint is complete.
"""

import sys

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_place
from tests.unit.kimi_pretrain.checkpoint import ranks

SIZE = 100_000  # 23 MB, written in several parts


def main() -> None:
    place, config = open_place(sys.argv[1]), ranks.config("checkpoint.keep_last=2")
    saver = CheckpointSaver(place, config, ranks.alone())
    saver.prepare(ranks.tensors(0, SIZE))
    print(saver._writer.pid, flush=True)
    first = max(place.steps(), default=0) + 1
    for step in range(first, first + int(sys.argv[2])):
        saver.begin(ranks.tensors(step, SIZE), ranks.state(step, step))
        try:
            saver.finish()
        except CheckpointError as error:
            print("failed", error, flush=True)
            continue
        print(step, flush=True)
    saver.close()


if __name__ == "__main__":
    main()
