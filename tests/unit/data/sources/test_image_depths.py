"""Images of every depth and mode have their brightness, or are refused; none is clipped."""

import io
import struct
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from jaxres.config.schema.data import DataSection, ImagesSource
from jaxres.data import BadRecord, open_dataset
from jaxres.data.sources import documents, images
from jaxres.data.sources.images import UnusableDepth, open_picture
from jaxres.faults import ConfigError

SIDE = 64
RAMP = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)
"""Of mean 1/2, from black above to white below."""


def ramp(bits, dtype=np.uint16):
    return (RAMP * (2**bits - 1)).astype(dtype)


GREY = ramp(8, np.uint8)
RGB = Image.fromarray(np.stack([GREY] * 3, -1))


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def tiff(values, *, bits, photometric=1, channels=1, sample_format=None):
    """Returns an uncompressed little-endian TIFF; its bits a value may be other than Pillow's."""
    data, offset = values if isinstance(values, bytes) else values.tobytes(), 8
    depths = struct.pack(f"<{channels}H", *[bits] * channels)
    tags = [(256, SIDE), (257, SIDE), (259, 1), (262, photometric), (273, offset), (277, channels)]
    tags += [(278, SIDE), (279, len(data))]
    tags += [] if sample_format is None else [(339, sample_format)]
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags]
    after = 8 + len(data)
    at = after + 2 + 12 * (len(tags) + 1) + 4
    inline = struct.pack("<HHI4s", 258, 3, channels, depths.ljust(4, b"\0")[:4])
    outside = struct.pack("<HHII", 258, 3, channels, at)
    entries.insert(2, inline if channels < 3 else outside)
    index = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 0)
    return b"II*\0" + struct.pack("<I", after) + data + index + depths


def deep_png(values, *, channels):
    """Returns a PNG file of 16 bits a channel, which Pillow does not write."""
    color = {2: 4, 3: 2, 4: 6}[channels]
    rows = np.stack([values] * channels, -1).astype(">u2")
    if channels in (2, 4):
        rows[..., -1] = 65_535
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 16, color, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", packed), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def packed_12_bits(values):
    high, low = values.ravel()[::2].astype(np.uint32), values.ravel()[1::2].astype(np.uint32)
    both = high << 12 | low
    return np.stack([both >> 16, both >> 8 & 255, both & 255], -1).astype(np.uint8).tobytes()


def turned(image, kind):
    """Returns a file whose pixels are upside down, as its EXIF says."""
    exif = Image.Exif()
    exif[0x0112] = 3
    return saved(image.rotate(180), kind, exif=exif)


def with_transparent_half():
    alpha = np.full_like(GREY, 255)
    alpha[: SIDE // 2] = 0
    return Image.fromarray(np.dstack([GREY, GREY, GREY, alpha]))


PALETTE = RGB.convert("P", palette=Image.Palette.ADAPTIVE)
BLACK = Image.new("RGB", RGB.size)
KNOWN = {
    "PNG of 8 bits": saved(Image.fromarray(GREY)),
    "PNG of 1 bit": saved(Image.fromarray(GREY).convert("1")),
    "PNG of 16 bits": saved(Image.fromarray(ramp(16))),
    "PNG of 16 bits, RGB": deep_png(ramp(16), channels=3),
    "PNG of 16 bits, RGBA": deep_png(ramp(16), channels=4),
    "PNG of 16 bits, grey with alpha": deep_png(ramp(16), channels=2),
    "PNG with a palette": saved(PALETTE),
    "PNG with transparent colors": saved(PALETTE, transparency=bytes(range(256))),
    "PNG of grey with alpha": saved(Image.fromarray(GREY).convert("LA")),
    "PNG, half transparent": saved(with_transparent_half()),
    "PNG upside down": turned(Image.fromarray(ramp(16)), "PNG"),
    "TIFF of 16 bits, little-endian": tiff(ramp(16), bits=16),
    "TIFF of 16 bits, big-endian": saved(Image.fromarray(ramp(16).astype(">u2")), "TIFF"),
    "TIFF of 16 bits, white is 0": tiff(65_535 - ramp(16), bits=16, photometric=0),
    "TIFF of 16 bits, RGB": tiff(np.stack([ramp(16)] * 3, -1), bits=16, photometric=2, channels=3),
    "TIFF of 12 bits": tiff(packed_12_bits(ramp(12)), bits=12),
    "TIFF of 8 bits, white is 0": tiff(255 - GREY, bits=8, photometric=0),
    "TIFF of 8 bits without sign": tiff(GREY, bits=8, sample_format=1),
    "TIFF of 16 bits without sign": tiff(ramp(16), bits=16, sample_format=1),
    "TIFF upside down": turned(RGB, "TIFF"),
    "TIFF of two pages": saved(RGB, "TIFF", save_all=True, append_images=[BLACK]),
    "TIFF in LAB": saved(RGB.convert("LAB"), "TIFF"),
    "GIF of two frames": saved(PALETTE, "GIF", save_all=True, append_images=[BLACK]),
    "WebP of two frames": saved(RGB, "WEBP", save_all=True, append_images=[BLACK], lossless=True),
    "JPEG of two pictures": saved(RGB, "MPO", save_all=True, append_images=[BLACK]),
    "JPEG in CMYK": saved(RGB.convert("CMYK"), "JPEG", quality=95),
    "JPEG in grey": saved(Image.fromarray(GREY), "JPEG", quality=95),
    "BMP": saved(RGB, "BMP"),
}
"""Files of the ramp."""
UNKNOWN = {
    "fractions from 0 to 1": saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
    "fractions up to 65535": saved(Image.fromarray(ramp(16, np.float32)), "TIFF"),
    "whole numbers of 32 bits": saved(Image.fromarray(ramp(8, np.int32)), "TIFF"),
    "12 bits in 16": saved(Image.fromarray(ramp(12))),
    "10 bits in 16": saved(Image.fromarray(ramp(10))),
    "8 bits in 16": saved(Image.fromarray(ramp(8))),
    "12 bits in 16 of TIFF": tiff(ramp(12), bits=16),
    "12 bits in 16, white is 0": tiff(ramp(12), bits=16, photometric=0),
    "12 bits in 16 of RGB": deep_png(ramp(12), channels=3),
    "8 bits in 16 of RGBA": deep_png(ramp(8), channels=4),
    "12 bits in 16 of grey with alpha": deep_png(ramp(12), channels=2),
    "8 bits with a sign": tiff(GREY, bits=8, sample_format=2),
    "16 bits with a sign": tiff(ramp(16), bits=16, sample_format=2),
    "CMYK of 16 bits": tiff(np.stack([ramp(16)] * 4, -1), bits=16, photometric=5, channels=4),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_image_of_any_depth_and_mode_has_its_brightness(name):
    images.check_depth(KNOWN[name])
    picture = open_picture(KNOWN[name])
    assert picture.mode == "RGB"
    pixels = np.asarray(picture).astype(float)
    coarse = 12 if name == "PNG of 1 bit" else 2  # Dithered.
    for quarter in range(4):
        rows = slice(quarter * SIDE // 4, (quarter + 1) * SIDE // 4)
        assert abs(pixels[rows].mean() - 255 * RAMP[rows].mean()) < coarse
        assert np.ptp(pixels[rows].mean((0, 1))) < 1, "all channels are equal"


def test_black_of_sixteen_bits_is_black():
    black = saved(Image.fromarray(np.zeros((SIDE, SIDE), np.uint16)))
    images.check_depth(black)
    assert not np.asarray(open_picture(black)).any()


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_without_a_known_black_and_white_are_refused_and_not_clipped(name):
    with pytest.raises(UnusableDepth, match="it has values of"):
        open_picture(UNKNOWN[name])
    with pytest.raises(UnusableDepth, match="it has values of"):
        images.check_depth(UNKNOWN[name])


def section(folder):
    source = ImagesSource(path=str(folder), size=8, include=("**/*.tif", "**/*.parquet"))
    return DataSection(source=source, heldout_fraction=0.0, cache_dir=folder.parent / "cache")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos" / "x").mkdir(parents=True)
    for number, name in enumerate(("TIFF of 12 bits", "fractions from 0 to 1")):
        content = {**KNOWN, **UNKNOWN}[name]
        (tmp_path / "photos" / "x" / f"{number}.tif").write_bytes(content)
    return tmp_path / "photos"


def test_a_corpus_with_such_an_image_is_refused_with_its_place(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"x/1\.tif: it has values of 32 bits .*8 bits a channel"):
        open_dataset(section(folder))
    contents = [path.read_bytes() for path in sorted(folder.glob("x/*"))]
    (tmp_path / "shards").mkdir()
    table = pyarrow.table({"image": contents, "label": [0, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "shards" / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet, row 2: it has values of 32 bits"):
        open_dataset(section(tmp_path / "shards"))


def test_such_an_image_in_a_folder_that_was_built_before_is_a_bad_record(folder, monkeypatch):
    monkeypatch.setattr(documents.images, "check_depth", lambda content: None)
    rows = open_dataset(section(folder)).train
    outcomes = []
    for row in range(2):
        try:
            outcomes.append(rows.rows(np.array([row]))["image"].max() > 100)
        except BadRecord as error:
            outcomes.append("it has values of 32 bits" in str(error))
    assert outcomes == [True, True]
