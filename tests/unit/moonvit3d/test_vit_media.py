"""Bytes to pixels: bit-exact decoding, and one clear error for each refused file."""

import io
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageFile

from moonvit3d import media
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits, video_chunks
from moonvit3d.media import MediaError, Probe, is_turned, probe, read_image, read_video, verify
from moonvit3d.preprocess import video_patches
from tests import ROOT
from tests.unit.data_pipeline.media import encoded, noise, video
from tests.unit.moonvit3d.plain import plain_patches

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(depth, colour, width, height, rows, extra=b""):
    """Encode a PNG by hand; `rows` are its bytes without the filter byte of each row."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = chunk(b"IHDR", head) + extra + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def check_line(error):
    """Check that the error is one short line without memory addresses, which differ by run."""
    text = str(error.value)
    assert text
    assert "\n" not in text
    assert len(text) < 200
    assert " at 0x" not in text


def complaint(function, data):
    """Return the message of its MediaError, or "" on success; other errors propagate."""
    try:
        function(data)
    except MediaError as error:
        return str(error)
    return ""


# Images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_known_by_their_bytes(kind):
    data = encoded(noise(20, 31), kind)
    assert probe(data, KIND_IMAGE) == verify(data, KIND_IMAGE) == Probe(kind, 1, 20, 31, 0.0)
    pixels = read_image(data)
    assert (pixels.shape, pixels.dtype) == ((20, 31, 3), np.uint8)
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_lossless_formats_are_exact():
    pixels = noise(20, 31)
    assert np.array_equal(read_image(encoded(pixels)), pixels)
    assert np.array_equal(read_image(encoded(pixels, "WEBP", lossless=True)), pixels)
    few = Image.fromarray(pixels).quantize(64)
    assert np.array_equal(read_image(encoded(few, "GIF")), np.asarray(few.convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparency_lies_over_white(kind):
    layer = np.concatenate([noise(8, 9), np.full((8, 9, 1), 255, np.uint8)], -1)
    layer[:4, :, 3] = 0
    pixels = read_image(encoded(layer, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert (pixels[:4] == 255).all()
    assert np.array_equal(pixels[4:], layer[4:, :, :3])


def test_a_transparent_gif_lies_over_white():
    few = Image.fromarray(noise(8, 9)).quantize(8)
    want = np.array(few.convert("RGB"))
    want[np.asarray(few) == 3] = 255
    assert np.array_equal(read_image(encoded(few, "GIF", transparency=3)), want)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_animations_are_refused(kind):
    pictures = [Image.fromarray(noise(16, 16, seed)) for seed in range(3)]
    data = encoded(pictures[0], kind, save_all=True, append_images=pictures[1:])
    with pytest.raises(MediaError, match=f"animated {kind}; store it as a video") as error:
        read_image(data)
    check_line(error)
    one = encoded(pictures[0], kind, save_all=True)  # written as an animation of one image
    assert read_image(one).shape == (16, 16, 3)


@pytest.mark.parametrize("kind", ["PNG", "MPO"])
def test_first_picture_of_an_animated_png_and_of_a_jpeg_with_several(kind):
    pictures = [Image.fromarray(noise(16, 16, seed)) for seed in range(3)]
    data = encoded(pictures[0], kind, save_all=True, append_images=pictures[1:])
    first = encoded(pictures[0], "PNG" if kind == "PNG" else "JPEG")
    assert np.array_equal(read_image(data), read_image(first))
    assert probe(data, KIND_IMAGE).format == ("PNG" if kind == "PNG" else "JPEG")


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (4, 2)], ids=["grey", "grey and alpha"])
def test_grey_of_16_bits_is_refused(colour, channels):
    rows = np.random.default_rng(0).integers(0, 2**16, (5, 7, channels)).astype(">u2")
    data = png(16, colour, 7, 5, [row.tobytes() for row in rows])
    assert probe(data, KIND_IMAGE).width == 7
    with pytest.raises(MediaError, match="16-bit grey; write the image as 8-bit") as error:
        read_image(data)
    check_line(error)


def test_colour_of_16_bits_gives_its_high_byte():
    values = np.random.default_rng(0).integers(0, 2**16, (5, 7, 3))
    data = png(16, 2, 7, 5, [row.astype(">u2").tobytes() for row in values])
    pixels = read_image(data)
    assert np.array_equal(pixels, values >> 8)
    assert np.abs(pixels - values / 257).max() < 1  # exact scaling of 65535 to 255
    opaque = np.concatenate([values, np.full((5, 7, 1), 65535)], -1)
    data = png(16, 6, 7, 5, [row.astype(">u2").tobytes() for row in opaque])
    assert np.array_equal(read_image(data), values >> 8)


def transparent(*values):
    return chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))


@pytest.mark.parametrize(
    ("depth", "row", "levels"),
    [(1, b"\x40", 2), (2, b"\x1b", 4), (4, b"\x01\x23\x45\x67\x89\xab\xcd\xef", 16),
     (8, bytes(range(256)), 256)],
)  # fmt: skip
def test_the_transparent_grey_of_a_png_is_white_at_every_depth(depth, row, levels):
    grey = np.arange(levels) * 255 // (levels - 1)
    for value in range(0, levels, max(1, levels // 16)):
        data = png(depth, 0, levels, 1, [row], transparent(value))
        want = np.where(np.arange(levels) == value, 255, grey)
        assert np.array_equal(read_image(data)[0, :, 1], want), value


def test_a_transparent_colour_of_8_bits_is_white_and_of_16_bits_refused():
    row = bytes([1, 2, 3, 1, 2, 4])
    # By the specification (11.3.2.1), only the lower 8 bits of each value count.
    data = png(8, 2, 2, 1, [row], transparent(1, 0xFF02, 4))
    assert read_image(data).tolist() == [[[1, 2, 3], [255, 255, 255]]]
    wide = b"".join(struct.pack(">H", value) for value in (0x1234, 0x5678, 0x9ABC))
    data = png(16, 2, 1, 1, [wide], transparent(0x1234, 0x5678, 0x9ABC))
    with pytest.raises(MediaError, match="16-bit colour of which one value is transparent") as told:
        read_image(data)
    check_line(told)
    assert read_image(png(16, 2, 1, 1, [wide])).tolist() == [[[0x12, 0x56, 0x9A]]]


def test_texts_in_a_png_do_not_matter_however_long_they_are():
    packed = zlib.compress(bytes(2 << 20))
    texts = chunk(b"zTXt", b"k\0\0" + packed) + chunk(b"iTXt", b"k\0\1\0\0\0" + packed)
    assert read_image(png(8, 0, 2, 1, [b"\7\xff"], texts))[0, :, 0].tolist() == [7, 255]
    plain = png(8, 0, 2, 1, [b"\7\xff"])
    behind = plain[: -len(chunk(b"IEND", b""))] + texts + chunk(b"IEND", b"")
    assert np.array_equal(read_image(behind), read_image(plain))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert is_turned(encoded(noise(4, 4), "PNG", exif=exif))
    # A length beyond the end of the file means a damaged file.
    assert complaint(read_image, plain[:33] + b"\xff\xff\xff\xf0zTXt" + plain[33:])


def test_the_rotation_tag_of_a_video_is_told_and_not_applied():
    plain = video([noise(16, 32)] * 3, 4.0)
    turned = video([noise(16, 32)] * 3, 4.0, turn=90)
    assert (verify(plain, KIND_VIDEO).turned, verify(turned, KIND_VIDEO).turned) == (False, True)
    for (a, _), (b, _) in zip(read_video(plain), read_video(turned), strict=True):
        assert np.array_equal(a, b)


def test_cmyk_inks_are_taken_as_stored_inverted():
    """Cyan ink alone is cyan on screen, with and without Adobe's marker in the file."""
    inks = {(255, 0, 0, 0): (0, 255, 255), (0, 255, 0, 0): (255, 0, 255),
            (0, 0, 255, 0): (255, 255, 0), (0, 0, 0, 255): (0, 0, 0), (0, 0, 0, 0): (255, 255, 255),
            (0, 0, 0, 100): (155, 155, 155), (255, 255, 0, 0): (0, 0, 255)}  # fmt: skip
    for ink, colour in inks.items():
        data = encoded(Image.new("CMYK", (16, 16), ink), "JPEG", quality=100)
        at = data.index(b"Adobe") - 4  # marker, length, then the name
        plain = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
        assert b"Adobe" not in plain
        for file in (data, plain):
            assert np.abs(read_image(file).astype(int) - colour).max() <= 2, ink
    # A file that stores the inks without inversion decodes to the opposite inks.
    other = Image.eval(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), lambda ink: 255 - ink)
    assert read_image(encoded(other, "JPEG", quality=100)).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_orientation_is_told_and_not_applied(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(noise(28, 56), kind), encoded(noise(28, 56), kind, exif=exif)
    assert (is_turned(plain), is_turned(turned)) == (False, True)
    assert np.array_equal(read_image(plain), read_image(turned))
    assert (verify(turned, KIND_IMAGE).height, probe(turned, KIND_IMAGE).width) == (28, 56)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_unreadable_exif_turns_nothing(kind):
    data = encoded(noise(28, 56), kind, exif=b"Exif\0\0no TIFF inside, only words")
    assert b"no TIFF" in data
    assert not is_turned(data)
    assert read_image(data).shape == (28, 56, 3)


@pytest.mark.parametrize(
    "data",
    [b"", b"no picture", encoded(noise(8, 8), "BMP"), encoded(noise(8, 8), "TIFF"), b"GIF89a",
     b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x1cftypisom"],
    ids=["empty", "text", "bmp", "tiff", "gif mark", "png mark", "jpeg mark", "webp mark", "mp4"],
)  # fmt: skip
def test_what_is_no_image_is_refused(data):
    for function in (read_image, lambda data: probe(data, KIND_IMAGE)):
        with pytest.raises(MediaError) as error:
            function(data)
        check_line(error)


def test_a_side_of_0_is_refused():
    gif = encoded(noise(16, 16), "GIF")
    at = gif.index(b",", 13 + 768)  # after the palette: the first frame
    narrow = gif[:6] + b"\0\0" + gif[8 : at + 5] + b"\0\0" + gif[at + 7 :]
    for data in (png(8, 2, 0, 5, []), png(8, 2, 5, 0, []), narrow):
        with pytest.raises(MediaError) as error:
            read_image(data)
        check_line(error)


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_cut_files_are_refused_whatever_pillow_is_set_to(kind, lenient, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    data = encoded(noise(64, 90), kind)
    for keep in (0.3, 0.6, 0.95):
        with pytest.raises(MediaError) as error:
            read_image(data[: int(len(data) * keep)])
        check_line(error)
    damaged = bytearray(encoded(noise(28, 28)))
    damaged[400] ^= 0xFF
    with pytest.raises(MediaError):
        read_image(bytes(damaged))
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient  # the setting is restored


def test_strictness_lasts_while_any_reader_is_inside(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    one, two = (media._open_image(encoded(noise(8, 8))) for _ in range(2))
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    two.__exit__(None, None, None)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def bombs():
    """Yield small files that declare far more pixels than they hold."""
    declared = png(8, 2, 50000, 50000, [b"\0" * 9])
    yield "PNG", declared
    # A second header, which Pillow accepts, and an animation that Pillow would allocate for.
    pictures = [Image.fromarray(noise(16, 16, seed)) for seed in range(2)]
    small = encoded(pictures[0], save_all=True, append_images=pictures[1:], disposal=1)
    yield "PNG", small[:33] + declared[8:33] + small[33:]
    jpeg = bytearray(encoded(noise(16, 16), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 50000, 50000)
    yield "JPEG", bytes(jpeg)
    webp = bytearray(encoded(noise(16, 16), "WEBP", lossless=True))
    bits = int.from_bytes(webp[21:25], "little")
    webp[21:25] = (bits | 0xFFFFFFF).to_bytes(4, "little")  # 14 bits a side: 16384
    yield "WEBP", bytes(webp)
    gif = encoded(noise(16, 16), "GIF")
    yield "GIF", gif[:6] + struct.pack("<HH", 50000, 50000) + gif[10:]
    at = gif.index(b",", 13 + 768)  # the frame exceeds the screen and must be cleared afterwards
    wipe = b"!\xf9\x04\x08\0\0\0\0"
    frame = struct.pack("<HHHH", 0, 0, 50000, 50000)
    yield "GIF", gif[:at] + wipe + gif[at : at + 1] + frame + gif[at + 9 :]


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None, 10**12])
@pytest.mark.parametrize(("kind", "data"), list(bombs()))
def test_image_bombs_are_refused_before_decoding(kind, data, limit, monkeypatch):
    """The limit holds even where Pillow's own check would pass."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)

    def never(*_, **__):
        raise AssertionError("room was made or a pixel decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    monkeypatch.setattr(Image.core, "fill", never)
    assert len(data) < 5000
    for function in (read_image, lambda data: verify(data, KIND_IMAGE)):
        with pytest.raises(MediaError, match="pixels; at most 80000000|exceeds limit") as error:
            function(data)
        check_line(error)


def test_the_bound_is_our_own(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    pixels = noise(20, 31)
    assert np.array_equal(read_image(encoded(pixels)), pixels)
    assert read_image(encoded(pixels, "JPEG")).shape == pixels.shape
    monkeypatch.setattr(media, "MAX_PIXELS", 20 * 31)
    assert np.array_equal(read_image(encoded(pixels)), pixels)
    monkeypatch.setattr(media, "MAX_PIXELS", 20 * 31 - 1)
    with pytest.raises(MediaError, match="31 x 20 pixels; at most 619"):
        read_image(encoded(pixels))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_images_give_pixels_or_one_error():
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(noise(12, 13), kind) for kind in FORMATS]
    files += [encoded(noise(12, 13), "JPEG", exif=exif, progressive=True)]
    for data in files:
        for _ in range(60):
            bad = bytearray(data[: rng.integers(1, len(data))] if rng.random() < 0.2 else data)
            for at in rng.integers(0, min(len(bad), rng.choice([40, len(data)])), 3):
                bad[at] = rng.integers(0, 256)
            for function in (read_image, is_turned):
                assert "\n" not in complaint(function, bytes(bad))


# Videos -----------------------------------------------------------------------------------------


def clip(frames, fps=4, height=48, width=64, codec="mpeg4"):
    """Return an MP4 of drifting noise, in which all frames differ."""
    base = noise(height, width).astype(int)
    drifting = [((base + 11 * i) % 256).astype(np.uint8) for i in range(frames)]
    return video(drifting, fps, codec)


def stills(sizes, fps=4):
    """Return an MP4 of JPEGs, each of its own size (height, width)."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mjpeg", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *sizes[0], "yuvj420p"
        for i, size in enumerate(sizes):
            packet = av.Packet(encoded(noise(*size, seed=i), "JPEG"))
            packet.stream, packet.pts, packet.dts, packet.duration = stream, i, i, 1
            packet.time_base, packet.is_keyframe = Fraction(1, fps), True
            container.mux(packet)
    return out.getvalue()


def boxes(data):
    """Return (name, begin, end) of the top-level boxes of an MP4."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found.append((data[at + 4 : at + 8], at, at + size))
        at += size
    return found


def index_first(data):
    """Return the same MP4 with its index (moov) before its frames, like files for the web."""
    parts = {name: data[begin:end] for name, begin, end in boxes(data)}
    moov = bytearray(parts[b"moov"])
    at = moov.index(b"stco") + 8
    count = int.from_bytes(moov[at : at + 4], "big")
    offsets = struct.unpack_from(f">{count}I", moov, at + 4)
    struct.pack_into(f">{count}I", moov, at + 4, *(offset + len(moov) for offset in offsets))
    return parts[b"ftyp"] + bytes(moov) + parts[b"free"] + parts[b"mdat"]


def patched(data, box, offset, value):
    """Overwrite bytes of a box; offsets count from the end of its name."""
    at = data.index(box) + len(box) + offset
    return data[:at] + value + data[at + len(value) :]


def all_frames(data):
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def plain_chunks(data, fps, limits):
    """Apply the whole video rule, written from the released processor's description only."""
    frames = all_frames(data)
    sample_fps = min(2.0, fps)
    count = max(round(len(frames) * sample_fps / fps), 1)
    sampled = [int(round(i)) for i in np.linspace(0, len(frames) - 1, count)]
    for first in range(0, count, 4):
        group = sampled[first : first + 4]
        patches, grids = zip(*(plain_patches(frames[i], limits.frame, 512) for i in group))
        seconds = group[0] / fps
        whole, rest = int(seconds), int((seconds % 1) * 1000)
        stamp = f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{rest:03d}"
        yield np.concatenate(patches), (len(group), *grids[0][1:]), stamp


@pytest.mark.parametrize(
    ("frames", "fps", "size"),
    [(7, 1, (48, 64)), (10, 12.5, (30, 34)), (40, 12.5, (48, 64)), (23, 24, (50, 90)),
     (40, 24, (16, 130)), (31, 30000 / 1001, (48, 64)), (40, 30000 / 1001, (70, 32)),
     (1, 24, (32, 32))],
)  # fmt: skip
def test_read_video_and_video_patches_equal_the_plain_rule(frames, fps, size):
    data = clip(frames, fps, *size)
    limits = PatchLimits(frame=9)
    want = list(plain_chunks(data, float(Fraction(fps).limit_denominator(1001)), limits))
    got = [(*video_patches(pixels, limits), stamp) for pixels, stamp in read_video(data)]
    assert [(grid, stamp) for _, grid, stamp in got] == [(grid, stamp) for _, grid, stamp in want]
    for (patches, _, _), (expected, _, _) in zip(got, want, strict=True):
        assert np.array_equal(patches, expected)


@pytest.mark.parametrize("chunks", [[0], [2], [2, 0], [1, 1], [], None])
def test_a_selection_equals_the_whole_and_stops_when_done(chunks, monkeypatch):
    data = clip(22)
    decoded = []
    one_size = media._of_one_size

    def counted(frames, found):
        for frame in one_size(frames, found):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(media, "_of_one_size", counted)
    whole, plan = list(read_video(data)), video_chunks(22, 4.0)
    decoded.clear()
    got = list(read_video(data, chunks))
    wanted = sorted(set(range(3) if chunks is None else chunks))
    assert len(decoded) == (plan[wanted[-1]].frames[-1] + 1 if wanted else 0)
    for (pixels, stamp), chunk in zip(got, wanted, strict=True):
        assert stamp == whole[chunk][1] == plan[chunk].timestamp
        assert np.array_equal(pixels, whole[chunk][0])


def test_one_chunk_is_held_at_a_time():
    data = clip(150, 6, 96, 128)  # 13 chunks
    chunk_bytes = 4 * 96 * 128 * 3
    list(read_video(data, [0]))
    tracemalloc.start()
    try:
        count = 0
        for frames, _ in read_video(data):
            count += frames.shape[0]
            del frames
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 50
    assert peak < 2 * chunk_bytes


def test_leaving_early_closes_the_file():
    reader = read_video(clip(22))
    next(reader)
    reader.close()
    assert list(reader) == []


def test_probe_and_verify_of_a_video():
    data = clip(22)
    want = Probe("MP4", 22, 48, 64, 4.0)
    assert probe(data, KIND_VIDEO) == verify(data, KIND_VIDEO) == want
    assert probe(index_first(data), KIND_VIDEO) == want
    assert all(np.array_equal(a, b) for (a, _), (b, _) in
               zip(read_video(index_first(data)), read_video(data), strict=True))  # fmt: skip


def refuses(data, match):
    """Check that all three functions raise the same error."""
    for function in (probe, verify, lambda data, _: list(read_video(data))):
        with pytest.raises(MediaError, match=match) as error:
            function(data, KIND_VIDEO)
        check_line(error)


@pytest.mark.parametrize("data", [b"", b"no video", encoded(noise(8, 8)), clip(9)[:700]],
                         ids=["empty", "text", "png", "without its index"])  # fmt: skip
def test_what_is_no_video_is_refused(data):
    refuses(data, "video does not decode|the file ends early")


def test_a_video_that_ends_early_is_refused():
    data = index_first(clip(22))
    for cut in (1, 100, 3000):
        refuses(
            data[:-cut], f"ends early: {len(data) - cut} bytes, its frames reach to {len(data)}"
        )
    # Cut between two frames: ffmpeg alone would read a shorter, intact video.
    moov = data[slice(*next((begin, end) for name, begin, end in boxes(data) if name == b"moov"))]
    at = moov.index(b"stsz") + 12
    last = struct.unpack_from(">22I", moov, at + 4)[-1]
    shorter = data[:-last]
    assert len(all_frames(shorter)) == 21
    refuses(shorter, "ends early")
    # A box of open length ("to the end of the file") gives no size; the truncated frame shows the
    # cut.
    begin = next(begin for name, begin, _ in boxes(data) if name == b"mdat")
    open_end = data[:begin] + bytes(4) + data[begin + 4 :]
    assert verify(open_end, KIND_VIDEO).frames == 22
    refuses(open_end[:-10], "frame 21 is cut off: the file ends early")
    # A box with a 64-bit length replaces the empty box before it.
    size = struct.pack(">Q", len(data) - begin + 8)
    wide = data[: begin - 8] + b"\0\0\0\1mdat" + size + data[begin + 8 :]
    assert verify(wide, KIND_VIDEO).frames == 22
    refuses(wide[:-last], f"its frames reach to {len(data)}")


def test_a_video_with_broken_frames_is_refused_where_they_are():
    data = index_first(clip(22))
    begin = next(begin for name, begin, _ in boxes(data) if name == b"mdat")
    middle = begin + (len(data) - begin) // 2
    broken = data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]
    assert len(all_frames(broken)) == 22  # by default ffmpeg conceals the error silently
    assert probe(broken, KIND_VIDEO).frames == 22  # headers do not show it
    with pytest.raises(MediaError) as error:
        verify(broken, KIND_VIDEO)
    check_line(error)
    reader = read_video(broken)
    assert np.array_equal(next(reader)[0], next(read_video(data))[0])
    with pytest.raises(MediaError) as error:
        list(reader)
    check_line(error)


def test_videos_without_stream_rate_or_frames_are_refused():
    data = clip(9)
    refuses(patched(data, b"hdlr", 8, b"soun"), "no video stream")
    still = patched(patched(data, b"stts", 12, bytes(4)), b"mdhd", 16, bytes(4))  # no durations
    refuses(still, "None frames a second: a video needs a rate above 0")
    refuses(patched(data, b"stsz", 8, bytes(4)), "no frames|rate above 0|ends early")
    unknown = patched(patched(data, b"stsd", 12, b"zzzz"), b"esds", 17, b"\xfe")
    refuses(unknown, "a video codec that ffmpeg does not know")


def test_frames_that_an_edit_list_drops_are_missed():
    data = clip(9)
    ticks = struct.unpack_from(">I", data, data.index(b"mdhd") + 16)[0]  # per second
    trimmed = patched(data, b"elst", 12, struct.pack(">I", 3 * ticks // 4))  # shown from frame 3 on
    with pytest.raises(MediaError, match="the file lists 9 frames, 6 decode"):
        verify(trimmed, KIND_VIDEO)
    with pytest.raises(MediaError, match="frame 8 of 9 does not decode"):
        list(read_video(trimmed))


def test_a_name_that_is_no_utf8_does_not_matter():
    data = clip(9)
    named = patched(data, b"VideoHandler", -1, b"\xb5")
    assert named != data
    assert verify(named, KIND_VIDEO) == verify(data, KIND_VIDEO)


def test_a_size_that_changes_inside_the_video_is_refused():
    assert verify(stills([(48, 64)] * 9), KIND_VIDEO) == Probe("MP4", 9, 48, 64, 4.0)
    data = stills([(48, 64)] * 5 + [(32, 64)] * 4)
    with pytest.raises(MediaError, match="frame 5 is 64 x 32 pixels, the stream 64 x 48") as error:
        verify(data, KIND_VIDEO)
    check_line(error)
    with pytest.raises(MediaError, match="encode the video at one size"):
        list(read_video(data))


def test_chunks_that_the_video_lacks_are_refused():
    for chunk in (3, -1):
        with pytest.raises(MediaError, match=f"chunk {chunk} asked for, the video has 3"):
            read_video(clip(22), [0, chunk])


def test_video_bombs_are_refused_before_decoding(monkeypatch):
    def never(*_):
        raise AssertionError("a frame was asked for")

    monkeypatch.setattr(media, "_of_one_size", never)
    # ffmpeg decodes the first JPEG while it opens the file, unless a limit is set before.
    data = bytearray(stills([(48, 64)]))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 10000, 20000)
    data = patched(bytes(data), b"mp4v", 24, struct.pack(">HH", 20000, 10000))
    started = time.process_time()  # CPU time, so that other work on the machine does not count
    refuses(data, "no size, or more than 80000000 pixels")
    assert time.process_time() - started < 1
    monkeypatch.setattr(media, "MAX_PIXELS", 48 * 64 - 1)
    refuses(clip(9), "no size, or more than 3071 pixels")
    if "libx264" in av.codecs_available:  # ffmpeg knows the size of H.264 without decoding
        refuses(clip(9, codec="libx264"), "64 x 48 pixels; at most 3071 are read")


def test_a_frame_above_the_bound_inside_a_video_is_refused(monkeypatch):
    data = stills([(48, 64)] * 9 + [(480, 640)] * 9)
    monkeypatch.setattr(media, "MAX_PIXELS", 48 * 64)
    assert next(read_video(data, [0]))[0].shape[1:] == (48, 64, 3)
    with pytest.raises(MediaError, match="video does not decode") as error:
        verify(data, KIND_VIDEO)
    check_line(error)


def test_damaged_videos_give_frames_or_one_error():
    rng = np.random.default_rng(0)
    for data in (clip(9), stills([(16, 16)] * 3)):
        begin, end = next((begin, end) for name, begin, end in boxes(data) if name == b"moov")
        for _ in range(60):
            bad = bytearray(data)
            for at in rng.integers(begin, end, 4):
                bad[at] = rng.integers(0, 256)
            for function in (lambda d: verify(d, KIND_VIDEO), lambda d: list(read_video(d, [0]))):
                assert "\n" not in complaint(function, bytes(bad))


# The package alone ------------------------------------------------------------------------------


def test_images_need_neither_pyav_nor_torch():
    script = (
        "import sys; sys.modules['av'] = None\n"
        "import moonvit3d.flops\n"
        "from moonvit3d import grid, image_patches, read_image\n"
        "print(image_patches(read_image(sys.stdin.buffer.read()))[1], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, input=encoded(noise(30, 58)), capture_output=True, cwd=ROOT)
    assert run.stdout.decode().strip() == "(1, 4, 6) False", run.stderr.decode()
