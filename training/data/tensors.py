"""Between uint8 pictures and the tensors that models train on."""

import numpy as np
import torch
from numpy.typing import NDArray


def to_tensor(image: NDArray[np.uint8]) -> torch.Tensor:
    """uint8 (H, W, 3) in 0..255 -> float32 (3, H, W) in [-1, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(127.5).sub_(1.0).contiguous()


def to_pixels(image: torch.Tensor) -> NDArray[np.uint8]:
    """float (3, H, W) in [-1, 1] -> uint8 (H, W, 3), values outside clipped."""
    scaled = image.detach().float().add(1.0).mul(127.5).round().clamp(0.0, 255.0)
    return scaled.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
