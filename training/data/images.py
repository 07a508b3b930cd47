"""One way in for whoever trains: scenes or a picture folder, as the settings say."""

from torch import Tensor
from torch.utils.data import Dataset

from training.data.folder import ImageFolderDataset
from training.data.scene_dataset import SceneSplitDataset
from training.data.scenes import SceneComposer
from training.data.settings import DataSettings
from training.data.splits import Split
from training.data.stage import prepare_sprites

# Held-out scenes are composed anew each time: their number is a choice, not a supply.
HELD_OUT_LENGTH = 2_000


def open_images(settings: DataSettings, split: Split = "train") -> Dataset[tuple[Tensor, str]]:
    """The pictures of a split; item: (image float32 (3, size, size) in [-1, 1], caption).

    Scenes: `settings.length` for train, HELD_OUT_LENGTH for the others; sprites are fetched and rendered on first
    use. A picture folder has train, val and test only.
    """
    if settings.source == "folder":
        assert settings.pictures is not None  # DataSettings checks it
        return ImageFolderDataset(settings.pictures, split, settings.size)
    composer = SceneComposer(prepare_sprites(settings), split, settings.seed, settings.size, settings.scenes)
    return SceneSplitDataset(composer, settings.length if split == "train" else HELD_OUT_LENGTH)
