"""Scenes show what their claims say, and train never shows what is held out."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from training.data.backgrounds import COLOURS, paint_background
from training.data.captions import caption_of
from training.data.claims import Background, Claims, ObjectClaim
from training.data.concepts import Concept
from training.data.errors import DataError
from training.data.layout import Box, cells_of, place
from training.data.scene_dataset import SceneSplitDataset, evaluation_scenes
from training.data.scenes import SceneComposer, blend, contrast_of
from training.data.settings import SceneSettings
from training.data.splits import FAMILIES, assign_units, background_held_out, pair_held_out
from training.data.sprites import SPRITE_SIZE, Sprite, SpriteSet
from training.data.tensors import to_pixels, to_tensor

STYLES = (("3d render", "fluent"), ("flat drawing", "fluent"), ("cartoon", "noto"))
CONCEPTS = [
    Concept(f"1f{n:03x}", f"thing {n}", f"thing {n}", "objects", "tool", (f"gadget {n}",), ()) for n in range(80)
]


def sprite_set():
    """Discs, one colour a sprite, so that a picture tells what was drawn where."""
    table, pixels = [], []
    distance = np.hypot(*(np.mgrid[:SPRITE_SIZE, :SPRITE_SIZE] - (SPRITE_SIZE - 1) / 2))
    for number, concept in enumerate(CONCEPTS):
        for style, family in STYLES:
            picture = np.zeros((SPRITE_SIZE, SPRITE_SIZE, 4), np.uint8)
            picture[distance <= SPRITE_SIZE / 2] = (*[(number * 37 + shift) % 256 for shift in (0, 90, 180)], 255)
            table.append(Sprite(len(table), concept, style, family, SPRITE_SIZE, SPRITE_SIZE))
            pixels.append(picture)
    return SpriteSet(table, np.stack(pixels))


SPRITES = sprite_set()
ONLY = {
    kind: SceneSettings(single=float(kind == "single"), pair=float(kind == "pair"), count=float(kind == "count"))
    for kind in ("single", "pair", "count")
}


def scenes_of(split, count=300, settings=None, **options):
    composer = SceneComposer(SPRITES, split, settings=settings, size=options.pop("size", 32), **options)
    return [composer.compose(index) for index in range(count)]


KNOWN_TEST_UNITS = {("1f429", "noto"), ("1f428", "fluent"), ("1f419", "noto")}


# -- splits ----------------------------------------------------------------------------------------------------------


def test_units_are_split_90_5_5_and_always_the_same_way():
    units = [(f"{code:x}", family) for code in range(4000) for family in FAMILIES]
    splits = assign_units(units)
    shares = {split: count / len(units) for split, count in Counter(splits.values()).items()}
    assert shares == {
        "train": pytest.approx(0.90, abs=0.01),
        "val": pytest.approx(0.05, abs=0.01),
        "test": pytest.approx(0.05, abs=0.01),
    }
    assert assign_units(reversed(units)) == splits
    assert assign_units(units, seed=1) != splits


def test_split_of_a_known_unit_does_not_change_between_releases():
    splits = assign_units((f"{code:x}", family) for code in range(0x1F400, 0x1F440) for family in ("fluent", "noto"))
    assert {unit for unit, split in splits.items() if split == "test"} == KNOWN_TEST_UNITS


def test_every_concept_keeps_a_family_in_train():
    splits = assign_units((f"{code:x}", family) for code in range(2000) for family in ("fluent", "noto"))
    assert all("train" in (splits[f"{code:x}", "fluent"], splits[f"{code:x}", "noto"]) for code in range(2000))
    lonely = assign_units((f"{code:x}", "noto") for code in range(2000))
    assert set(lonely.values()) == {"train"}


def test_a_tenth_of_colours_and_pairs_is_held_out_in_either_order():
    codes = [concept.code for concept in CONCEPTS]
    pairs = list(combinations(codes, 2))
    assert np.mean([pair_held_out(*pair) for pair in pairs]) == pytest.approx(0.10, abs=0.02)
    assert all(pair_held_out(first, second) == pair_held_out(second, first) for first, second in pairs)
    assert np.mean([background_held_out(code, colour) for code in codes for colour in COLOURS]) == pytest.approx(
        0.10, abs=0.03
    )


def test_train_shows_nothing_that_is_held_out():
    units = assign_units({(row.concept.code, row.family) for row in SPRITES.table})
    for scene in scenes_of("train", 1500):
        codes = [item.code for item in scene.claims.objects]
        assert all(units[item.code, item.family] == "train" for item in scene.claims.objects)
        assert not any(
            background_held_out(code, colour) for code in codes for colour in scene.claims.background.colours
        )
        assert len(codes) == 1 or not pair_held_out(*codes)


@pytest.mark.parametrize("split", ["val", "test"])
def test_val_and_test_draw_their_own_drawings_only(split):
    units = assign_units({(row.concept.code, row.family) for row in SPRITES.table})
    assert all(units[item.code, item.family] == split for scene in scenes_of(split) for item in scene.claims.objects)


def test_composition_shows_known_drawings_in_held_out_combinations_only():
    units = assign_units({(row.concept.code, row.family) for row in SPRITES.table})
    kinds = Counter()
    for scene in scenes_of("composition"):
        codes = [item.code for item in scene.claims.objects]
        kinds[scene.claims.kind] += 1
        assert all(units[item.code, item.family] == "train" for item in scene.claims.objects)
        if scene.claims.kind == "single":
            assert all(background_held_out(codes[0], colour) for colour in scene.claims.background.colours)
        else:
            assert pair_held_out(*codes)
    assert set(kinds) == {"single", "pair"}


def test_a_split_without_drawings_says_so():
    lonely = SpriteSet(
        [row for row in SPRITES.table if row.family == "noto"],
        SPRITES.pixels[[row.index for row in SPRITES.table if row.family == "noto"]],
    )
    with pytest.raises(DataError, match="split test has no drawing"):
        SceneComposer(lonely, "test")


def test_a_single_drawing_cannot_make_a_pair_and_says_so():
    alone = SpriteSet([replace(SPRITES.table[0], index=0)], SPRITES.pixels[:1])
    with pytest.raises(DataError, match=r"data\.scenes\.pair"):
        SceneComposer(alone, "train", settings=ONLY["pair"]).compose(0)


# -- composing -------------------------------------------------------------------------------------------------------


def test_a_scene_depends_on_split_seed_and_index_alone():
    composer, again = (SceneComposer(SPRITES, "train", seed=3, size=48) for _ in range(2))
    ahead = [composer.compose(index) for index in (7, 3, 5)]
    for scene, index in zip(reversed(ahead), (5, 3, 7), strict=True):
        same = again.compose(index)
        assert same.caption == scene.caption
        assert same.claims == scene.claims
        assert np.array_equal(same.image, scene.image)
    assert SceneComposer(SPRITES, "train", seed=4, size=48).compose(7).claims != ahead[0].claims


def test_kinds_and_backgrounds_come_as_often_as_the_settings_say():
    scenes = scenes_of("train", 2000, SceneSettings(contrast=0.0))
    kinds = Counter(scene.claims.kind for scene in scenes)
    grounds = Counter(scene.claims.background.kind for scene in scenes)
    for kind, share in {"single": 0.60, "pair": 0.25, "count": 0.15}.items():
        assert kinds[kind] / len(scenes) == pytest.approx(share, abs=0.04)
    for kind, share in {"solid": 0.55, "gradient": 0.30, "floor": 0.15}.items():
        assert grounds[kind] / len(scenes) == pytest.approx(share, abs=0.04)


def test_a_solid_background_is_exactly_flat_and_near_its_named_colour():
    settings = replace(ONLY["single"], solid=1.0, gradient=0.0, floor=0.0)
    for scene in scenes_of("train", 60, settings, size=64):
        corners = scene.image[[0, 0, -1, -1], [0, -1, 0, -1]].astype(int)
        assert (corners == corners[0]).all()
        named = np.array(COLOURS[scene.claims.background.colours[0]])
        assert np.abs(corners[0] - named).max() <= settings.colour_jitter


def test_jittered_colours_stay_nearer_their_own_name_than_any_other():
    colours = np.array(list(COLOURS.values()))
    gaps = np.abs(colours[:, None] - colours[None]).max(axis=-1)[~np.eye(len(colours), dtype=bool)]
    assert gaps.min() > 2 * 10  # 10 is the largest jitter that SceneSettings takes


def test_gradient_and_floor_show_both_colours_where_the_caption_says():
    rng = np.random.default_rng(0)
    gradient = paint_background(Background("gradient", ("red", "blue")), 64, 0, rng)
    floor = paint_background(Background("floor", ("brown", "white")), 64, 0, rng)
    assert tuple(gradient[0, 0]) == COLOURS["red"]
    assert tuple(gradient[-1, 0]) == COLOURS["blue"]
    assert tuple(floor[0, 0]) == COLOURS["white"]
    assert tuple(floor[-1, 0]) == COLOURS["brown"]


def centre_of(scene, item):
    """Where the disc of `item` was drawn: the mean position of the pixels with its colour."""
    row = next(row for row in SPRITES.table if (row.concept.code, row.style) == (item.code, item.style))
    colour = SPRITES.pixels[row.index, SPRITE_SIZE // 2, SPRITE_SIZE // 2, :3]
    rows, cols = np.nonzero((scene.image == colour).all(axis=-1))
    assert len(rows), f"{item.label} is not in the picture"
    return rows.mean(), cols.mean()


def test_pairs_stand_as_the_claims_say():
    for scene in scenes_of("train", 80, ONLY["pair"], size=64):
        first, second = (centre_of(scene, item) for item in scene.claims.objects)
        axis = 1 if scene.claims.relation == "left of" else 0
        assert first[axis] < second[axis] - 16
        assert scene.claims.objects[0].style == scene.claims.objects[1].style


def disc_count(scene):
    """Connected groups of drawn pixels, by flood fill on the mask of what differs from the flat background."""
    drawn = {tuple(point) for point in np.argwhere((scene.image != scene.image[0, 0]).any(axis=-1))}
    groups = 0
    while drawn:
        groups, stack = groups + 1, [drawn.pop()]
        while stack:
            row, col = stack.pop()
            near = {(row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)} & drawn
            drawn -= near
            stack.extend(near)
    return groups


def test_as_many_copies_are_drawn_as_are_claimed():
    settings = replace(ONLY["count"], solid=1.0, gradient=0.0, floor=0.0)
    scenes = scenes_of("train", 40, settings, size=64)
    assert {scene.claims.count for scene in scenes} == {2, 3, 4}
    for scene in scenes:
        assert disc_count(scene) == scene.claims.count


@pytest.mark.parametrize(
    "claims",
    [
        Claims(kind, (ObjectClaim("a", "a", "a", "cartoon", "noto"),), count, relation, Background("solid", ("red",)))
        for kind, count, relation in [
            ("single", 1, None),
            ("pair", 1, "left of"),
            ("pair", 1, "above"),
            ("count", 2, None),
            ("count", 3, None),
            ("count", 4, None),
        ]
    ],
)
@pytest.mark.parametrize("size", [16, 33, 128])
def test_objects_stay_in_the_picture_and_never_overlap(claims, size):
    rng = np.random.default_rng(0)
    for _ in range(50):
        boxes = [place(cell, size, rng.uniform(0.7, 1.0), rng) for cell in cells_of(claims, size)]
        assert all(
            box.left >= 0 and box.top >= 0 and box.left + box.width <= size and box.top + box.height <= size
            for box in boxes
        )
        assert not any(overlap(first, second) for first, second in combinations(boxes, 2))


def overlap(first, second):
    return (
        first.left < second.left + second.width
        and second.left < first.left + first.width
        and first.top < second.top + second.height
        and second.top < first.top + first.height
    )


def test_single_objects_are_as_large_as_the_settings_say():
    settings = replace(ONLY["single"], solid=1.0, gradient=0.0, floor=0.0)
    for scene in scenes_of("train", 60, settings, size=128):
        columns = np.nonzero((scene.image != scene.image[0, 0]).any(axis=(0, 2)))[0]
        assert 0.70 * 128 - 2 <= columns[-1] - columns[0] + 1 <= 0.92 * 128 + 2


@pytest.mark.parametrize("scale", [0.1, 0.74, 0.875, 1.0])
def test_a_step_puts_sizes_and_positions_on_a_grid(scale):
    rng = np.random.default_rng(0)
    one = Claims("single", (ObjectClaim("a", "a", "a", "cartoon", "noto"),), 1, None, Background("solid", ("red",)))
    cells = [cell for relation in (None, "left of", "above") for cell in cells_of(replace(one, relation=relation), 128)]
    boxes = [(cell, place(cell, 128, scale, rng, step=8)) for cell in cells for _ in range(20)]
    for cell, box in boxes:
        assert box.width == box.height
        assert box.width % 16 == box.left % 8 == box.top % 8 == 0
        assert cell.left <= box.left
        assert box.left + box.width <= cell.left + cell.width
        assert cell.top <= box.top
        assert box.top + box.height <= cell.top + cell.height
    if scale == 0.875:  # of the default data: a drawing has one place, in the middle
        assert len(set(boxes)) == len(cells)


def test_backgrounds_are_redrawn_until_the_object_stands_out():
    def contrasts(threshold):
        settings = replace(ONLY["single"], solid=1.0, gradient=0.0, floor=0.0, contrast=threshold)
        for scene in scenes_of("train", 200, settings, size=64):
            yield np.abs(scene.image[32, 32].astype(int) - scene.image[0, 0].astype(int)).mean()

    assert min(contrasts(70.0)) > 60.0  # every disc has a colour that stands out, and jitter moves it a little
    assert min(contrasts(0.0)) < 50.0


def test_blending_follows_alpha_and_leaves_the_rest_untouched():
    image = np.full((4, 4, 3), 100, np.uint8)
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0], pixels[0, 1], pixels[1, 0] = (200, 0, 50, 255), (200, 0, 50, 128), (200, 0, 50, 0)
    blend(image, pixels, Box(1, 1, 2, 2))
    assert tuple(image[1, 1]) == (200, 0, 50)
    assert np.abs(image[1, 2] - np.array([150, 50, 75])).max() <= 1
    assert (image[2, 1] == 100).all()
    assert (image[0] == 100).all()


def test_blending_keeps_a_flat_background_flat_for_every_value():
    image = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, axis=2)
    before = image.copy()
    blend(image, np.zeros((256, 1, 4), np.uint8), Box(0, 0, 1, 256))
    assert np.array_equal(image, before)


def test_an_invisible_drawing_has_no_contrast():
    assert contrast_of(np.zeros((8, 8, 4), np.uint8), Box(0, 0, 8, 8), np.full((8, 8, 3), 255, np.uint8)) == 0.0


# -- what trainers and evaluation read -------------------------------------------------------------------------------


def test_dataset_items_are_tensors_in_range_with_their_caption():
    dataset = SceneSplitDataset(SceneComposer(SPRITES, "train", size=32), length=4)
    image, caption = dataset[3]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert image.min() >= -1.0
    assert image.max() <= 1.0
    scene = dataset.composer.compose(3)
    assert caption == scene.caption
    assert np.array_equal(to_pixels(image), scene.image)
    assert len(list(dataset)) == 4


def test_pixels_survive_the_way_to_tensors_and_back():
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    assert np.array_equal(to_pixels(to_tensor(ramp)), ramp)


def test_scenes_do_not_depend_on_the_number_of_loader_workers():
    dataset = SceneSplitDataset(SceneComposer(SPRITES, "train", size=16), length=8)
    alone = list(torch.utils.data.DataLoader(dataset, batch_size=4))
    shared = list(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2))
    for (images, captions), (same_images, same_captions) in zip(alone, shared, strict=True):
        assert torch.equal(images, same_images)
        assert captions == same_captions


@pytest.mark.parametrize("kind", ["single", "pair", "count"])
def test_evaluation_scenes_are_of_one_kind_with_full_captions(kind):
    scenes = evaluation_scenes(SPRITES, 20, seed=1, kind=kind, split="val", size=32)
    assert len(scenes) == 20
    for scene in scenes:
        assert scene.claims.kind == kind
        assert scene.claims.style_said
        assert scene.claims.background_said
        assert scene.caption == caption_of(scene.claims)
        assert all(item.name == item.label for item in scene.claims.objects)
