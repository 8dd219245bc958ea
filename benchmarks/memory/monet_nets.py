"""The five nets of MONeT's zoo as it traces them: nodes in the order of the forward pass.

Written from the published architectures (torchvision's VGG-16, ResNet-50, MobileNet-V2 and
GoogLeNet with both of its auxiliary heads; a U-Net whose ways up are pools). Whether the nodes are
those whose times were profiled shows in their number: with the loss and the backward nodes
(`checkmate_rules`) 97, 405, 343, 495 and 154.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Node:
    """One op of the forward pass."""

    kind: str
    inputs: tuple[int, ...]
    """Numbers of nodes; empty where it reads the batch."""
    size: int
    """Bytes of its output."""
    again: int | None = None
    """The node that it makes again, for a reader far away."""


@dataclass
class Net:
    """A net as its nodes are added; shapes are channels and sides of one image."""

    batch: int
    shape: tuple[int, int, int] = (3, 224, 224)
    nodes: list[Node] = field(default_factory=list)
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    num_params: int = 0
    skips: list[int] = field(default_factory=list)
    """Nodes that are read again far away, and held until then."""

    @property
    def image_bytes(self) -> int:
        """Of the batch."""
        return 4 * self.batch * self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def last(self) -> int:
        """The node that was added last."""
        return len(self.nodes) - 1

    def add(self, kind: str, shape: tuple[int, int, int], *inputs: int) -> int:
        """A node; it reads the last one unless told otherwise."""
        before = inputs or ((self.last,) if self.nodes else ())
        self.shapes.append(shape)
        size = 4 * self.batch * shape[0] * shape[1] * shape[2]
        self.nodes.append(Node(kind, before, size))
        return self.last

    def _before(self, at: int | None) -> tuple[int, int, int]:
        if not self.nodes:
            return self.shape
        return self.shapes[self.last if at is None else at]

    def conv(self, width: int, kernel: int, stride: int = 1, at: int | None = None,
             kind: str = "conv", bias: bool = False) -> int:  # fmt: skip
        """A convolution that keeps the sides, but for its stride."""
        channels, height, side = self._before(at)
        self.num_params += width * kernel**2 * (1 if kind == "depthwise" else channels)
        self.num_params += width if bias else 0
        shape = (width, -(-height // stride), -(-side // stride))
        return self.add(kind, shape, *(() if at is None else (at,)))

    def same(self, kind: str) -> int:
        """A node whose output is as large as its input."""
        self.num_params += 4 * self._before(None)[0] if kind == "norm" else 0
        return self.add(kind, self._before(None))

    def unit(self, width: int, kernel: int, stride: int = 1, at: int | None = None,
             act: str = "relu", kind: str = "conv", bias: bool = False) -> int:  # fmt: skip
        """Convolution, norm and, where there is one, activation."""
        self.conv(width, kernel, stride, at, kind, bias)
        self.same("norm")
        return self.same(act) if act else self.last

    def pool(self, side_of: int, kind: str = "max_pool", at: int | None = None) -> int:
        """A pool to a part of the sides, rounded up."""
        channels, height, side = self._before(at)
        shape = (channels, -(-height // side_of), -(-side // side_of))
        return self.add(kind, shape, *(() if at is None else (at,)))

    def linear(self, width: int) -> int:
        """A matrix with bias."""
        channels, height, side = self._before(None)
        self.num_params += width * channels * height * side + width
        return self.add("linear", (width, 1, 1))

    def head(self, *more: str) -> int:
        """Average, flattened, what comes then, and 1000 classes."""
        self.add("avg_pool", (self._before(None)[0], 1, 1))
        for kind in ("flatten", *more):
            self.same(kind)
        return self.linear(1000)


def vgg16() -> Net:
    """Batch 176."""
    net = Net(176)
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(width, 3, bias=True)
            net.same("relu")
        net.pool(2)
    net.same("avg_pool")
    net.same("flatten")
    for _ in range(2):
        net.linear(4096)
        net.same("relu")
        net.same("dropout")
    net.linear(1000)
    return net


def resnet50() -> Net:
    """Batch 184."""
    net = Net(184)
    net.unit(64, 7, 2)
    before = net.pool(2)
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(count):
            stride = 2 if block == 0 and width > 64 else 1
            net.unit(width, 1)
            net.unit(width, 3, stride)
            main = net.unit(4 * width, 1, act="")
            short = net.unit(4 * width, 1, stride, before, act="") if block == 0 else before
            net.add("add", net.shapes[main], main, short)
            before = net.same("relu")
    net.head()
    return net


def mobilenet_v2() -> Net:
    """Batch 272."""
    net = Net(272)
    net.unit(32, 3, 2, act="relu6")
    wide = 1
    for width, count, stride in ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1),
                                 (160, 3, 2), (320, 1, 1)):  # fmt: skip
        for block in range(count):
            before = net.last
            channels = net.shapes[before][0]
            if wide > 1:
                net.unit(wide * channels, 1, act="relu6")
            net.unit(wide * channels, 3, stride if block == 0 else 1, act="relu6",
                     kind="depthwise")  # fmt: skip
            net.unit(width, 1, act="")
            if block > 0:
                net.add("add", net.shapes[before], before, net.last)
        wide = 6
    net.unit(1280, 1, act="relu6")
    net.head("dropout")
    return net


INCEPTIONS = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128), (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip
"""Widths: 1x1; 3x3 reduced and whole; 5x5 (3x3 in torchvision) reduced and whole; behind a pool."""


def googlenet() -> Net:
    """Batch 320, with heads behind the third and the sixth inception."""
    net = Net(320)
    net.unit(64, 7, 2)
    net.pool(2)
    net.unit(64, 1)
    net.unit(192, 3)
    net.pool(2)
    for number, (one, three_in, three, five_in, five, pooled) in enumerate(INCEPTIONS):
        before = net.pool(2) if number in (2, 7) else net.last
        if number in (3, 6):
            net.add("avg_pool", (net.shapes[before][0], 4, 4), before)
            net.unit(128, 1)
            net.same("flatten")
            net.linear(1024)
            net.same("relu")
            net.same("dropout")
            net.linear(1000)
        ends = [net.unit(one, 1, at=before)]
        net.unit(three_in, 1, at=before)
        ends.append(net.unit(three, 3))
        net.unit(five_in, 1, at=before)
        ends.append(net.unit(five, 3))
        net.pool(1, at=before)
        ends.append(net.unit(pooled, 1))
        width = sum(net.shapes[end][0] for end in ends)
        net.add("cat", (width, *net.shapes[before][1:]), *ends)
    net.head("dropout")
    return net


def unet(num_again: int = 0) -> Net:
    """Batch 11 of 416 x 608; ways up are average pools to larger sides.

    Of the largest skips so many are made again out of their convolutions, which are held instead.
    """
    net = Net(11, (3, 416, 608))
    ends = []
    for width in (64, 128, 256, 512, 512):
        if ends:
            net.pool(2)
        net.unit(width, 3, bias=True)
        ends.append(net.unit(width, 3, bias=True))
    for level, skip in reversed(list(enumerate(ends[:-1]))):
        channels, height, side = net.shapes[skip]
        up = net.add("avg_pool", (net.shapes[net.last][0], height, side))
        both = channels + net.shapes[up][0]
        if level < num_again:
            for node in (skip - 1, skip):
                before = skip - 2 if node < skip else net.last
                net.add(net.nodes[node].kind, net.shapes[node], before)
                net.nodes[-1] = replace(net.nodes[-1], again=node)
        net.skips.append(skip - 2 if level < num_again else skip)
        net.add("cat", (both, height, side), skip if level >= num_again else net.last, up)
        net.unit(both // 2, 3, bias=True)
        net.unit(max(channels // 2, 64), 3, bias=True)
    net.conv(2, 1, bias=True)
    return net
