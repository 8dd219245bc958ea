"""What shapes make of work on accelerators, against what an H200 took."""

import numpy as np
import pytest

from hocket.cost.efficiency import (
    CONVOLUTION,
    FLOAT32_NORM,
    NORM_PASSES,
    WEIGHT_GRADIENT,
    OpWork,
    Shaped,
    roofline_s,
    shaped,
)
from hocket.cost.families import FAMILIES
from hocket.graph.graph import DTYPES
from hocket.graph.signatures import tensor_shapes
from hocket.hardware import cluster_from_text

H200 = cluster_from_text("1xh200-141g").devices[0].kind
STEPS = "None, [1, 1], [1, 1], [1, 1], False, [0, 0]"


def forward(channels, side=32, kernel=3, groups=1, dtype="float32", strides=""):
    given = f"{dtype}[64,{channels},{side},{side}]{strides}"
    weight = f"{dtype}[{channels},{channels // groups},{kernel},{kernel}]"
    return f"aten.convolution.default({given}, {weight}, {STEPS}, {groups})"


def backward(channels, wanted="True, True, False", groups=1, dtype="float32"):
    plane = f"{dtype}[64,{channels},32,32]"
    weight = f"{dtype}[{channels},{channels // groups},3,3]"
    return (
        f"aten.convolution_backward.default({plane}, {plane}, {weight}, {STEPS}, {groups}, "
        f"[{wanted}])"
    )


def work_like(signature, family, flops, size_bytes, dtype="float32"):
    return OpWork(
        np.array([FAMILIES.index(family)]),
        np.array([DTYPES.index(dtype)], dtype=np.int8),
        np.array([flops]),
        np.array([size_bytes]),
        np.zeros(1, dtype=np.int32),
        [signature],
    )


def seconds(*given, **named):
    return float(roofline_s(work_like(*given, **named), H200)[0])


def test_without_matrix_units_nothing_is_copied():
    """V100: 16-bit products have matrix units, those of 32 bits have none."""
    v100 = cluster_from_text("1xv100-16g").devices[0].kind

    def on_v100(dtype):
        return work_like(forward(64, dtype=dtype), "convolution", 1e9, 1e6, dtype).shaped_on(v100)

    assert [float(part[0]) for part in on_v100("float32")] == [1.0, 1.0, 1.0, 1.0]
    assert [float(part[0]) for part in on_v100("float16")] == list(shaped(forward(64)))


def test_few_channels_take_the_time_of_a_tile():
    assert shaped(forward(64)).flops == shaped(forward(128)).flops == 1.0
    whole = CONVOLUTION
    assert shaped(forward(16)).flops == whole * 64 / 16 * 32 / 16
    assert shaped(forward(96)).flops == pytest.approx(128 / 96)
    assert shaped(backward(16)).flops > shaped(forward(16)).flops
    assert shaped(backward(16, "True, False, False")).flops == shaped(forward(16)).flops
    assert shaped(backward(16, "False, False, True")).flops == whole
    # Gradients of inputs have the channels of the inputs in place of those of the outputs.
    planes = "float32[8,64,9,9], float32[8,16,9,9], float32[64,16,3,3]"
    wanted = f"aten.convolution_backward.default({planes}, {STEPS}, 1, [True, False, False])"
    assert shaped(wanted).flops == whole * 64 / 16


@pytest.mark.parametrize(("dtype", "slower"), [("float32", 1), ("bfloat16", 2)])
def test_images_have_kernels_that_sum_few_empty_channels(dtype, slower):
    image, weight = f"{dtype}[8,3,32,32]", f"{dtype}[64,3,7,7]"
    own = shaped(f"aten.convolution.default({image}, {weight}, {STEPS}, 1)").flops
    assert own == pytest.approx(slower * CONVOLUTION * 16 / 3)
    given = f"{dtype}[8,64,32,32], {image}, {weight}, {STEPS}, 1, [False, True, False]"
    assert shaped(f"aten.convolution_backward.default({given})").flops == pytest.approx(1.5 * own)


def test_groups_share_tiles_that_are_mostly_zeros():
    assert shaped(forward(256, groups=32)).flops == CONVOLUTION * 64 / 8
    assert shaped(forward(256, groups=2)).flops == 1.0
    planes = "float32[8,128,9,9], float32[8,256,9,9], float32[128,8,3,3]"
    given = f"{planes}, {STEPS}, 32, [False, True, False]"
    own = shaped(f"aten.convolution_backward.default({given})").flops
    assert own == CONVOLUTION * WEIGHT_GRADIENT * 64 / 4


# Channels, side, window, batch 64, microseconds forward and of both gradients, in float32 and in
# bfloat16: convnext-base and efficientnet-b3 of thirdparty.py, H200, 2026-11-18.
DEPTHWISE = [
    (512, 14, 7, (131, 2062), (61, 161)), (128, 56, 7, (472, 6309), (184, 596)),
    (192, 75, 3, (661, 2191), (670, 2163)), (816, 18, 5, (279, 991), (295, 1036)),
]  # fmt: skip


@pytest.mark.parametrize(("channels", "side", "window", "float32_us", "half_us"), DEPTHWISE)
def test_depthwise_convolutions_are_near_what_was_measured(
    channels, side, window, float32_us, half_us
):
    for dtype, width, measured in (("float32", 4, float32_us), ("bfloat16", 2, half_us)):
        plane = f"{dtype}[64,{channels},{side},{side}]"
        given = f"{plane}, {dtype}[{channels},1,{window},{window}], {STEPS}, {channels}"
        elements = 64.0 * channels * side**2
        for text, flops, moved, us in (
            (f"aten.convolution.default({given})", 2, 2, measured[0]),
            (f"aten.convolution_backward.default({plane}, {given}, [True, True, False])", 4, 3,
             measured[1]),
        ):  # fmt: skip
            work = flops * elements * window**2, moved * width * elements
            found = seconds(text, "convolution", *work, dtype)
            assert 0.6 < found / us * 1e6 < 1.6


def test_channels_first_are_copied_and_points_less():
    assert shaped(forward(64)).bytes == 3
    assert shaped(backward(64)).kernels > shaped(forward(64)).kernels > 1
    assert shaped(forward(64, kernel=1)).bytes == 2
    assert shaped(forward(64, strides="{65536,1,2048,64}")).bytes == 1


def test_norms_over_batches_need_channels_to_fill_a_device():
    def norm(channels, dtype="float32", kind="batch"):
        return shaped(f"aten.native_{kind}_norm.default({dtype}[64,{channels},8,8], 1)").bytes

    assert norm(4, kind="layer") == norm(4, "bfloat16", "group") == NORM_PASSES
    assert norm(512) == FLOAT32_NORM * NORM_PASSES
    assert norm(64) == 4 * norm(512)
    assert norm(16) == norm(4) == 8 * norm(512)
    # Their kernels are slower, so half of the bytes take longer: 42 and 28 ms in resnet101.
    assert norm(64, "bfloat16") == pytest.approx(2 / FLOAT32_NORM * norm(64))


@pytest.mark.parametrize(
    "signature",
    ["", "aten.convolution.default()", "aten.convolution.default(float32[], float32[])",
     "aten.convolution.default(float32[0,0,0], float32[0,0,0], 0)", "aten.mm(float32[2,2])",
     "aten.convolution.default(float32[1,2,3], float32[4,0,3], None, 7)",
     "aten.convolution_backward.default(float32[1,2,3])"],
)  # fmt: skip
def test_other_signatures_are_what_their_sizes_say(signature):
    assert shaped(signature) == Shaped()


def test_extents_and_groups_that_no_tensor_has_are_not_known():
    endless = "9" * 5000
    assert tensor_shapes(f"f(float32[2,{endless}], float32[3,4], half[{endless}], bool[])") == [
        (3, 4), (),
    ]  # fmt: skip
    assert shaped(forward(64).replace(", 1)", f", {endless})")) == Shaped()
    assert shaped(forward(64).replace("[64,64,3", f"[64,{endless},3")) == Shaped()
    assert tensor_shapes("a" * 1_000_000) == []


def test_norms_of_unknown_shapes_are_not_idle():
    for text in ("aten.native_batch_norm.default(float32[3])", "aten.cudnn_batch_norm.default(1)"):
        assert shaped(text) == Shaped(1.0, FLOAT32_NORM * NORM_PASSES)


# Channels, side, batch, microseconds forward and of both gradients: benchmarks/results, small-h200.
MEASURED = [(16, 32, 256, 89, 419), (32, 16, 256, 33, 135), (64, 56, 64, 143, 366),
            (128, 28, 64, 92, 223), (256, 14, 64, 72, 207), (512, 7, 64, 80, 204)]  # fmt: skip


@pytest.mark.parametrize(("channels", "side", "batch", "forward_us", "backward_us"), MEASURED)
def test_convolutions_of_any_width_are_within_two_of_what_was_measured(
    channels, side, batch, forward_us, backward_us
):
    plane, weight = 4.0 * batch * channels * side**2, 4.0 * 9 * channels**2
    flops = plane / 4 * 2 * 9 * channels
    found = seconds(forward(channels, side), "convolution", flops, 2 * plane + weight)
    assert 0.5 < found / forward_us * 1e6 < 2
    found = seconds(backward(channels), "convolution", 2 * flops, 3 * plane + 2 * weight)
    assert 0.45 < found / backward_us * 1e6 < 2


def test_shapes_mean_nothing_to_a_processor():
    kind = cluster_from_text("1xcpu-host").devices[0].kind
    one = np.zeros(1, dtype=np.int32)
    works = [
        OpWork(np.array([FAMILIES.index("convolution")]), np.zeros(1, np.int8), np.array([1e9]),
               np.array([1e6]), one, [text])
        for text in (forward(16), forward(64))
    ]  # fmt: skip
    assert roofline_s(works[0], kind) == roofline_s(works[1], kind)
