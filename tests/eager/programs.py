"""Programs for one device, as people write them; each runs on plain tensors, and on global ones.

A program takes `batch`, which turns the tensors of the full batch into what the program sees, and returns
numbers and tensors by name. Losses, metrics, noise and control flow stand outside of any compiled module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch: TypeAlias = Callable[..., Any]
Program: TypeAlias = Callable[[Batch], dict[str, Any]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """List a program under its name."""
    PROGRAMS[function.__name__] = function
    return function


def gradients(*modules: nn.Module) -> dict[str, Any]:
    """The gradients of modules, by name."""
    named = ((f"{i}.{n}", p.grad) for i, m in enumerate(modules) for n, p in m.named_parameters())
    return {name: grad for name, grad in named if grad is not None}


def net(inputs: int = 6, hidden: int = 7, outputs: int = 4, norm: bool = False) -> nn.Sequential:
    """Two layers, with BatchNorm between if asked for."""
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(inputs, hidden), *between, nn.Tanh(), nn.Linear(hidden, outputs))


def data(seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    """Samples and labels."""
    torch.manual_seed(seed)
    return torch.randn(size, 6), torch.randint(0, 4, (size,))


# -- numbers whose conjugate is a bit ---------------------------------------------------------------------


@program
def autocorrelation(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(outputs=6), data()
    conjugated = batch(torch.complex(x, x.flip(1)).conj(), x)[0]
    x = batch(x)
    keys = torch.fft.rfft(model(x), dim=1)
    found = torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.conj(keys), n=6, dim=1)
    loss = (found.topk(2, dim=1).values * torch.conj(keys).imag[:, :2]).sum()
    loss.backward()
    return {"loss": loss.item(), "imag": (conjugated * 2).imag.sum().item(), **gradients(model)}


# -- losses and metrics ------------------------------------------------------------------------------------


@program
def cross_entropy_with_ignored_labels(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), data()
    y[2] = y[6] = -100
    x, y = batch(x, y)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def cross_entropy_with_weights_and_smoothing(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    loss = F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 0.5, 1.5]), label_smoothing=0.1)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def sum_and_mean_of_squares(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), data()
    x, t = batch(x, torch.randn(8, 4))
    loss = F.mse_loss(model(x), t, reduction="sum") + F.mse_loss(model(x), t) + F.l1_loss(model(x), t)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def binary_cross_entropy(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(outputs=1), data()
    x, y = batch(x, (y > 1).double())
    p = model(x).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(p, y) + F.binary_cross_entropy(torch.sigmoid(p), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def accuracy_and_top_k(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    correct = 0
    with torch.no_grad():
        out = model(x)
        loss = F.nll_loss(F.log_softmax(out, 1), y, reduction="sum").item()
        pred = out.argmax(dim=1, keepdim=True)
        correct += pred.eq(y.view_as(pred)).sum().item()
        accuracy = (out.argmax(1) == y).float().mean()
        top = out.topk(2, 1)[1].t()
        hits = top.eq(y.view(1, -1).expand_as(top)).reshape(-1).float().sum(0, keepdim=True)
    sizes = str((x.size(0), len(x), *out.shape))
    shown = f"{accuracy:.9f}"
    return {"loss": loss, "correct": correct, "accuracy": shown, "sizes": sizes, "top": hits.item()}


@program
def results_read_on_the_host(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    out = model(x).detach()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    return {
        "out": out, "sorted": out[:, 0].sort()[0], "largest": out.max().item(),
        "var": out.var(0).sum().item(), "std": out.std().item(), "list": torch.tensor(out[0].tolist()),
        "array": torch.from_numpy(out.mean(0).numpy()),
        "cumsum": out.cumsum(0).sum().item(), "unique": y.unique().numel(),
        "by row": sum(float(row.sum()) for row in out), "flipped": float((out.flip(0) * out).sum()),
        "permuted": float((out[order] * out).sum()), "median": out.median().item(),
        "by numbers": out[[*y[:3]], [*out[:3].argmax(1)]],
    }  # fmt: skip


# -- noise -------------------------------------------------------------------------------------------------


@program
def variational_autoencoder(batch: Batch) -> dict[str, Any]:
    encoder, decoder = net(outputs=6), net(3, outputs=6)
    x = batch(torch.rand(8, 6))
    torch.manual_seed(3)
    mu, logvar = encoder(x).chunk(2, 1)
    std = torch.exp(0.5 * logvar)
    out = torch.sigmoid(decoder(mu + torch.randn_like(std) * std))
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss = F.binary_cross_entropy(out, x.view(-1, 6), reduction="sum") + divergence
    loss.backward()
    return {"loss": loss.item(), "each": loss.item() / len(x), **gradients(encoder, decoder)}


@program
def generative_adversarial_networks(batch: Batch) -> dict[str, Any]:
    critic, generator = net(outputs=1), net(5, outputs=6)
    real = batch(data()[0])
    torch.manual_seed(5)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (critic, generator)]
    criterion, losses = nn.BCEWithLogitsLoss(), []
    for _ in range(3):
        n = real.size(0)
        critic.zero_grad()
        label = torch.full((n,), 1.0)
        on_real = criterion(critic(real).view(-1), label)
        on_real.backward()
        fake = generator(torch.randn(n, 5))
        label.fill_(0.0)
        on_fake = criterion(critic(fake.detach()).view(-1), label)
        on_fake.backward()
        optimizers[0].step()
        generator.zero_grad()
        label.fill_(1.0)
        fooled = criterion(critic(fake).view(-1), label)
        fooled.backward()
        optimizers[1].step()
        losses += [on_real.item(), on_fake.item(), fooled.item()]
    parameters = [*critic.parameters(), *generator.parameters()]
    return {"losses": torch.tensor(losses), **{f"p{i}": p.detach() for i, p in enumerate(parameters)}}


@program
def mixup(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    torch.manual_seed(11)
    order = torch.randperm(x.size(0))
    out = model(0.3 * x + 0.7 * x[order])
    loss = 0.3 * F.cross_entropy(out, y) + 0.7 * F.cross_entropy(out, y[order])
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


# -- samples that meet -------------------------------------------------------------------------------------


@program
def contrastive(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), data()
    x, near = batch(x, x + 0.1 * torch.randn(8, 6))
    a, b = F.normalize(model(x), dim=1), F.normalize(model(near), dim=1)
    logits, labels = a @ b.t() / 0.1, torch.arange(x.size(0))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def simclr(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), data()
    x, near = batch(x, x + 0.1 * torch.randn(8, 6))
    f = F.normalize(torch.cat([model(x), model(near)]), dim=1)
    n = f.shape[0]
    similar = (f @ f.T).masked_fill(torch.eye(n, dtype=torch.bool), -9e15)
    positive = torch.eye(n, dtype=torch.bool).roll(n // 2, 0)
    loss = (-similar[positive] / 0.1 + torch.logsumexp(similar / 0.1, -1)).mean()
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


@program
def batch_norm(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(norm=True), batch(*data())
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    model.eval()
    evaluated = F.cross_entropy(model(x), y)
    buffers = {f"buffer {name}": value for name, value in model.named_buffers()}
    return {"loss": loss.item(), "eval": evaluated.item(), **gradients(model), **buffers}


# -- gradients of gradients, and functions of one's own ----------------------------------------------------


@program
def gradient_penalty(batch: Batch) -> dict[str, Any]:
    critic = net(outputs=1)
    real, fake = batch(data()[0], data(9)[0])
    torch.manual_seed(7)
    alpha = torch.rand(real.size(0), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = critic(between)
    grad = torch.autograd.grad(
        outputs=out, inputs=between, grad_outputs=torch.ones(out.size()), create_graph=True,
        retain_graph=True, only_inputs=True,
    )[0].view(real.size(0), -1)  # fmt: skip
    penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    return {"loss": loss.item(), "penalty": penalty.item(), **gradients(critic)}


@program
def maml(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    names, parameters = zip(*model.named_parameters(), strict=True)
    inner = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
    fast = {name: p - 0.1 * g for name, p, g in zip(names, parameters, inner, strict=True)}
    loss = F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


@program
def autograd_function_and_hooks(batch: Batch) -> dict[str, Any]:
    model, (x, _) = net(), batch(*data())
    out = model(x)
    out.register_hook(lambda grad: grad * 2)
    model[0].weight.register_hook(lambda grad: grad + 1)
    loss = _Square.apply(out).mean()  # type: ignore[no-untyped-call]
    loss.backward()
    return {"loss": loss.item(), **gradients(model)}


# -- control flow, masks, writes ---------------------------------------------------------------------------


@program
def control_flow(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    count = 0
    while x.norm() > 1.0 and count < 9:
        x, count = x * 0.7, count + 1
        if x.mean() > 0:
            x = x + 0.01
    out = model(x)
    if (out > 0.3).any():
        out = out * 2
    loss = F.cross_entropy(out, y)
    assert torch.isfinite(loss)
    loss.backward()
    return {"count": count, "loss": loss.item(), **gradients(model)}


@program
def boolean_masks(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    out, keep = model(x), y != 1
    loss, kept = F.cross_entropy(out[keep], y[keep]), out[keep]
    large = kept[kept[:, 0] > 0]
    loss = loss + large.pow(2).mean() + out[y == 2].sum() + torch.masked_select(out, out > 0).mean()
    loss.backward()
    counts = {"kept": kept.shape[0], "large": large.shape[0], "where": (y == 2).nonzero()}
    return {"loss": loss.item(), **counts, **gradients(model)}


@program
def writes_in_place(batch: Batch) -> dict[str, Any]:
    model, (x, y) = net(), batch(*data())
    x = x.clone()
    x[:, 0] = 0
    x.mul_(2).add_(1)
    x[x > 2] = 2.0
    out, total = model(x), torch.zeros(4)
    total += out.detach().sum(0)
    out = out.clone()
    out[:, 1] *= 3
    out[0] = 1.0
    out[2:5].mul_(2)
    loss = F.cross_entropy(out, y)
    loss.backward()
    return {"loss": loss.item(), "total": total, **gradients(model)}


@program
def views_see_writes(batch: Batch) -> dict[str, Any]:
    x = batch(data()[0]).clone()
    row, column, flat = x[3], x[:, 2], x.view(-1)
    x.mul_(3)
    column.add_(1)
    row.fill_(5)
    flat[1] = 7
    x[4] += row
    return {"x": x, "row": row, "column": column, "flat": flat, "again": x[3] + x[4]}


# -- layers ------------------------------------------------------------------------------------------------


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
