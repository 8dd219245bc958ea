"""Models of Hugging Face, built from small configurations; as in `foreseen_models`."""

import torch


def _of_words(model, num_words=500):
    words = torch.randint(num_words, (4, 64))
    return model.train(), {"input_ids": words, "labels": words}, None


def _of_images(model):
    return model.train(), {"pixel_values": torch.randn(4, 3, 64, 64),
                           "labels": torch.randint(10, (4,))}, None  # fmt: skip


def gpt2():
    import transformers as hf

    config = hf.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=500, n_positions=64,
                           bos_token_id=0, eos_token_id=0)  # fmt: skip
    return _of_words(hf.GPT2LMHeadModel(config))


def llama():
    import transformers as hf

    config = hf.LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4,
                            num_key_value_heads=2, intermediate_size=128, vocab_size=500,
                            max_position_embeddings=64)  # fmt: skip
    return _of_words(hf.LlamaForCausalLM(config))


def bert():
    import transformers as hf

    config = hf.BertConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4,
                           intermediate_size=128, vocab_size=500)  # fmt: skip
    return _of_words(hf.BertForMaskedLM(config))


def vit():
    import transformers as hf

    config = hf.ViTConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_labels=10,
                          intermediate_size=128, image_size=64, patch_size=8)  # fmt: skip
    return _of_images(hf.ViTForImageClassification(config))


def resnet():
    import transformers as hf

    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64],
                             depths=[2, 2, 2, 2], num_labels=10)  # fmt: skip
    return _of_images(hf.ResNetForImageClassification(config))
