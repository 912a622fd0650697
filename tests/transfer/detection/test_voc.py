import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from instdisc.errors import UserError
from transfer.detection.voc import (
    VOC_CLASSES,
    VocSplit,
    find_class_names,
    fingerprint,
    read_voc,
)

OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult>
<part><name>head</name><bndbox><xmin>9.5</xmin><ymin>9</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></part>
<bndbox><xmax>{x2}</xmax><xmin>{x1}</xmin><ymin>{y1}</ymin><ymax>{y2}</ymax></bndbox></object>"""
SIZE = "<size><width>40</width><height>30</height><depth>3</depth></size>"
BOMB = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x "ha">'
    + "".join(
        f'<!ENTITY x{i} "{("&x" + str(i - 1) + ";" if i else "&x;") * 10}">' for i in range(9)
    )
    + "]><annotation>&x8;</annotation>"
)


def an_object(name="cat", box=(1, 1, 40, 30), difficult=0):
    x1, y1, x2, y2 = box
    return OBJECT.format(name=name, difficult=difficult, x1=x1, y1=y1, x2=x2, y2=y2)


def an_annotation(*objects, size=SIZE):
    return f"<annotation>{size}{''.join(objects)}</annotation>"


@pytest.fixture
def devkit(tmp_path):
    """Two images, of which the list names the second first."""
    folder = tmp_path / "data" / "VOCdevkit" / "VOC2007"
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / name).mkdir(parents=True)
    (folder / "ImageSets/Main/trainval.txt").write_text("000007\n000005\n")
    (folder / "ImageSets/Main/cat_trainval.txt").write_text("000007 -1\n000005  1\n\n")
    for image_id in ("000005", "000007"):
        Image.new("RGB", (40, 30)).save(folder / "JPEGImages" / f"{image_id}.jpg")
    write(folder, "000005", an_annotation(an_object(), an_object("bus", (3, 4, 3, 4), 1)))
    write(folder, "000007", an_annotation())
    return folder


def write(folder: Path, image_id: str, xml: str | bytes) -> None:
    data = xml.encode() if isinstance(xml, str) else xml
    (folder / "Annotations" / f"{image_id}.xml").write_bytes(data)


def test_records_are_detectron2s_with_zero_based_boxes_in_the_lists_order(devkit):
    empty, full = read_voc(devkit.parent, 2007, "trainval")
    assert empty["image_id"] == "000007"
    assert empty["annotations"] == []
    assert full == {
        "file_name": str(devkit / "JPEGImages" / "000005.jpg"),
        "image_id": "000005",
        "height": 30,
        "width": 40,
        "annotations": [
            {"bbox": [0, 0, 40, 30], "bbox_mode": 0, "category_id": 7, "difficult": False},
            {"bbox": [2, 3, 3, 4], "bbox_mode": 0, "category_id": 5, "difficult": True},
        ],
    }
    assert all(type(value) is float for value in full["annotations"][0]["bbox"])


def test_the_devkit_its_parent_and_the_years_folder_are_the_same_root(devkit):
    wanted = read_voc(devkit, 2007, "trainval")
    assert read_voc(devkit.parent, 2007, "trainval") == wanted
    assert read_voc(devkit.parents[1], "2007", "trainval") == wanted


def test_a_label_column_is_passed_over(devkit):
    assert VocSplit(devkit, 2007, "cat_trainval").ids == ["000007", "000005"]


def test_another_year_is_not_taken_for_the_one_asked(devkit):
    with pytest.raises(UserError, match=r"2012.*VOCdevkit/VOC2012/\{Annotations"):
        read_voc(devkit, 2012, "trainval")


def test_a_data_set_of_another_name_brings_its_classes(devkit, tmp_path):
    own = tmp_path / "apples"
    shutil.copytree(devkit, own)
    assert find_class_names(own, 2007, ["trainval"]) == VOC_CLASSES
    write(own, "000007", an_annotation(an_object("zebra"), an_object("apple")))
    names = find_class_names(own, 2007, ["trainval"])
    assert names == ("apple", "bus", "cat", "zebra")
    records = read_voc(own, 2007, "trainval", names)
    assert [a["category_id"] for a in records[0]["annotations"]] == [3, 0]


def test_an_absent_size_is_taken_from_the_image(devkit):
    write(devkit, "000007", an_annotation(an_object(), size=""))
    assert read_voc(devkit, 2007, "trainval")[0]["width"] == 40
    write(devkit, "000007", an_annotation(size="<size><width>0</width><height>0</height></size>"))
    assert read_voc(devkit, 2007, "trainval")[0]["height"] == 30


def test_images_may_be_png_but_jpg_comes_first(devkit):
    (devkit / "JPEGImages/000007.jpg").unlink()
    Image.new("RGB", (40, 30)).save(devkit / "JPEGImages/000007.PNG")
    Image.new("RGB", (40, 30)).save(devkit / "JPEGImages/000005.png")
    paths = VocSplit(devkit, 2007, "trainval").image_paths
    assert [path.name for path in paths.values()] == ["000007.PNG", "000005.jpg"]


@pytest.mark.parametrize(
    ("xml", "message"),
    [
        (an_annotation(an_object(box=(20, 1, 10, 5))), "object 1 .* has xmax < xmin"),
        (an_annotation(an_object(), an_object(box=(1, 9, 10, 5))), "object 2 .* ymax < ymin"),
        (an_annotation(an_object(box=(1, 1, 41, 30))), "outside its 40x30 image"),
        (an_annotation(an_object(box=(0, 1, 40, 30))), r"\(0, 1, 40, 30\) lies outside"),
        (an_annotation(an_object(box=("nan", 1, 40, 30))), "<xmin> is 'nan'"),
        (an_annotation(an_object(box=("", 1, 40, 30))), "no <xmin>"),
        (an_annotation(an_object("unicorn")), "unknown class 'unicorn'.*aeroplane"),
        (an_annotation("<object><name>cat</name></object>"), "no <bndbox>"),
        ("this is not XML", "is not XML"),
        ("", "is not XML"),
        ("<annotation><size></annotation>", "is not XML"),
        ('<?xml version="1.0" encoding="klingon"?><annotation/>', "is not XML"),
        ("<a:annotation/>", "is not XML"),
        (BOMB, "DOCTYPE"),
        (BOMB.encode("utf-16"), "DOCTYPE"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "DOCTYPE"),
    ],
)
def test_bad_annotations_are_one_clear_line(devkit, xml, message):
    write(devkit, "000007", xml)
    with pytest.raises(UserError, match=message) as caught:
        read_voc(devkit, 2007, "trainval")
    assert "000007.xml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_parts_are_named_and_counted(devkit):
    with pytest.raises(UserError, match=r"nowhere.*Annotations/ID.xml.*Main/trainval.txt"):
        read_voc(devkit / "nowhere", 2007, "trainval")
    with pytest.raises(UserError, match=r"no list .*tset.txt: lists there are trainval"):
        read_voc(devkit, 2007, "tset")
    (devkit / "JPEGImages/000005.jpg").unlink()
    with pytest.raises(UserError, match=r"1 of 2 images .* missing.*000005.jpg"):
        read_voc(devkit, 2007, "trainval")
    assert len(read_voc(devkit, 2007, "trainval", with_images=False)) == 2
    (devkit / "Annotations/000005.xml").unlink()
    with pytest.raises(UserError, match=r"1 of 2 images .* no annotation.*000005.xml"):
        read_voc(devkit, 2007, "trainval", with_images=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "is empty"),
        ("000005\n000005\n", "names 000005 twice"),
        ("000005 2\n", ":1: expected"),
        ("000005\n../000007\n", ":2: expected"),
    ],
)
def test_bad_lists_are_one_clear_line(devkit, text, message):
    (devkit / "ImageSets/Main/trainval.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_voc(devkit, 2007, "trainval")


def test_fingerprint_sees_order_and_annotations_and_not_the_place(devkit, tmp_path):
    def of(root, split="trainval"):
        return fingerprint(VocSplit(root, 2007, split))

    before = of(devkit)
    assert before == of(shutil.copytree(devkit, tmp_path / "copy"))
    (devkit / "ImageSets/Main/turned.txt").write_text("000005\n000007\n")
    assert of(devkit, "turned") != before
    write(devkit, "000007", an_annotation(an_object()))
    assert of(devkit) != before


def test_real_images_read_as_detectron2_reads_them(shared_data):
    pascal_voc = pytest.importorskip("detectron2.data.datasets.pascal_voc")
    folder = shared_data / "voc2007-mini" / "VOCdevkit" / "VOC2007"
    for split, count in (("trainval", 400), ("test", 300)):
        ours = read_voc(folder, 2007, split)
        theirs = pascal_voc.load_voc_instances(str(folder), split, VOC_CLASSES)
        for record in ours:
            for annotation in record["annotations"]:
                del annotation["difficult"]
        assert len(ours) == count
        assert ours == theirs
        assert find_class_names(folder, 2007, [split]) == VOC_CLASSES


def test_all_official_test_annotations_are_valid(shared_data):
    records = read_voc(shared_data / "voc2007-ap-check", 2007, "test", with_images=False)
    flags = Counter(a["difficult"] for record in records for a in record["annotations"])
    # The customary counts of the VOC2007 test set: images, objects that count, all objects.
    assert (len(records), flags[False], flags.total()) == (4952, 12032, 14976)


@pytest.mark.parametrize(("outside", "clip"), [(0, 0), (1, 0), (1, 1), (3, 2), (3, 3)])
def test_boxes_a_pixel_outside_are_clipped_on_demand(devkit, outside, clip):
    box = (1 - outside, 1, 40 + outside, 30)
    write(devkit, "000005", an_annotation(an_object(box=box)))
    if outside > clip:
        hint = "or --clip-boxes 1" if outside == 1 else "correct it$"
        with pytest.raises(UserError, match=hint):
            read_voc(devkit, 2007, "trainval", clip=clip)
        return
    _, record = read_voc(devkit, 2007, "trainval", clip=clip)
    assert record["annotations"][0]["bbox"] == [0, 0, 40, 30]


def test_a_box_beside_its_image_is_not_clipped(devkit):
    write(devkit, "000005", an_annotation(an_object(box=(41, 1, 42, 30))))
    with pytest.raises(UserError, match="has nothing in its 40x30 image"):
        read_voc(devkit, 2007, "trainval", clip=5)
