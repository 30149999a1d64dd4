"""Layers, and whole networks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tests.eager.programs.listed import Batch, data, gradients, net, program


@program
def convolutions(batch: Batch) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3),
        nn.GroupNorm(1, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(5, 4),
    )  # fmt: skip
    x, y = batch(torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,)))
    torch.manual_seed(4)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def lstm(batch: Batch) -> dict[str, Any]:
    torch.manual_seed(1)
    layer, head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)
    x, y = batch(torch.randn(8, 3, 6), torch.randint(0, 4, (8, 3)))
    out, _ = layer(x, (torch.zeros(1, x.size(0), 5), torch.zeros(1, x.size(0), 5)))
    loss = F.cross_entropy(head(out).reshape(-1, 4), y.reshape(-1))
    loss.backward()
    return {"loss": loss.item(), **gradients(layer, head)}


def _encoder(batch: Batch, dropout: float) -> dict[str, Any]:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=dropout, batch_first=True)
    x = batch(torch.randn(8, 5, 6))
    torch.manual_seed(2)
    loss = layer(x).pow(2).mean()
    loss.backward()
    return {"loss": loss.item(), **gradients(layer)}


@program
def transformer_layer(batch: Batch) -> dict[str, Any]:
    return _encoder(batch, 0.0)


@program
def dropout_of_one_half_in_training_and_without_gradient(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), batch(*data())
    out = F.dropout(model(x), 0.5)
    with torch.no_grad():
        kept = F.dropout(x, 0.5)
    return {"out": out.sum().item(), "kept": kept, "noise": torch.rand(3)}


@program
def shapes_that_change_in_place(batch: Batch) -> dict[str, Any]:
    torch.manual_seed(1)
    gru = nn.GRU(6, 5, batch_first=True)
    x = batch(data()[0])
    out, last = gru(x.unsqueeze(1).repeat(1, 3, 1))
    y = x * 1.0
    whole, row = y[:, :2], y[1]
    y.t_().mul_(2)  # its view and its row see the write
    y.unsqueeze_(0).squeeze_().transpose_(0, 1)[:, 3] = 5.0
    loss = out.square().mean() + last.sum() + (y * whole.sum(1, keepdim=True)).mean() + row.sum()
    loss.backward()
    return {"loss": loss.item(), "y": y, "row": row, "shape": str((*y.shape, *y.stride())), **gradients(gru)}


@program
def packed_sequences(batch: Batch) -> dict[str, Any]:
    torch.manual_seed(1)
    lstm = nn.LSTM(3, 4, batch_first=True)
    x, lengths = batch(torch.randn(8, 5, 3), torch.tensor([3, 5, 1, 2, 5, 4, 2, 3]))
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    out, sizes = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
    loss = (out.sum((1, 2)) / lengths).square().mean() + out[torch.arange(8), sizes - 1].sum()
    loss.backward()
    return {"loss": loss.item(), "sizes": str(sizes.tolist()), **gradients(lstm)}


@program
def losses_by_function_transforms(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    grads, value = torch.func.grad_and_value(loss)(plain, x, y)
    plain = {name: p - 0.1 * grads[name] for name, p in plain.items()}
    one = torch.func.grad(lambda params, x, y: loss(params, x[None], y[None]))
    each = torch.func.vmap(one, in_dims=(None, 0, 0))(plain, x, y)
    slopes = torch.func.vmap(torch.func.grad(lambda row: model(row).square().sum()))(x)
    (slopes.square().mean() + value).backward()  # through the derivative, to parameters
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()])
    return {"value": value, "norms": norms, "slopes": slopes, **gradients(model)}


@program
def diagonals_and_powers_in_place(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(outputs=3), batch(*data())
    out = model(x)
    similar = out @ out.t()
    similar.fill_diagonal_(0.5)
    beside = out.t().flatten()[:-1].view(1, -1).clone()
    halves = out.detach().exp().floor_divide_(torch.tensor(2.0))
    loss = similar.square().mean() + beside.pow_(2).sum() + halves.sum()
    loss.backward()
    return {"loss": loss.item(), "similar": similar, **gradients(model)}


@program
def transformer_layer_with_dropout(batch: Batch) -> dict[str, Any]:
    return _encoder(batch, 0.1)


def _attention(batch: Batch, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)
    x = batch(torch.randn(8, 5, 6))
    torch.manual_seed(2)
    loss = layer(x, x, x, **options)[0].pow(2).mean()
    loss.backward()
    return {"loss": loss.item(), **gradients(layer)}


@program
def attention_with_weights(batch: Batch) -> dict[str, Any]:
    return _attention(batch)


@program
def attention_without_weights(batch: Batch) -> dict[str, Any]:
    return _attention(batch, need_weights=False)


@program
def gpt2(batch: Batch) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    tokens = torch.randint(0, 50, (8, 7))
    labels = tokens.clone()
    labels[1, 3:] = labels[6, 1:] = -100
    tokens, labels, mask = batch(tokens, labels, (labels != -100).long())
    logits = model(input_ids=tokens, attention_mask=mask).logits  # its own loss is in float32
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def bert_with_dropout(batch: Batch) -> dict[str, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 20}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=50, num_labels=3)).train()
    tokens, labels = batch(torch.randint(0, 50, (8, 7)), torch.randint(0, 3, (8,)))
    torch.manual_seed(2)
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def fake_quantization(batch: Batch) -> dict[str, Any]:
    """As layers do in quantization-aware training; the observer's minimum, ... are written beside."""
    model, (x, _) = net(), batch(*data())
    low, high = torch.tensor(torch.inf, dtype=torch.float32), torch.tensor(-torch.inf, dtype=torch.float32)
    scale, zero = torch.ones(1, dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    on = torch.ones(1, dtype=torch.long)
    for part in (x[:5], x):
        out = torch.fused_moving_avg_obs_fake_quant(
            model(part).float(), on, on, low, high, scale, zero, 0.01, 0, 255, -1
        )
    loss = out.double().square().mean()
    loss.backward()
    return {"loss": loss.item(), "low": low, "high": high, "scale": scale, "zero": zero, **gradients(model)}


@program
def quantized_layers(batch: Batch) -> dict[str, Any]:
    """The numbers of a batch are rounded by its own range, and by a given one."""
    x, _ = batch(*data())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        model = torch.ao.quantization.quantize_dynamic(net().float(), {nn.Linear})  # type: ignore[no-untyped-call]
        rounded = torch.quantize_per_tensor(x.float(), 0.1, 3, torch.quint8).relu()
    outputs = [model(scale * x.float()) for scale in (1, 2)]
    return {"outputs": torch.cat(outputs), "rounded": rounded.dequantize()}


@program
def attention_with_a_causal_bias(batch: Batch) -> dict[str, Any]:
    """The bias is a tensor whose memory has no values."""
    torch.manual_seed(1)
    queries, keys = batch(torch.randn(8, 2, 3, 4), torch.randn(8, 2, 5, 4))
    attend = F.scaled_dot_product_attention
    last = attend(queries, keys, keys, attn_mask=causal_lower_right(3, 5))
    return {"last": last, "first": attend(queries, keys, keys, attn_mask=causal_upper_left(3, 5))}
