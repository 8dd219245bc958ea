import numpy as np
import pytest

from hocket.cost.efficiency import DEFAULT_EFFICIENCY
from hocket.cost.families import FAMILIES, MATRIX_FAMILIES, family_index, family_of, refine

KINDS = {
    "aten.mm": "matmul",
    "aten.addmm": "matmul",
    "aten.bmm.default": "matmul",
    "aten::baddbmm": "matmul",
    "aten._cudnn_rnn_backward": "matmul",
    "aten._grouped_mm": "matmul",
    "aten._scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten._scaled_dot_product_efficient_attention_backward": "attention",
    "aten._scaled_dot_product_cudnn_attention": "attention",
    "aten._flash_attention_forward": "attention",
    "aten.convolution": "convolution",
    "aten.convolution_backward": "convolution",
    "aten.cudnn_convolution": "convolution",
    "aten.native_layer_norm": "normalization",
    "aten.native_layer_norm_backward": "normalization",
    "aten._native_batch_norm_legit_functional": "normalization",
    "aten.cudnn_batch_norm_backward": "normalization",
    "aten._fused_rms_norm": "normalization",
    "aten._softmax": "softmax",
    "aten._log_softmax_backward_data": "softmax",
    "aten.sum": "reduction",
    "aten.max_pool2d_with_indices_backward": "reduction",
    "aten._adaptive_avg_pool2d": "reduction",
    "aten.topk": "scan",
    "aten.add_": "elementwise",
    "aten.add.Tensor": "elementwise",
    "aten.gelu_backward": "elementwise",
    "aten.threshold_backward": "elementwise",
    "aten.native_dropout_backward": "elementwise",
    "aten.where": "elementwise",
    "aten.embedding": "gather",
    "aten.embedding_dense_backward": "gather",
    "aten.index_put_": "gather",
    "aten.scatter_add": "gather",
    "aten.nll_loss_backward": "gather",
    "aten.clone": "copy",
    "aten._to_copy": "copy",
    "aten.copy_": "copy",
    "aten.slice_backward": "copy",
    "aten.select_backward": "copy",
    "aten.cat": "copy",
    "aten.zeros_like": "copy",
    "aten._unsafe_view": "view",
    "aten.t": "view",
    "aten.split_with_sizes": "view",
    "aten.detach_": "view",
    "aten.empty_like": "view",
    "aten.bernoulli_": "random",
    "aten.normal_": "random",
    "aten.rand_like": "random",
    "optimizer.adamw": "optimizer",
    "optimizer.sgd": "optimizer",
    "aten._fused_adamw_": "optimizer",
    "Conv2d(3, 64, kernel_size=(7, 7))": "convolution",
    "torch.nn.BatchNorm2d": "normalization",
    "module.Linear": "matmul",
    "LSTM(1024, 1024)": "matmul",
    "ReLU": "elementwise",
    "MaxPool2d": "reduction",
    "Embedding(32320, 1024)": "gather",
    "<built-in function getitem>": "view",
    "Size": "view",
    "matmul.backward_weight": "matmul",
    "adamw": "optimizer",
    "aten.convert_dtype": "other",
    "mylib.frobnicate": "other",
    "": "other",
    "...": "other",
    "\x00 ☃": "other",
}


@pytest.mark.parametrize(("kind", "family"), KINDS.items())
def test_family_of_known_kinds(kind, family):
    assert family_of(kind) == family


def test_families_all_have_a_default_efficiency():
    assert set(DEFAULT_EFFICIENCY) == set(FAMILIES)
    assert set(MATRIX_FAMILIES) < set(FAMILIES)
    for efficiency in DEFAULT_EFFICIENCY.values():
        assert 0 < efficiency.compute <= 1
        assert 0 < efficiency.memory <= 1


def test_family_index_points_at_the_family():
    kinds = list(KINDS)
    assert [FAMILIES[i] for i in family_index(kinds)] == [KINDS[kind] for kind in kinds]


@pytest.mark.parametrize(
    ("signature", "family"),
    [
        ("aten.mm.default(bfloat16[65536,768], bfloat16[768,50257]{1,768})", "matmul_unaligned"),
        ("aten.mm.default(bfloat16[65536,768], bfloat16[768,50304])", "matmul"),
        ("aten.mm.default(float32[65536,768], float32[768,50257])", "matmul"),
        ("aten.bmm.default(float16[12,64,33], float16[12,33,64])", "matmul_unaligned"),
        (f"aten.mm.default(bfloat16[{'9' * 5000},9], bfloat16[8,8])", "matmul"),
        ("", "matmul"),
    ],
)
def test_products_of_unaligned_half_precision_sides_are_a_family(signature, family):
    matmul = np.array([FAMILIES.index("matmul")], dtype=np.int32)
    index = np.array([0 if signature else -1], dtype=np.int32)
    assert FAMILIES[refine(matmul, index, [signature] if signature else [])[0]] == family


def test_other_families_do_not_care_about_alignment():
    softmax = np.array([FAMILIES.index("softmax")], dtype=np.int32)
    refined = refine(softmax, np.array([0], dtype=np.int32), ["f(bfloat16[3,50257])"])
    assert refined.tolist() == softmax.tolist()
