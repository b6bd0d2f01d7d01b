"""Photographs with captions, from the sample images inside scikit-image and scikit-learn.

Only files that ship in the wheels are read; nothing is downloaded. Each photograph is used whole
and in a few crops at sizes spread evenly on a logarithmic scale, so that a few are large.
"""

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from data_pipeline.ingest.samples import CrudeSample, ImageSegment, TextSegment
from launch.demo.generator import generator

# The file names alone would make poor captions.
CAPTIONS = {
    "skimage/data/astronaut.png": "an astronaut in an orange suit in front of a flag",
    "skimage/data/brick.png": "a wall of bricks",
    "skimage/data/camera.png": "a photographer with a camera on a tripod on a lawn",
    "skimage/data/cell.png": "a cell under the microscope",
    "skimage/data/chelsea.png": "the face of a tabby cat",
    "skimage/data/clock_motion.png": "a clock, blurred by motion",
    "skimage/data/coffee.png": "a cup of coffee on a wooden table with a spoon",
    "skimage/data/coins.png": "old Greek coins in rows",
    "skimage/data/color.png": "a chart of colours",
    "skimage/data/grass.png": "grass seen from above",
    "skimage/data/gravel.png": "gravel seen from above",
    "skimage/data/horse.png": "the black outline of a horse",
    "skimage/data/hubble_deep_field.jpg": "galaxies in the Hubble deep field",
    "skimage/data/ihc.png": "stained tissue under the microscope",
    "skimage/data/logo.png": "the logo of scikit-image, a snake around a picture",
    "skimage/data/moon.png": "the surface of the moon with craters",
    "skimage/data/motorcycle_left.png": "a motorcycle in a workshop, left view",
    "skimage/data/motorcycle_right.png": "a motorcycle in a workshop, right view",
    "skimage/data/page.png": "a scanned page of a book",
    "skimage/data/phantom.png": "the Shepp-Logan phantom of a head",
    "skimage/data/retina.jpg": "the retina of an eye with its vessels",
    "skimage/data/rocket.jpg": "a rocket on its launch pad at night",
    "skimage/data/text.png": "a photograph of handwritten text",
    "sklearn/datasets/images/china.jpg": "a Chinese temple with tiled roofs",
    "sklearn/datasets/images/flower.jpg": "a pink flower before dark leaves",
}
SIDES = (56, 512)
SMALLEST_CROP = 0.4


def package_folder(package: str) -> Path:
    """Return the folder of an installed package without importing it.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"the package {package!r} is not installed; the demo needs it: "
            "pip install 'kimi-pretrain[demo]'"
        )
    return Path(spec.submodule_search_locations[0])


def package_file(path: str) -> Path:
    """Return the file of "package/inner/path" in the installed package.

    Raises:
        FileNotFoundError: the installed version does not have the file.
    """
    package, inner = path.split("/", 1)
    place = package_folder(package) / inner
    if not place.is_file():
        raise FileNotFoundError(
            f"{inner} is missing from the installed package {package!r}; "
            "constraints.txt names the version that has it"
        )
    return place


def opaque(image: Image.Image) -> Image.Image:
    """Return an image as RGB; a transparent background becomes white."""
    if image.mode in ("RGBA", "LA", "P"):
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def variant(image: Image.Image, rng: np.random.Generator, whole: bool) -> Image.Image:
    """Cut a window out of `image` (unless `whole`) and scale its longer side."""
    width, height = image.size
    if not whole:
        w, h = (max(28, int(side * rng.uniform(SMALLEST_CROP, 1.0))) for side in image.size)
        left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        image = image.crop((left, top, left + w, top + h))
    side = float(np.exp(rng.uniform(*np.log(SIDES))))
    scale = min(1.0, side / max(image.size))
    width, height = (max(14, round(s * scale)) for s in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def photos(seed: int, *, per_photo: int) -> Iterator[CrudeSample]:
    """Yield `per_photo` variants of every photograph as JPEG with its caption."""
    for path, caption in CAPTIONS.items():
        with Image.open(package_file(path)) as opened:
            image = opaque(opened)
        for number in range(per_photo):
            picture = variant(image, generator(seed, f"photos/{path}", number), number == 0)
            out = io.BytesIO()
            picture.save(out, "JPEG", quality=88)
            part = "" if number == 0 else "part of "
            texts = [f"{part}a picture: {caption}", f"{part}a photograph of {caption}", caption]
            yield CrudeSample(
                f"photos-{Path(path).stem}-{number:02d}",
                [ImageSegment(out.getvalue(), "jpg"), TextSegment(texts=texts)],
                {"source": path, "size": list(picture.size)},
            )
