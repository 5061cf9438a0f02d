"""A residual network: convolutions and batch norm, with basic or bottleneck blocks."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    image_size: int
    num_classes: int
    width: int
    depths: tuple[int, ...]
    bottleneck: bool
    large_stem: bool


PRESETS = {
    "tiny": Config(
        image_size=32, num_classes=16, width=16, depths=(2, 2, 2), bottleneck=False, large_stem=False
    ),
    "resnet50": Config(
        image_size=224, num_classes=1000, width=64, depths=(3, 4, 6, 3), bottleneck=True, large_stem=True
    ),
}  # fmt: skip


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(channels_in, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


def downsample(channels_in: int, channels_out: int, stride: int) -> nn.Module | None:
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
    )


class ResNet(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        kind = Bottleneck if config.bottleneck else BasicBlock
        if config.large_stem:
            self.conv1 = nn.Conv2d(3, config.width, 7, stride=2, padding=3, bias=False)
            self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(3, config.width, 3, padding=1, bias=False)
            self.pool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(config.width)
        self.relu = nn.ReLU(inplace=True)
        stages = []
        channels_in = config.width
        for stage, depth in enumerate(config.depths):
            channels = config.width * 2**stage
            blocks = []
            for index in range(depth):
                blocks.append(kind(channels_in, channels, 2 if stage > 0 and index == 0 else 1))
                channels_in = channels * kind.expansion
            stages.append(nn.Sequential(*blocks))
        self.layers = nn.Sequential(*stages)
        self.fc = nn.Linear(channels_in, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        x = self.layers(x)
        x = x.mean(dim=(2, 3))
        return F.cross_entropy(self.fc(x), labels)


def _config(preset: str, **changes: int | None) -> Config:
    return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})


def build(preset: str = "tiny", width: int | None = None, num_classes: int | None = None) -> ResNet:
    return ResNet(_config(preset, width=width, num_classes=num_classes))


def example_inputs(
    batch_size: int = 8, preset: str = "tiny", image_size: int | None = None, num_classes: int | None = None
) -> tuple[Tensor, Tensor]:
    config = _config(preset, image_size=image_size, num_classes=num_classes)
    images = torch.randn(batch_size, 3, config.image_size, config.image_size)
    return images, torch.randint(config.num_classes, (batch_size,))
