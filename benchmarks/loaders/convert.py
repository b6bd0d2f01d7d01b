"""Converts the samples into the peers' formats. Runs in the peers' environment.

    python -m benchmarks.loaders.convert ROOT

Reads ROOT/ours/pairs/*.tar and writes ROOT/mds (mosaicml-streaming), ROOT/lit (litdata) and
ROOT/tar (the same tars with Energon's metadata). Chunks hold 8 MiB, like the tars.
"""

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.loaders.imports import import_streaming

CHUNK_BYTES = 1 << 23


def samples(tars: Path) -> Iterator[dict[str, Any]]:
    """Yield every sample of the tars: its number, its JPEG and its document as text."""
    for path in sorted(tars.glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore
        for name, text in files.items():
            key, _, suffix = name.partition(".")
            if suffix == "json":
                yield {"id": int(key), "jpg": files[f"{key}.0.jpg"], "json": text.decode()}


def mosaic(tars: Path, out: Path) -> None:
    import_streaming()
    from streaming import MDSWriter

    columns = {"id": "int", "jpg": "bytes", "json": "str"}
    with MDSWriter(out=str(out), columns=columns, size_limit=CHUNK_BYTES) as writer:
        for sample in samples(tars):
            writer.write(sample)


def lit(tars: Path, out: Path) -> None:
    import litdata

    # One process with one generator keeps the samples in order across chunks.
    litdata.optimize(
        fn=_all_samples, inputs=[str(tars)], output_dir=str(out), chunk_bytes=CHUNK_BYTES,
        num_workers=1,
    )  # fmt: skip


def _all_samples(tars: str) -> Iterator[dict[str, Any]]:
    yield from samples(Path(tars))


def energon(tars: Path, out: Path) -> None:
    from megatron.energon.flavors.webdataset import prepare

    out.mkdir(parents=True)
    names = sorted(path.name for path in tars.glob("*.tar"))
    for name in names:
        os.link(tars / name, out / name)
    found = [kind for kind in vars(prepare).values() if hasattr(kind, "prepare_dataset")]
    found[0].prepare_dataset(str(out), names, split_parts_ratio=[("train", 1.0)], workers=2)
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (out / ".nv-meta" / "dataset.yaml").write_text(crude)


FORMATS = {"mds": mosaic, "lit": lit, "tar": energon}


def main() -> None:
    root = Path(sys.argv[1])
    failed: dict[str, str] = {}
    for name, write in FORMATS.items():
        done = root / f"made-{name}"
        if done.exists():
            continue
        shutil.rmtree(root / name, ignore_errors=True)
        try:
            write(root / "ours" / "pairs", root / name)
            done.touch()
        except Exception as error:  # a missing loader must not affect the others
            failed[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"failed": failed}))


if __name__ == "__main__":
    main()
