"""Untrusted tar files: none can leave its folder, fill the memory or crash the ingest."""

import gzip
import io
import os
import tarfile
import tracemalloc

import pytest

from data_pipeline.index.shards import check_sample_key
from data_pipeline.ingest import readers
from data_pipeline.ingest.readers import open_inputs
from data_pipeline.ingest.samples import IngestPolicy, Refused
from tests.unit.data_pipeline.media import encoded, noise

PNG = encoded(noise(14, 14))
SECRET = b"of somebody else"
MIB = 1 << 20


def loaded(where, **options):
    """Return (key, bytes of the first item or the rejection reason) of every sample."""
    found = []
    for _, unit in open_inputs([str(where)], "caption", **options).read():
        try:
            found.append((unit.key, unit.load(IngestPolicy()).segments[0].data))
        except Refused as refusal:
            found.append((unit.key, refusal.args[0]))
    return found


def member(name, size=0, kind=tarfile.REGTYPE, link="", data=b""):
    """Return a header, which may claim any size, and the bytes that follow."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = (size % 256**12 | 1 << 95).to_bytes(12, "big")
    if size < 0:
        header[124:136] = b"\xff" + (size % 256**11).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data + bytes(-len(data) % 512)


def sample(name="good"):
    return member(f"{name}.png", len(PNG), data=PNG) + member(f"{name}.txt", 1, data=b"x")


END = bytes(1024)


def test_names_that_climb_are_only_names(tmp_path):
    """Sample keys use safe characters only, and nothing is unpacked under a name from the tar."""
    names = ("../../up", "/etc/passwd", "a/../../b", "..", "C:\\x", "a\nb", "\x1b[31m")
    tar = tmp_path / "in.tar"
    tar.write_bytes(b"".join(sample(name) for name in names) + END)
    before = sorted(os.listdir(tmp_path.parent))
    found = loaded(tar)
    assert len(found) == 4  # names with a leading dot are hidden files
    for key, _ in found:
        check_sample_key(key)
    assert sorted(os.listdir(tmp_path)) == ["in.tar"]
    assert sorted(os.listdir(tmp_path.parent)) == before


def test_links_and_devices_of_a_tar_are_never_followed_and_reported(tmp_path):
    (tmp_path / "secret.png").write_bytes(SECRET)
    tar = tmp_path / "in.tar"
    with tar.open("wb") as file:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE)):
            for target in (str(tmp_path / "secret.png"), "../secret.png", "/dev/zero"):
                file.write(member(f"l{number}.png", kind=kind, link=target))
        for number, kind in enumerate((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)):
            file.write(member(f"d{number}.png", kind=kind))
        file.write(member("folder.png", kind=tarfile.DIRTYPE) + sample() + END)
    names = [f"l{number}" for number in (0, 0, 0, 1, 1, 1)] + ["d0", "d1", "d2"]
    assert loaded(tar) == [*((name, "missing file") for name in names), ("good", PNG)]


LONG = b"%d path=%s\n" % (5021, b"n" * 5010)
HEADERS = {
    "a member of 32 TiB": member("a.png", 1 << 45),
    "a member of all numbers": member("a.png", 256**11 - 1),
    "a member that leads back": member("a.png", -512),
    "a long name of 16 TiB": member("x", 1 << 44, tarfile.GNUTYPE_LONGNAME),
    "records of 16 TiB": member("x", 1 << 44, tarfile.XHDTYPE),
    "records that lead back": member("x", -1024, tarfile.XHDTYPE),
    "records of records": member("x", 8, tarfile.XHDTYPE, data=b"8 a=bcd\n") * 900,
    "a number that is none": member("x", 19, tarfile.XHDTYPE, data=b"19 GNU.sparse.map=x\n"),
    "a name of 5,010 letters": member("x", len(LONG), tarfile.XHDTYPE, data=LONG),
}


@pytest.mark.parametrize("what", HEADERS)
@pytest.mark.parametrize("packed", [False, True], ids=["tar", "tgz"])
@pytest.mark.timeout(60)
def test_an_absurd_header_is_a_damaged_file(what, packed, tmp_path):
    """Samples before the header are used; ingest neither crashes nor hangs."""
    # The sample just before the header may be incomplete.
    data = sample() + sample("before") + HEADERS[what] + sample("after") + END
    tar = tmp_path / ("in.tgz" if packed else "in.tar")
    tar.write_bytes(gzip.compress(data) if packed else data)
    found = loaded(tar)
    assert found[0] == ("good", PNG)
    assert found[-1] == (tar.name, "damaged file")
    assert set(found[1:-1]) <= {("before", PNG)}


def _of_zeros(size, kind=tarfile.REGTYPE, name="a.png"):
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(sample() + sample("before") + member(name, size, kind))
        for _ in range(size // MIB):
            file.write(bytes(MIB))
        file.write(sample("last") + END)
    return packed.getvalue()


def _sparse(size):
    records = b"".join(
        b"%d %s\n" % (len(record) + 4, record)
        for record in (b"GNU.sparse.size=%d" % size, b"GNU.sparse.realsize=%d" % size)
    )
    records += b"24 GNU.sparse.map=0,512\n"
    head = member("x", len(records), tarfile.XHDTYPE, data=records)
    return (
        sample()
        + sample("before")
        + head
        + member("a.png", 512, data=bytes(512))
        + sample("last")
        + END
    )


def test_what_is_packed_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LOADED", 2 * MIB)
    bombs = {
        "member.tgz": _of_zeros(48 * MIB),
        "records.tgz": _of_zeros(48 * MIB, tarfile.XHDTYPE),
        "many.tgz": gzip.compress(
            b"".join(member(f"a.{n}.png", MIB, data=bytes(MIB)) for n in range(24)) + END, 1
        ),
        "sparse.tar": _sparse(1 << 40),
    }
    expected = {
        "member.tgz": [("good", PNG), ("before", PNG), ("a", "too large"), ("last", PNG)],
        "records.tgz": [("good", PNG), ("records.tgz", "damaged file")],
        "many.tgz": [("a", "too large")],
        "sparse.tar": [("good", PNG), ("before", PNG), ("a", "too large"), ("last", PNG)],
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
        tracemalloc.start()
        found = loaded(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if name == "many.tgz":  # its text is also missing, but memory never held it
            found = [(key, "too large") for key, _ in found]
        assert found == expected[name], name
        assert peak < 12 * MIB, f"{name}: {peak / MIB:.0f} MiB"


def test_a_sample_has_so_many_files_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MOST_MEMBERS", 20)
    tar = tmp_path / "in.tar"
    tar.write_bytes(
        sample() + sample("before") + b"".join(member(f"a.{n}.png") for n in range(30)) + END
    )
    assert loaded(tar) == [("good", PNG), ("before", PNG), ("in.tar", "damaged file")]


def test_links_out_of_a_folder_are_refused(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "a.png").write_bytes(PNG)
    (folder / "a.txt").write_bytes(b"x")
    (folder / "own.png").write_bytes(PNG)
    (folder / "a.png").symlink_to(folder / "own.png")
    assert ("a", PNG) in loaded(folder)  # a link inside the folder is allowed
    for target in (outside / "a.png", outside):
        (folder / "a.png").unlink()
        (folder / "a.png").symlink_to(target)
        with pytest.raises(ValueError, match="leads out of the folder.*--follow-links"):
            loaded(folder)
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(outside / "a.png")
    assert ("a", PNG) in loaded(folder, follow_links=True)


def test_links_out_of_a_manifest_s_folder_are_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "a.png").write_bytes(PNG)
    (folder / "a.png").symlink_to(tmp_path / "a.png")
    (folder / "b.png").write_bytes(PNG)
    lines = '{"image": "a.png", "text": "x"}\n{"image": "b.png", "text": "x"}\n'
    (folder / "m.jsonl").write_text(lines + '{"image": "ftp://host/b.png", "text": "x"}\n')
    found = loaded(folder / "m.jsonl")
    assert found[0] == ("m.jsonl:1", "bad path")
    assert found[1][1] == PNG
    assert found[2] == ("m.jsonl:3", "missing file")
    assert loaded(folder / "m.jsonl", follow_links=True)[0][1] == PNG
