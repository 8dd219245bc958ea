"""Models of different kinds with batches and losses, as those who train configs write them."""

import torch
from torch import nn
from torch.nn import functional


def class_loss(model, batch):
    scores = model(batch[0])
    return {"loss": functional.cross_entropy(scores, batch[1]), "scores": scores}


def mlp():
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 3),
    )
    batches = [(torch.randn(9, 6).double(), torch.randint(0, 3, (9,))) for _ in range(3)]
    return model.double(), batches, class_loss


def single():
    model, batches, loss = mlp()
    return model.float(), [(rows.float(), labels) for rows, labels in batches], loss


class Residual(nn.Module):
    """A residual network in small, with batch norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, image):
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def resnet():
    batches = [(torch.randn(9, 1, 5, 5).double(), torch.randint(0, 3, (9,))) for _ in range(3)]
    return Residual().double(), batches, class_loss


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.split_size, self.head_dim = 16, 8

    def forward(self, x):
        parts = self.c_attn(x).split(self.split_size, -1)
        heads = [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer with the names of GPT-2."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(16), nn.LayerNorm(16), Attention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(16, 32), "c_proj": nn.Linear(32, 16)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Words(nn.Module):
    """A small language model whose embedding is its last layer, too."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(40, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, input_ids):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


def text_loss(model, batch):
    """In double precision; Hugging Face's own losses are in single."""
    returned = model(input_ids=batch["input_ids"])
    scores = returned if isinstance(returned, torch.Tensor) else returned.logits
    flat, labels = scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return {"loss": functional.cross_entropy(flat, labels), "scores": scores}


def texts(model, least=0):
    batches = []
    for _ in range(3):
        tokens = torch.randint(least, 40, (8, 6))
        batches.append({"input_ids": tokens, "labels": tokens})
    return model.double(), batches, text_loss


class Unbound(Words):
    """Takes its matrices out of one parameter first, and uses them in other partitions."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, input_ids):
        first, last = self.stack.unbind(0)
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x @ first)
        return functional.linear(self.norm(x @ last), self.words.weight)


def words():
    return texts(Words())


def unbound():
    return texts(Unbound())


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return texts(GPT2LMHeadModel(GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )))  # fmt: skip


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40,
         "max_position_embeddings": 16}  # fmt: skip


def qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=24)
    return texts(Qwen2ForCausalLM(config))


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)
    return texts(OPTForCausalLM(config), least=2)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return texts(BertForMaskedLM(BertConfig(
        **SIZES, intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )), least=2)  # fmt: skip
