"""Pictures that requests bring: every format, turned upright, as Pillow reads them; alpha of masks; the size of the init
image; what is pasted back; and files whose header promises more than is taken.

What a file shows is Pillow's word: a picture that is drawn from it is drawn from Pillow's pixels of it in a PNG.
"""

import io
import struct
import zlib

import grpc
import numpy as np
import pytest
from conftest import Daemon, Result, reason_of
from latentd.v1 import denoise_pb2
from PIL import Image, ImageOps
from test_replay import GOLDENS, half_mask, picture

ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("pictures"), "--model-roots", str(GOLDENS))
    yield daemon
    assert daemon.stop() == 0


def draw(daemon, model="tiny-sd15", **params) -> Result:
    values = {"prompt": "a photo of a red house", "seed": 7, "steps": 2, "width": 64, "height": 64, **params}
    result = Result()
    for response in daemon.denoise.Generate(denoise_pb2.GenerateRequest(
            model=model, params=denoise_pb2.GenerateParams(**values)), timeout=120):
        result.add(response.event)
    return result


def fails(daemon, **params):
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, **params)
    return reason_of(caught.value)


def init(data: bytes):
    return denoise_pb2.InitImage(data=data, strength=0.5)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def upright(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def exif(orientation: int):
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def rgba(seed=1) -> Image.Image:
    image = picture(seed).convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.arange(80, dtype=np.uint8) * 3, (72, 1))))
    return image


def transparent_gif(interlace: int) -> bytes:
    image = picture(3).quantize(17)
    return saved(image, "GIF", transparency=4, interlace=interlace)


def animation(kind: str) -> bytes:
    return saved(picture(1), kind, save_all=True, append_images=[picture(2), picture(3)], duration=50)


def gif_with_a_part() -> bytes:
    """A first picture of 10 × 8 at (3, 5) of a canvas of 40 × 30."""
    whole = bytearray(saved(picture(1, (10, 8)).quantize(16), "GIF"))
    whole[6:10] = struct.pack("<HH", 40, 30)
    at = whole.index(b"\x2c\0\0\0\0\x0a\0\x08\0")
    whole[at + 1:at + 5] = struct.pack("<HH", 3, 5)
    return bytes(whole)


def bmp(bits: int, compression: int, rows: list[bytes], size, *, masks=b"", palette=b"", from_top=False, header=40) -> bytes:
    body = b"".join(r + b"\0" * (-len(r) % 4) for r in (rows if from_top else rows[::-1]))
    info = struct.pack("<IiiHHIIiiII", header, size[0], -size[1] if from_top else size[1], 1, bits, compression, len(body),
                       2835, 2835, len(palette) // 4, 0)
    info += masks.ljust(header - 40, b"\0") if header > 40 else masks
    return struct.pack("<2sIHHI", b"BM", 14 + len(info) + len(palette) + len(body), 0, 0,
                       14 + len(info) + len(palette)) + info + palette + body


def bmp_16(from_top: bool) -> bytes:
    pixels = np.random.default_rng(5).integers(0, 1 << 15, (24, 33), dtype=np.uint16)
    return bmp(16, 0, [row.tobytes() for row in pixels], (33, 24), from_top=from_top)


def bmp_565() -> bytes:
    pixels = np.random.default_rng(6).integers(0, 1 << 16, (24, 33), dtype=np.uint16)
    return bmp(16, 3, [row.tobytes() for row in pixels], (33, 24), masks=struct.pack("<III", 0xf800, 0x7e0, 0x1f))


def bmp_4() -> bytes:
    rows = np.random.default_rng(7).integers(0, 256, (9, 11), dtype=np.uint8)
    return bmp(4, 0, [row.tobytes() for row in rows], (21, 9), palette=np.random.default_rng(8).bytes(64))


FILES = {
    "webp": lambda: saved(picture(1), "WEBP", quality=80),
    "webp, lossless": lambda: saved(picture(1), "WEBP", lossless=True),
    "webp, alpha": lambda: saved(rgba(), "WEBP", lossless=True, exact=True),
    "gif": lambda: saved(picture(1).quantize(200), "GIF"),
    "gif, transparent": lambda: transparent_gif(0),
    "gif, interlaced": lambda: transparent_gif(1),
    "gif, first of three": lambda: animation("GIF"),
    "bmp 1": lambda: saved(picture(1).convert("1"), "BMP"),
    "bmp 4": bmp_4,
    "bmp 8, grey": lambda: saved(picture(1).convert("L"), "BMP"),
    "bmp 8": lambda: saved(picture(1).quantize(100), "BMP"),
    "bmp 16": lambda: bmp_16(False),
    "bmp 16, from the top": lambda: bmp_16(True),
    "bmp 16, masks": bmp_565,
    "bmp 24": lambda: saved(picture(1, (79, 72)), "BMP"),
    "bmp 32": lambda: saved(rgba(), "BMP"),
    "jpeg": lambda: saved(picture(1), "JPEG", quality=90),
    "jpeg, grey": lambda: saved(picture(1).convert("L"), "JPEG"),
    "jpeg, cmyk": lambda: saved(picture(1).convert("CMYK"), "JPEG", quality=95),
    "jpeg, progressive": lambda: saved(picture(1), "JPEG", progressive=True),
    "png, alpha": lambda: saved(rgba(), "PNG"),
    "png, palette": lambda: saved(picture(1).quantize(30), "PNG"),
    "png, 16 bits": lambda: saved(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64) * 16), "PNG"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_by_pillow(daemon, name):
    data = FILES[name]()
    pixels = upright(data)
    if name == "png, 16 bits":    # which Pillow's RGB cuts off at 255
        pixels = Image.fromarray((np.asarray(Image.open(io.BytesIO(data))).astype(float) / 257 + 0.5).astype(np.uint8)).convert("RGB")
    ours, theirs = draw(daemon, init_image=init(data)), draw(daemon, init_image=init(saved(pixels, "PNG")))
    assert ours.sha256 == theirs.sha256
    assert ours.sha256 != draw(daemon, init_image=init(saved(ImageOps.invert(pixels), "PNG"))).sha256


def test_the_first_picture_of_a_gif_lies_where_its_file_says(daemon):
    data = gif_with_a_part()
    small = Image.open(io.BytesIO(saved(picture(1, (10, 8)).quantize(16), "GIF"))).convert("RGB")
    canvas = Image.new("RGB", (40, 30), tuple(Image.open(io.BytesIO(data)).getpalette()[:3]))
    canvas.paste(small, (3, 5))
    assert draw(daemon, init_image=init(data)).sha256 == draw(daemon, init_image=init(saved(canvas, "PNG"))).sha256


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_what_was_held_otherwise_is_turned_upright(daemon, kind):
    """Init images and masks, and the size that is taken from one."""
    seen = {}
    for orientation in range(1, 9):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(picture(1, (96, 64)), kind, exif=exif(orientation), **options)
        assert Image.open(io.BytesIO(data)).getexif()[ORIENTATION] == orientation
        ours = draw(daemon, init_image=init(data), width=None, height=None)
        theirs = draw(daemon, init_image=init(saved(upright(data), "PNG")), width=None, height=None)
        assert ours.sha256 == theirs.sha256
        size = (ours.done.params.width, ours.done.params.height)
        assert size == ((96, 64) if orientation < 5 else (64, 96))
        seen[orientation] = ours.sha256
        mask = saved(half_mask(), kind, exif=exif(orientation), **options)
        plain = saved(upright(mask), "PNG")
        start = init(saved(picture(2), "PNG"))
        assert draw(daemon, init_image=start, mask_image=denoise_pb2.MaskImage(data=mask)).sha256 == \
            draw(daemon, init_image=start, mask_image=denoise_pb2.MaskImage(data=plain)).sha256
    assert len(set(seen.values())) == 8


def test_exif_that_is_damaged_does_not_matter(daemon):
    plain = draw(daemon, init_image=init(saved(picture(1), "PNG"))).sha256
    whole = exif(6).tobytes()
    for tags in (whole[:n] for n in (0, 6, 7, 10, 14, 16, 20)):
        assert draw(daemon, init_image=init(saved(picture(1), "PNG", exif=tags or b"Exif\0\0"))).sha256 == plain
    for tags in (whole[:10] + b"\xff\xff\xff\xff" + whole[14:], whole[:-8] + b"\0\x99" + whole[-6:]):
        assert draw(daemon, init_image=init(saved(picture(1), "PNG", exif=tags))).sha256 == plain


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_alpha_of_a_mask_counts_where_it_is_used(daemon, kind):
    """What is opaque is repainted, whatever its colour; of a mask that is opaque all over, colours count."""
    alpha = half_mask().convert("L")
    if kind == "GIF":
        strokes = Image.fromarray((np.asarray(alpha) > 0).astype(np.uint8), "P")
        strokes.putpalette([200, 200, 200, 0, 0, 0])
        data = saved(strokes, "GIF", transparency=0)
        assert Image.open(io.BytesIO(data)).info["transparency"] == 0
    else:
        strokes = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
        strokes.putalpha(alpha)
        data = saved(strokes, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    start = init(saved(picture(2), "PNG"))
    drawn = lambda mask: draw(daemon, init_image=start, mask_image=denoise_pb2.MaskImage(data=mask)).sha256    # noqa: E731
    by_colour = drawn(saved(half_mask(), "PNG"))
    assert drawn(data) == by_colour
    opaque = half_mask().convert("RGBA")
    assert drawn(saved(opaque, "PNG")) == by_colour
    assert drawn(saved(Image.new("RGB", (64, 64)), "PNG")) != by_colour


def test_the_size_is_that_of_the_init_image_where_none_is_given(daemon):
    start = init(saved(picture(1, (101, 71)), "PNG"))
    for model, size in (("tiny-sd15", (100, 70)), ("tiny-sdxl", (100, 70)), ("tiny-dev", (96, 64))):
        result = draw(daemon, model, init_image=start, width=None, height=None)
        multiple = 16 if model == "tiny-dev" else 2
        got = Image.open(io.BytesIO(result.pictures[0].data)).size
        assert got == (result.done.params.width, result.done.params.height)
        assert all(g % multiple == 0 and 0 <= s - g < 16 for g, s in zip(got, (101, 71))), (model, got, size)
    # One of them given: the other is the model's.
    usual = draw(daemon, width=None, height=None).done.params
    one = draw(daemon, init_image=start, width=64, height=None).done.params
    assert (one.width, one.height) == (64, usual.height)
    small = draw(daemon, init_image=init(saved(picture(1, (1, 1)), "PNG")), width=None, height=None).done.params
    assert small.width == small.height > 0


@pytest.mark.parametrize("model", ["tiny-sd15", "tiny-sdxl", "tiny-sd15-inpaint"])
@pytest.mark.parametrize("size", [(64, 64), (80, 72)])
def test_what_the_mask_leaves_is_pasted_back(daemon, model, size):
    start = picture(1, size)
    mask = Image.fromarray(np.random.default_rng(4).integers(0, 2, (64, 64), dtype=np.uint8) * 255).convert("RGB")
    def drawn(**more):
        params = {"init_image": denoise_pb2.InitImage(data=saved(start, "PNG"), strength=1.0), "steps": 3}
        result = draw(daemon, model, **params, mask_image=denoise_pb2.MaskImage(data=saved(mask, "PNG"), **more))
        return np.asarray(Image.open(io.BytesIO(result.pictures[0].data)))
    without, pasted = drawn(), drawn(paste_back=True)
    left = np.asarray(mask)[..., 0] == 0
    kept = np.asarray(start.resize((64, 64), Image.Resampling.LANCZOS))
    assert (pasted[left] == kept[left]).all() and (without[left] != kept[left]).any()
    assert (pasted[~left] == without[~left]).all()
    assert 1000 < left.sum() < 3000
    if model == "tiny-sd15-inpaint":
        return
    # Grey as a value mixes the two.
    mask = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    without, pasted = drawn(gradient=True), drawn(gradient=True, paste_back=True)
    share = np.asarray(mask.convert("L"))[..., None].astype(np.float64) / 255
    mixed = kept + (without.astype(np.float64) - kept) * share
    assert np.abs(pasted - mixed).max() <= 0.5001


def huge_png() -> bytes:
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def huge_jpeg() -> bytes:
    data = bytearray(saved(picture(1), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5:at + 9] = struct.pack(">HH", 60000, 60000)
    return bytes(data)


def huge_gif() -> bytes:
    data = bytearray(saved(picture(1).quantize(4), "GIF"))
    data[6:10] = struct.pack("<HH", 60000, 60000)
    return bytes(data)


def huge_webp(lossless: bool) -> bytes:
    data = bytearray(saved(picture(1), "WEBP", lossless=lossless))
    if lossless:
        data[21:25] = struct.pack("<I", 16382 | 16382 << 14)
    else:
        data[26:30] = struct.pack("<HH", 16383, 16383)
    return bytes(data)


def huge_bmp() -> bytes:
    data = bytearray(saved(picture(1), "BMP"))
    data[18:26] = struct.pack("<ii", 60000, -60000)
    return bytes(data)


@pytest.mark.parametrize("make", [huge_png, huge_jpeg, huge_gif, lambda: huge_webp(False), lambda: huge_webp(True), huge_bmp],
                         ids=["png", "jpeg", "gif", "webp", "webp, lossless", "bmp"])
def test_bombs_are_refused_by_their_header(daemon, make):
    data = make()
    for field in ("init_image", "mask_image", "control_image"):
        params = {"init_image": init(saved(picture(1), "PNG"))}
        params[field] = {"init_image": init(data), "mask_image": denoise_pb2.MaskImage(data=data),
                         "control_image": denoise_pb2.ControlImage(data=data)}[field]
        error = fails(daemon, **params)
        assert error.fields == [f"params.{field}.data"] and "is over the limit of" in error.message, error


def test_what_cannot_be_read_is_refused_by_name(daemon):
    rle = bytearray(saved(picture(1).quantize(10), "BMP"))
    rle[30:34] = struct.pack("<I", 1)
    for data, words in ((animation("WEBP"), "animated"), (bytes(rle), "compressed BMP"), (b"%PDF-1.4", "none of PNG, JPEG")):
        error = fails(daemon, init_image=init(data))
        assert error.fields == ["params.init_image.data"] and words in error.message, error


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_cut_short_are_errors(daemon, name):
    data = FILES[name]()
    for share in (0.02, 0.1) if "three" in name else (0.02, 0.3, 0.9):    # the first picture is enough
        error = fails(daemon, init_image=init(data[:int(len(data) * share)]))
        assert error.fields == ["params.init_image.data"] and error.reason == "INVALID_FIELD"


def test_webp_comes_out(daemon):
    one, other = draw(daemon, image_format=denoise_pb2.IMAGE_FORMAT_WEBP), draw(daemon)
    assert [e.image_header.mime for e in one.events if e.HasField("image_header")] == ["image/webp"]
    ours = Image.open(io.BytesIO(one.pictures[0].data))
    assert (ours.format, ours.size) == ("WEBP", (64, 64))
    exact = np.asarray(Image.open(io.BytesIO(other.pictures[0].data))).astype(int)
    theirs = Image.open(io.BytesIO(saved(Image.fromarray(exact.astype(np.uint8)), "WEBP", quality=95)))
    error, usual = (np.abs(np.asarray(i.convert("RGB")).astype(int) - exact).mean() for i in (ours, theirs))
    assert error <= usual * 1.1 + 0.1    # no worse than Pillow's
