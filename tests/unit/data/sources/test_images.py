import io
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image, UnidentifiedImageError

from jaxres.config.schema.data import DataSection, ImagesSource, TokensSource
from jaxres.config.schema.model import VitModel
from jaxres.data import (
    BadRecord,
    batch_at,
    find_bad_rows,
    first_row,
    open_dataset,
    sample_ids_at,
    write_tokens,
)
from jaxres.data.inspect import image_statistics
from jaxres.data.sources import images
from jaxres.data.sources.images import centre, open_picture, random_crop
from jaxres.faults import ConfigError
from jaxres.storage import files
from jaxres.storage.path import GcsPath

COLORS = {"cat": (200, 40, 40), "dog": (40, 200, 40), "eel": (40, 40, 200)}
NUM_IMAGES = 12


def picture(color, *, seed, size=(40, 30)):
    rng = np.random.default_rng(seed)
    pixels = np.clip(rng.normal(color, 30, (*size[::-1], 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    for number, (name, color) in enumerate(COLORS.items()):
        (tmp_path / "photos" / name / "deep").mkdir(parents=True)
        for index in range(NUM_IMAGES):
            kind, ending = (("PNG", "png"), ("JPEG", "JPG"))[index % 2]
            content = encoded(picture(color, seed=100 * number + index), kind)
            place = "deep/" if index == 0 else ""
            (tmp_path / "photos" / name / f"{place}{index}.{ending}").write_bytes(content)
    return tmp_path / "photos"


def section(folder, *, heldout_fraction=0.25, **fields):
    source = ImagesSource(path=str(folder), size=8, **fields)
    return DataSection(
        source=source, heldout_fraction=heldout_fraction, cache_dir=folder.parent / "cache"
    )


def test_every_image_has_the_label_of_its_class_and_all_classes_are_held_out(folder):
    dataset = open_dataset(section(folder))
    assert (len(dataset.train), len(dataset.heldout)) == (27, 9)
    for rows in (dataset.train, dataset.heldout):
        arrays = rows.rows(np.arange(len(rows)))
        assert (arrays["image"].dtype, arrays["image"].shape[1:]) == (np.uint8, (8, 8, 3))
        assert arrays["label"].dtype == np.int32
        channel = arrays["image"].mean((1, 2)).argmax(1)
        assert channel.tolist() == arrays["label"].tolist()
        assert set(arrays["label"].tolist()) == {0, 1, 2}
    both = [
        np.array(rows.numbers(np.arange(len(rows)))) for rows in (dataset.train, dataset.heldout)
    ]
    assert sorted(np.concatenate(both).tolist()) == list(range(36))


def test_without_augmentation_a_row_is_the_middle_of_its_image(folder):
    shutil.rmtree(folder / "cat")
    shutil.rmtree(folder / "dog")
    dataset = open_dataset(section(folder, heldout_fraction=0.0))
    found = {one.tobytes() for one in dataset.train.rows(np.arange(12))["image"]}
    for path in folder.glob("eel/**/*.*"):
        whole = Image.open(path)
        resized = whole.resize((8, 8), Image.Resampling.BILINEAR, box=centre(*whole.size))
        assert np.asarray(resized).tobytes() in found


def test_parquet_files_of_the_same_images_give_the_same_rows(folder, tmp_path):
    (tmp_path / "shards").mkdir()
    paths = sorted(folder.glob("**/*.*"))
    labels = [list(COLORS).index(path.relative_to(folder).parts[0]) for path in paths]
    contents = [path.read_bytes() for path in paths]
    structs = [{"bytes": content, "path": "x.png"} for content in contents]
    expected = open_dataset(section(folder, heldout_fraction=0.0))
    kept = {row.tobytes() for row in expected.train.rows(np.arange(36))["image"]}
    for column in (contents, structs):
        table = pyarrow.table({"image": column, "kind": labels})
        pyarrow.parquet.write_table(table, tmp_path / "shards" / "all.parquet", row_group_size=5)
        config = section(tmp_path / "shards", heldout_fraction=0.0, label_column="kind")
        rows = open_dataset(config).train.rows(np.arange(36))
        assert {row.tobytes() for row in rows["image"]} == kept
        assert rows["image"].mean((1, 2)).argmax(1).tolist() == rows["label"].tolist()


@pytest.mark.parametrize("twice", ["image", "label", "bytes"])
def test_a_column_that_a_parquet_file_has_twice_is_refused(folder, tmp_path, twice):
    content = pyarrow.array([next(folder.glob("**/*.png")).read_bytes()])
    fields = ["bytes", "bytes" if twice == "bytes" else "path"]
    image = pyarrow.StructArray.from_arrays([content, content], names=fields)
    columns = {"image": image, "label": pyarrow.array([0])}
    names = ["image", "label", *([twice] if twice in columns else [])]
    table = pyarrow.Table.from_arrays([columns[name] for name in names], names=names)
    (tmp_path / "shards").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "shards" / "all.parquet")
    with pytest.raises(ConfigError, match=rf"all\.parquet has 2 columns '{twice}'"):
        open_dataset(section(tmp_path / "shards", heldout_fraction=0.0))


def test_a_row_depends_on_its_id_alone_and_changes_with_the_epoch(folder, monkeypatch):
    dataset = open_dataset(section(folder, augment="crop_flip"))
    order = dataset.order(seed=0, rows_per_step=9)
    at = batch_at(dataset.train, order, global_batch_size=9)
    ids, _ = sample_ids_at(order, 0, 3 * 27)
    assert sorted(ids.tolist()) == list(range(3 * 27)), "an id is of a row in an epoch"
    batches = [at(cursor) for cursor in range(0, 81, 9)]
    monkeypatch.setattr(images, "num_threads", lambda num_rows: 1)
    again = open_dataset(section(folder, augment="crop_flip"))
    for batch in reversed(batches):
        for index, one in enumerate(batch.ids):
            alone = again.train.rows(np.array([one]))
            assert np.array_equal(alone["image"][0], batch.arrays["image"][index])
            assert alone["label"][0] == batch.arrays["label"][index]
    epochs = [dataset.train.rows(np.arange(27) + 27 * epoch)["image"] for epoch in range(3)]
    assert (epochs[0] != epochs[1]).reshape(27, -1).any(1).all()
    assert (epochs[1] != epochs[2]).reshape(27, -1).any(1).all()
    other = open_dataset(section(folder, augment="crop_flip", augment_seed=1))
    assert (other.train.rows(np.arange(27))["image"] != epochs[0]).any()
    assert other.fingerprint == dataset.fingerprint
    plain = open_dataset(section(folder))
    for rows in (dataset.heldout, plain.heldout):
        assert np.array_equal(
            rows.rows(np.arange(9))["image"], plain.heldout.rows(np.arange(9))["image"]
        )
    with pytest.raises(IndexError):
        plain.train.rows(np.array([27]))


def test_crops_are_the_same_in_every_version_and_within_their_limits():
    # Recorded once: other numbers would change the rows of every existing run.
    assert random_crop(500, 375, key=(0, 5, 2)) == ((18, 37, 383, 368), False)
    drawn = [random_crop(64, 48, key=(0, number, 1)) for number in range(2000)]
    boxes = np.array([box for box, _ in drawn])
    widths, heights = (boxes[:, 2:] - boxes[:, :2]).T
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= (64, 48)).all()
    shares = widths * heights / (64 * 48)
    assert 0.07 < shares.min() < 0.12
    assert shares.max() > 0.9
    assert abs(np.mean([flip for _, flip in drawn]) - 0.5) < 6 * 0.5 / np.sqrt(2000)
    assert len({box for box, _ in drawn}) > 1900
    assert random_crop(1, 1, key=(0, 0, 0))[0] == (0, 0, 1, 1)


def test_every_kind_of_image_becomes_upright_rgb(tmp_path):
    flag = Image.new("RGB", (16, 16), (255, 0, 0))
    flag.paste((0, 0, 255), (0, 8, 16, 16))  # Red above, blue below.
    turned = Image.Exif()
    turned[0x0112] = 3  # Upside down.
    kinds = {
        "a.png": encoded(flag.convert("RGBA")),
        "b.png": encoded(flag.convert("P", palette=Image.Palette.ADAPTIVE)),
        "c.jpg": encoded(flag.convert("CMYK"), "JPEG", quality=100, subsampling=0),
        "d.jpg": encoded(flag.rotate(180), "JPEG", exif=turned, quality=100, subsampling=0),
        "e.webp": encoded(flag, "WEBP", lossless=True),
        "f.bmp": encoded(flag, "BMP"),
    }
    (tmp_path / "photos" / "x").mkdir(parents=True)
    for name, content in kinds.items():
        (tmp_path / "photos" / "x" / name).write_bytes(content)
    (tmp_path / "photos" / "x" / "g.png").write_bytes(encoded(flag.convert("L")))
    rows = open_dataset(section(tmp_path / "photos", heldout_fraction=0.0)).train
    found = rows.rows(np.arange(7))["image"].astype(int)
    colored = [one for one in found if one[0, 0, 0] != one[0, 0, 1]]
    assert len(colored) == 6, "the grey one has equal channels"
    for one in colored:
        assert np.abs(one[0, 0] - (255, 0, 0)).max() < 40
        assert np.abs(one[-1, -1] - (0, 0, 255)).max() < 40


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    (tmp_path / "photos" / "x").mkdir(parents=True)
    deep = Image.fromarray(np.full((9, 9), 40_000, np.uint16))
    deep.save(tmp_path / "photos" / "x" / "a.png")
    rows = open_dataset(section(tmp_path / "photos", heldout_fraction=0.0)).train
    assert (rows.rows(np.array([0]))["image"] == 40_000 >> 8).all()


def is_bad(rows, row):
    try:
        rows.rows(np.array([row]))
    except BadRecord:
        return True
    return False


def test_an_image_that_can_not_be_decoded_is_a_bad_record(folder):
    path = folder / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:-300])
    rows = open_dataset(section(folder, heldout_fraction=0.0)).train
    bad = []
    for row in range(36):
        try:
            rows.rows(np.array([row]))
        except BadRecord as error:
            bad.append(str(error))
    (message,) = bad
    size = path.stat().st_size
    assert f"label 0, a file of {size:,} bytes, can't be decoded" in message
    whole = rows.evaluated().rows(np.arange(36))
    (at,) = (row for row in range(36) if is_bad(rows, row))
    after = rows.rows(np.array([(at + 1) % 36]))
    assert np.array_equal(whole["image"][at], after["image"][0]), "the next one takes its place"
    assert whole["label"][at] == after["label"][0]
    assert first_row(rows)["image"].shape == (1, 8, 8, 3)
    found = image_statistics(rows, progress=lambda _: None)
    assert [message.endswith(text) for text in found.undecodable] == [True]
    assert found.labels == {0: 12, 1: 12, 2: 12}


def test_what_is_no_image_or_has_no_class_is_refused_with_what_to_do(folder, tmp_path):
    def refused(config):
        with pytest.raises(ConfigError) as error:
            open_dataset(config)
        return str(error.value)

    (folder / "dog" / "x.png").write_text("<html>not found</html>")
    assert "dog/x.png is no JPEG, PNG" in refused(section(folder))
    (folder / "dog" / "x.png").write_bytes(b"")
    assert "dog/x.png is no JPEG, PNG" in refused(section(folder))
    (folder / "dog" / "x.png").unlink()
    shutil.copy(folder / "dog" / "2.png", folder / "alone.png")
    assert "alone.png is in no folder of a class" in refused(section(folder))
    (folder / "alone.png").unlink()
    table = pyarrow.table({"image": [b"x", None], "label": [1, 2]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    assert "other files are Parquet" in refused(section(folder))
    only = section(folder / "a.parquet")
    assert "row 1 is no JPEG" in refused(only)
    assert "has no column 'img'; its columns are image, label" in refused(
        section(folder / "a.parquet", image_column="img")
    )
    good = (folder / "dog" / "2.png").read_bytes()
    table = pyarrow.table({"image": [good, None], "label": ["a", "b"]})
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    assert "row 1 has bytes in column 'image' and str in 'label'" in refused(only)
    for label in (-1, 2**31):
        table = pyarrow.table({"image": [good], "label": [label]})
        pyarrow.parquet.write_table(table, folder / "a.parquet")
        assert f"row 1: the label is {label}, not in 0.." in refused(only)
    (tmp_path / "one" / "class").mkdir(parents=True)
    shutil.copy(folder / "dog" / "2.png", tmp_path / "one" / "class")
    assert "leaves none to train on" in refused(section(tmp_path / "one"))


def test_an_image_whose_end_is_zeros_is_a_bad_record_and_zeros_after_its_end_are_not():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    for kind in ("JPEG", "GIF", "PNG"):
        whole = encoded(image, kind)
        pixels = np.asarray(open_picture(whole))
        assert np.array_equal(pixels, open_picture(whole + bytes(99))), kind
        for share in (0.3, 0.98):
            begin = int(len(whole) * share)
            with pytest.raises(ValueError, match="as an unfinished copy does"):
                open_picture(whole[:begin] + bytes(len(whole) - begin))


def test_an_image_whose_label_is_no_class_of_the_model_is_a_bad_record(tmp_path):
    (tmp_path / "shards").mkdir()
    good = [encoded(picture(COLORS["cat"], seed=seed)) for seed in range(8)]
    table = pyarrow.table({"image": good, "label": [0, 1, 2, 10, 1, 0, 2, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "shards" / "a.parquet")
    model = VitModel(num_classes=3, image_size=8, patch_size=8)
    opened = open_dataset(section(tmp_path / "shards")).for_model(model, has_64_bits=False)
    for rows in (opened.train, opened.heldout):
        bad = np.flatnonzero(rows.numbers(np.arange(len(rows))) == 3)
        found = find_bad_rows(replace(rows, is_evaluated=False), np.arange(len(rows)))
        assert list(found) == bad.tolist()
        assert all("image 3 has the label 10, not in 0..2" in text for text in found.values())
        evaluated = rows.evaluated().rows(np.arange(len(rows)))["label"]
        assert evaluated.max() < 3, "the next image takes its place in an evaluation"


def test_names_of_folders_are_told_to_have_no_effect_on_parquet(tmp_path):
    good = [encoded(picture(COLORS["cat"], seed=seed)) for seed in range(8)]
    table = pyarrow.table({"image": good, "label": [0, 1] * 4})
    (tmp_path / "shards").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "shards" / "a.parquet")
    for classes in ((), ("cat", "dog")):
        told = []
        open_dataset(section(tmp_path / "shards", classes=classes), progress=told.append)
        assert any("data.source.classes names folders" in line for line in told) == bool(classes)


def test_labels_mean_the_same_classes_in_every_set(folder, tmp_path):
    (tmp_path / "few").mkdir()
    (folder / "eel").rename(tmp_path / "few" / "eel")
    few = {"kind": "images", "path": str(tmp_path / "few"), "size": 8, "augment": "crop_flip"}

    def both(**fields):
        config = section(folder, **fields).model_dump() | {
            "validation": ({"name": "few", "source": few | fields},)
        }
        return open_dataset(DataSection.model_validate(config))

    with pytest.raises(ConfigError, match=r"few. has the classes eel, the training data cat, dog"):
        both()
    dataset = both(classes=("cat", "dog", "eel"))
    rows = dataset.validation["few"]
    assert set(rows.rows(np.arange(NUM_IMAGES))["label"].tolist()) == {2}
    assert dataset.classes == ("cat", "dog", "eel")
    plain = open_dataset(section(tmp_path / "few", heldout_fraction=0.0, classes=("eel",))).train
    found = [one.rows(np.arange(NUM_IMAGES))["image"] for one in (rows, plain)]
    assert np.array_equal(*found), "what is evaluated is not augmented"
    with pytest.raises(ConfigError, match=r"data.source.classes: has no 'dog'"):
        open_dataset(section(folder, classes=("cat",)))


def shard(path, *names):
    """Writes a Parquet file of images as `datasets` does, with the names of its labels."""
    rows = [encoded(picture(COLORS["cat"], seed=seed)) for seed in range(8)]
    table = pyarrow.table({"image": rows, "label": [0, 1] * 4})
    if names:
        label = {"names": names, "_type": "ClassLabel"}
        info = json.dumps({"info": {"features": {"label": label, "image": {"_type": "Image"}}}})
        table = table.replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, path)


def test_labels_of_parquet_files_have_the_names_in_their_schemas(tmp_path):
    for name, names in (("a", ("cat", "dog")), ("b", ("cat", "dog")), ("c", ())):
        shard(tmp_path / "all" / f"{name}.parquet", *names)
    for _ in range(2):  # The second one opens the cached images.
        told = []
        found = open_dataset(section(tmp_path / "all"), progress=told.append)
        assert found.classes == ("cat", "dog")
        assert any("1 Parquet files have no names of classes, such as" in line for line in told)
    shard(tmp_path / "other" / "a.parquet", "dog", "cat")
    config = section(tmp_path / "all").model_dump()
    other = {"kind": "images", "path": str(tmp_path / "other"), "size": 8}
    config |= {"validation": ({"name": "other", "source": other},)}
    with pytest.raises(
        ConfigError, match=r"other. has the classes dog, cat, the training data cat"
    ):
        open_dataset(DataSection.model_validate(config))
    shard(tmp_path / "all" / "b.parquet", "dog", "cat")
    with pytest.raises(ConfigError, match="one number means two classes"):
        open_dataset(section(tmp_path / "all"))


@pytest.mark.parametrize("where", ["validation", "mixture"])
def test_labels_without_names_beside_others_are_told(folder, tmp_path, where):
    shard(tmp_path / "plain" / "a.parquet")
    kind = {"kind": "images", "path": str(tmp_path / "plain"), "size": 8}
    config = section(folder).model_dump()
    if where == "validation":
        config |= {"validation": ({"name": "plain", "source": kind},)}
    else:
        sources = [
            {"name": name, "weight": 1, "source": source}
            for name, source in (("photos", config["source"]), ("plain", kind))
        ]
        config |= {"source": {"kind": "mixture", "sources": tuple(sources)}}
    told = []
    open_dataset(DataSection.model_validate(config), progress=told.append)
    found = [line for line in told if "whether a label is the same class" in line]
    assert [bool(re.search(r"plain\]? has no names of classes", line)) for line in found] == [True]


def test_folders_of_numbers_whose_labels_are_others_are_told(folder, tmp_path):
    for names, says in (("0 1 2", None), ("2 9 10", "label 0 is the class '10'")):
        for old, new in zip(sorted(folder.iterdir()), names.split(), strict=True):
            old.rename(folder / f"to-{new}")
        for path in folder.iterdir():
            path.rename(folder / path.name.removeprefix("to-"))
        told = []
        open_dataset(section(folder), progress=told.append)
        found = [line for line in told if "the classes are numbers" in line]
        assert [says in line for line in found] == [True] * (says is not None)


def test_a_changed_image_or_class_changes_the_fingerprint_and_other_settings_do_not(folder):
    first = open_dataset(section(folder)).fingerprint
    config = section(folder, augment="crop_flip", augment_seed=3)
    assert open_dataset(config).fingerprint == first
    (folder / "dog").rename(folder / "fox")
    (folder / "eel").rename(folder / "dog")
    assert open_dataset(section(folder)).fingerprint != first


@pytest.mark.slow
def test_images_in_a_bucket_are_copied_and_a_built_folder_is_read_where_it_is(
    folder, tmp_path, gcs_bucket
):
    here = open_dataset(section(folder))
    (built,) = (tmp_path / "cache" / "corpora").iterdir()
    for local, name in ((folder, "photos"), (built, "built")):
        for path in local.glob("**/*.*"):
            place = GcsPath(gcs_bucket, f"{name}/{path.relative_to(local).as_posix()}")
            files.replace(place, path.read_bytes())
    for name in ("photos", "built"):
        config = section(folder).model_copy(update={"cache_dir": tmp_path / name})
        source = config.source.model_copy(update={"path": f"gs://{gcs_bucket}/{name}"})
        there = open_dataset(config.model_copy(update={"source": source}))
        assert there.fingerprint == here.fingerprint
        assert there.classes == here.classes == ("cat", "dog", "eel")
        other = source.model_copy(update={"classes": ("eel", "dog", "cat")})
        if name == "built":
            with pytest.raises(ConfigError, match=r"in this order. Leave `classes` out"):
                open_dataset(config.model_copy(update={"source": other}))
        for one, other in ((there.train, here.train), (there.heldout, here.heldout)):
            rows = [rows.rows(np.arange(len(rows))) for rows in (one, other)]
            assert all(np.array_equal(rows[0][key], rows[1][key]) for key in ("image", "label"))
    assert not (tmp_path / "built" / "corpora").exists(), "nothing was copied"


def test_a_folder_of_tokens_is_no_folder_of_images_and_the_other_way(folder, tmp_path):
    open_dataset(section(folder))
    (built,) = (tmp_path / "cache" / "corpora").iterdir()
    with pytest.raises(ConfigError, match=r"has images. Set data"):
        open_dataset(DataSection(source=TokensSource(path=built)))
    write_tokens(tmp_path / "tokens", [[1, 2, 3]], vocab_size=4, tokenizer="mine")
    with pytest.raises(ConfigError, match=r"has tokens. Set data"):
        open_dataset(section(tmp_path / "tokens"))


@pytest.mark.parametrize("hidden", ["cat/.thumbnails", "dog/deep/@eaDir"])
def test_small_copies_of_other_programs_are_no_images_of_a_class(folder, hidden):
    place = folder / hidden
    place.mkdir(parents=True)
    shutil.copy(folder / "dog" / "2.png", place)
    with pytest.raises(ConfigError, match=f"the hidden folder '{hidden}' has images"):
        open_dataset(section(folder))
    assert open_dataset(section(folder, exclude=(f"{hidden}/*",))).classes == tuple(COLORS)


@pytest.mark.parametrize("pair", [("dog", "Dog"), ("caf\u00e9", "cafe\u0301"), ("dog", "dog ")])
def test_folders_whose_names_look_alike_are_not_two_classes(folder, pair):
    for name in pair:
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(folder / "eel" / "2.png", folder / name / "own.png")
    with pytest.raises(ConfigError, match="would be two classes"):
        open_dataset(section(folder))
    names = tuple({*COLORS, *pair})
    assert open_dataset(section(folder, classes=names, heldout_fraction=0)).classes == names


def test_a_file_of_another_program_makes_no_token_folder_of_images(folder):
    (folder / "meta.json").write_text('{"camera": "a"}')
    assert open_dataset(section(folder)).classes == tuple(COLORS)


def test_only_formats_without_programs_are_opened_and_palettes_give_no_warning():
    picture = Image.fromarray(np.zeros((9, 9, 3), np.uint8))
    eps, palette = io.BytesIO(), io.BytesIO()
    picture.save(eps, "EPS")
    with pytest.raises(UnidentifiedImageError):
        open_picture(eps.getvalue())
    picture.convert("P").save(palette, "PNG", transparency=bytes([255, 0, 9]))
    assert open_picture(palette.getvalue()).mode == "RGB"


def test_folders_that_are_rather_parts_than_classes_are_refused(folder, tmp_path):
    content = encoded(picture(COLORS["cat"], seed=0))
    for part in ("train", "val"):
        for name in COLORS:
            (tmp_path / "parts" / part / name).mkdir(parents=True)
            (tmp_path / "parts" / part / name / "0.png").write_bytes(content)
    with pytest.raises(ConfigError, match=r"train, val have only folders within \(cat, dog"):
        open_dataset(section(tmp_path / "parts"))
    (tmp_path / "above").mkdir()
    shutil.copytree(folder, tmp_path / "above" / "photos")
    with pytest.raises(ConfigError, match=r"photos have only folders within \(cat, dog, eel\)"):
        open_dataset(section(tmp_path / "above"))
    for part, name in (("train", "cat"), ("val", "dog")):
        place = tmp_path / "others" / part / name / "0.png"
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
    with pytest.raises(ConfigError, match=r"train, val have only folders within \(cat, dog\)"):
        open_dataset(section(tmp_path / "others"))
    chosen = section(tmp_path / "parts", classes=("train", "val"), heldout_fraction=0)
    assert len(open_dataset(chosen).train) == 6
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "0-checkpoint.png").write_bytes(content)
    with pytest.raises(ConfigError, match=r"hidden folder '\.ipynb_checkpoints' has images"):
        open_dataset(section(folder))
    assert len(open_dataset(section(folder, exclude=(".ipynb_checkpoints/*",))).train) == 27
